"""A worker's mailbox: the worker takes orders one after the other, and reports stay until the driver has read them.

    driver -> Host.post -> Mailbox.next -> the worker -> Mailbox.report -> Host.collect -> driver

The worker has its own thread; other threads serve the driver on the other side of the mailbox, so that orders arrive
while the worker is busy. It polls for urgent ones (`is_called`). Owned by `host.py`. It must never look into messages,
nor know of Ray.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.fleet.commands import Command, Drop, Preempt
from paceline.fleet.reports import Joined, Lost, Unplaced
from paceline.fleet.transport.weights import Package
from paceline.fleet.transport.wire import Parcel
from paceline.fleet.view import Speed

LINGER_S = 0.2
"""How long to hold back a report that can wait."""
URGENT = (Preempt, Drop)
"""Orders that change what a worker is doing now."""

CrewEvent = Joined | Parcel | Lost | Unplaced
"""An event from a worker's process. Joined: the worker takes orders. Lost: it has ended, which it never should."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """One command and its payload."""

    serial: int
    """Counted by the driver, from 0."""
    command: Command
    payload: Parcel | Package | None = None
    """Weights are a package, everything else is a parcel."""

    @property
    def is_urgent(self) -> bool:
        return isinstance(self.command, URGENT)


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    serial: int
    event: CrewEvent


@dataclass(frozen=True, slots=True, eq=False)
class Bulletin:
    """The answer to a driver's `collect`."""

    reports: tuple[Letter, ...]
    quiet_s: float
    """Seconds since a busy worker's last sign of life; 0 for one that waits for orders."""


class Mailbox:
    """Between a worker, which has one thread, and the threads that serve its driver."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._reports: deque[Letter] = deque()
        self._num_orders = self._num_reports = 0
        self._num_pressing = 0
        """Reports before this one should be read at once."""
        self._has_failed = self._is_waiting = False
        self._seen_at = clock()

    # --- the worker's side --------------------------------------------------------------------------------------------

    def next(self, seconds: float | None = None) -> Order | None:
        """The next order, first in, first out; None if none arrives in time. 0 does not wait."""
        with self._changed:
            self._is_waiting = seconds != 0
            self._changed.wait_for(lambda: bool(self._orders), seconds)
            self._is_waiting = False
            self._seen_at = self._clock()
            return self._orders.popleft() if self._orders else None

    @property
    def is_called(self) -> bool:
        """Whether an urgent order waits: stop spare-time work, or check that your work is still wanted.

        A call is no sign of life.
        """
        with self._changed:
            return any(order.is_urgent for order in self._orders)

    def report(self, *parcels: Parcel, can_wait: bool = False) -> None:
        """Send reports to the driver; a sign of life. A report that can wait is read with the next ones."""
        self._add(parcels, can_wait)

    # --- the other side -----------------------------------------------------------------------------------------------

    def join(self, speed: Speed, process_id: int) -> None:
        """Announce that the worker takes orders."""
        self._add([Joined(speed, process_id)])

    def fail(self, reason: str) -> None:
        """Announce that the worker has failed. Only the first reason counts."""
        with self._changed:
            if self._has_failed:
                return
            self._has_failed = True
        self._add([Lost(reason)])

    def post(self, order: Order) -> None:
        """Add an order; one out of sequence fails the worker, which might otherwise do the wrong thing."""
        with self._changed:
            expected = self._num_orders
            if order.serial == expected:
                self._num_orders += 1
                self._orders.append(order)
                self._changed.notify_all()
        if order.serial != expected:
            self.fail(f"order {order.serial} arrived instead of order {expected}")

    def collect(self, num_read: int, seconds: float) -> Bulletin:
        """All reports after the first `num_read`, which are deleted; waits up to `seconds` until there is one.

        If all of them can wait, it waits a little longer: reading each by itself costs a driver more than using it.
        """
        with self._changed:
            while self._reports and self._reports[0].serial < num_read:
                self._reports.popleft()
            self._changed.wait_for(lambda: bool(self._reports), seconds)
            self._changed.wait_for(lambda: self._is_pressing, min(seconds, LINGER_S))
            quiet_s = 0.0 if self._is_waiting else self._clock() - self._seen_at
            return Bulletin(tuple(self._reports), quiet_s)

    @property
    def _is_pressing(self) -> bool:
        """Whether an unread report cannot wait, or none is unread."""
        return not self._reports or self._reports[0].serial < self._num_pressing

    def _add(self, events: Iterable[CrewEvent], can_wait: bool = False) -> None:
        with self._changed:
            for event in events:
                self._reports.append(Letter(self._num_reports, event))
                self._num_reports += 1
            if not can_wait:
                self._num_pressing = self._num_reports
            self._seen_at = self._clock()
            self._changed.notify_all()
