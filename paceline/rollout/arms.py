"""The bandit's choice, one step early, of which drafters run and how deep and wide the model drafter guesses.

`Proposer` creates it if there is a model drafter. The chosen drafters still compete per sequence, and `allocate` still
decides who gets rows. A choice is for the step after the one being planned, because a GPU guesses right after a step,
before the host sees its tokens. Nothing here can change a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.rollout.drafters.model_drafter import GuessShape, ModelDrafter
from paceline.rollout.speculation.bandit import OFF, Arm, Bandit

SHAPES: dict[int, tuple[GuessShape, GuessShape, GuessShape]] = {
    1: (GuessShape(4, 1), GuessShape(8, 3), GuessShape(6, 2)),
    8: (GuessShape(6, 1), GuessShape(2, 1), GuessShape(8, 1)),
    64: (GuessShape(2, 1), GuessShape(4, 1), GuessShape(1, 1)),
    256: (GuessShape(1, 1), GuessShape(2, 1), GuessShape(3, 1)),
}
"""By the smallest number of sequences: measured on an H200 up to 32 (`bench/strategies.py`), above that from the cost
of rows there. The first two are also used beside other drafters: one pays with a good drafter, one with a poor one."""
SLEEP, CLOSE = 16, 0.97
"""A sleeping drafter is woken in one of this many calls; one this close to the best does not sleep."""
TRIED = "tried"
"""The key of the tried version in a state."""
MOST_SIZES = 12
"""How many powers of two are checked."""
OTHER = 2
"""A version with this many times the number of the tried one counts as a new drafter: a young drafter learns fast."""
JOINT = "+"
"""Separates the names of drafters that run together."""


class Arms:
    """The bandit and its arms."""

    def __init__(self, model: ModelDrafter, others: Sequence[str], seed: int = 0) -> None:
        """`others` names the other drafters."""
        self._model = model
        self.bandit = Bandit({size: _arms(model.name, others, shapes) for size, shapes in SHAPES.items()}, seed)
        self._num_calls = self._tried = 0
        """The number of calls, and the drafter version with which the current estimates began."""
        self.next: Arm | None = None
        """The arm for the next step; None if not chosen yet."""

    def begin(self) -> None:
        """Start a call. A model drafter that has paid nowhere sleeps, except in an occasional call.

        Awake, it costs a little in every step, even without drafting. One that has learned much since is tried again.
        """
        self._num_calls += 1
        version = self._model.version or 0
        if version > self._tried and version >= OTHER * self._tried:  # one from a folder may stay at version 0
            self._tried = version
            self.bandit.forget(lambda arm: arm.depth > 0)
        if self._num_calls % SLEEP == 0 or self._may_pay():
            self._model.wake()
        else:
            self._model.sleep()
        self.next = None

    def _may_pay(self) -> bool:
        """Whether an arm with the model drafter is among the best, or untried, for some number of sequences."""
        is_known = False
        for size in (2**exponent for exponent in range(MOST_SIZES)):
            rates = self.bandit.rates(size)
            learned = [rate for arm, rate in rates.items() if arm.depth]
            others = [rate for arm, rate in rates.items() if not arm.depth]
            if learned and others:
                is_known = True
                if max(learned) >= CLOSE * max(others):
                    return True
        return not is_known

    def take(self, size: int, free_tokens: float = 0.0) -> Arm:
        """Return the arm for this step with `size` requested sequences, and choose the one for the next step.

        `free_tokens`: tokens of sequences that need no drafter, per sequence that does; infinite if none does.
        """
        arm = self.next or self._choose(size, free_tokens)
        self.next = self._choose(size, free_tokens)
        return arm

    @property
    def takes_guesses(self) -> bool:
        """Whether only the model drafter drafts for the next step."""
        return self.next is not None and self.next.drafter == self._model.name

    @property
    def next_depth(self) -> int:
        """How many tokens to guess after the step being launched, for the next step."""
        return 0 if self.next is None else self.next.depth

    def _choose(self, size: int, free_tokens: float) -> Arm:
        arms = self.bandit.arms(size)
        if math.isinf(free_tokens):  # no sequence needs a draft
            return next((arm for arm in arms if arm != OFF and not arm.depth), OFF)
        has_version = self._model.layer is not None
        return self.bandit.choose(size, [arm for arm in arms if has_version or not arm.depth], free_tokens)

    def observe(self, size: int, arm: Arm, tokens: float, seconds: float, plain_seconds: float) -> None:
        """Record a step's tokens per drafted sequence and its time, with and without drafts."""
        if size > 0 and plain_seconds > 0:
            self.bandit.observe(size, arm, tokens, seconds, 1 / plain_seconds)

    def state(self) -> dict[str, Any]:
        """What the bandit has learned."""
        return self.bandit.state() | {TRIED: self._tried}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.bandit.restore(state)
        tried = state.get(TRIED)
        self._tried = tried if isinstance(tried, int) else 0


def names_of(arm: Arm) -> frozenset[str]:
    """The drafters of an arm."""
    return frozenset(arm.drafter.split(JOINT))


def describe(arm: Arm) -> str:
    """An arm as reports show it, such as `eagle 4x2`."""
    return f"{arm.drafter} {arm.depth}x{arm.width}" if arm.depth else arm.drafter


def _arms(model: str, others: Sequence[str], shapes: Sequence[GuessShape]) -> list[Arm]:
    if not others:
        return [OFF, *(Arm(model, depth, width, depth * width) for depth, width in shapes)]
    host = JOINT.join(others)
    names = (model, f"{host}{JOINT}{model}")
    # Every arm has to be tried: with two arms per shape, two shapes are enough.
    learned = [Arm(name, depth, width, depth * width) for depth, width in shapes[:2] for name in names]
    return [OFF, Arm(host, 0, 1, 0), *learned]
