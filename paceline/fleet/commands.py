"""What the driver can tell a worker, and the key by which both know a sequence.

`rules.decide` returns these, the ledger notes them, a carrier brings them to the worker that each names. A worker
carries out what it is told in the order it was told; every command may arrive twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class StepPhase(Enum):
    """What a step waits for. Between the two the driver scores, applies gradients, evaluates or saves."""

    ROLLOUT = "rollout"
    LEARN = "learn"
    BETWEEN = "between"


class SequenceKey(NamedTuple):
    """One sequence: what its noise is made of, but for the seed."""

    draw: int
    sample: int
    stream: str = "train"


@dataclass(frozen=True, slots=True)
class Publish:
    """Fetch the weights of a version and hold them instead of older ones; whoever holds them already is done."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Finish these sequences with the weights of this version, in this order, from the tokens that the driver has."""

    worker: int
    version: int
    keys: tuple[SequenceKey, ...]


@dataclass(frozen=True, slots=True)
class Learn:
    """Send the gradient sum of each of these parts, in this order, with the weights of this version."""

    worker: int
    version: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Others have these or are done with them; those that are over or never came are nothing to drop."""

    worker: int
    keys: tuple[SequenceKey, ...] = ()
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Write drafts of these draws of a later step with the weights at hand, until all are whole or `Preempt` comes."""

    worker: int
    turn: int
    """How often the worker had spare time before: an end that is reported late is that of its own turn."""
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
    """Draft with this version of the drafter. Said by the driver itself: it changes what nothing depends on."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """To the driver: all that the phase waits for is in."""

    phase: StepPhase


@dataclass(frozen=True, slots=True)
class Wait:
    """To the driver: nothing can go on until a worker joins."""

    reason: str


Spare = RunAhead | SpotTrain
"""What a worker does while nobody needs it."""
Command = Publish | Generate | Learn | Drop | Spare | Preempt | Equip | Finish | Wait
