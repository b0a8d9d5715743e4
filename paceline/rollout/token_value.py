"""What a token of each running sequence is worth, for the budget: how likely it is to shorten this call or the next.

A token saves its sequence a row and the reading of its past in some later step. It saves all a step itself, which costs
something however few rows it has, with the probability that its sequence is the last to end. Where rows cost nearly
nothing, the second is all that counts; where steps do, the first. Those made ahead count in the same way for the call
that will ask for them, all together by the share of their text that survives: drafting for others slows them down. Text
made ahead tells how long a response will be: where it is whole, nothing is left to come unless it breaks off, which
had better be found out early. Those made ahead that are likely to be the last of the call that asks for them lead it,
and are drafted for like those asked for now.
Asked by `Proposer` in every step, while a GPU waits; what takes time is done in `look`, while it works.
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
from paceline.rollout.speculation.host_gap import HostGap
from paceline.rollout.speculation.makespan import Lengths, last_shares

LOOK_EVERY = 16
"""Steps that the probabilities are used for."""
TOKENS_PER_STEP, REPLAYED_PER_STEP = 2.0, 64.0
"""What a sequence makes in a step, for comparing it with one that follows a text made ahead."""
LEAST_SHARE = 1e-6
LEAST_STRAGGLER_SHARE = 0.05
"""Probability to be the last from which a sequence made ahead is drafted for: below, the guesses that come true save
less than it takes the host to make them."""
NEAR_ROWS = 32
"""Over how many rows the price of one more is averaged."""
NO_WAIT = HostGap()
"""Of steps that are launched before the one in front of them is known."""


class Price(NamedTuple):
    """Milliseconds of a step: whoever is in it, per sequence, and per cached token that is read."""

    step_ms: float
    row_ms: float
    kv_ms: float


class TokenValues:
    """Keeps what is known of lengths across calls."""

    def __init__(self, replay: Replay | None, ahead: RunAheadStore | None, can_draft_run_ahead: bool = True) -> None:
        """`can_draft_run_ahead`: whether there is a drafter for those made ahead."""
        self.lengths = Lengths()
        self.stragglers: Collection[int] = ()
        """Sequences made ahead that are worth drafting for."""
        self.waiting = HostGap()
        self._can_draft_run_ahead = can_draft_run_ahead
        self._replay, self._ahead = replay, ahead
        self._whole: set[SampleKey] = set()
        self._shares: dict[int, float] = {}
        self._age = 0

    def begin(self) -> None:
        """A new call."""
        self.lengths.begin()
        self._whole.clear()
        self._shares, self.stragglers = {}, ()

    def ask(self, prompt_ids: Collection[int], whole: Collection[SampleKey] = ()) -> None:
        """The call asks for prompts that it has not asked for yet; `whole` names texts for it that came to an end."""
        self.lengths.ask(prompt_ids)
        self._whole.update(whole)

    def ended(self, sequence: Sequence) -> None:
        """A sequence is over."""
        count = sequence.length - sequence.prompt_length
        self.lengths.observe(sequence.prompt_id, count, sequence.finish_reason == "stop")

    def weigh(self, plan: Plan, curve: CostCurve) -> tuple[NDArray[np.float64], float]:
        """Milliseconds that a token of each sequence in the lead is worth, and one of all others together."""
        draftable = plan.draftable()
        if any(sequence.sequence_id not in self._shares for sequence in draftable):
            self._look(plan.asked_for(), plan.ahead())
        price = self.price(plan, curve, self.waiting)
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

    def price(self, plan: Plan, curve: CostCurve, waiting: HostGap = NO_WAIT) -> Price:
        """What a step costs as it is planned, with the wait for it; one without drafts is not waited for."""
        num_rows = plan.num_rows
        now, more = curve.ms_many([num_rows, num_rows + NEAR_ROWS])
        row_ms = float(more - now) / NEAR_ROWS
        step_ms = max(float(now) - num_rows * row_ms, 0.0)
        return Price(step_ms + waiting.step_ms, row_ms + waiting.sequence_ms, curve.kv_ms)

    def shares(self, sequence_ids: SequenceOf[int]) -> NDArray[np.float64]:
        """How likely these sequences are to be last, as seen lately; one never seen counts like the least."""
        known = [self._shares.get(sequence_id, 0.0) for sequence_id in sequence_ids]
        return np.maximum(np.array(known, np.float64), LEAST_SHARE)

    @property
    def _survival(self) -> float:
        return self._ahead.survival if self._ahead is not None else 0.0

    def look(self, asked: SequenceOf[Sequence], ahead: SequenceOf[Sequence]) -> None:
        """Find anew who is likely to be last, every few steps."""
        self._age += 1
        if self._age >= LOOK_EVERY:
            self._look(asked, ahead)

    def _look(self, asked: SequenceOf[Sequence], ahead: SequenceOf[Sequence]) -> None:
        """Two races: of those asked for, and of those made ahead."""
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
        """Steps it surely takes still, that may follow on average, the most in all, and the chance that any follow."""
        num_left = max(sequence.num_left, 1)
        text = 0 if self._replay is None else min(self._replay.num_left(sequence), num_left)
        chance = 1.0
        if text and self._ahead is not None and (sequence.draw, sequence.sample_index) in self._whole:
            chance = -math.expm1(-text * self._ahead.break_rate)
        known = text / REPLAYED_PER_STEP
        return known, mean / TOKENS_PER_STEP, known + (num_left - text) / TOKENS_PER_STEP, chance
