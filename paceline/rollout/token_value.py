"""Token values for the budget: how much time one more token of each running sequence saves, in this call or the next.

A token saves its sequence one row and one read of its KV cache in some later step. With the probability that the
sequence finishes last, it also saves a whole step, whose fixed cost does not depend on its rows. Where rows are nearly
free, only the second counts; where steps are, the first. Run-ahead sequences count the same way for the call that will
request them, together weighted by the share of their text that survives: drafting for others slows them down. Run-ahead
text predicts the length of a response: if it is complete, nothing will follow unless part of it is rejected, and that
had better be found out early. Run-ahead sequences that are likely to finish last in their own call are stragglers, and
are drafted for like requested ones.
`weigh` is called before every drafted step; `look` does the slow part now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.run_ahead.store import RunAheadStore, SampleKey
from paceline.rollout.scheduler import Plan
from paceline.rollout.sequence import Sequence
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.makespan import Lengths, last_shares
from paceline.rollout.speculation.step_line import StepLine
from paceline.rollout.table import SequenceTable

LOOK_EVERY = 16
"""Steps between updates of the probabilities."""
TOKENS_PER_STEP, REPLAYED_PER_STEP = 2.0, 64.0
"""Tokens per step of a sequence, without and with run-ahead text to verify."""
LEAST_SHARE = 1e-6
LEAST_STRAGGLER_SHARE = 0.05
"""Run-ahead sequences are drafted for from this probability of finishing last: below it, accepted tokens save less
than the host takes to draft them."""
NEAR_ROWS = 32
"""The number of rows over which the price of one more is averaged."""
TextLeft = Callable[[Sequence], int]
NO_WAIT = StepLine()
"""The gap of overlapped steps, which are launched before the previous one is known."""


class Price(NamedTuple):
    """Milliseconds of a step: fixed, per sequence, and per cached token read."""

    step_ms: float
    row_ms: float
    kv_ms: float


class TokenValues:
    """Token values; remembers response lengths across calls."""

    def __init__(
        self,
        table: SequenceTable,
        ahead: RunAheadStore | None = None,
        text_left: TextLeft | None = None,
        can_draft_run_ahead: bool = True,
    ) -> None:
        """`text_left`: how much run-ahead text a sequence has before it, while it follows that. `can_draft_run_ahead`:
        whether anything can draft for run-ahead sequences."""
        self.lengths = Lengths()
        self.stragglers: Collection[int] = ()
        """Run-ahead sequences that are worth drafting for."""
        self.host_gap = StepLine()
        self._can_draft_run_ahead = can_draft_run_ahead
        self._table, self._ahead, self._text_left = table, ahead, text_left
        self._whole: set[SampleKey] = set()
        self._age = 0

    def begin(self) -> None:
        """Start a new call."""
        self.lengths.begin()
        self._whole.clear()
        self.stragglers = ()

    def ask(self, prompt_ids: Collection[int], whole: Collection[SampleKey] = ()) -> None:
        """Note prompts new to the call; `whole` names the samples with complete run-ahead text."""
        self.lengths.ask(prompt_ids)
        self._whole.update(whole)

    def ended(self, sequence: Sequence) -> None:
        """Record a finished sequence."""
        count = sequence.length - sequence.prompt_length
        self.lengths.observe(sequence.prompt_id, count, sequence.finish_reason == "stop")

    def weigh(self, plan: Plan, curve: CostCurve) -> tuple[NDArray[np.float64], float]:
        """Milliseconds that a token of each draftable sequence is worth, and one token of all others together."""
        table, slots = self._table, plan.slots[: plan.num_draftable]
        if np.isnan(table.shares[slots]).any():
            self._look(plan.requested(), plan.ahead())
        price = self.price(plan, curve, self.host_gap)
        num_others = len(plan.decoding) - len(slots)
        if not num_others:
            return self.worth(slots, price), 0.0
        lead = self.shares(slots[table.is_ahead[slots]]).sum()
        kv_tokens = float(table.lengths[plan.slots[len(slots) :]].sum())
        others_worth = price.step_ms * max(1 - lead, 0.0) + num_others * price.row_ms + price.kv_ms * kv_tokens
        return self.worth(slots, price), float(self._survival * others_worth)

    def worth(self, slots: NDArray[np.int64], price: Price) -> NDArray[np.float64]:
        """Milliseconds that a token of each of these sequences saves."""
        lasting = np.where(self._table.is_ahead[slots], self._survival, 1.0)
        found: NDArray[np.float64] = lasting * (
            self.shares(slots) * price.step_ms + price.row_ms + price.kv_ms * self._table.lengths[slots]
        )
        return found

    def price(self, plan: Plan, curve: CostCurve, host_gap: StepLine = NO_WAIT) -> Price:
        """The cost of a planned step, including the host gap before it; steps without drafts have none."""
        num_rows = plan.num_rows
        now, more = curve.ms_many([num_rows, num_rows + NEAR_ROWS])
        row_ms = float(more - now) / NEAR_ROWS
        step_ms = max(float(now) - num_rows * row_ms, 0.0)
        return Price(step_ms + host_gap.step_ms, row_ms + host_gap.sequence_ms, curve.kv_ms)

    def shares(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """How likely these sequences are to finish last, as of the last update; an unseen one counts like the least."""
        found: NDArray[np.float64] = np.fmax(self._table.shares[slots], LEAST_SHARE)
        return found

    @property
    def _survival(self) -> float:
        return self._ahead.survival if self._ahead is not None else 0.0

    def look(self, plan: Plan) -> None:
        """Update every few steps who is likely to finish last."""
        self._age += 1
        if self._age >= LOOK_EVERY:
            self._look(plan.requested(), plan.ahead())

    def _look(self, asked: SequenceOf[Sequence], ahead: SequenceOf[Sequence]) -> None:
        """Run two races: one of requested sequences, one of run-ahead sequences."""
        self._age = 0
        running = [*asked, *ahead]
        means = self.lengths.mean_left([s.prompt_id for s in running], [s.length - s.prompt_length for s in running])
        races = [self._race(sequence, mean) for sequence, mean in zip(running, means.tolist(), strict=True)]
        leads: set[int] = set()
        for sequences, race in ((asked, races[: len(asked)]), (ahead, races[len(asked) :])):
            if race:
                shares = last_shares(*zip(*race, strict=True))
                self._table.shares[[sequence.slot for sequence in sequences]] = shares
                if sequences is ahead and self._can_draft_run_ahead:
                    found = np.flatnonzero(shares >= LEAST_STRAGGLER_SHARE).tolist()
                    leads = {sequences[i].sequence_id for i in found}
        self.stragglers = leads

    def _race(self, sequence: Sequence, mean: float) -> tuple[float, float, float, float]:
        """Steps it surely needs, mean of those that may follow, most steps in all, and the chance that any follow."""
        num_left, key = max(sequence.num_left, 1), (sequence.draw, sequence.sample_index)
        text = 0 if self._text_left is None else min(self._text_left(sequence), num_left)
        chance = 1.0
        if text and self._ahead is not None and key in self._whole:
            chance = -math.expm1(-text * self._ahead.break_rate)
        known = text / REPLAYED_PER_STEP
        return known, mean / TOKENS_PER_STEP, known + (num_left - text) / TOKENS_PER_STEP, chance
