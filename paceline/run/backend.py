"""What generates and learns for a run: one engine and one learner in this process, or a fleet of workers.

`loop.py` talks to a `Backend` and never asks which one it has; `LocalBackend` (`run/local.py`) and `FleetBackend`
(`fleet/driver.py`) implement it, and `open.py` chooses. Every backend yields the same tokens and weights: it may decide
when work is done and by whom, never what is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.core.trace import Trace
from paceline.core.types import Rollout, Sampling
from paceline.model.policy import Policy
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rollout.compare import Comparison
from paceline.rollout.engine import OnFinish
from paceline.rollout.stats import Stats

NamedDraw = tuple[Sequence[int], int]
"""The token ids of a prompt, and the draw that uses it."""


@dataclass(frozen=True)
class RunContext:
    """What a run shares with its backend."""

    folder: Path
    trace: Trace
    note: Callable[[str], None]
    """Takes a message for the user."""


class Backend(Protocol):
    """Called in this order in every step: `begin_step`, `generate` and `take_stats` per wave, `learn`, `end_step`."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `generate` can use the draws of later steps."""

    def begin_step(self) -> None:
        """Start a step."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[int],
        on_finish: OnFinish | None = None,
        ahead: Sequence[NamedDraw] | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per prompt, ordered by prompt, then sample; `ahead` names draws of later steps."""

    def take_stats(self) -> list[Stats]:
        """The engines' counters since the last call."""

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Update the policy's weights once; returns metrics."""

    def end_step(self, step: int, seconds: float) -> dict[str, float]:
        """Finish a step that took `seconds`; train the drafter if due. Returns metrics of drafter and workers."""

    def compare(
        self,
        rounds: Sequence[Sequence[NamedDraw]],
        sampling: Sampling,
        seconds: float,
        track: Callable[[int, str], OnFinish],
    ) -> Comparison | None:
        """Time the same rollouts with and without speculation; None if the backend cannot measure that.

        The first round warms up, one is timed, and more only until `seconds` have passed. `track(total, pass)`
        takes the number of rollouts in a pass, and its name; it returns the callback for each of them.
        """

    def drafter_state(self) -> dict[str, Any]:
        """What drafts are made from, for a checkpoint: it affects speed, never a token."""

    def restore_drafter(self, state: Mapping[str, Any]) -> None:
        """Restore what `drafter_state` returned."""

    def save(self, step: int) -> None:
        """Save the trained drafter as of this step."""

    def resume(self, step: int) -> None:
        """Resume with the drafter of this step; discard later ones."""

    def close(self) -> None:
        """Release workers, processes and files."""


@dataclass(frozen=True)
class OpenedBackend:
    """A backend before the run has a folder: nothing has been written for it yet."""

    policy: Policy
    make: Callable[[Learner, RunContext], Backend]
