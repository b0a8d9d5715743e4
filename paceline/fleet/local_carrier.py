"""The carrier within one process: workers take turns, one piece of work each. No Ray is needed.

The default of a run, with one worker on its one device; with several on a CPU it is the twin of the Ray carrier, which
tests compare. Made by `opening.py`, used by `driver.py`. It must never reorder what a worker is told or says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.fleet.fleet_view import Command, Finish, Speed, Wait
from paceline.fleet.messages import Joined, Lost, Report
from paceline.fleet.worker import FleetWorker

MakeWorker = Callable[[Callable[[Report], None]], FleetWorker]
"""Makes a worker that reports in this way."""


class LocalCarrier:
    """See `driver.Carrier`."""

    def __init__(self, makers: Sequence[MakeWorker], speed: Speed) -> None:
        self._reports: list[tuple[int, Report]] = []
        self._workers: dict[int, FleetWorker] = {}
        for number, make in enumerate(makers):
            self._workers[number] = make(partial(self._hear, number))
            self._hear(number, Joined(speed))

    @property
    def may_come(self) -> bool:
        """Whether somebody has not been heard of yet."""
        return any(isinstance(report, Joined) for _, report in self._reports)

    def send(self, command: Command, payload: Any) -> None:
        assert not isinstance(command, Finish | Wait), "those are for the driver"
        worker = self._workers.get(command.worker)
        if worker is not None:
            worker.take(command, payload)

    def collect(self) -> list[tuple[int, Report]]:
        """One turn of every worker."""
        for worker in self._workers.values():
            worker.turn()
        found, self._reports = self._reports, []
        return found

    def _hear(self, number: int, report: Report) -> None:
        self._reports.append((number, report))

    def lose(self, number: int, reason: str) -> None:
        """Take a worker out, in the middle of whatever it does."""
        self._workers.pop(number).close()
        self._hear(number, Lost(reason))
