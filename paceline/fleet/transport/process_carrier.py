"""The carrier between processes: a crew delivers messages to workers and back, tensors go through a store.

    driver.FleetBackend -> ProcessCarrier -> ray_worker.Crew -> worker_process.ProcessWorker, and back
    RunAheadProcess     -> ProcessCarrier -> pipe.ChildCrew  -> worker_process.ProcessWorker, and back

A thread copies new weights into the store, once for all workers; a worker that should fetch them gets a reference.
Made by `run/open_fleet.py` for a fleet and by `run/run_ahead_process.py` for one child. It must never decide what a
worker does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from paceline.fleet.commands import Command, Equip, Finish, Learn, Publish, Wait
from paceline.fleet.reports import Lost, WorkerReport
from paceline.fleet.transport.mailbox import CrewEvent
from paceline.fleet.transport.weights import Package, Publisher, Store, WeightsError
from paceline.fleet.transport.wire import Parcel, pack, unpack

WAIT_S = 1.0
"""How long a driver waits for reports by default."""


class WorkerCrew(Protocol):
    """Workers in their own processes. Not thread-safe."""

    @property
    def may_come(self) -> bool:
        """Whether a worker may still join."""

    def send(self, number: int, command: Command, payload: Parcel | Package | None = None) -> None:
        """Send a worker a command, after all earlier ones; ignored if the worker is lost."""

    def collect(self, seconds: float) -> list[tuple[int, CrewEvent]]:
        """Events since the last call, with the workers' numbers; waits up to `seconds` for one."""

    def kill(self, number: int, reason: str) -> Lost | None:
        """Kill a worker's process; None if it is already gone."""

    def close(self) -> None:
        """End all processes."""


class ProcessCarrier:
    """See `driver.Carrier`."""

    def __init__(self, crew: WorkerCrew, store: Store, weight_bytes: int = 0) -> None:
        """Prepares `weight_bytes` of memory for each set of weights while workers load their models."""
        self.collect_s = 0.0
        self._crew, self._store = crew, store
        self._publisher = Publisher(store)
        if weight_bytes:
            self._publisher.warm(weight_bytes)
        self._shared: dict[type[Command], tuple[Any, Parcel]] = {}
        """Payloads that all workers get: samples to learn from, the drafter."""

    @property
    def may_come(self) -> bool:
        return self._crew.may_come

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._publisher.publish(version, weights)

    def send(self, command: Command, payload: Any) -> None:
        assert not isinstance(command, Finish | Wait), "this command is for the driver"
        self._crew.send(command.worker, command, self._packed(command, payload))

    def _packed(self, command: Command, payload: Any) -> Parcel | Package | None:
        match command:
            case Publish():
                return self._publisher.wait()  # no worker can use a version before it is in the store
            case Learn() | Equip():
                return self._pack_once(type(command), payload)
        return None if payload is None else pack(payload, self._store)

    def _pack_once(self, kind: type[Command], payload: Any) -> Parcel:
        """Pack a payload once for all workers; replaces the previous one."""
        if kind not in self._shared or self._shared[kind][0] is not payload:
            self._shared[kind] = payload, pack(payload, self._store, is_shared=True)
        return self._shared[kind][1]

    def collect(self, seconds: float = WAIT_S) -> list[tuple[int, WorkerReport]]:
        begun = time.thread_time()
        found: list[tuple[int, WorkerReport]] = []
        for number, event in self._crew.collect(seconds):
            found += self._read(number, event) if isinstance(event, Parcel) else [(number, event)]
        self.collect_s = time.thread_time() - begun
        return found

    def close(self) -> None:
        self._shared.clear()
        self._publisher.close()
        self._crew.close()

    def _read(self, number: int, parcel: Parcel) -> list[tuple[int, WorkerReport]]:
        try:
            return [(number, unpack(parcel, self._store))]
        except WeightsError as error:
            # Its tensors are lost or damaged, so the worker is lost too, or will be.
            lost = self._crew.kill(number, f"its message was lost: {error}")
            return [] if lost is None else [(number, lost)]
