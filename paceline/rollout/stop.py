"""Stop rules: when a response ends, and which part of it is text; end tokens, stop strings, the length limit.

`verify.py` calls them after every token, so a response ends inside an accepted draft exactly where plain decoding ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.types import FinishReason, Sampling
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.sequence import Sequence

_BYTES_PER_CHARACTER = 4
_SILENT_TOKENS = 16
"""How many tokens that decode to nothing a stop string may contain and still be found."""


@dataclass
class StopRules:
    """The rules of one call."""

    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    end_tokens: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        own = () if self.sampling.ignore_eos else self.eos_token_ids
        self.end_tokens = frozenset((*own, *self.sampling.stop_token_ids))
        longest = max((len(stop) for stop in self.sampling.stop), default=0)
        # A token holds at least one byte, so a stop string of n characters lies within the last 4 n tokens.
        self._window = longest * _BYTES_PER_CHARACTER + _SILENT_TOKENS

    def find(self, sequence: Sequence) -> FinishReason | None:
        """Why the response ends with its last token, or None."""
        if sequence.last_token in self.end_tokens:
            return "stop"
        if self.sampling.stop and self._has_stop_string(sequence):
            return "stop"
        return "length" if sequence.num_left == 0 else None

    def _has_stop_string(self, sequence: Sequence) -> bool:
        assert self.tokenizer is not None, "stop strings are refused without a tokenizer"
        recent = self.tokenizer.decode(sequence.response_ids[-self._window :].tolist())
        return any(stop in recent for stop in self.sampling.stop)

    def text(self, sequence: Sequence) -> str:
        """The response up to its end token or stop string; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        ids = sequence.response_ids.tolist()
        if ids and ids[-1] in self.end_tokens:
            ids.pop()
        whole = self.tokenizer.decode(ids)
        cuts = [at for stop in self.sampling.stop if (at := whole.find(stop)) >= 0]
        return whole[: min(cuts)] if cuts else whole
