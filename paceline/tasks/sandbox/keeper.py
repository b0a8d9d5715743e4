"""The processes around a sandbox: they wait for it, end what it leaves behind, and die as it died.

The outer keeper is the process that the caller started; the caller sees its exit code. With namespaces there is an
inner one, the first process of the PID namespace: when it ends, the kernel ends everything else in there. Without,
the outer keeper adopts every orphan below it and kills them itself. Keepers run none of the code in the sandbox.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from typing import NoReturn

from paceline.core.linux import end_family

ENDING = (signal.SIGTERM, signal.SIGCHLD)
_STATUS_BYTES = 8


def wait_inside(child: int, report: int) -> NoReturn:
    """The inner keeper: reap every orphan; when the child ends, report how, and end all others with this process."""
    _leave_pipes(report)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            os.write(report, status.to_bytes(_STATUS_BYTES, "little"))
            os._exit(0)


def wait_outside(inner: int, report: int) -> NoReturn:
    """The outer keeper of namespaces: the kernel ends the inner one with it, and all processes with that one."""
    _leave_pipes(report)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(inner, 0)
    told = os.read(report, _STATUS_BYTES)
    die_like(int.from_bytes(told, "little") if told else status)


def wait_and_end(child: int, scratch: str | None) -> NoReturn:
    """The only keeper where there are no namespaces: when the child ends or the caller says so, end all of its family.

    `ENDING` must be blocked since before the fork, so that none of these signals is missed.
    """
    _leave_pipes()
    status: int | None = None
    while status is None:
        was_told = signal.sigwait(ENDING) == signal.SIGTERM
        status = int(signal.SIGTERM) if was_told else _reap(child)
    end_family()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    die_like(status)


def _reap(child: int) -> int | None:
    """Reap all that have ended; the status of the child if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None


def _leave_pipes(kept: int = 2) -> None:
    """Close all but one descriptor, so that the caller sees the end of its pipes when the sandbox closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, kept)
    os.closerange(max(3, kept + 1), most)


def die_like(status: int) -> NoReturn:
    """End with the exit code or the signal of another process's wait status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
