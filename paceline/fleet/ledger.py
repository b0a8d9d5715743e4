"""The driver's ledger: reports received, commands sent, and which results count.

    reports -> Ledger -> View -> rules.decide -> commands -> Ledger.note, and to the workers

The driver enters reports, passes the ledger's view to `rules.decide`, records every command and has a carrier deliver
it. A command counts as carried out once recorded, so no message is sent twice. The first result made with the step's
weights counts. The ledger holds no texts, no weights and no gradients, reads no clock and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.fleet.commands import (
    Command,
    Drop,
    Finish,
    Generate,
    Learn,
    Preempt,
    Publish,
    RunAhead,
    SequenceKey,
    Spare,
    SpotTrain,
    StepPhase,
)
from paceline.fleet.view import OpenPart, OpenSequence, Prices, RunAheadDraw, SpareValues, Speed, View, Worker


class Ledger:
    """Keeps a view up to date. Reports may come late, twice, in any order and from lost workers."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.phase = StepPhase.BETWEEN
        self.version = 0
        self.prices = prices or Prices()
        self.values = SpareValues()
        self._workers: dict[int, Worker] = {}
        self._sequences: dict[SequenceKey, OpenSequence] = {}
        self._parts: dict[int, OpenPart] = {}
        self._planned: dict[int, RunAheadDraw] = {}
        self._taken: set[int] = set()
        """Draws that a worker is running ahead."""

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
        """Request these sequences with the newest weights; a step may request more, but never the same twice."""
        assert self.phase is StepPhase.BETWEEN, f"the {self.phase.value} phase is not over"
        self.phase = StepPhase.ROLLOUT
        self._sequences = {sequence.key: sequence for sequence in sequences}

    def begin_learn(self, rows: Iterable[int]) -> None:
        """Request the sums of parts with these numbers of rows, with the newest weights: one epoch."""
        assert self.phase is StepPhase.BETWEEN, f"the {self.phase.value} phase is not over"
        self.phase = StepPhase.LEARN
        self._parts = {part: OpenPart(part, count, count) for part, count in enumerate(rows)}

    def begin_version(self, version: int) -> None:
        """Move to new weights."""
        assert self.phase is StepPhase.BETWEEN and version > self.version, "weights change between phases, and forward"
        self.version = version

    def plan_ahead(self, draws: Iterable[RunAheadDraw]) -> None:
        """Replace the planned draws of later steps; they may include draws that a worker has begun."""
        self._planned = {draw.draw: draw for draw in draws}

    # --- reports ------------------------------------------------------------------------------------------------------

    def join(self, number: int, speed: Speed) -> None:
        """Add a worker, which has no weights yet."""
        assert number not in self._workers, f"there already is a worker {number}"
        self._workers[number] = Worker(number, speed)

    def lose(self, number: int) -> None:
        """Remove a worker that died or timed out."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            self._end_spare(worker)

    def measure(self, number: int, speed: Speed) -> None:
        """Record a worker's current speed."""
        self._change(number, speed=speed)

    def holds(self, number: int, version: int) -> None:
        """Record that a worker holds the weights of a version."""
        worker = self._workers.get(number)
        if worker is not None and (worker.version is None or worker.version < version):
            self._change(number, version=version, awaited=None if worker.awaited == version else worker.awaited)

    def advance(self, number: int, version: int, key: SequenceKey, num_tokens: int, tokens_left: float) -> bool:
        """Record a worker's progress on a sequence; returns whether to keep its tokens."""
        known = self._sequences.get(key)
        if known is None or version != self.version or known.worker != number or num_tokens < known.num_tokens:
            return False
        self._sequences[key] = OpenSequence(
            key, tokens_left, num_tokens, number, True, known.num_moves, known.taken_from
        )
        return True

    def finish(self, number: int, version: int, key: SequenceKey) -> bool:
        """Record a finished sequence; returns whether this result counts."""
        if version != self.version or key not in self._sequences:
            return False
        known = self._sequences.pop(key)
        # A worker may have got a sequence back: then this may be a late result of its first attempt.
        is_sole = known.worker == number and not known.num_moves
        if known.worker in self._workers and not is_sole:
            self._change(known.worker, stale_keys=(*self._workers[known.worker].stale_keys, key))
        return True

    def advance_part(self, number: int, version: int, part: int, rows_left: float) -> None:
        """Record how many rows of a part a worker has left."""
        known = self._parts.get(part)
        if known is not None and version == self.version and number in known.workers and rows_left < known.rows_left:
            self._parts[part] = replace(known, rows_left=rows_left)

    def finish_part(self, number: int, version: int, part: int) -> bool:
        """Record the sum of a part; returns whether it counts."""
        if version != self.version or part not in self._parts:
            return False
        for holder in self._parts.pop(part).workers:
            if holder != number and holder in self._workers:
                self._change(holder, stale_parts=(*self._workers[holder].stale_parts, part))
        return True

    def finish_spare(self, command: Spare) -> None:
        """Record that a worker finished its spare-time work."""
        worker = self._workers.get(command.worker)
        if worker is not None and worker.spare == command:
            self._end_spare(worker)
            if isinstance(command, RunAhead):
                self._planned = {n: draw for n, draw in self._planned.items() if n not in command.draws}

    # --- commands -----------------------------------------------------------------------------------------------------

    def note(self, command: Command) -> None:
        """Record a command as sent."""
        match command:
            case Publish(number, version):
                self._change(number, awaited=version)
            case Generate(number, _, keys):
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
                self.phase = StepPhase.BETWEEN

    def _note_drop(self, command: Drop) -> None:
        """Clear what was finished elsewhere; unassign what is still open, so that it can move to another worker."""
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
        """Release the draws that it was running ahead, for other workers."""
        if isinstance(worker.spare, RunAhead):
            self._taken.difference_update(worker.spare.draws)
        self._change(worker.number, spare=None)
