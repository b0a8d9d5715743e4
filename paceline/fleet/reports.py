"""What a worker of a fleet says to its driver. What the driver says to workers are the commands of `commands.py`.

Made by `worker.py`, heard by `driver.py`, brought by a carrier, which adds who it is from and says who came and went.
Between processes all of it travels as it is, but for tensors, which go through a store (`transport/wire.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.types import Prefix, Request, Rollout, Sampling
from paceline.fleet.commands import SequenceKey, Spare
from paceline.fleet.view import Speed
from paceline.rl.learner import WorkerSum
from paceline.rollout.run_ahead.store import RunAheadText
from paceline.rollout.stats import Stats
from paceline.spot.trainer import LogEntry, TrainerState

# --- what commands bring along ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """With `Generate` and `RunAhead`: the sequences, and how their tokens are drawn."""

    sampling: Sampling
    requests: Sequence[Request]
    drafts: Mapping[SequenceKey, RunAheadText] = field(default_factory=dict)
    """Run-ahead text of some of them."""


LoadWeights = Callable[[], object]
"""With `Publish`: puts the weights of its version in place, all of them, or raises."""


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """It is there, without weights."""

    speed: Speed
    process_id: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """It is gone, or does not answer: what it was told is not done."""

    reason: str


@dataclass(frozen=True, slots=True)
class Holds:
    """It has the weights of a version, whole."""

    version: int


class Growth(NamedTuple):
    """A sequence has more tokens than its worker has told of."""

    key: SequenceKey
    start: int
    """How many it has told of, or was given."""
    more: Prefix
    """Those behind them."""


@dataclass(frozen=True, slots=True, eq=False)
class Grew:
    """Sequences of one way of sampling have grown."""

    version: int
    growths: Sequence[Growth]


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A sequence is whole."""

    version: int
    key: SequenceKey
    rollout: Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """The sum of a part."""

    version: int
    part: int
    found: WorkerSum


class Stretch(NamedTuple):
    """Time in which a worker did one thing, by its own clock."""

    name: str
    """generate, learn, publish, run_ahead, spot_train or wait."""
    start_s: float
    seconds: float
    amount: int
    """What came of it: tokens, rows; 0 where nothing is counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Spent:
    """What it did since it last said so; said before the last result of a piece of work."""

    now_s: float
    """Its clock as it says so: clocks of machines differ."""
    stretches: Sequence[Stretch]
    speed: Speed
    """As measured by now."""
    stats: Stats | None = None
    """Of the rollouts among it."""


@dataclass(frozen=True, slots=True, eq=False)
class Wrote:
    """Run-ahead text that it has not told of yet."""

    texts: Mapping[SequenceKey, RunAheadText]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """It trained the drafter, or took a version back. What it does not tell of has not happened."""

    stage: TrainerState
    """From which another worker would go on."""
    has_version: bool
    """Whether its eagle is a new version, for all to draft with."""
    entries: Sequence[LogEntry] = ()
    """What was done, line by line: the log of the drafter's micro-steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rested:
    """It came to the end of what it did in spare time. Whoever ran ahead says so once, also where it was preempted."""

    command: Spare


WorkerReport = Joined | Lost | Holds | Grew | Ended | Summed | Spent | Wrote | Trained | Rested
