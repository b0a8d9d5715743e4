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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import host_loop
from paceline.rollout.run_ahead.store import RunAheadStore, SampleKey
from paceline.rollout.scheduler import Plan
from paceline.rollout.sequence import Sequence
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.makespan import Lengths, last_shares
from paceline.rollout.speculation.step_line import StepLine
from paceline.rollout.table import SequenceTable

LOOK_EVERY = 16
"""Steps between updates of the probabilities; with MANY sequences, which take longer to look at, twice as many."""
MANY = 64
TOKENS_PER_STEP, REPLAYED_PER_STEP = 2.0, 64.0
"""Tokens per step of a sequence: until that is known, and with run-ahead text to verify."""
SPEED_FADE = 0.94
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
        table, slots = self._table, plan.slots
        price = self.price(plan, curve, self.host_gap)
        given = slots, plan.num_draftable, table.is_ahead, table.lengths, LEAST_SHARE, self._survival, *price
        weights, others_worth, is_known = _weigh(table.shares, *given)
        if not is_known:
            self._look(plan)
            weights, others_worth, _ = _weigh(table.shares, *given)
        return weights, others_worth

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
        now, more = curve.ms(num_rows), curve.ms(num_rows + NEAR_ROWS)
        row_ms = (more - now) / NEAR_ROWS
        step_ms = max(now - num_rows * row_ms, 0.0)
        return Price(step_ms + host_gap.step_ms, row_ms + host_gap.sequence_ms, curve.kv_ms)

    def shares(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """How likely these sequences are to finish last, as of the last update; an unseen one counts like the least."""
        found: NDArray[np.float64] = np.fmax(self._table.shares[slots], LEAST_SHARE)
        return found

    @property
    def _survival(self) -> float:
        return self._ahead.survival if self._ahead is not None else 0.0

    def progress(self, slots: NDArray[np.int64], num_emitted: NDArray[np.int64]) -> float:
        """Of a drafted step: the mean of emitted tokens, or that weighted by who is likely to finish last, if less."""
        given = self._table.shares, self._table.speeds, slots, num_emitted
        return float(_progress(*given, LEAST_SHARE, SPEED_FADE, TOKENS_PER_STEP))

    def look(self, plan: Plan) -> None:
        """Update every few steps who is likely to finish last."""
        self._age += 1
        if self._age >= LOOK_EVERY * (1 + (len(plan.decoding) >= MANY)):
            self._look(plan)

    def _look(self, plan: Plan) -> None:
        """Run two races: one of requested sequences, one of run-ahead sequences."""
        self._age = 0
        table, running, slots, count = self._table, plan.decoding, plan.slots, plan.num_requested
        made = table.lengths[slots] - table.prompt_lengths[slots]
        means = self.lengths.mean_left([sequence.prompt_id for sequence in running], made.tolist())
        races = self._races(running, slots, means)
        leads: set[int] = set()
        for part, is_ahead in ((slice(count), False), (slice(count, len(running)), True)):
            if not len(slots[part]):
                continue
            table.shares[slots[part]] = shares = last_shares(*(values[part] for values in races))
            if is_ahead and self._can_draft_run_ahead:
                found = np.flatnonzero(shares >= LEAST_STRAGGLER_SHARE).tolist()
                leads = {running[part][i].sequence_id for i in found}
        self.stragglers = leads

    def _races(
        self, running: SequenceOf[Sequence], slots: NDArray[np.int64], means: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], ...]:
        """Steps each surely needs, mean of those that may follow, most steps in all, and the chance that any follow."""
        num_left = np.maximum(self._table.max_lengths[slots] - self._table.lengths[slots], 1)
        texts, chances = np.zeros(len(running)), np.ones(len(running))
        if self._text_left is not None and self._ahead is not None:
            texts = np.minimum([self._text_left(sequence) for sequence in running], num_left)
            for i in np.flatnonzero(texts).tolist():
                if (running[i].draw, running[i].sample_index) in self._whole:
                    chances[i] = -math.expm1(-texts[i] * self._ahead.break_rate)
        known, speeds = texts / REPLAYED_PER_STEP, self._table.speeds[slots]
        is_known = ~np.isnan(speeds)
        usual = float(speeds[is_known].mean()) if is_known.any() else TOKENS_PER_STEP
        speeds = np.where(is_known, speeds, usual)
        return known, means / speeds, known + (num_left - texts) / speeds, chances


@host_loop
def _progress(shares: Any, speeds: Any, slots: Any, num_emitted: Any, least: float, fade: float, start: float) -> float:
    """Also keeps the speeds."""
    total, weighted, weight = 0.0, 0.0, 0.0
    for i in range(len(slots)):
        share, speed = shares[slots[i]], speeds[slots[i]]
        if num_emitted[i] > 0:
            speed = start if np.isnan(speed) else speed
            speeds[slots[i]] = fade * speed + (1 - fade) * num_emitted[i]
        share = share if share > least else least  # NaN counts like the least
        total += num_emitted[i]
        weighted += num_emitted[i] * share
        weight += share
    return min(weighted / weight, total / len(slots))


@host_loop
def _weigh(
    shares: Any,
    slots: Any,
    num_draftable: int,
    is_ahead: Any,
    lengths: Any,
    least: float,
    survival: float,
    step_ms: float,
    row_ms: float,
    kv_ms: float,
) -> Any:
    weights, is_known = np.empty(num_draftable, np.float64), True
    lead, kv_tokens = 0.0, 0.0
    for i in range(len(slots)):
        slot = slots[i]
        if i >= num_draftable:
            kv_tokens += lengths[slot]
            continue
        share = shares[slot]
        is_known = is_known and not np.isnan(share)
        share = share if share > least else least
        lasting = 1.0
        if is_ahead[slot]:
            lead, lasting = lead + share, survival
        weights[i] = lasting * (share * step_ms + row_ms + kv_ms * lengths[slot])
    num_others = len(slots) - num_draftable
    others = step_ms * max(1.0 - lead, 0.0) + num_others * row_ms + kv_ms * kv_tokens if num_others else 0.0
    return weights, survival * others, is_known
