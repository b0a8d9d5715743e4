"""What lives in a worker's process beside the worker: makes it, gives it a thread, and serves its driver meanwhile.

    driver -> Host.post -> Mailbox -> the worker's own thread -> Mailbox -> Host.collect -> driver

The worker is made by a factory that is known by its import path: what makes one stands above this folder. The process
answers however busy the worker is, and says why it ended where it did. Ray makes an actor of it (`ray_worker.py`), a
child process has one (`pipe.py`). It must never decide what a worker does.
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
    """What a factory makes: `factory(mailbox, settings)`. It is ready to work once it is made."""

    @property
    def speed(self) -> Speed:
        """What its driver should expect."""

    def run(self) -> None:
        """Take orders from the mailbox, for ever."""


Factory = Callable[[Mailbox, Any], MailboxWorker]


def find_factory(path: str) -> Factory:
    """What `package.module:name` names."""
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
            self._mailbox.fail("it ended by itself")
        except BaseException as error:  # whatever it was, the driver has to hear of it
            self._mailbox.fail(explain(error))

    def post(self, order: Order) -> None:
        self._mailbox.post(order)

    def collect(self, num_read: int, seconds: float) -> Bulletin:
        return self._mailbox.collect(num_read, seconds)


def explain(error: BaseException) -> str:
    """An exception and where it came from, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
