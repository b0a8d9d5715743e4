"""One fleet worker's part of the drafter's training: texts of its own parts and, on one worker, the trainer.

There is one drafter. The first worker told to train it is its trainer until it is lost. After every stretch of
micro-steps the trainer reports what it did and its state; the next trainer continues from there, so that the drafter is
a function of the driver's log of micro-steps, whichever workers ran them. Every worker keeps hidden states of what it
learned from, and drafts with the version that the driver sends. Owned by `worker.py`. It must never touch the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from paceline.fleet.reports import Trained
from paceline.model.backward.states import States
from paceline.model.eagle.network import Eagle
from paceline.rl.packing import Pack
from paceline.rollout.engine import Engine
from paceline.rollout.stats import Stats
from paceline.spot.trainer import TrainerState
from paceline.spot.worker import Spot


class SpotPart:
    """See the module."""

    def __init__(self, spot: Spot, engine: Engine) -> None:
        self._spot, self._engine = spot, engine
        self._is_trainer = False

    def observe(self, pack: Pack, states: States) -> None:
        """The learner's observer: keeps what the drafter can learn from."""
        self._spot.observe(pack, states)

    def use(self, eagle: Eagle) -> None:
        """Draft with this version."""
        if self._engine.eagle is not None:
            self._engine.eagle.use(eagle)

    def go_on(self, stage: TrainerState) -> None:
        """Become the trainer, and continue from another trainer's state."""
        self._spot.go_on(stage)

    def train(
        self, weights: Mapping[str, Tensor], version: int, seconds: float, should_stop: Callable[[], bool]
    ) -> Trained | None:
        """Run micro-steps for `seconds` or until `should_stop`; None if there was no time or no text for one."""
        self._is_trainer = True
        before = self._spot.eagle
        metrics = self._spot.work(weights, version, seconds, should_stop)
        return self._tell(self._spot.eagle is not before, metrics)

    def judge(self, stats: Stats) -> Trained | None:
        """Report to the trainer how drafts fared here; returns another version if it rolls back the one in use."""
        eagle = self._engine.eagle
        if not self._is_trainer or eagle is None or eagle.version is None or eagle.name not in stats.drafters:
            return None
        found = stats.drafters[eagle.name]
        collapsed = self._spot.report(eagle.version, found.firsts, found.drafts)
        return None if collapsed is None else self._tell(True, {})

    def _tell(self, has_version: bool, metrics: Mapping[str, float]) -> Trained | None:
        entries, stage = self._spot.take_log(), self._spot.stage()
        return Trained(stage, has_version, entries, metrics) if entries and stage is not None else None
