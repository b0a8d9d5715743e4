"""What a worker of a fleet says to its driver. What the driver says to workers are the commands of `fleet_view.py`.

Made by `worker.py`, heard by `driver.py`, brought by a carrier, which adds who it is from and says who came and went.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.fleet.fleet_view import Key, Speed
from paceline.rl.learner import WorkerSum
from paceline.types import Known, Rollout


@dataclass(frozen=True, slots=True)
class Joined:
    """It is there, without weights."""

    speed: Speed


@dataclass(frozen=True, slots=True)
class Lost:
    """It is gone, or does not answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Holds:
    """It has the weights of a version, whole."""

    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Grew:
    """A sequence has more tokens than it has told of."""

    version: int
    key: Key
    start: int
    """How many it has told of, or was given."""
    more: Known
    """Those behind them."""


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A sequence is whole."""

    version: int
    key: Key
    rollout: Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """The sum of a part."""

    version: int
    part: int
    found: WorkerSum


Report = Joined | Lost | Holds | Grew | Ended | Summed
