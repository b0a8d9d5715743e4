"""What a token of each running sequence is worth, for the budget: how likely it is to shorten this call or the next.

A sequence counts by the probability that it ends last, and for what a token costs in a step of its own, its row and
the reading of its past, which a long draft saves. Those made ahead count in the same way for the call that will ask for
them, all together by the share of their text that survives: drafting for others slows them down. Text made ahead tells
how long a response will be: where it is whole, there is little left to come.
Asked by `Drafting` in every step, while a card waits; what takes time is done in `look`, while it works.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from paceline.budget.cost import CostCurve
from paceline.budget.makespan import Lengths, last_shares
from paceline.drafters.replay import Replay
from paceline.engine.ahead import AheadTexts, Key
from paceline.engine.scheduler import Plan
from paceline.engine.sequence import Sequence

LOOK_EVERY = 16
"""Steps that the probabilities are used for."""
TOKENS_PER_STEP, REPLAYED_PER_STEP = 2.0, 64.0
"""What a sequence makes in a step, for comparing it with one that follows a text made ahead."""
LEAST_SHARE = 1e-6
TYPICAL_GAIN = 1.5
"""How much more a step brings by drafts."""
NEAR_ROWS = 32
"""Over how many rows the price of one more is averaged."""


class Urgency:
    """Keeps what is known of lengths across calls."""

    def __init__(self, replay: Replay | None, ahead: AheadTexts | None) -> None:
        self.lengths = Lengths()
        self._replay, self._ahead = replay, ahead
        self._whole: Collection[Key] = ()
        self._shares: dict[int, float] = {}
        self._age = 0

    def begin(self, prompt_ids: set[int], whole: Collection[Key] = ()) -> None:
        """A new call; `whole` names the texts made ahead for it that came to an end."""
        self.lengths.begin(prompt_ids)
        self._whole = whole
        self._shares = {}

    def ended(self, sequence: Sequence) -> None:
        """A sequence is over."""
        count = sequence.length - sequence.prompt_length
        self.lengths.observe(sequence.prompt_id, count, sequence.finish_reason == "stop")

    def weigh(self, plan: Plan, asked: SequenceOf[Sequence], curve: CostCurve) -> tuple[NDArray[np.float64], float]:
        """A weight per sequence that is asked for, and what all those made ahead weigh together."""
        if any(sequence.sequence_id not in self._shares for sequence in asked):
            self._look(asked)
        beside = self._survival if len(asked) < len(plan.decoding) else 0.0
        shares = self.shares([sequence.sequence_id for sequence in asked])
        lengths = np.array([sequence.length for sequence in asked], np.float64)
        num_rows = plan.num_rows
        now, more = curve.ms_many([num_rows, num_rows + NEAR_ROWS], plan.num_kv_tokens)
        token_ms = (more - now) / NEAR_ROWS + curve.kv_ms * lengths
        # A weight of 1 is worth a step divided by all that a step brings, drafts included.
        return shares + token_ms / now * (1.0 + beside) * TYPICAL_GAIN, beside

    def shares(self, sequence_ids: SequenceOf[int]) -> NDArray[np.float64]:
        """How likely these sequences are to be last, as seen lately; one never seen counts like the least."""
        known = [self._shares.get(sequence_id, 0.0) for sequence_id in sequence_ids]
        return np.maximum(np.array(known, np.float64), LEAST_SHARE)

    @property
    def _survival(self) -> float:
        return self._ahead.survival if self._ahead is not None else 0.0

    def look(self, sequences: SequenceOf[Sequence]) -> None:
        """Find anew who is likely to be last, every few steps."""
        self._age += 1
        if self._age >= LOOK_EVERY:
            self._look(sequences)

    def _look(self, sequences: SequenceOf[Sequence]) -> None:
        self._age = 0
        running: dict[int, int] = {}
        for sequence in sequences:
            made = sequence.length - sequence.prompt_length
            running[sequence.prompt_id] = running.get(sequence.prompt_id, 0) + made
        means = self.lengths.mean_left(running)
        races = [self._race(sequence, means[sequence.prompt_id]) for sequence in sequences]
        shares = last_shares(*zip(*races, strict=True))
        self._shares = {s.sequence_id: float(share) for s, share in zip(sequences, shares, strict=True)}

    def _race(self, sequence: Sequence, mean: float) -> tuple[float, float, float]:
        """Steps it surely takes still, steps that may follow on average, and the most it may take in all."""
        num_left = max(sequence.num_left, 1)
        text = 0 if self._replay is None else min(self._replay.num_left(sequence), num_left)
        if text and (sequence.draw, sequence.sample_index) in self._whole:
            mean *= 1 - self._survival
        known = text / REPLAYED_PER_STEP
        return known, mean / TOKENS_PER_STEP, known + (num_left - text) / TOKENS_PER_STEP
