"""A child process of `pipe.py`: passes orders from its parent's pipe to a worker, and reports back.

Run as `python -m paceline.fleet.transport.child DESCRIPTOR PARENT`. The parent decides when it ends: it dies with its
parent, however that ends, even while it still imports. Signals that ask a whole group or session to end mean the
parent. So nothing that takes a while may be imported at the top of this file.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.core.linux import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paceline.fleet.transport.host import Host

POLL_S = 2.0
"""How long it waits for reports before it polls again."""


def main() -> None:
    """Pass orders to the worker until the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    from multiprocessing.connection import Connection

    from paceline.fleet.transport.host import Host

    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):  # where the kernel does not end this process, the end of the pipe does
        host = Host(*pipe.recv())
        threading.Thread(target=_report, args=(pipe, host), daemon=True, name="reports").start()
        while True:
            host.post(pipe.recv())
    os._exit(0)  # even in the middle of work: nobody is left to use it


def _report(pipe: Connection, host: Host) -> None:
    num_read = 0
    with suppress(OSError):
        while True:
            for letter in host.collect(num_read, POLL_S).reports:
                pipe.send(letter)
                num_read = letter.serial + 1
    os._exit(0)


if __name__ == "__main__":
    main()
