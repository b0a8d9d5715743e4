"""What generates and learns for a run: one engine and one learner in this process, or a fleet of workers.

`loop.py` talks to a `Backend` and never asks which one it has; `LocalBackend` (`run/local.py`) and `FleetBackend`
(`fleet/driver.py`) implement it, and `open.py` chooses. Whatever the backend, a run has the same tokens and weights: a
backend may decide when work is done and by whom, never what is trained on.
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
    """Takes a sentence for the user."""


class Backend(Protocol):
    """Called in this order in every step: `begin_step`, `generate` and `take_stats` per wave, `learn`, `end_step`."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `generate` has a use for the draws of later steps."""

    def begin_step(self) -> None:
        """A step begins."""

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
        """What engines have counted since the last time."""

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One step of the policy's weights; returns metrics."""

    def end_step(self, step: int, seconds: float) -> dict[str, float]:
        """The step has taken so long; train the drafter where that is due. Returns metrics of drafter and workers."""

    def compare(
        self, rounds: Sequence[Sequence[NamedDraw]], sampling: Sampling, track: Callable[[int], OnFinish]
    ) -> Comparison | None:
        """Time the same rollouts with and without speculation; None where that cannot be measured.

        `track(total)` is told the number of rollouts of a round and returns what to call for each of them.
        """

    def drafter_state(self) -> dict[str, Any]:
        """What drafts are made from, for a checkpoint: no token depends on it, only time."""

    def restore_drafter(self, state: Mapping[str, Any]) -> None:
        """Go on from a `drafter_state`."""

    def save(self, step: int) -> None:
        """Keep the trained drafter as it is after this step."""

    def resume(self, step: int) -> None:
        """Go on with the drafter of this step; forget what came after it."""

    def close(self) -> None:
        """Let go of workers, processes and files."""


@dataclass(frozen=True)
class OpenedBackend:
    """What a backend needs before a run has a folder: nothing was written for it so far."""

    policy: Policy
    make: Callable[[Learner, RunContext], Backend]
