"""The sampling settings in use, numbered: how rows are sampled and what ends a response may differ per request.

Number 0 is the call's own, and a plain call has no other. The request book numbers requests; the runner asks for the
settings of a step's rows, and the engine for what ends its sequences. Settings that differ only in seed, stream, count
or length have the same number: the key and the sequence hold those. A number is given to other settings once no
sequence has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Sampling
from paceline.model.config import ModelConfig
from paceline.model.mixed_sampling import MixedSampling, RowSampling
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.sequence import Sequence
from paceline.rollout.stop import StopRules

InUse = Callable[[], Collection[int]]
"""The numbers that sequences have."""


class SamplingKinds:
    """The settings of one open engine."""

    def __init__(self, sampling: Sampling, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._numbers: dict[Sampling, int] = {}
        self._samplings: list[Sampling] = []
        self._rules: list[StopRules] = []
        self.ends = np.zeros((0, config.vocab_size), np.bool_)
        """[numbers, vocabulary]: which tokens end a response."""
        self.has_stops = False
        """Whether any of them has stop strings."""
        self.number(sampling, lambda: ())

    def number(self, sampling: Sampling, in_use: InUse) -> int:
        """The number of these settings, a new one if need be; raises a ValueError if they do not suit the model."""
        kind = _kind(sampling)
        if kind in self._numbers:
            return self._numbers[kind]
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model folder has none; use stop_token_ids")
        number = self._free_number(in_use) if self._samplings else 0
        if number == len(self._samplings):
            self._add_row()
        else:
            del self._numbers[self._samplings[number]]
        rules = StopRules(kind, self._config.eos_token_ids, self._tokenizer)
        self._numbers[kind], self._samplings[number], self._rules[number] = number, kind, rules
        self.ends[number] = rules.end_table(self._config.vocab_size)
        self.has_stops = any(kind.stop for kind in self._numbers)
        return number

    def _free_number(self, in_use: InUse) -> int:
        taken = {0, *in_use()}
        return next((number for number in range(len(self._samplings)) if number not in taken), len(self._samplings))

    def _add_row(self) -> None:
        self.ends = np.concatenate([self.ends, np.zeros((1, self._config.vocab_size), np.bool_)])
        self._samplings.append(Sampling())
        self._rules.append(StopRules(Sampling(), (), None))

    def of_rows(self, kinds: NDArray[np.int64], owners: NDArray[np.int64]) -> RowSampling:
        """How the rows of a step are sampled: `kinds` are its sequences' numbers, `owners` the sequence of each row."""
        if len(self._samplings) == 1:
            return self._samplings[0]
        if not len(kinds) or (kinds == kinds[0]).all():
            return self._samplings[int(kinds[0]) if len(kinds) else 0]
        return MixedSampling(tuple(self._samplings), kinds[owners])

    def rules(self, sequence: Sequence) -> StopRules:
        """When a live sequence ends, and what its text is."""
        return self._rules[sequence.kind]

    def after_stop(self, sequence: Sequence, new_ids: list[int]) -> int:
        """After how many of the new tokens a stop string ends the response; 0 if none does."""
        rules = self._rules[sequence.kind]
        return rules.after_stop(sequence, new_ids) if rules.sampling.stop else 0


def _kind(sampling: Sampling) -> Sampling:
    """The settings that sampler and stop rules read."""
    return replace(sampling, n=1, max_new_tokens=1, seed=0, stream="")
