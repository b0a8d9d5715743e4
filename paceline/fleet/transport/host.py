"""The host of a worker in its process: creates the worker, runs it in a thread, and serves the driver meanwhile.

    driver -> Host.post -> Mailbox -> the worker's own thread -> Mailbox -> Host.collect -> driver

A factory creates the worker. It is named by import path, since it lives in a layer above. The process answers however
busy the worker is, and reports why the worker ended. It is a Ray actor (`ray_worker.py`), or runs in a child process
(`pipe.py`). It must never decide what a worker does.
"""

from __future__ import annotations

import importlib
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from paceline.fleet.transport.mailbox import Bulletin, Mailbox, Order
from paceline.fleet.view import Speed


class MailboxWorker(Protocol):
    """What a factory returns: `factory(mailbox, settings)`, ready to work."""

    @property
    def speed(self) -> Speed:
        """What the driver should expect."""

    def run(self) -> None:
        """Take orders from the mailbox, forever."""


Factory = Callable[[Mailbox, Any], MailboxWorker]


def find_factory(path: str) -> Factory:
    """The factory at `package.module:name`."""
    module, _, name = path.partition(":")
    found: Factory = getattr(importlib.import_module(module), name)
    return found


class Host:
    """One worker and its mailbox."""

    def __init__(self, factory: str, settings: Any) -> None:
        self._mailbox = Mailbox()
        threading.Thread(target=self._work, args=(factory, settings), daemon=True, name="worker").start()

    def _work(self, factory: str, settings: Any) -> None:
        try:
            worker = find_factory(factory)(self._mailbox, settings)
            self._mailbox.join(worker.speed, os.getpid())
            worker.run()
            self._mailbox.fail("its loop returned")
        except BaseException as error:  # the driver must learn of any failure
            self._mailbox.fail(explain(error))

    def post(self, order: Order) -> None:
        self._mailbox.post(order)

    def collect(self, num_read: int, seconds: float) -> Bulletin:
        return self._mailbox.collect(num_read, seconds)


def explain(error: BaseException) -> str:
    """An exception and its origin, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
