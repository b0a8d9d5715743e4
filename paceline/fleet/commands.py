"""The commands that the driver sends to workers, and the key that identifies a sequence.

`rules.decide` returns them, the ledger records them, a carrier delivers them to the worker that each names. A worker
carries out its commands in order; every command may arrive twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class StepPhase(Enum):
    """What a step waits for. In between, the driver scores, applies gradients, evaluates or saves."""

    ROLLOUT = "rollout"
    LEARN = "learn"
    BETWEEN = "between"


class SequenceKey(NamedTuple):
    """Identifies a sequence; with the seed, it determines the sequence's noise."""

    draw: int
    sample: int
    stream: str = "train"


@dataclass(frozen=True, slots=True)
class Publish:
    """Fetch the weights of a version and replace older ones; a worker that already holds them is done."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Finish these sequences with this version's weights, in this order, from the tokens that the driver has."""

    worker: int
    version: int
    keys: tuple[SequenceKey, ...]


@dataclass(frozen=True, slots=True)
class Learn:
    """Send the gradient sum of each of these parts, in this order, with this version's weights."""

    worker: int
    version: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop what other workers have or have finished; ignores what is finished or never arrived."""

    worker: int
    keys: tuple[SequenceKey, ...] = ()
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Run ahead on these draws of a later step with the current weights, until all are complete or `Preempt` comes."""

    worker: int
    turn: int
    """Counts the worker's spare turns, so that a late report of an end is matched to its own turn."""
    draws: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpotTrain:
    """Train the drafter until the carrier's limit or a `Preempt` comes."""

    worker: int
    turn: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop running ahead or training the drafter, within one micro-step."""

    worker: int


@dataclass(frozen=True, slots=True)
class Equip:
    """Draft with this version of the drafter. Sent by the driver itself, not the rules: no result depends on it."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """For the driver: the phase has all its results."""

    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Wait:
    """For the driver: nothing can proceed until a worker joins."""

    reason: str


Spare = RunAhead | SpotTrain
"""What an idle worker does."""
Command = Publish | Generate | Learn | Drop | Spare | Preempt | Equip | Finish | Wait
