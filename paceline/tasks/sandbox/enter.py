"""Enters a sandbox: after `enter(limits)` this process and all that it starts are shut in, for good.

`grader_process.py` calls it first thing; other code that runs what nobody has checked can do the same. Call it in a
new process with one thread, before anything else is loaded. On Linux the process that called `enter` becomes the
keeper of the sandbox (`keeper.py`) and never returns; the call returns in its descendant, with the same descriptors.
To end a sandbox, send its keeper SIGTERM.

The layers, each where the kernel has it: namespaces (network, read-only disk, processes that end together), else a
keeper that adopts and kills every orphan; then Landlock, then a filter on system calls. What is missing is said
(`Sandbox.missing`), never silently ignored.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from paceline.core.linux import (
    adopt_orphans,
    die_with_hidden_parent,
    die_with_parent,
    drop_capabilities,
    gain_no_privileges,
)
from paceline.tasks.sandbox import keeper
from paceline.tasks.sandbox.landlock import restrict
from paceline.tasks.sandbox.limits import Sandbox, SandboxLimits
from paceline.tasks.sandbox.namespaces import fork_into_namespaces, kernel, map_users, set_up_mounts
from paceline.tasks.sandbox.seccomp import filter_calls

_READ_EVERYTHING = 2  # CAP_DAC_READ_SEARCH
_READY, _GO = b"+", b"g"


@dataclass(frozen=True)
class _Pipe:
    read: int
    write: int

    @classmethod
    def open(cls) -> _Pipe:
        return cls(*os.pipe())

    def close(self) -> None:
        for descriptor in (self.read, self.write):
            with suppress(OSError):  # one end may be closed already
                os.close(descriptor)


def enter(limits: SandboxLimits, parent: int, has_namespaces: bool = True) -> Sandbox:
    """Shut this process in; it dies with the process `parent`, which started it.

    `has_namespaces=False` leaves them out, as on a kernel that does not offer them.
    """
    die_with_parent(parent, signal.SIGTERM)
    if sys.platform != "linux":
        return Sandbox(limits, obstacle=f"{sys.platform} has none")
    obstacle = "left out"
    if limits.is_enforced and has_namespaces:
        try:
            return _enter_namespaces(limits)
        except OSError as error:
            obstacle = str(error)
    return _enter_family(limits, parent, obstacle if limits.is_enforced else "")


def _enter_namespaces(limits: SandboxLimits) -> Sandbox:
    """Returns in the sandbox, or raises OSError out here if the kernel refuses any of it."""
    orders, reports = _Pipe.open(), _Pipe.open()
    try:
        inner = fork_into_namespaces(limits.has_network)
        if inner == 0:
            return _start_inside(limits, orders, reports)
        os.close(reports.write)
        try:
            map_users(inner)
            os.write(orders.write, _GO)
            _expect_ready(reports.read)
        except OSError:
            os.kill(inner, signal.SIGKILL)
            os.waitpid(inner, 0)
            raise
    except OSError:
        orders.close()
        reports.close()
        raise
    keeper.wait_outside(inner, reports.read)


def _expect_ready(reports: int) -> None:
    said = os.read(reports, 1 << 12)
    if said != _READY:
        raise OSError(said.decode(errors="replace") or "the first process in them died")


def _start_inside(limits: SandboxLimits, orders: _Pipe, reports: _Pipe) -> Sandbox:
    """In the first process of the namespaces: set them up, then go on in a child of it."""
    die_with_hidden_parent()
    os.close(orders.write)
    os.close(reports.read)
    if os.read(orders.read, 1) != _GO:  # the keeper died before the line above
        os._exit(1)
    os.close(orders.read)
    try:
        scratch, is_limited = set_up_mounts(limits)
    except BaseException as error:
        os.write(reports.write, str(error).encode())
        os._exit(1)
    os.write(reports.write, _READY)
    child = os.fork()
    if child:
        keeper.wait_inside(child, reports.write)
    os.close(reports.write)
    sandbox = Sandbox(
        limits,
        network="" if limits.has_network else "namespace",
        disk="mounts",
        processes="PID namespace",
        num_processes="PID namespace" if is_limited else "",
        scratch=scratch,
    )
    return _harden(_limit_user(sandbox), keepers=())


def _limit_user(sandbox: Sandbox) -> Sandbox:
    """Limit the processes of this user here; since Linux 5.14 those outside the namespace do not count."""
    if sandbox.num_processes or os.geteuid() == 0 or kernel() < (5, 14):
        return sandbox
    most = sandbox.limits.max_processes
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    return replace(sandbox, num_processes="rlimit")


def _enter_family(limits: SandboxLimits, parent: int, obstacle: str) -> Sandbox:
    """Without namespaces: this process becomes the keeper of its child's whole family."""
    can_adopt = adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, keeper.ENDING)  # first: whoever makes the folder must live to remove it
    scratch = tempfile.mkdtemp(prefix="paceline-grader-") if limits.is_enforced else None
    outer = os.getpid()
    child = os.fork()
    if child:
        keeper.wait_and_end(child, scratch)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, keeper.ENDING)
    die_with_parent(outer)
    os.setpgid(0, 0)  # a reward that signals its group does not signal its keeper
    sandbox = Sandbox(limits, processes="orphans adopted" if can_adopt else "", scratch=scratch, obstacle=obstacle)
    return _harden(sandbox, keepers=(outer, parent)) if limits.is_enforced else sandbox


def _harden(sandbox: Sandbox, keepers: Collection[int]) -> Sandbox:
    """The layers that need no namespace: a temporary folder of its own, Landlock, and the filter on calls."""
    limits = sandbox.limits
    if sandbox.scratch is not None:
        os.environ["TMPDIR"] = sandbox.scratch
        tempfile.tempdir = sandbox.scratch
    gain_no_privileges()
    with suppress(OSError):
        drop_capabilities((_READ_EVERYTHING,) if os.geteuid() == 0 else ())
    network, disk = [sandbox.network], [sandbox.disk]
    with suppress(OSError):
        writable = [*limits.writable, *([sandbox.scratch] if sandbox.scratch else [])]
        if restrict(writable, limits.has_network):
            disk.append("Landlock")
    with suppress(OSError):
        if filter_calls(limits.has_network, keepers) and not limits.has_network:
            network.append("seccomp")
    return replace(sandbox, network=_join(network), disk=_join(disk))


def _join(means: list[str]) -> str:
    return " and ".join(one for one in means if one)
