"""A `paceline train` that is struck by signals: started, struck, waited for, and searched for what it left behind.

`kills.py` uses it for each of its kills. A run is forked from a process that has imported everything, which takes
milliseconds, or started cold. Whatever outlives it becomes a child of this process, which is how leftovers are found.
Nothing here knows what a run computes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.cli import main
from paceline.fleet.transport import pipe
from paceline.tasks import grading

SOFT = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that ask a run to end: it saves first."""
GONE_S = 20.0
"""A process that is still there this long after its run is left behind; a busy machine takes a while to end one."""
END_S = 120.0
"""A run that is still there this long after it was struck hangs."""
MEMORY = Path("/dev/shm")
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
Hook = Callable[[], None]


@dataclass(frozen=True)
class Attack:
    """Signals to a run's process, or to all processes of its group, as a terminal sends them."""

    name: str
    num_rows: int | None
    """Strike once the run has written so many more rows of metrics; None: at any moment since its start."""
    share: float
    """How long after that, as a share of the duration of a step, or of a whole run."""
    signals: tuple[tuple[float, int], ...]
    """Seconds to wait before each."""
    is_group: bool

    @classmethod
    def draw(cls, rng: random.Random, soft: float) -> Attack:
        """A share of `soft` asks the run to end, half of these many times; the others kill it."""
        num_rows = rng.choice((None, 0, 0, 1, 1, 2, 2, 3, 4))
        # A busy machine takes longer than it did for the reference.
        moment = num_rows, rng.random() * (1.0 if num_rows is None else rng.choice((0.1, 1.0, 3.0)))
        if rng.random() >= soft:
            return cls("SIGKILL", *moment, ((0.0, signal.SIGKILL),), is_group=False)
        if rng.random() < 0.5:
            number = rng.choice(SOFT)
            return cls(number.name, *moment, ((0.0, number),), is_group=rng.random() < 0.5)
        pauses = [rng.random() * rng.choice((0.005, 0.08)) for _ in range(rng.randint(3, 12))]
        return cls("burst", *moment, tuple((pause, rng.choice(SOFT)) for pause in pauses), is_group=rng.random() < 0.5)

    @property
    def is_soft(self) -> bool:
        return self.name != "SIGKILL"

    @property
    def exit_codes(self) -> set[int]:
        """What the run may end with: 0 if it was just done."""
        return {0} | {128 + number for _, number in self.signals if self.is_soft}


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Negative for a signal, as `subprocess` has it."""
    seconds: float
    struck_s: float | None = None
    """When it was struck, in seconds since its start; None if it ended first."""
    hung: bool = False


class TrainProcess:
    """One `paceline train` in a process group of its own."""

    def __init__(self, arguments: Sequence[str], log: Path, is_cold: bool, hook: Hook | None) -> None:
        """A forked process calls `hook` first."""
        self._begun = time.monotonic()
        self._log = log
        self.pid = self._start_cold(arguments) if is_cold else self._fork(arguments, hook)
        self._code: int | None = None

    def run(self, attack: Attack | None, is_due: Callable[[], bool] = lambda: True, delay_s: float = 0.0) -> Ended:
        """Wait until it ends; strike it `delay_s` after the moment when `is_due`, if it is still there."""
        struck_s = None
        if attack is not None and not self._wait(END_S, is_due) and not self._wait(delay_s):
            struck_s = time.monotonic() - self._begun
            for pause, number in attack.signals:
                self._wait(pause)
                self._send(number, attack.is_group)
        hung = not self._wait(END_S)
        if hung:
            self._send(signal.SIGKILL, is_group=True)
            self._wait(END_S)
        assert self._code is not None
        return Ended(self._code, time.monotonic() - self._begun, struck_s, hung)

    def _send(self, number: int, is_group: bool) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                (os.killpg if is_group else os.kill)(self.pid, number)

    def _wait(self, seconds: float, is_due: Callable[[], bool] = lambda: False) -> bool:
        """Whether it has ended within this time, or before something is due."""
        deadline = time.monotonic() + seconds
        while self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline or is_due():
                return False
            else:
                time.sleep(min(0.003, max(deadline - time.monotonic(), 0.0)))
        return True

    def _start_cold(self, arguments: Sequence[str]) -> int:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "paceline", "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).pid

    def _fork(self, arguments: Sequence[str], hook: Hook | None) -> int:
        pid = os.fork()
        if pid:
            with suppress(PermissionError, ProcessLookupError):  # it has done so itself
                os.setpgid(pid, pid)
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if hook is not None:
                hook()
            main(["train", *arguments])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
            os._exit(code)


class ForkedChild:
    """Stands in for the `subprocess.Popen` of a grader or a run-ahead process: the same code, without its imports."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        kept = set(pass_fds)
        pipes = [os.pipe() if given == subprocess.PIPE else None for given in (stdin, stdout, stderr)]
        self.pid = os.fork()
        if not self.pid:
            try:
                for number, ends in enumerate(pipes):
                    if ends is not None:
                        os.dup2(ends[min(number, 1)], number)
                if start_new_session:
                    os.setsid()
                for name in os.listdir("/proc/self/fd"):
                    if int(name) > 2 and int(name) not in kept:
                        with suppress(OSError):
                            os.close(int(name))
                sys.argv = [*arguments[arguments.index("-m") + 1 :]]
                importlib.import_module(sys.argv[0]).main()
            finally:
                os._exit(1)
        self.stdin, self.stdout, self.stderr = (
            None if ends is None else _own_end(ends, is_input=number == 0) for number, ends in enumerate(pipes)
        )

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            found, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("child", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self.returncode


def _own_end(ends: tuple[int, int], is_input: bool) -> IO[bytes]:
    theirs, own = ends if is_input else ends[::-1]
    os.close(theirs)
    return os.fdopen(own, "wb" if is_input else "rb")


def fork_children() -> None:
    """From now on, graders and run-ahead processes of this process and of those it forks are forked too."""
    for module in (grading, pipe):
        vars(module)["subprocess"] = _Forking


class _Forking:
    """Stands in for the module `subprocess`."""

    Popen, PIPE, DEVNULL, TimeoutExpired = ForkedChild, subprocess.PIPE, None, subprocess.TimeoutExpired


# --- what is left behind ----------------------------------------------------------------------------------------------


def wait_until_gone() -> list[str]:
    """Wait for the processes that a run has left to this one; returns the command lines of those that stay."""
    deadline = time.monotonic() + GONE_S
    while children := _reaped_children():
        if time.monotonic() >= deadline:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return [f"process {' '.join(command.split()) or pid}" for pid, command in children.items()]
        time.sleep(0.005)
    return []


def _reaped_children() -> dict[int, str]:
    """The processes below this one that are alive, with their command lines."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with suppress(OSError):
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def hide_memory() -> bool:
    """Give this process and its children their own /dev/shm, where nobody else leaves anything.

    Needs a permission; without it, other programs' files cannot be told from ours and only our names count.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    return libc.mount(b"tmpfs", bytes(MEMORY), b"tmpfs", 0, None) == 0


def temporary_files(is_private: bool) -> set[str]:
    """What lies in the folders for temporary files and for memory."""
    in_memory = {str(entry) for entry in MEMORY.iterdir() if is_private or "paceline" in entry.name}
    return in_memory | {str(entry) for entry in Path(tempfile.gettempdir()).iterdir()}


def hidden_files(folder: Path, whole: Path) -> list[str]:
    """Hidden files and folders that a run has, and the run in the folder `whole`, which nobody struck, has not."""
    found, usual = ({str(path.relative_to(run)) for path in run.rglob(".*")} for run in (folder, whole))
    return sorted(found - usual)
