"""Toy workers of a fleet, made in processes of their own by `test_fleet_ray.py`: what they are told is what happens.

A `Generate` comes with a payload that says what to do: sleep, echo, die, hang, use up the memory. Faults are real.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.fleet.commands import Drop, Preempt, Publish, RunAhead
from paceline.fleet.throughput import FIRST_SPEED
from paceline.fleet.transport.mailbox import Mailbox, Order
from paceline.fleet.transport.ray_cluster import RayStore
from paceline.fleet.transport.weights import Holder, Package, WeightsError
from paceline.fleet.transport.wire import Parcel, pack, unpack
from paceline.fleet.view import Speed


class Toy:
    def __init__(self, mailbox: Mailbox, settings: Mapping[str, Any]) -> None:
        if settings.get("fails"):
            raise ValueError("no such model")
        time.sleep(settings.get("load_s", 0.0))
        self._mailbox = mailbox
        self._weights: dict[str, Tensor] = {}
        self._store = RayStore()
        self._holder = Holder(self._store, self._load)

    @property
    def speed(self) -> Speed:
        return FIRST_SPEED

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._weights.setdefault(name, torch.empty_like(weight)).copy_(weight)

    def run(self) -> None:
        while True:
            order = self._mailbox.next()
            assert order is not None
            match order.command:
                case Publish():
                    self._take(order)
                case RunAhead(_, turn):
                    self._run_ahead(turn)
                case Preempt() | Drop():
                    self._say({"did": type(order.command).__name__})
                case _:
                    assert isinstance(order.payload, Parcel)
                    given = unpack(order.payload, self._store)
                    getattr(self, f"do_{given['do']}")(given)

    def _say(self, message: Any) -> None:
        self._mailbox.report(pack(message, self._store))

    def _take(self, order: Order) -> None:
        assert isinstance(order.payload, Package)
        start = time.perf_counter()
        try:
            self._holder.take(order.payload)
        except WeightsError as error:
            self._say({"refused": str(error), "version": self._holder.version})
            return
        seconds = time.perf_counter() - start
        sums = {name: float(weight.double().sum()) for name, weight in self._weights.items()}
        self._say({"version": self._holder.version, "sums": sums, "seconds": seconds})

    def _run_ahead(self, turn: int) -> None:
        """Busy without a pause, until it is called."""
        self._say({"began": turn})
        while not self._mailbox.is_called:
            sum(range(1000))
        self._say({"ended": turn})

    def do_echo(self, given: Mapping[str, Any]) -> None:
        time.sleep(given.get("sleep_s", 0.0))
        omp = os.environ.get("OMP_NUM_THREADS")
        process = {"id": os.getpid(), "threads": torch.get_num_threads(), "OMP_NUM_THREADS": omp}
        self._say({"echo": given["value"], "process": process})

    def do_sum(self, given: Mapping[str, Any]) -> None:
        """Gradients go the other way."""
        gradients = {name: torch.full((3,), value) for name, value in given["values"].items()}
        self._say({"part": 1, "gradients": gradients})

    def do_exit(self, given: Mapping[str, Any]) -> None:
        os._exit(3)

    def do_kill(self, given: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_segfault(self, given: Mapping[str, Any]) -> None:
        ctypes.string_at(0)

    def do_stop(self, given: Mapping[str, Any]) -> None:
        """The whole process stands still, and can still be killed."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_hang(self, given: Mapping[str, Any]) -> None:
        while True:
            pass

    def do_hold(self, given: Mapping[str, Any]) -> None:
        """No other thread of the process gets on: `sleep` called this way keeps the interpreter's lock."""
        ctypes.PyDLL(None).sleep(600)

    def do_memory(self, given: Mapping[str, Any]) -> None:
        """Take memory until the system gives no more."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**28
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        held = []
        while True:
            held.append(bytearray(2**24))

    def do_raise(self, given: Mapping[str, Any]) -> None:
        raise KeyError(given["value"])

    def do_return(self, given: Mapping[str, Any]) -> None:
        raise SystemExit


def make(mailbox: Mailbox, settings: Mapping[str, Any]) -> Toy:
    return Toy(mailbox, settings)
