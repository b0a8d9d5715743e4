"""The input of `rules.decide`: the workers, the open work of their step, and what moving work costs.

A sequence is identified by its key; the driver holds `num_tokens` of it, which travel with it wherever it goes. A part
is what `rl/packing.py` deals to one virtual worker. A worker that is not in the view is lost; one that comes back has a
new number, and what it finished under the old one still counts if it is the first result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.fleet.commands import SequenceKey, Spare, StepPhase


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds measured on one worker. A step of b sequences takes `step_s + b * row_s` and makes b tokens."""

    step_s: float
    row_s: float
    prefill_s: float
    """Per token whose KV cache is rebuilt."""
    learn_s: float
    """Per row of a part."""
    num_slots: int
    """Sequences that run at the same time; the others wait."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker."""

    number: int
    speed: Speed
    version: int | None = None
    """Of the weights that it holds completely."""
    awaited: int | None = None
    """Of the weights on their way to it."""
    spare: Spare | None = None
    num_turns: int = 0
    """Number of spare turns so far."""
    stale_keys: tuple[SequenceKey, ...] = ()
    """Sequences that it was given but another worker has finished."""
    stale_parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence without a result yet."""

    key: SequenceKey
    tokens_left: float
    """Expected, from its own tokens and from the lengths of others."""
    num_tokens: int = 0
    """Tokens that the driver has."""
    worker: int | None = None
    """The worker told to finish it."""
    is_running: bool = False
    """Whether that worker has reported a token of it."""
    num_moves: int = 0
    """How often it was taken from a live worker."""
    taken_from: int | None = None
    """The last worker it was taken from."""


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A virtual worker whose sum has not arrived yet."""

    part: int
    rows: int
    rows_left: float
    """On the worker that is farthest."""
    workers: tuple[int, ...] = ()
    """The workers told to sum it."""


@dataclass(frozen=True, slots=True)
class RunAheadDraw:
    """A draw of a later step that no worker runs ahead yet."""

    draw: int
    num_samples: int
    tokens: float
    """Expected length of one sample."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What decides whether to move a sequence."""

    move_s: float = 0.05
    """Seconds that a move costs, besides the prefill."""
    publish_s: float = 1.0
    """Until a worker that was sent weights holds them."""
    margin: float = 0.1
    """Share of the remaining time that a move must save on top: estimates waver, and nothing may bounce."""
    max_moves: int = 2
    """Per sequence; 0 turns moves off."""


@dataclass(frozen=True, slots=True)
class SpareValues:
    """Seconds lately saved by a second of either; 0 or less turns it off."""

    ahead: float = 0.0
    spot: float = 0.0
    max_spot_workers: int = 1
    """How many workers may train the one drafter at a time."""
    trainer: int | None = None
    """The drafter's trainer; None: any worker may become it."""


@dataclass(frozen=True, slots=True)
class View:
    """All that `decide` looks at. Lists only open work: a phase without any is complete."""

    phase: StepPhase
    version: int
    """Of the weights that the phase is made with, or the newest."""
    workers: tuple[Worker, ...] = ()
    sequences: tuple[OpenSequence, ...] = ()
    parts: tuple[OpenPart, ...] = ()
    ahead: tuple[RunAheadDraw, ...] = ()
    prices: Prices = field(default=Prices())
    values: SpareValues = field(default=SpareValues())
