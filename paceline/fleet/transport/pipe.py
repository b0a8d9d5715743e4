"""One worker in a child process, connected by a pipe, with weights in files in memory.

    ProcessCarrier -> ChildCrew -> pipe -> Host in the child -> the worker, and back

The child is this module run as `python -m`. It exits as soon as its parent closes the pipe, however the parent ends. No
call of the parent waits longer than its timeout for a child that is stopped: after that it kills the child, and `Lost`
says how it ended. It is not replaced. Used by `run/run_ahead_process.py`. Tensors go one way: the child must never be
asked for sums or a drafter.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from safetensors.torch import load_file

from paceline.fleet.commands import Command
from paceline.fleet.reports import Lost
from paceline.fleet.transport.host import Host
from paceline.fleet.transport.mailbox import CrewEvent, Letter, Order
from paceline.fleet.transport.weights import ByteChunk, Package, Ref, WeightsError
from paceline.fleet.transport.wire import Parcel

CHILD = 0
"""The number of the only worker."""
MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
POLL_S = 2.0
"""How long the child waits for reports before it polls again."""


class ChildCrew:
    """The parent's handle of the child."""

    def __init__(self, factory: str, worker_settings: Any, patience_s: float) -> None:
        """`patience_s`: how long a child that is stopped may block a message."""
        self._pipe, theirs = Pipe()
        _limit_waits(self._pipe, patience_s)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # its output is not the run's
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        theirs.close()
        self._num_orders = 0
        self._is_lost = False
        self._send((factory, worker_settings))

    @property
    def may_come(self) -> bool:
        return not self._is_lost

    def send(self, number: int, command: Command, payload: Parcel | Package | None = None) -> None:
        self._send(Order(self._num_orders, command, payload))
        self._num_orders += 1

    def _send(self, message: object) -> None:
        try:
            if not self._is_lost:
                self._pipe.send(message)
        except OSError:
            self.process.kill()  # `collect` finds the pipe closed

    def collect(self, seconds: float) -> list[tuple[int, CrewEvent]]:
        found: list[tuple[int, CrewEvent]] = []
        try:
            while not self._is_lost and self._pipe.poll(0 if found else seconds):
                letter: Letter = self._pipe.recv()
                if isinstance(letter.event, Lost):
                    self.close()
                found.append((CHILD, letter.event))
        except (EOFError, OSError):
            self.close()
            found.append((CHILD, Lost(f"its process ended with exit code {self.process.returncode}")))
        return found

    def kill(self, number: int, reason: str) -> Lost | None:
        if self._is_lost:
            return None
        self.close()
        return Lost(reason)

    def close(self) -> None:
        self._is_lost = True
        self.process.kill()
        self.process.wait()
        self._pipe.close()


def _limit_waits(pipe: Connection, seconds: float) -> None:
    """Raise an `OSError` for a message that cannot be fully written or read within `seconds`."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6) or 1)
    with socket.socket(fileno=os.dup(pipe.fileno())) as own:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            own.setsockopt(socket.SOL_SOCKET, option, limit)


class FileStore:
    """Chunks in files: the parent writes them to a folder in memory, which it removes, and the child reads them."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def put(self, chunk: ByteChunk) -> Ref:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-", dir=MEMORY if MEMORY.is_dir() else None)
        path = Path(self._folder.name) / f"{next(self._numbers)}.safetensors"
        save_file({str(place): array for place, array in enumerate(chunk)}, path)
        return StoredFile(path)

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        try:
            found = [load_file(path) for path in refs]
        except OSError as error:
            raise WeightsError(f"chunks are lost: {error}") from error
        # Views of the files, which stay valid while they are open.
        return [[chunk[str(place)].numpy() for place in range(len(chunk))] for chunk in found]

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


class StoredFile:
    """Deletes its file when garbage-collected; pickled for the child, it is a path."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        weakref.finalize(self, path.unlink, missing_ok=True)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._path,)


# --- the child --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Pass orders to the worker until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):
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
