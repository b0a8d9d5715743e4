"""Stop rules: when a response ends, and which part of it is text; end tokens, stop strings, the length limit.

`verify.py` applies them to every token, so a response ends inside an accepted draft exactly where plain decoding ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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

    def end_table(self, vocab_size: int) -> NDArray[np.bool_]:
        """For every token whether it ends a response."""
        table = np.zeros(vocab_size, np.bool_)
        table[[token for token in self.end_tokens if 0 <= token < vocab_size]] = True
        return table

    def find(self, sequence: Sequence) -> FinishReason | None:
        """Why the response ends with its last token, or None."""
        if sequence.last_token in self.end_tokens:
            return "stop"
        if self.sampling.stop and self._has_stop_string(sequence):
            return "stop"
        return "length" if sequence.num_left == 0 else None

    def _has_stop_string(self, sequence: Sequence) -> bool:
        return self.first_stop(sequence.response_ids[-self._window - 1 : -1].tolist(), [sequence.last_token]) > 0

    def after_stop(self, sequence: Sequence, new_ids: list[int]) -> int:
        """After how many of the new tokens a stop string ends the response; 0 if none does."""
        return self.first_stop(sequence.response_ids[-self._window :].tolist(), new_ids)

    def first_stop(self, ids: list[int], new_ids: list[int]) -> int:
        """After how many new tokens, following these, a stop string is complete; 0 if none is."""
        assert self.tokenizer is not None, "stop strings are refused without a tokenizer"
        for count in range(1, len(new_ids) + 1):
            recent = self.tokenizer.decode([*ids, *new_ids[:count]][-self._window :])
            if any(stop in recent for stop in self.sampling.stop):
                return count
        return 0

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
