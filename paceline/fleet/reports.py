"""The reports that a fleet's workers send to the driver, and the payloads of its commands (`commands.py`).

`worker.py` makes reports and `driver.py` handles them; a carrier delivers them, adds the worker's number, and reports
who joined and was lost. Between processes they are pickled, except for tensors, which go through a store
(`transport/wire.py`).
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

# --- payloads of commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """With `Generate` and `RunAhead`: the requested sequences and their sampling."""

    sampling: Sampling
    requests: Sequence[Request]
    drafts: Mapping[SequenceKey, RunAheadText] = field(default_factory=dict)
    """Run-ahead text for some of them."""


LoadWeights = Callable[[], object]
"""With `Publish`: loads all weights of its version, or raises."""


# --- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker is ready, without weights."""

    speed: Speed
    process_id: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is gone or does not answer: its work is not done."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """There is no room for the worker: it joins if there ever is, and the run goes on without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Holds:
    """The worker holds all weights of a version."""

    version: int


class Growth(NamedTuple):
    """New tokens of a sequence since its worker's last report."""

    key: SequenceKey
    start: int
    """How many it has reported, or was given."""
    more: Prefix
    """The new ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Grew:
    """New tokens of sequences with the same sampling."""

    version: int
    growths: Sequence[Growth]


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A sequence is finished."""

    version: int
    key: SequenceKey
    rollout: Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """The gradient sum of a part."""

    version: int
    part: int
    found: WorkerSum


class Stretch(NamedTuple):
    """A span of time in which a worker did one thing, by its own clock."""

    name: str
    """generate, learn, publish, run_ahead, spot_train or wait."""
    start_s: float
    seconds: float
    amount: int
    """Tokens or rows produced; 0 if nothing is counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Spent:
    """The worker's time since its last such report; sent before the last result of a piece of work."""

    now_s: float
    """Its clock when sending: clocks differ between machines."""
    stretches: Sequence[Stretch]
    speed: Speed
    """The latest measurement."""
    stats: Stats | None = None
    """The engine's counters, if it generated."""


@dataclass(frozen=True, slots=True, eq=False)
class Wrote:
    """New run-ahead text."""

    texts: Mapping[SequenceKey, RunAheadText]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The worker trained the drafter, or rolled a version back. What it does not report does not count."""

    stage: TrainerState
    """Where another worker would continue."""
    has_version: bool
    """Whether its eagle is a new version, for all workers to draft with."""
    entries: Sequence[LogEntry] = ()
    """New lines for the log of the drafter's micro-steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rested:
    """The worker ended its spare-time work. After running ahead it reports this once, even if preempted."""

    command: Spare


WorkerReport = Joined | Lost | Unplaced | Holds | Grew | Ended | Summed | Spent | Wrote | Trained | Rested
