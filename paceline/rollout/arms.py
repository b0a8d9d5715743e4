"""Which drafters are asked in a step, and how deep and wide the model drafter guesses: a bandit's choice, made early.

Made by `Proposer` where there is a model drafter; those who are asked still compete per sequence, and `allocate` still
decides who gets rows. A choice is for the step after the one being planned, because on a GPU guesses are made behind a
step, before anybody has seen it. Nothing here can reach a token.
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
"""From so many sequences on, as measured on an H200 up to 32 (`bench/strategies.py`), and as rows cost there above. The
first two are used beside other drafters as well: one that pays with a good drafter, one that does with a poor one."""
SLEEP, CLOSE = 16, 0.97
"""A sleeping drafter is woken for one call in so many; one that comes so close to the best does not sleep."""
TRIED = "tried"
"""Where a state has the version that was tried."""
MOST_SIZES = 12
"""Powers of two that are looked at."""
OTHER = 2
"""A version whose number is so many times that of the one tried before is another drafter: a young one learns fast."""
JOINT = "+"
"""Between the names of drafters asked together."""


class Arms:
    """The bandit, and what it may choose from."""

    def __init__(self, model: ModelDrafter, others: Sequence[str], seed: int = 0) -> None:
        """`others` names the drafters beside the model drafter."""
        self._model = model
        self.bandit = Bandit({size: _arms(model.name, others, shapes) for size, shapes in SHAPES.items()}, seed)
        self._num_calls = self._tried = 0
        """Calls, and the version that what is known of the model drafter began with."""
        self.next: Arm | None = None
        """For the step to come; None where nobody has chosen yet."""

    def begin(self) -> None:
        """A new call. Where the model drafter has not paid anywhere, it sleeps, but for one call in a while.

        Awake it costs a little of every step, drafting or not. One that has learned much since is tried anew.
        """
        self._num_calls += 1
        version = self._model.version or 0
        if version > self._tried and version >= OTHER * self._tried:  # one from a folder may be version 0 for good
            self._tried = version
            self.bandit.forget(lambda arm: arm.depth > 0)
        if self._num_calls % SLEEP == 0 or self._may_pay():
            self._model.wake()
        else:
            self._model.sleep()
        self.next = None

    def _may_pay(self) -> bool:
        """Whether with some number of sequences an arm with the model drafter is among the best, or unknown."""
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
        """The choice for this step, of which so many sequences are asked for; that for the next one is made as well.

        `free_tokens`: tokens of sequences that need no drafter, for each that does; infinite where none does.
        """
        arm = self.next or self._choose(size, free_tokens)
        self.next = self._choose(size, free_tokens)
        return arm

    @property
    def takes_guesses(self) -> bool:
        """Whether the step to come is drafted for by the model drafter alone."""
        return self.next is not None and self.next.drafter == self._model.name

    @property
    def next_depth(self) -> int:
        """How far to guess behind the step being launched, for the one to come."""
        return 0 if self.next is None else self.next.depth

    def _choose(self, size: int, free_tokens: float) -> Arm:
        arms = self.bandit.arms(size)
        if math.isinf(free_tokens):  # nobody would be drafted for
            return next((arm for arm in arms if arm != OFF and not arm.depth), OFF)
        has_version = self._model.layer is not None
        return self.bandit.choose(size, [arm for arm in arms if has_version or not arm.depth], free_tokens)

    def observe(self, size: int, arm: Arm, tokens: float, seconds: float, plain_seconds: float) -> None:
        """What a step brought for each sequence that was drafted for, and what it would have taken without drafts."""
        if size > 0 and plain_seconds > 0:
            self.bandit.observe(size, arm, tokens, seconds, 1 / plain_seconds)

    def state(self) -> dict[str, Any]:
        """What it has learned."""
        return self.bandit.state() | {TRIED: self._tried}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.bandit.restore(state)
        tried = state.get(TRIED)
        self._tried = tried if isinstance(tried, int) else 0


def names_of(arm: Arm) -> frozenset[str]:
    """The drafters that a choice asks."""
    return frozenset(arm.drafter.split(JOINT))


def describe(arm: Arm) -> str:
    """A choice in words, for whoever looks at it: eagle 4x2."""
    return f"{arm.drafter} {arm.depth}x{arm.width}" if arm.depth else arm.drafter


def _arms(model: str, others: Sequence[str], shapes: Sequence[GuessShape]) -> list[Arm]:
    if not others:
        return [OFF, *(Arm(model, depth, width, depth * width) for depth, width in shapes)]
    host = JOINT.join(others)
    names = (model, f"{host}{JOINT}{model}")
    # Every arm has to be tried: with two ways to ask for each shape, two shapes are enough.
    learned = [Arm(name, depth, width, depth * width) for depth, width in shapes[:2] for name in names]
    return [OFF, Arm(host, 0, 1, 0), *learned]
