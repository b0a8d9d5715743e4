"""Curricula: which level of a task each draw gets.

`run/loop.py` asks for the level of every draw it plans and records what the step's rewards were. A level is a pure
function of (seed, step, draw) and of the statistics of steps up to step - 2: the prompts of step t + 1 are known while
step t is made, and rollouts for them may be made ahead. Nothing that was made ahead may be recorded before its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.core.config import SettingsError
from paceline.core.noise import derive_key
from paceline.tasks.base import LevelledTask, Task
from paceline.tasks.settings import TaskSettings

LAG = 2
"""A step's levels depend on the steps up to this many before it."""

WINDOW = 16
"""How many steps the adaptive curriculum looks back."""

MIN_SHARE = 0.1
"""What part of the draws the adaptive curriculum spreads over all levels alike, so that none goes unmeasured."""


class Curriculum(Protocol):
    """Chooses levels. Its state is what was recorded, and goes into checkpoints as JSON."""

    def level(self, step: int, draw: int) -> int:
        """The level of a draw that is planned for a step; the same however often it is asked."""

    def is_planned(self, step: int) -> bool:
        """Whether all is known that decides the levels of a step."""

    def record(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Told once per step, in order: the rewards of the samples trained on, by level."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, fit for JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class EvenCurriculum:
    """Every level of a range alike; a range of one level is the curriculum `easy`."""

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
    """Levels in proportion to how much they can teach: most where about half of the samples are right.

    A group teaches by the difference between its samples, whose variance is p (1 - p) at solve rate p. A level that was
    not drawn lately counts as half solved, so it is tried again.
    """

    def __init__(self, seed: int, levels: range) -> None:
        assert len(levels) > 0
        self._seed, self._levels = seed, levels
        self._history: dict[int, dict[int, tuple[float, int]]] = {}
        """By step and level: sum and number of rewards."""

    def level(self, step: int, draw: int) -> int:
        shares = self.shares(step)
        left = _fraction(self._seed, draw)
        for level, share in zip(self._levels, shares, strict=True):
            left -= share
            if left < 0:
                return level
        return self._levels[-1]  # the shares' rounding error

    def is_planned(self, step: int) -> bool:
        return max(self._history, default=0) >= step - LAG

    def shares(self, step: int) -> list[float]:
        """What part of a step's draws each level gets."""
        newest = max(self._history, default=None)
        assert newest is None or newest >= step - LAG, f"step {step} was planned before step {step - LAG} was recorded"
        values = [self._teaching_value(step, level) for level in self._levels]
        even = MIN_SHARE / len(values)
        return [even + (1 - MIN_SHARE) * value / sum(values) for value in values]

    def _teaching_value(self, step: int, level: int) -> float:
        total, count = 1.0, 2  # one right and one wrong before anything is known
        for past in range(step - LAG - WINDOW + 1, step - LAG + 1):
            rewards, num_rewards = self._history.get(past, {}).get(level, (0.0, 0))
            total, count = total + rewards, count + num_rewards
        solve_rate = total / count
        return solve_rate * (1 - solve_rate)

    def record(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        assert not self._history or step == max(self._history) + 1, f"step {step} was recorded out of order"
        self._history[step] = {
            # Shaped rewards may leave the range from wrong to right, which a solve rate cannot.
            level: (sum(min(max(float(reward), 0.0), 1.0) for reward in values), len(values))
            for level, values in sorted(rewards.items())
        }
        # Levels of this step and later ones may still be asked for; they look back no further.
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
    """The curriculum of a `task` section, for the task that section makes."""
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
    """A number from 0 up to 1 that belongs to a draw."""
    return (derive_key(seed, "curriculum", draw, 0) >> 11) / 2**53
