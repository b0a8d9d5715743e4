"""The governor: which way a step is run, and whether rollouts are begun ahead, by what both cost and brought before.

Tokens are the same either way, so the engine may compare in production. A bandit chooses among ways to run a step
(plain, drafts from texts, from drafters, from a network in some shape; plain is always among them) for every number of
sequences. Its reward is progress towards the end of the call per second of wall-clock time, the host's share included.
What progress is, see `_progress`: it is the proxy for "tokens that decide when the call ends". Run-ahead is an
investment with an account of its own.

The engine asks before a step is launched and reports when it is settled. Nothing here reads a clock or sees a token's
value, and nothing that equality compares depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.rollout.arms import Arms, describe
from paceline.rollout.drafters.model_drafter import GuessShape, ModelDrafter
from paceline.rollout.run_ahead.account import Account
from paceline.rollout.run_ahead.admission import run_ahead_room
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.rollout.scheduler import Load, Plan
from paceline.rollout.speculation.bandit import OFF, Arm
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.step_line import StepLine
from paceline.rollout.stats import Stats, floor_power
from paceline.rollout.step import Step
from paceline.rollout.token_value import TokenValues

AHEAD_REST = 16
"""Steps between looks at whether run-ahead has room, while it has none."""
HOST_BOUND = 1.3
"""A step that takes this many times what the GPU needs for it waits for the host."""
HOPED = 0.75
"""The share of guesses that a model drafter may be hoped to get right."""
FIRST_GAP_MS = 0.5
"""The host gap before a drafted step until one was measured."""
TOKEN_FADE = 0.95
_ARMS, _ACCOUNT = "arms", "run_ahead"


class Governor:
    """Keeps what it learned across calls; `state` keeps it across runs."""

    def __init__(
        self,
        arms: Arms | None,
        curve: CostCurve,
        token_values: TokenValues,
        ahead: RunAheadStore | None,
        max_rows: int,
        model: ModelDrafter | None = None,
    ) -> None:
        """Without `arms`, everything that can draft does, in every step."""
        self.arms, self._model = arms, model
        if arms is not None:
            arms.could_pay = self._guesses_could_pay
        self.curve = curve
        self._token_values, self._ahead, self._max_rows = token_values, ahead, max_rows
        self.walls = StepLine()
        """The wall-clock time of steps without drafts, by their number of sequences."""
        self.account = Account()
        self.token_ms = 0.0
        """Recent wall-clock milliseconds per token of a requested sequence."""
        self._ahead_rest = 0

    def begin(self) -> None:
        """Start a call."""
        if self.arms is not None:
            self.arms.begin()
        self._ahead_rest = 0

    def end(self, stats: Stats) -> None:
        """End a call."""
        self.account.close_call(stats.ahead_offered)
        if self.arms is not None or stats.drafters:
            stats.curve = tuple(zip(self.curve.anchors, self.curve.anchor_ms.tolist(), strict=True))

    def take(self, plan: Plan, has_text: bool) -> Arm | None:
        """The way to run this step; None: everything drafts. Call it exactly once per step."""
        return None if self.arms is None else self.arms.take(max(plan.num_requested, 1), has_text)

    @property
    def next(self) -> Arm | None:
        """How the step after that will be run; None if that is not decided yet, or everything drafts."""
        return None if self.arms is None else self.arms.next

    # --- what a step brought ------------------------------------------------------------------------------------------

    def observe(self, step: Step, counts: NDArray[np.int64], num_from_ahead: int, stats: Stats) -> None:
        """Learn from a settled step: tokens per decoding sequence, and how many of them are accepted run-ahead text."""
        plan, num_requested = step.plan, step.plan.num_requested
        if num_requested and (self.arms is not None or step.arm != OFF):
            stats.arms[floor_power(num_requested), describe(step.arm)] += 1
        if not num_requested or step.wall <= 0:
            return
        wall_ms = 1e3 * step.wall
        is_plain = not step.drafts.counts.any()
        if is_plain and not plan.chunks:
            self.walls.observe(len(plan.decoding), wall_ms)
        progress = 1.0 if is_plain else self._progress(plan, counts[:num_requested])
        token_ms = wall_ms / max(progress * num_requested, 1.0)
        self.token_ms += (1 - TOKEN_FADE) * (token_ms - self.token_ms) if self.token_ms else token_ms
        if self.arms is not None:
            plain_ms = self.curve.ms(plan.num_rows, step.timing[1])
            self.arms.observe(num_requested, step.arm, progress, step.wall, plain_ms / 1e3)
        if self._ahead is not None:
            self._book(step, progress, counts, num_from_ahead)

    def _progress(self, plan: Plan, emitted: NDArray[np.int64]) -> float:
        """By how many plain steps this one brought the end of the call nearer.

        The sequences that are likely to finish last decide; but a sequence far in front of the others holds up no one,
        so it counts no more than with equal weights. While others wait for a place, every token counts the same.
        """
        found = self._token_values.progress(plan.slots[: plan.num_requested], emitted)
        return float(emitted.mean()) if plan.has_waiting else found

    def _book(self, step: Step, progress: float, counts: NDArray[np.int64], num_from_ahead: int) -> None:
        """Charge run-ahead with what its sequences add to a step, and credit it with what its text saved there."""
        self.account.pass_time(1e3 * step.wall)
        num_ahead = len(step.plan.decoding) - step.plan.num_requested
        if num_ahead:
            self.account.charge(num_ahead * float(self.sequence_ms(len(step.plan.decoding))))
        drafted = int(counts[: step.plan.num_requested].sum()) - step.plan.num_requested if num_from_ahead else 0
        if drafted > 0:
            saved_ms = progress * self.walls.ms(step.plan.num_requested) - 1e3 * step.wall
            self.account.credit(float(saved_ms) * num_from_ahead / drafted)

    # --- run-ahead ----------------------------------------------------------------------------------------------------

    def ahead_rows(self, load: Load, typical_rows: float, token_ms: float) -> int:
        """How many rows the next step may spend on starting run-ahead sequences. `token_ms`: what a token costs."""
        if self._ahead is None or not self.account.may_run:
            return 0
        if self._ahead_rest:  # looking at it in every step would cost more than some steps take
            self._ahead_rest -= 1
            return 0
        if self._ahead.num_tokens + load.num_made >= self._ahead.max_tokens:
            return 0
        room = run_ahead_room(
            self.curve,
            num_rows=load.num_rows + round(typical_rows),
            kv_tokens=load.kv_tokens,
            max_rows=self._max_rows,
            token_ms=token_ms,
            survival=self._ahead.survival,
            sequence_ms=self.sequence_ms(load.num_rows),
            num_ahead=load.num_ahead,
            is_tested=self._ahead.is_tested,
        )
        self._ahead_rest = 0 if room else AHEAD_REST
        return room

    def sequence_ms(self, num_sequences: int) -> float:
        """What one more sequence adds to the wall-clock time of a step: nothing the GPU's curve does not know while the
        GPU is the slower one; else its share of the host's time, which is nearly all spent on sequences."""
        wall_ms, gpu_ms = self.walls.ms(num_sequences), self.curve.ms(num_sequences)
        return wall_ms / num_sequences if num_sequences and wall_ms > HOST_BOUND * gpu_ms else self.walls.sequence_ms

    # --- a network ----------------------------------------------------------------------------------------------------

    def _guesses_could_pay(self, size: int, shape: GuessShape) -> bool:
        """Whether guesses of this shape would pay if most came true: a short step has no time for them."""
        model = self._model
        if model is None or not model.pass_ms:
            return True
        plain_ms = self.curve.ms(size)
        gap_ms = self._token_values.host_gap.ms(size) or FIRST_GAP_MS
        tokens = sum(HOPED**depth for depth in range(shape.depth + 1))
        return tokens * plain_ms > plain_ms + gap_ms + shape.depth * model.pass_ms

    @property
    def model_could_pay(self) -> bool:
        """Whether a well-trained model drafter could save time here; if not, it need not be trained."""
        return self.arms is None or self.arms.model_could_pay

    # --- memory -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learned."""
        found: dict[str, Any] = {} if self.arms is None else {_ARMS: self.arms.state()}
        return found if self._ahead is None else found | {_ACCOUNT: self.account.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        if self.arms is not None and _ARMS in state:
            self.arms.restore(state[_ARMS])
        if self._ahead is not None and _ACCOUNT in state:
            self.account.restore(state[_ACCOUNT])
