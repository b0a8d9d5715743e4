"""What a driver knows of its workers and of the step they share, what it can tell them, and the ledger of both.

    reports -> Ledger -> View -> rules.decide -> commands -> Ledger.note, and to the workers

A carrier fills a `Ledger` with what it hears, asks `rules.decide` about the ledger's view, notes every command and
carries it out. What was commanded counts as done by whoever is to do it: a message on its way is never sent twice. The
ledger also says which results count: the first of each, made with the weights that the step asks for. It holds no
texts, no weights and no gradients, reads no clock and sends nothing.

A sequence is known by its key; `num_tokens` of it are at the driver and travel with it, wherever it goes. A part is
what `rl/packing.py` deals to one virtual worker. A worker that is not in the view is lost. One that comes back after
that has a new number; what it finished under the old one still counts if it is the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """What a step waits for. Between the two the driver scores, applies gradients, evaluates or saves."""

    ROLLOUT = "rollout"
    LEARN = "learn"
    BETWEEN = "between"


class Key(NamedTuple):
    """One sequence: what its noise is made of, but for the seed."""

    draw: int
    sample: int
    stream: str = "train"


# --- commands ---------------------------------------------------------------------------------------------------------
# A worker carries out what it is told in the order it was told. All of them may come twice.


@dataclass(frozen=True, slots=True)
class Publish:
    """Fetch the weights of a version and hold them instead of older ones; whoever holds them already is done."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Finish these sequences with the weights of this version, in this order, from the tokens that the driver has."""

    worker: int
    version: int
    keys: tuple[Key, ...]


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
    keys: tuple[Key, ...] = ()
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

    phase: Phase


@dataclass(frozen=True, slots=True)
class Wait:
    """To the driver: nothing can go on until a worker joins."""

    reason: str


Spare = RunAhead | SpotTrain
"""What a worker does while nobody needs it."""
Command = Publish | Rollout | Learn | Drop | Spare | Preempt | Equip | Finish | Wait


# --- the view ---------------------------------------------------------------------------------------------------------


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
    stale_keys: tuple[Key, ...] = ()
    """Those that it was given and another one has finished."""
    stale_parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """One that has no result yet."""

    key: Key
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
class AheadDraw:
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

    phase: Phase
    version: int
    """Of the weights that the phase is made with, or the newest."""
    workers: tuple[Worker, ...] = ()
    sequences: tuple[OpenSequence, ...] = ()
    parts: tuple[OpenPart, ...] = ()
    ahead: tuple[AheadDraw, ...] = ()
    prices: Prices = field(default=Prices())
    values: SpareValues = field(default=SpareValues())


# --- the ledger -------------------------------------------------------------------------------------------------------


