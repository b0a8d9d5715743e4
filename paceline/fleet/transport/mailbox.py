"""A worker's mailbox: orders come in and are taken one after the other, reports are kept until they were read.

    driver -> Host.post -> Mailbox.next -> the worker -> Mailbox.report -> Host.collect -> driver

The worker has a thread of its own; whoever serves the driver uses the other side of the mailbox from other threads, so
an order arrives while the worker is busy. It learns of an urgent one by asking (`is_called`). Owned by `host.py`. It
must never look into what passes through, nor know of Ray.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.fleet.commands import Command, Drop, Preempt
from paceline.fleet.reports import Joined, Lost
from paceline.fleet.transport.weights import Package
from paceline.fleet.transport.wire import Parcel
from paceline.fleet.view import Speed

LINGER_S = 0.2
"""How long a report that can wait does."""
URGENT = (Preempt, Drop)
"""They change what a worker is doing now."""

CrewEvent = Joined | Parcel | Lost
"""What a worker's process says. Joined: the worker takes orders. Lost: the worker has ended, which it never should."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """One command and what it needs."""

    serial: int
    """Counted by the driver, from 0."""
    command: Command
    payload: Parcel | Package | None = None
    """Weights are a package, all else is a parcel."""

    @property
    def is_urgent(self) -> bool:
        return isinstance(self.command, URGENT)


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    serial: int
    event: CrewEvent


@dataclass(frozen=True, slots=True, eq=False)
class Bulletin:
    """What a driver hears when it asks."""

    reports: tuple[Letter, ...]
    quiet_s: float
    """How long ago a busy worker gave a sign of life; 0 for one that waits for orders."""


class Mailbox:
    """Between a worker, which has one thread, and those who serve its driver."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._reports: deque[Letter] = deque()
        self._num_orders = self._num_reports = 0
        self._num_pressing = 0
        """Up to that report somebody should look at once."""
        self._has_failed = self._is_waiting = False
        self._seen_at = clock()

    # --- the worker's side --------------------------------------------------------------------------------------------

    def next(self, seconds: float | None = None) -> Order | None:
        """The next order, in the order they were given; None if none comes in time. 0 only looks."""
        with self._changed:
            self._is_waiting = seconds != 0
            self._changed.wait_for(lambda: bool(self._orders), seconds)
            self._is_waiting = False
            self._seen_at = self._clock()
            return self._orders.popleft() if self._orders else None

    @property
    def is_called(self) -> bool:
        """Whether an urgent order waits: leave what you do in spare time, or look whether what you make is wanted.

        Asking is no sign of life.
        """
        with self._changed:
            return any(order.is_urgent for order in self._orders)

    def report(self, *parcels: Parcel, can_wait: bool = False) -> None:
        """Tell the driver something; a sign of life. What can wait is read with what comes shortly after it."""
        self._add(parcels, can_wait)

    # --- the other side -----------------------------------------------------------------------------------------------

    def join(self, speed: Speed, process_id: int) -> None:
        """The worker is made and begins to take orders."""
        self._add([Joined(speed, process_id)])

    def fail(self, reason: str) -> None:
        """The worker is at its end. Only the first reason counts."""
        with self._changed:
            if self._has_failed:
                return
            self._has_failed = True
        self._add([Lost(reason)])

    def post(self, order: Order) -> None:
        """Put an order into the mailbox; one that is not the next ends the worker: it might do wrong."""
        with self._changed:
            expected = self._num_orders
            if order.serial == expected:
                self._num_orders += 1
                self._orders.append(order)
                self._changed.notify_all()
        if order.serial != expected:
            self.fail(f"order {order.serial} came where order {expected} was due")

    def collect(self, num_read: int, seconds: float) -> Bulletin:
        """All reports but the first `num_read`, which are forgotten; waits until there is one, or so long.

        Where all of them can wait, a little longer: to read each by itself takes a driver more time than to use it.
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
        """Whether something that cannot wait is unread, or nothing."""
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
