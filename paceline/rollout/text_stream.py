"""The text of a response while it is generated: tokens in, text out that is never taken back.

Held back are only bytes that later ones may make a character of, and what may be the beginning of a stop string. A
caller makes one `TextStream` per response that it shows to somebody, and adds the tokens of `Serving.new_tokens`;
`finish` returns what the rollout's text has beyond them. It must never decide where a response ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.model.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are no character, or none yet."""
MOST_UNFINISHED = 3
"""Bytes of a character that may have come before its last one."""
WINDOW = 256
"""Tokens after which bytes that are no character are taken for what they are."""


class TextStream:
    """The text of one response so far."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        """The last tokens: enough to decode the next one as it is in the whole text."""
        self._num_clean = 0
        """How many of them end with a whole character."""
        self._num_read = 0
        """Characters of their text that have been read."""
        self._held = ""
        self.text = ""
        """All that was returned."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain with these tokens and was not before."""
        # Decoders pass over silent tokens, even between two bytes of a character.
        loud = [token for token in token_ids if self._tokenizer.is_loud(token)]
        if loud:
            self._held += self._read(loud)
        return self._release(len(self._held) - self._num_stop_begun())

    def finish(self, text: str) -> str:
        """The rest of the finished rollout's text."""
        self._held = text[len(self.text) :]
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        found, self._held = self._held[:count], self._held[count:]
        self.text += found
        return found

    def _read(self, token_ids: Sequence[int]) -> str:
        """Decode more tokens behind some that are known: a decoder may need those, and decoding all would be slow."""
        self._ids += token_ids
        whole = self._tokenizer.decode(self._ids)
        stable = self._stable(whole)
        is_clean = stable == whole or len(self._ids) > WINDOW
        found = (whole if is_clean else stable)[self._num_read :]
        self._num_read += len(found)
        if is_clean:
            del self._ids[: self._num_clean]
            if self._num_clean:
                self._num_read = len(self._tokenizer.decode(self._ids))
            self._num_clean = len(self._ids)
        return found

    def _stable(self, whole: str) -> str:
        """The part of the decoded text that no later token can change."""
        bytes_only = self._tokenizer.byte_ids
        if self._ids[-1] in bytes_only:  # bytes in a row are decoded together: one may break them all
            end = len(self._ids)
            while end and self._ids[end - 1] in bytes_only:
                end -= 1
            return self._tokenizer.decode(self._ids[:end])
        for _ in range(MOST_UNFINISHED):
            whole = whole.removesuffix(REPLACEMENT)
        return whole

    def _num_stop_begun(self) -> int:
        """How many of the last characters held are the beginning of a stop string."""
        counts = [_num_common(self._held, stop) for stop in self._stop]
        return max(counts, default=0)


def _num_common(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, without being all of it."""
    most = min(len(stop) - 1, len(text))
    return next((count for count in range(most, 0, -1) if text.endswith(stop[:count])), 0)
