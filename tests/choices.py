"""Choices of arms for tests: in place of `Bandit.choose`, so that no clock decides what a test covers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from paceline.rollout.speculation.bandit import OFF, Arm, Bandit

Choose = Callable[[Bandit, int, Sequence[Arm]], Arm]


def keen(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
    """Everybody drafts in every step."""
    return available[-1]


def led(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
    """Nothing but run-ahead text is verified."""
    return next((arm for arm in available if arm.drafter == "ahead"), OFF)


def keen_when_alone(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
    """Drafts are for the last sequence."""
    return OFF if size > 1 else available[-1]


def changing(every: int = 3) -> Choose:
    """A few steps without drafts, a few with, and so on."""
    numbers = itertools.count()

    def choose(bandit: Bandit, size: int, available: Sequence[Arm]) -> Arm:
        return available[-1] if next(numbers) // every % 2 else OFF

    return choose
