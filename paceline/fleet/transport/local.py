"""The carrier within one process: workers take turns, one piece of work each, without Ray.

The slow twin of the carrier between processes, which tests compare it with: several workers on one core
(`fleet.in_process`). Made by `run/open_fleet.py`, used by `driver.py`. It must never reorder commands or reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.fleet.commands import Command, Finish, Publish, Wait
from paceline.fleet.reports import Joined, Lost, WorkerReport
from paceline.fleet.worker import FleetWorker

MakeWorker = Callable[[Callable[[WorkerReport], None]], FleetWorker]
"""Makes a worker that reports to this function."""


class LocalCarrier:
    """See `driver.Carrier`."""

    collect_s = 0.0
    """All the time here is the workers' own work."""

    def __init__(self, makers: Sequence[MakeWorker]) -> None:
        self._weights: Mapping[str, Tensor] = {}
        self._reports: list[tuple[int, WorkerReport]] = []
        self._workers: dict[int, FleetWorker] = {}
        for number, make in enumerate(makers):
            self._workers[number] = make(partial(self._hear, number))
            self._hear(number, Joined(self._workers[number].speed))

    @property
    def may_come(self) -> bool:
        """Whether a worker's `Joined` has not been collected yet."""
        return any(isinstance(report, Joined) for _, report in self._reports)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Each worker copies them before they change."""
        self._weights = weights

    def send(self, command: Command, payload: Any) -> None:
        assert not isinstance(command, Finish | Wait), "this command is for the driver"
        worker = self._workers.get(command.worker)
        if worker is not None:
            is_weights = isinstance(command, Publish)
            worker.take(command, partial(worker.load, self._weights) if is_weights else payload)

    def collect(self) -> list[tuple[int, WorkerReport]]:
        """Run one turn of every worker and return their reports."""
        self.turn()
        found, self._reports = self._reports, []
        return found

    def turn(self) -> None:
        """Let every worker do one piece of work; a worker may be lost in the middle of it."""
        for worker in list(self._workers.values()):
            worker.turn()

    def _hear(self, number: int, report: WorkerReport) -> None:
        self._reports.append((number, report))

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def lose(self, number: int, reason: str) -> None:
        """Remove a worker in the middle of its work."""
        self._workers.pop(number).close()
        self._hear(number, Lost(reason))
