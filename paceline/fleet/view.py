"""What `rules.decide` looks at: the workers, what is open in the step they share, and what moving work costs.

A sequence is known by its key; the driver holds `num_tokens` of it, which travel with it wherever it goes. A part is
what `rl/packing.py` deals to one virtual worker. A worker that is not in the view is lost; one that comes back after
that has a new number, and what it finished under the old one still counts if it is the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.fleet.commands import SequenceKey, Spare, StepPhase


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds, as measured on one worker. A step of b sequences takes `step_s + b * row_s` and makes b tokens."""

    step_s: float
    row_s: float
    prefill_s: float
    """Per token whose cache is rebuilt."""
    learn_s: float
    """Per row of a part."""
    num_slots: int
    """Sequences that run at a time; the others wait."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One that lives."""

    number: int
    speed: Speed
    version: int | None = None
    """Of the weights that it holds whole."""
    awaited: int | None = None
    """Of the weights on their way to it."""
    spare: Spare | None = None
    num_turns: int = 0
    """Times that it had spare time."""
    stale_keys: tuple[SequenceKey, ...] = ()
    """Those that it was given and another one has finished."""
    stale_parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """One that has no result yet."""

    key: SequenceKey
    tokens_left: float
    """Expected; whoever makes the view knows what the sequence has and what others had."""
    num_tokens: int = 0
    """Those that the driver has."""
    worker: int | None = None
    """Who was told to finish it."""
    is_running: bool = False
    """Whether that worker has reported a token of it."""
    num_moves: int = 0
    """How often it was taken from one that lives."""
    taken_from: int | None = None
    """Who that was, the last time."""


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A virtual worker whose sum is not in yet."""

    part: int
    rows: int
    rows_left: float
    """At whoever got farthest."""
    workers: tuple[int, ...] = ()
    """Who was told to sum it."""


@dataclass(frozen=True, slots=True)
class RunAheadDraw:
    """A draw of a later step that nobody runs ahead yet."""

    draw: int
    num_samples: int
    tokens: float
    """Expected of one sample."""


@dataclass(frozen=True, slots=True)
class Prices:
    """When to move a sequence."""

    move_s: float = 0.05
    """Seconds that any move costs, besides the prefill."""
    publish_s: float = 1.0
    """Until a worker that was sent weights holds them."""
    margin: float = 0.1
    """Share of the time to the end that a move has to save on top: estimates waver, and nothing may go to and fro."""
    max_moves: int = 2
    """Of one sequence; 0 leaves everything where it is."""


@dataclass(frozen=True, slots=True)
class SpareValues:
    """Seconds that a second of either saved lately; 0 or less: leave it."""

    ahead: float = 0.0
    spot: float = 0.0
    max_spot_workers: int = 1
    """There is one drafter; how many may train it at a time."""
    trainer: int | None = None
    """Who has it in training; None: nobody yet, so anybody may."""


@dataclass(frozen=True, slots=True)
class View:
    """All that `decide` looks at. Lists what is open only: in a phase with nothing open, all is in."""

    phase: StepPhase
    version: int
    """Of the weights that the phase is made with, or the newest."""
    workers: tuple[Worker, ...] = ()
    sequences: tuple[OpenSequence, ...] = ()
    parts: tuple[OpenPart, ...] = ()
    ahead: tuple[RunAheadDraw, ...] = ()
    prices: Prices = field(default=Prices())
    values: SpareValues = field(default=SpareValues())