class Ledger:
    """Keeps a view up to date. Reports may come late, twice, in any order and from those that are lost."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.phase = Phase.BETWEEN
        self.version = 0
        self.prices = prices or Prices()
        self.values = SpareValues()
        self._workers: dict[int, Worker] = {}
        self._sequences: dict[Key, OpenSequence] = {}
        self._parts: dict[int, OpenPart] = {}
        self._planned: dict[int, AheadDraw] = {}
        self._taken: set[int] = set()
        """Draws that somebody runs ahead."""

    def view(self) -> View:
        return View(
            self.phase,
            self.version,
            tuple(self._workers.values()),
            tuple(self._sequences.values()),
            tuple(self._parts.values()),
            tuple(draw for number, draw in self._planned.items() if number not in self._taken),
            self.prices,
            self.values,
        )

    # --- the driver ---------------------------------------------------------------------------------------------------

    def begin_rollout(self, sequences: Iterable[OpenSequence]) -> None:
        """Ask for these, with the newest weights; a step may ask again, but for other sequences."""
        assert self.phase is Phase.BETWEEN, f"the {self.phase.value} phase is not over"
        self.phase = Phase.ROLLOUT
        self._sequences = {sequence.key: sequence for sequence in sequences}

    def begin_learn(self, rows: Iterable[int]) -> None:
        """Ask for the sums of parts of so many rows, with the newest weights: one epoch."""
        assert self.phase is Phase.BETWEEN, f"the {self.phase.value} phase is not over"
        self.phase = Phase.LEARN
        self._parts = {part: OpenPart(part, count, count) for part, count in enumerate(rows)}

    def begin_version(self, version: int) -> None:
        """There are new weights."""
        assert self.phase is Phase.BETWEEN and version > self.version, "weights change between phases, and forwards"
        self.version = version

    def plan_ahead(self, draws: Iterable[AheadDraw]) -> None:
        """What later steps will ask, instead of what was planned before; it may name draws that somebody has begun."""
        self._planned = {draw.draw: draw for draw in draws}

    # --- reports ------------------------------------------------------------------------------------------------------

    def join(self, number: int, speed: Speed) -> None:
        """A worker without weights is there."""
        assert number not in self._workers, f"there is a worker {number} already"
        self._workers[number] = Worker(number, speed)

    def lose(self, number: int) -> None:
        """A worker died, or did not answer for too long."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            self._end_spare(worker)

    def measure(self, number: int, speed: Speed) -> None:
        """How fast a worker is now."""
        self._change(number, speed=speed)

    def holds(self, number: int, version: int) -> None:
        """A worker holds the weights of a version."""
        worker = self._workers.get(number)
        if worker is not None and (worker.version is None or worker.version < version):
            self._change(number, version=version, awaited=None if worker.awaited == version else worker.awaited)

    def miss(self, number: int, version: int) -> None:
        """Weights did not arrive, or were damaged; they are sent again."""
        worker = self._workers.get(number)
        if worker is not None and worker.awaited == version:
            self._change(number, awaited=None)

    def advance(self, number: int, version: int, key: Key, num_tokens: int, tokens_left: float) -> bool:
        """A worker is so far with a sequence; whether its tokens are to be kept."""
        known = self._sequences.get(key)
        if known is None or version != self.version or known.worker != number or num_tokens < known.num_tokens:
            return False
        self._sequences[key] = OpenSequence(
            key, tokens_left, num_tokens, number, True, known.num_moves, known.taken_from
        )
        return True

    def finish(self, number: int, version: int, key: Key) -> bool:
        """A sequence is whole; whether this is the result that counts."""
        if version != self.version or key not in self._sequences:
            return False
        known = self._sequences.pop(key)
        # A worker may have got back what it had once: then this may be a late result of the first time.
        is_sole = known.worker == number and not known.num_moves
        if known.worker in self._workers and not is_sole:
            self._change(known.worker, stale_keys=(*self._workers[known.worker].stale_keys, key))
        return True

    def advance_part(self, number: int, version: int, part: int, rows_left: float) -> None:
        """A worker has so many rows of a part to go."""
        known = self._parts.get(part)
        if known is not None and version == self.version and number in known.workers and rows_left < known.rows_left:
            self._parts[part] = replace(known, rows_left=rows_left)

    def finish_part(self, number: int, version: int, part: int) -> bool:
        """The sum of a part is there; whether it is the one that counts."""
        if version != self.version or part not in self._parts:
            return False
        for holder in self._parts.pop(part).workers:
            if holder != number and holder in self._workers:
                self._change(holder, stale_parts=(*self._workers[holder].stale_parts, part))
        return True

    def finish_spare(self, command: Spare) -> None:
        """A worker came to the end of what it did while nobody needed it."""
        worker = self._workers.get(command.worker)
        if worker is not None and worker.spare == command:
            self._end_spare(worker)
            if isinstance(command, RunAhead):
                self._planned = {n: draw for n, draw in self._planned.items() if n not in command.draws}

    # --- commands -----------------------------------------------------------------------------------------------------

    def note(self, command: Command) -> None:
        """A command is on its way."""
        match command:
            case Publish(number, version):
                self._change(number, awaited=version)
            case Rollout(number, _, keys):
                for key in keys:
                    known = self._sequences[key]
                    self._sequences[key] = replace(known, worker=number, is_running=False)
            case Learn(number, _, parts):
                for part in parts:
                    known_part = self._parts[part]
                    holders = tuple(holder for holder in known_part.workers if holder in self._workers)
                    self._parts[part] = replace(known_part, workers=(*holders, number))
            case Drop():
                self._note_drop(command)
            case RunAhead(number, turn) | SpotTrain(number, turn):
                if isinstance(command, RunAhead):
                    self._taken.update(command.draws)
                self._change(number, spare=command, num_turns=turn + 1)
            case Preempt(number):
                self._end_spare(self._workers[number])
            case Finish():
                self.phase = Phase.BETWEEN

    def _note_drop(self, command: Drop) -> None:
        """What was finished elsewhere is forgotten; what is not has lost its worker, to move to another."""
        worker = self._workers[command.worker]
        for key in command.keys:
            known = self._sequences.get(key)
            if known is not None and known.worker == command.worker:
                num_moves = known.num_moves + 1
                self._sequences[key] = replace(known, worker=None, num_moves=num_moves, taken_from=command.worker)
        if worker.stale_keys or worker.stale_parts:
            keys = tuple(key for key in worker.stale_keys if key not in command.keys)
            parts = tuple(part for part in worker.stale_parts if part not in command.parts)
            self._change(command.worker, stale_keys=keys, stale_parts=parts)

    def _change(self, number: int, **changes: object) -> None:
        if number in self._workers:
            self._workers[number] = replace(self._workers[number], **changes)  # type: ignore[arg-type]

    def _end_spare(self, worker: Worker) -> None:
        """What it was running ahead is somebody else's chance."""
        if isinstance(worker.spare, RunAhead):
            self._taken.difference_update(worker.spare.draws)
        self._change(worker.number, spare=None)
