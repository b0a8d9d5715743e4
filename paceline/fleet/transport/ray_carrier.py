"""The carrier between processes: a crew of Ray actors, weights and samples through the object store.

    driver.Fleet -> RayCarrier -> ray_worker.Crew -> fleet_process.ProcessWorker, and back

Weights are copied into the store by a thread, once for all workers, as soon as they are there; whoever is told to fetch
them gets a reference. Whoever is lost is replaced by the crew. Made by `open.py`. It must never look into what it
carries, and never send a worker anything but plain data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.fleet.commands import Command, Equip, Finish, Generate, Learn, Publish, RunAhead, SpotTrain, Wait
from paceline.fleet.reports import WorkerReport
from paceline.fleet.transport.mailbox import Plain
from paceline.fleet.transport.ray_worker import Crew, Heard
from paceline.fleet.transport.weights import Package, Publisher, Store, WeightsError
from paceline.fleet.transport.wire import pack_ask, pack_eagle, pack_samples, pack_stage, unpack_report
from paceline.model.eagle.network import Eagle
from paceline.rl.packing import Sample

WAIT_S = 1.0
"""How long a driver waits for news before it looks around."""


class RayCarrier:
    """See `driver.Carrier`."""

    may_come = True
    """A crew replaces whoever is lost, and ends the run when it has done so too often."""

    def __init__(self, crew: Crew, store: Store, weight_bytes: int = 0) -> None:
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

    def collect(self) -> list[tuple[int, WorkerReport]]:
        begun = time.thread_time()
        found: list[tuple[int, WorkerReport]] = []
        for number, event in self._crew.collect(WAIT_S):
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
