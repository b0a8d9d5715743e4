"""The carrier between processes: a crew takes messages to workers and brings theirs, tensors go through a store.

    driver.Fleet    -> ProcessCarrier -> ray_worker.Crew -> worker_process.ProcessWorker, and back
    RunAheadProcess -> ProcessCarrier -> pipe.ChildCrew  -> worker_process.ProcessWorker, and back

A thread copies weights into the store, once for all workers, as soon as they are there; whoever is told to fetch them
gets a reference. Made by `run/workers.py` for a fleet and by `run/run_ahead_process.py` for one child. It must never
look into what it carries, and never send a worker anything but plain data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paceline.fleet.commands import Command, Equip, Finish, Generate, Learn, Publish, RunAhead, SpotTrain, Wait
from paceline.fleet.reports import Joined, Lost, WorkerReport
from paceline.fleet.transport.mailbox import Letter, MessageKind, Plain
from paceline.fleet.transport.weights import Package, Publisher, Store, WeightsError
from paceline.fleet.transport.wire import pack_ask, pack_eagle, pack_samples, pack_stage, unpack_report, unpack_speed
from paceline.model.eagle.network import Eagle
from paceline.rl.packing import Sample

WAIT_S = 1.0
"""How long a driver waits for news before it looks around."""


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """A worker reported something."""

    data: Plain
    package: Package | None


CrewEvent = Joined | Heard | Lost
"""Joined: it is made and takes orders. Lost: it is no more."""


def event_of(letter: Letter) -> CrewEvent:
    """What a letter from a worker's process says."""
    match letter.kind:
        case MessageKind.READY:
            process_id, speed = letter.data
            return Joined(unpack_speed(speed), process_id)
        case MessageKind.FAILED:
            return Lost(letter.data)
    return Heard(letter.data, letter.package)


class WorkerCrew(Protocol):
    """Workers in processes of their own. Used by one thread."""

    def send(self, number: int, command: Command, payload: Plain = None, package: Package | None = None) -> None:
        """Tell a worker something, after all that it was told before; one that is lost hears nothing."""

    def collect(self, seconds: float) -> list[tuple[int, CrewEvent]]:
        """What happened since the last time, and to whom; waits until something does, at most so long."""

    def kill(self, number: int, reason: str) -> Lost | None:
        """End a worker's process; None where that was done already."""

    def close(self) -> None:
        """End all processes."""


class ProcessCarrier:
    """See `driver.Carrier`."""

    may_come = True
    """Ray's crew replaces whoever is lost, and ends the run when it has done so too often."""

    def __init__(self, crew: WorkerCrew, store: Store, weight_bytes: int = 0) -> None:
        """`weight_bytes` of memory are made ready for every set while workers load their models."""
        self.collect_s = 0.0
        self._crew, self._store = crew, store
        self._publisher = Publisher(store)
        if weight_bytes:
            self._publisher.warm(weight_bytes)
        self._batch: tuple[Sequence[Sample], Package] | None = None
        self._num_batches = 0
        self._drafter: tuple[Eagle, tuple[Plain, Package]] | None = None

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._publisher.publish(version, weights)

    def send(self, command: Command, payload: Any) -> None:
        assert not isinstance(command, Finish | Wait), "those are for the driver"
        number = command.worker
        match command:
            case Publish():
                # Nobody can work with a version before it is in the store.
                self._crew.send(number, command, None, self._publisher.wait())
            case Generate() | RunAhead():
                self._crew.send(number, command, pack_ask(payload))
            case Learn():
                self._crew.send(number, command, None, self._package(payload))
            case SpotTrain() if payload is not None:
                self._crew.send(number, command, *pack_stage(payload, self._store))
            case Equip():
                self._crew.send(number, command, *self._pack_drafter(payload))
            case _:
                self._crew.send(number, command)

    def collect(self, seconds: float = WAIT_S) -> list[tuple[int, WorkerReport]]:
        begun = time.thread_time()
        found: list[tuple[int, WorkerReport]] = []
        for number, event in self._crew.collect(seconds):
            found += self._read(number, event) if isinstance(event, Heard) else [(number, event)]
        self.collect_s = time.thread_time() - begun
        return found

    def close(self) -> None:
        self._batch = self._drafter = None
        self._publisher.close()
        self._crew.close()

    def _read(self, number: int, heard: Heard) -> list[tuple[int, WorkerReport]]:
        try:
            return [(number, unpack_report(heard.data, heard.package, self._store))]
        except WeightsError as error:
            # Its tensors are lost or damaged, so it is or will be.
            lost = self._crew.kill(number, f"what it sent did not arrive: {error}")
            return [] if lost is None else [(number, lost)]

    def _pack_drafter(self, eagle: Eagle) -> tuple[Plain, Package]:
        """The same for all workers."""
        if self._drafter is None or self._drafter[0] is not eagle:
            self._drafter = eagle, pack_eagle(eagle, self._store)
        return self._drafter[1]

    def _package(self, samples: Sequence[Sample]) -> Package:
        """One package for all workers of a batch; the one before may go."""
        if self._batch is None or self._batch[0] is not samples:
            self._batch = samples, pack_samples(samples, self._store, self._num_batches)
            self._num_batches += 1
        return self._batch[1]
