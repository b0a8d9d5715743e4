"""One worker in a child process, connected by a pipe, with weights in files in memory.

    ProcessCarrier -> ChildCrew -> pipe -> Host in the child (`child.py`) -> the worker, and back

However the parent ends, the child ends with it, and so do the weights in memory. No call of the parent waits longer
than its timeout for a child that is stopped: after that it kills the child, and `Lost` says how it ended. It is not
replaced. Used by `run/run_ahead_process.py`. Tensors go one way: the child must never be asked for sums or a drafter.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save
from safetensors.torch import load_file
from torch import Tensor

from paceline.fleet.commands import Command
from paceline.fleet.reports import Lost
from paceline.fleet.transport.mailbox import CrewEvent, Letter, Order
from paceline.fleet.transport.weights import ByteChunk, Package, Ref, WeightsError
from paceline.fleet.transport.wire import Parcel

CHILD = 0
"""The number of the only worker."""
CHILD_MODULE = "paceline.fleet.transport.child"


class ChildCrew:
    """The parent's handle of the child."""

    def __init__(self, factory: str, worker_settings: Any, patience_s: float) -> None:
        """`patience_s`: how long a child that is stopped may block a message."""
        self._pipe, theirs = Pipe()
        _limit_waits(self._pipe, patience_s)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-m", CHILD_MODULE, str(theirs.fileno()), str(os.getpid())],
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
    """Chunks in files in memory, which the parent writes and the child reads.

    On Linux they have no name in any folder: the kernel removes them with the last process that has them open.
    Elsewhere they are in a temporary folder, which a killed process leaves behind.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def put(self, chunk: ByteChunk) -> Ref:
        content = save({str(place): array for place, array in enumerate(chunk)})
        name = f"paceline-{next(_numbers)}"
        if hasattr(os, "memfd_create"):
            return NamelessFile(name, content)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        return NamedFile(Path(self._folder.name) / name, content)

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        try:
            found = [load_nameless(*ref) if isinstance(ref, tuple) else load_file(ref) for ref in refs]
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"chunks are lost: {error}") from error
        # Views of the files, which stay valid while they are open.
        return [[chunk[str(place)].numpy() for place in range(len(chunk))] for chunk in found]

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


_numbers = itertools.count()
"""No two chunks of a process have one name."""


class NamelessFile:
    """Closes its file when garbage-collected; pickled for the child, it is a name and where the parent has it open."""

    def __init__(self, name: str, content: bytes) -> None:
        self._name, self._descriptor = name, os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self._name, f"/proc/{os.getpid()}/fd/{self._descriptor}"),)


def load_nameless(name: str, path: str) -> dict[str, Tensor]:
    """The content of another process's file; an OSError if the descriptor has become another file's."""
    own = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        is_it = os.readlink(f"/proc/self/fd/{own}") == f"/memfd:{name} (deleted)"
        if not is_it:
            raise FileNotFoundError(f"{path} is no longer {name}")
        return load_file(f"/proc/self/fd/{own}")
    finally:
        os.close(own)


class NamedFile:
    """Deletes its file when garbage-collected; pickled for the child, it is a path."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = str(path)
        weakref.finalize(self, path.unlink, missing_ok=True)
        path.write_bytes(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._path,)
