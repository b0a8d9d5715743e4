"""A worker's desk: orders come in and are taken one after the other, reports go out and are kept until they were read.

    driver -> ray_worker.Host.post -> Desk.next -> the worker -> Desk.report -> ray_worker.Host.collect -> driver

The worker has a thread of its own; whoever serves the driver uses the other side of the desk from other threads, so an
order arrives while the worker is busy. It learns of an urgent one by asking (`is_called`) or at once (`on_call`). What
lies here is plain data: numbers, texts and arrays of numbers, checked as it comes. It must never know of Ray.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import numpy as np

from paceline.fleet.commands import Command, Drop, Finish, Preempt, SequenceKey, Spare, Wait
from paceline.fleet.transport.weights import Package

Plain = Any
"""What `check_plain` lets through."""
LINGER_S = 0.2
"""How long a report that can wait does."""
URGENT = (Preempt, Drop)
"""They change what a worker is doing now."""
_LEAVES = (type(None), bool, int, float, str, bytes)
_COMMANDS = tuple({*get_args(Command), *get_args(Spare)} - {Finish, Wait})
"""Those that a worker carries out."""


def check_plain(data: Plain, where: str = "it") -> None:
    """Raise a ValueError for all but numbers, texts, arrays of numbers, keys, and lists and dicts of these.

    Types are compared and not asked: a subclass may bring methods along.
    """
    if type(data) in _LEAVES:
        return
    if type(data) in (list, tuple, SequenceKey):
        for place, value in enumerate(data):
            check_plain(value, f"{where}[{place}]")
    elif type(data) is dict:
        for key, value in data.items():
            check_plain(key, f"a key of {where}")
            check_plain(value, f"{where}[{key!r}]")
    elif type(data) is not np.ndarray or data.dtype.kind not in "biuf":
        raise ValueError(f"{where} is of type {type(data).__name__}; only plain data travels between workers")


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """One command and what it needs."""

    serial: int
    """Counted by the driver, from 0."""
    command: Command
    payload: Plain = None
    package: Package | None = None

    @property
    def is_urgent(self) -> bool:
        return isinstance(self.command, URGENT)

    def check(self) -> None:
        if type(self.command) not in _COMMANDS:
            raise ValueError(f"a worker cannot carry out a {type(self.command).__name__}")
        if type(self.package) not in (Package, type(None)):
            raise ValueError(f"an order's package is a {type(self.package).__name__}")
        check_plain(self.payload, "the payload")


class MessageKind(Enum):
    READY = "ready"
    """The worker is made and begins to take orders; `data` is its process id and its speed."""
    DATA = "data"
    """Something that the worker has to say."""
    FAILED = "failed"
    """The worker has come to an end, which it never should; `data` says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    serial: int
    kind: MessageKind
    data: Plain = None
    package: Package | None = None
    """Tensors that belong to it."""


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
        self._calls: list[Callable[[], None]] = []

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

    def on_call(self, callback: Callable[[], None]) -> None:
        """Have this called, from another thread, when an urgent order comes. It must be quick, and may come late."""
        self._calls.append(callback)

    def report(self, data: Plain, package: Package | None = None) -> None:
        """Tell the driver something; a sign of life."""
        self.report_all([(data, package)])

    def report_all(self, reports: Iterable[tuple[Plain, Package | None]], can_wait: bool = False) -> None:
        """Tell the driver several things at once. What can wait is read with what comes shortly after it."""
        reports = list(reports)
        for data, _ in reports:
            check_plain(data, "the report")
        self._add([(MessageKind.DATA, data, package) for data, package in reports], can_wait)

    # --- the other side -----------------------------------------------------------------------------------------------

    def ready(self, process_id: int, speed: Plain) -> None:
        self._add([(MessageKind.READY, (process_id, speed), None)])

    def fail(self, reason: str) -> None:
        """The worker is at its end. Only the first reason counts."""
        with self._changed:
            if self._has_failed:
                return
            self._has_failed = True
        self._add([(MessageKind.FAILED, reason, None)])

    def post(self, order: Order) -> None:
        """Lay an order on the desk; one that is not plain, or not the next, ends the worker: it might do wrong."""
        try:
            order.check()
        except ValueError as error:
            return self.fail(f"order {order.serial} was refused: {error}")
        with self._changed:
            expected = self._num_orders
            if order.serial == expected:
                self._num_orders += 1
                self._orders.append(order)
                self._changed.notify_all()
        if order.serial != expected:
            return self.fail(f"order {order.serial} came where order {expected} was due")
        if order.is_urgent:
            for callback in self._calls:
                callback()

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

    def _add(self, reports: Iterable[tuple[MessageKind, Plain, Package | None]], can_wait: bool = False) -> None:
        with self._changed:
            for kind, data, package in reports:
                self._reports.append(Letter(self._num_reports, kind, data, package))
                self._num_reports += 1
            if not can_wait:
                self._num_pressing = self._num_reports
            self._seen_at = self._clock()
            self._changed.notify_all()
