"""Curricula: they choose the task level of each draw.

`run/loop.py` asks for the level of every draw it plans and records the rewards of each step. A level is a pure function
of (seed, step, draw) and of the statistics of steps up to step - 2: the prompts of step t + 1 are known during step t,
so their rollouts may run ahead. Rewards of run-ahead rollouts must not be recorded before their own step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.core.config import SettingsError
from paceline.core.noise import derive_key
from paceline.tasks.base import LevelledTask, Task
from paceline.tasks.settings import TaskSettings

LAG = 2
"""A step's levels depend on statistics up to this many steps before it."""

WINDOW = 16
"""How many steps the adaptive curriculum looks back."""

MIN_SHARE = 0.1
"""The share of draws that the adaptive curriculum spreads evenly over all levels, so that none goes unmeasured."""


class Curriculum(Protocol):
    """Chooses levels. Its state is the recorded rewards, stored in checkpoints as JSON."""

    def level(self, step: int, draw: int) -> int:
        """The level of a draw planned for a step; repeated calls agree."""

    def is_planned(self, step: int) -> bool:
        """Whether everything that decides a step's levels is known."""

    def record(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Take the rewards of the samples trained on, by level. Called once per step, in order."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON-compatible data."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


class EvenCurriculum:
    """Draws every level of a range equally often; with a range of one level it is the curriculum `easy`."""

    def __init__(self, seed: int, levels: range) -> None:
        assert len(levels) > 0
        self._seed, self._levels = seed, levels

    def level(self, step: int, draw: int) -> int:
        return self._levels[int(_fraction(self._seed, draw) * len(self._levels))]

    def is_planned(self, step: int) -> bool:
        return True

    def record(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


class AdaptiveCurriculum:
    """Draws levels in proportion to how much they can teach: most where about half of the samples are correct.

    A group teaches through the differences between its samples, whose variance is p (1 - p) at solve rate p. A level
    that was not drawn recently counts as half solved, so it is tried again.
    """

    def __init__(self, seed: int, levels: range) -> None:
        assert len(levels) > 0
        self._seed, self._levels = seed, levels
        self._history: dict[int, dict[int, tuple[float, int]]] = {}
        """Sum and number of rewards, by step and level."""

    def level(self, step: int, draw: int) -> int:
        shares = self.shares(step)
        left = _fraction(self._seed, draw)
        for level, share in zip(self._levels, shares, strict=True):
            left -= share
            if left < 0:
                return level
        return self._levels[-1]  # rounding error of the shares

    def is_planned(self, step: int) -> bool:
        return max(self._history, default=0) >= step - LAG

    def shares(self, step: int) -> list[float]:
        """The share of a step's draws that each level gets."""
        newest = max(self._history, default=None)
        assert newest is None or newest >= step - LAG, f"step {step} was planned before step {step - LAG} was recorded"
        values = [self._teaching_value(step, level) for level in self._levels]
        even = MIN_SHARE / len(values)
        return [even + (1 - MIN_SHARE) * value / sum(values) for value in values]

    def _teaching_value(self, step: int, level: int) -> float:
        total, count = 1.0, 2  # prior: one correct and one wrong sample
        for past in range(step - LAG - WINDOW + 1, step - LAG + 1):
            rewards, num_rewards = self._history.get(past, {}).get(level, (0.0, 0))
            total, count = total + rewards, count + num_rewards
        solve_rate = total / count
        return solve_rate * (1 - solve_rate)

    def record(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        assert not self._history or step == max(self._history) + 1, f"step {step} was recorded out of order"
        self._history[step] = {
            # Shaped rewards may fall outside 0 to 1; a solve rate cannot.
            level: (sum(min(max(float(reward), 0.0), 1.0) for reward in values), len(values))
            for level, values in sorted(rewards.items())
        }
        # The levels of this step and later ones may still be needed; they look back no further.
        self._history = {past: levels for past, levels in self._history.items() if past > step - LAG - WINDOW}

    def state(self) -> dict[str, Any]:
        return {
            "steps": [
                {"step": step, "levels": [[level, *numbers] for level, numbers in levels.items()]}
                for step, levels in self._history.items()
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history = {
            entry["step"]: {level: (total, count) for level, total, count in entry["levels"]}
            for entry in state["steps"]
        }


def make_curriculum(settings: TaskSettings, task: Task) -> Curriculum:
    """The curriculum that a `task` section asks for, for that section's task."""
    if not isinstance(task, LevelledTask):
        if settings.curriculum != "easy" or settings.level or settings.max_level:
            raise SettingsError(f"task.curriculum: {task.name} has no levels; use curriculum easy with level 0")
        return EvenCurriculum(settings.seed, range(1))
    last = task.num_levels - 1 if settings.max_level is None else settings.max_level
    if last >= task.num_levels:
        raise SettingsError(f"task.max_level: {task.name} has levels 0 to {task.num_levels - 1}, got {last}")
    if settings.curriculum == "easy":
        return EvenCurriculum(settings.seed, range(settings.level, settings.level + 1))
    if last < settings.level:
        raise SettingsError(f"task.max_level: must not be below task.level {settings.level}, got {last}")
    levels = range(settings.level, last + 1)
    kind = EvenCurriculum if settings.curriculum == "mixed" else AdaptiveCurriculum
    return kind(settings.seed, levels)


def _fraction(seed: int, draw: int) -> float:
    """A draw's own number in [0, 1)."""
    return (derive_key(seed, "curriculum", draw, 0) >> 11) / 2**53
