"""Token values for the budget: how much time one more token of each running sequence saves, in this call or the next.

A token saves its sequence one row and one read of its KV cache in some later step. With the probability that the
sequence finishes last, it also saves a whole step, whose fixed cost does not depend on its rows. Where rows are nearly
free, only the second counts; where steps are, the first. Run-ahead sequences count the same way for the call that will
request them, together weighted by the share of their text that survives: drafting for others slows them down. Run-ahead
text predicts the length of a response: if it is complete, nothing will follow unless part of it is rejected, and that
had better be found out early. Run-ahead sequences that are likely to finish last in their own call are stragglers, and
are drafted for like requested ones.
`Proposer` calls `weigh` in every step while a GPU waits; `look` does the slow part while the GPU works.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.drafters.replay import Replay
from paceline.rollout.run_ahead.store import RunAheadStore, SampleKey
from paceline.rollout.scheduler import Plan
from paceline.rollout.sequence import Sequence
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.makespan import Lengths, last_shares
from paceline.rollout.speculation.step_line import StepLine

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
NO_WAIT = StepLine()
"""The gap of overlapped steps, which are launched before the previous one is known."""


class Price(NamedTuple):
    """Milliseconds of a step: fixed, per sequence, and per cached token read."""

    step_ms: float
    row_ms: float
    kv_ms: float


class TokenValues:
    """Token values; remembers response lengths across calls."""

    def __init__(self, replay: Replay | None, ahead: RunAheadStore | None, can_draft_run_ahead: bool = True) -> None:
        """`can_draft_run_ahead`: whether a drafter can draft for run-ahead sequences."""
        self.lengths = Lengths()
        self.stragglers: Collection[int] = ()
        """Run-ahead sequences that are worth drafting for."""
        self.host_gap = StepLine()
        self._can_draft_run_ahead = can_draft_run_ahead
        self._replay, self._ahead = replay, ahead
        self._whole: set[SampleKey] = set()
        self._shares: dict[int, float] = {}
        self._age = 0

    def begin(self) -> None:
        """Start a new call."""
        self.lengths.begin()
        self._whole.clear()
        self._shares, self.stragglers = {}, ()

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
        draftable = plan.draftable()
        if any(sequence.sequence_id not in self._shares for sequence in draftable):
            self._look(plan.requested(), plan.ahead())
        price = self.price(plan, curve, self.host_gap)
        num_others = len(plan.decoding) - len(draftable)
        if not num_others:
            return self.worth(draftable, price), 0.0
        lead = self.shares([s.sequence_id for s in draftable if s.is_ahead]).sum()
        kv_tokens = plan.num_kv_tokens - sum(sequence.length for sequence in draftable)
        others_worth = price.step_ms * max(1 - lead, 0.0) + num_others * price.row_ms + price.kv_ms * kv_tokens
        return self.worth(draftable, price), float(self._survival * others_worth)

    def worth(self, sequences: SequenceOf[Sequence], price: Price) -> NDArray[np.float64]:
        """Milliseconds that a token of each sequence saves."""
        shares = self.shares([sequence.sequence_id for sequence in sequences])
        lengths = np.array([sequence.length for sequence in sequences], np.float64)
        lasting = np.array([self._survival if sequence.is_ahead else 1.0 for sequence in sequences], np.float64)
        return lasting * (shares * price.step_ms + price.row_ms + price.kv_ms * lengths)

    def price(self, plan: Plan, curve: CostCurve, host_gap: StepLine = NO_WAIT) -> Price:
        """The cost of a planned step, including the host gap before it; steps without drafts have none."""
        num_rows = plan.num_rows
        now, more = curve.ms_many([num_rows, num_rows + NEAR_ROWS])
        row_ms = float(more - now) / NEAR_ROWS
        step_ms = max(float(now) - num_rows * row_ms, 0.0)
        return Price(step_ms + host_gap.step_ms, row_ms + host_gap.sequence_ms, curve.kv_ms)

    def shares(self, sequence_ids: SequenceOf[int]) -> NDArray[np.float64]:
        """How likely these sequences are to finish last, as of the last update; an unseen one counts like the least."""
        known = [self._shares.get(sequence_id, 0.0) for sequence_id in sequence_ids]
        return np.maximum(np.array(known, np.float64), LEAST_SHARE)

    @property
    def _survival(self) -> float:
        return self._ahead.survival if self._ahead is not None else 0.0

    def look(self, asked: SequenceOf[Sequence], ahead: SequenceOf[Sequence]) -> None:
        """Update every few steps who is likely to finish last."""
        self._age += 1
        if self._age >= LOOK_EVERY:
            self._look(asked, ahead)

    def _look(self, asked: SequenceOf[Sequence], ahead: SequenceOf[Sequence]) -> None:
        """Run two races: one of requested sequences, one of run-ahead sequences."""
        self._age = 0
        running = [*asked, *ahead]
        means = self.lengths.mean_left([s.prompt_id for s in running], [s.length - s.prompt_length for s in running])
        races = [self._race(sequence, mean) for sequence, mean in zip(running, means.tolist(), strict=True)]
        self._shares = {}
        for sequences, race in ((asked, races[: len(asked)]), (ahead, races[len(asked) :])):
            if race:
                shares = last_shares(*zip(*race, strict=True)).tolist()
                self._shares |= {s.sequence_id: share for s, share in zip(sequences, shares, strict=True)}
        stragglers = (s.sequence_id for s in ahead if self._shares[s.sequence_id] >= LEAST_STRAGGLER_SHARE)
        self.stragglers = set(stragglers) if self._can_draft_run_ahead else ()

    def _race(self, sequence: Sequence, mean: float) -> tuple[float, float, float, float]:
        """Steps it surely needs, mean of those that may follow, most steps in all, and the chance that any follow."""
        num_left, key = max(sequence.num_left, 1), (sequence.draw, sequence.sample_index)
        text = 0 if self._replay is None else min(self._replay.num_left(sequence.sequence_id, key), num_left)
        chance = 1.0
        if text and self._ahead is not None and key in self._whole:
            chance = -math.expm1(-text * self._ahead.break_rate)
        known = text / REPLAYED_PER_STEP
        return known, mean / TOKENS_PER_STEP, known + (num_left - text) / TOKENS_PER_STEP, chance
