"""What a token of each running sequence is worth, for the budget: how likely it is to shorten this call or the next.

A token saves its sequence a row and the reading of its past in some later step. It saves all a step itself, which costs
something however few rows it has, with the probability that its sequence is the last to end. Where rows cost nearly
nothing, the second is all that counts; where steps do, the first. Those made ahead count in the same way for the call
that will ask for them, all together by the share of their text that survives: drafting for others slows them down. Text
made ahead tells how long a response will be: where it is whole, there is little left to come.
Asked by `Drafting` in every step, while a card waits; what takes time is done in `look`, while it works.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

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
NEAR_ROWS = 32
"""Over how many rows the price of one more is averaged."""


class Price(NamedTuple):
    """Milliseconds of a step: however many rows it has, per row, and per cached token that is read."""

    step_ms: float
    row_ms: float
    kv_ms: float


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
        """Milliseconds that a token of each sequence asked for is worth, and one of all those made ahead together."""
        if any(sequence.sequence_id not in self._shares for sequence in asked):
            self._look(asked)
        shares = self.shares([sequence.sequence_id for sequence in asked])
        lengths = np.array([sequence.length for sequence in asked], np.float64)
        price = self.price(plan, curve)
        num_ahead, kv_ahead = len(plan.decoding) - len(asked), plan.num_kv_tokens - lengths.sum()
        beside = price.step_ms + num_ahead * price.row_ms + price.kv_ms * kv_ahead if num_ahead else 0.0
        return shares * price.step_ms + price.row_ms + price.kv_ms * lengths, self._survival * beside

    def price(self, plan: Plan, curve: CostCurve) -> Price:
        """What a step costs as it is planned."""
        num_rows = plan.num_rows
        now, more = curve.ms_many([num_rows, num_rows + NEAR_ROWS])
        row_ms = (more - now) / NEAR_ROWS
        return Price(max(float(now - num_rows * row_ms), 0.0), float(row_ms), curve.kv_ms)

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
