"""What one worker of a fleet has of the drafter's training: texts of its own parts, and, in one of them, the trainer.

There is one drafter. Whoever is told first to train it is its trainer until it is lost; the next one goes on from the
version that all draft with. Every worker keeps hidden states of what it learned from, and drafts with the version that
its driver hands out. Owned by `worker.py`. It must never touch the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from paceline.engine.engine import Engine
from paceline.engine.stats import Stats
from paceline.model.eagle import Eagle
from paceline.model.training.states import States
from paceline.rl.packing import Pack
from paceline.spot.worker import Spot

MakeSpot = Callable[[Eagle | None], Spot]
"""Makes a trainer that goes on with a drafter, or begins one."""


class SpotPart:
    """See the module."""

    def __init__(self, make_spot: MakeSpot, engine: Engine) -> None:
        self._make, self._engine = make_spot, engine
        self._spot = make_spot(self._network)
        self._is_trainer = False

    @property
    def _network(self) -> Eagle | None:
        """What the engine drafts with."""
        return None if self._engine.eagle is None else self._engine.eagle.network

    def observe(self, pack: Pack, states: States) -> None:
        """For the learner: keep what the drafter can learn from."""
        self._spot.observe(pack, states)

    def use(self, eagle: Eagle) -> None:
        """Draft with this version."""
        if self._engine.eagle is not None:
            self._engine.eagle.use(eagle)

    def train(
        self, weights: Mapping[str, Tensor], version: int, seconds: float, should_stop: Callable[[], bool]
    ) -> tuple[Eagle | None, dict[str, float]]:
        """Micro-steps for so long, or until called; the version that came of them, if any, and metrics."""
        if not self._is_trainer:
            self._take_over()
        before = self._spot.eagle
        metrics = self._spot.work(weights, version, seconds, should_stop)
        self._spot.save(version)  # without a folder it only forgets its log
        return self._spot.eagle if self._spot.eagle is not before else None, metrics

    def judge(self, stats: Stats) -> Eagle | None:
        """Tell the trainer what became of guesses here; another version if the one in use has to go."""
        eagle = self._engine.eagle
        if not self._is_trainer or eagle is None or eagle.version is None or eagle.name not in stats.drafters:
            return None
        found = stats.drafters[eagle.name]
        collapsed = self._spot.report(eagle.version, found.accepted, found.verified)
        return self._spot.eagle if collapsed is not None else None

    def _take_over(self) -> None:
        self._is_trainer = True
        network = self._network
        if network is not None and network.version:
            ring, self._spot = self._spot.ring, self._make(network)
            self._spot.ring = ring
