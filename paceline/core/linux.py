"""Calls to the Linux kernel that Python lacks, and what they do on other systems: nothing.

Whatever starts child processes uses it, so that none outlives a run, and `tasks/sandbox` uses it to shut rewards in.
The functions that tie processes together return whether the kernel did it, so that a caller can fall back or say what
is missing; those that change what a process may do raise an OSError, because going on without would be a silent hole.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38

NEW_MOUNTS, NEW_IPC, NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
"""Namespaces that `clone_process` can make."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_READ_ONLY = 1
_PRIVATE = 1 << 18
_BIND, _RECURSIVE, _NO_SUID, _NO_DEVICES = 0x1000, 0x4000, 0x2, 0x4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")


def die_with_parent(parent: int, last_signal: signal.Signals = signal.SIGKILL) -> bool:
    """From now on, get this signal at once when the process `parent` dies; call it in the child, with the parent's id.

    Linux reacts to the death of the *thread* that started this process, so start children from a long-lived one.
    """
    is_set = prctl(_PR_SET_PDEATHSIG, last_signal)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(0)
    return is_set


def die_with_hidden_parent() -> bool:
    """The same for a parent in another PID namespace, whose id this process cannot see or compare."""
    return prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """From now on, processes below this one whose parent dies become its children, so that it can end them."""
    return prctl(_PR_SET_CHILD_SUBREAPER, 1)


def gain_no_privileges() -> bool:
    """From now on, no program started below this process gains rights that it lacks, as `sudo` would."""
    return prctl(_PR_SET_NO_NEW_PRIVS, 1)


def prctl(option: int, value: int) -> bool:
    """Set one attribute of this process."""
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0


def call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """A system call by its number; an OSError if the kernel refuses it."""
    # PyDLL keeps the interpreter's lock: a child made by clone must find it held by its only thread.
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(int(libc.syscall(ctypes.c_long(number), *wide)))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def clone_process(namespaces: int) -> int:
    """Like `os.fork`, with the child in new namespaces.

    Python does not know of this fork, so the child may only make system calls and `os.fork`; call it where there is a
    single thread.
    """
    number = _CLONE.get(platform.machine())
    if number is None:
        raise OSError(f"not known for {platform.machine()} processors")
    return call(number, namespaces | signal.SIGCHLD, 0, 0, 0, 0)


def set_read_only(path: str, is_read_only: bool, is_recursive: bool = False) -> None:
    """Make a mount read-only or writable again, and keep what happens to it here from the rest of the machine."""
    change = (_MOUNT_READ_ONLY, 0) if is_read_only else (0, _MOUNT_READ_ONLY)
    attributes = struct.pack("QQQQ", *change, _PRIVATE, 0)
    flags = _AT_RECURSIVE if is_recursive else 0
    call(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, len(attributes))


def mount(kind: str, path: str, options: str = "") -> None:
    """Mount a new file system of this kind: tmpfs or proc."""
    _mount(kind, path, kind, _NO_SUID | _NO_DEVICES, options)


def bind(path: str) -> None:
    """Make a folder a mount of its own, which can have its own rights."""
    _mount(path, path, None, _BIND | _RECURSIVE, "")


def _mount(source: str, path: str, kind: str | None, flags: int, options: str) -> None:
    libc = ctypes.PyDLL(None, use_errno=True)
    words = [None if word is None else os.fsencode(word) for word in (source, path, kind)]
    _checked(int(libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options))))


def drop_capabilities(kept: Collection[int] = ()) -> None:
    """Give up root's rights for good, but for the numbers in `kept`; also for programs started later."""
    for number in range(int(_LAST_CAPABILITY.read_text()) + 1):
        if number not in kept:
            prctl(_PR_CAPBSET_DROP, number)
    mask = sum(1 << number for number in kept)
    libc = ctypes.PyDLL(None, use_errno=True)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _checked(int(libc.capset(header, struct.pack("6I", low, low, 0, high, high, 0))))


def children(pid: int) -> list[int]:
    """The child processes of a process, those of all its threads."""
    found: list[int] = []
    with suppress(OSError):  # it may end meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def end_family() -> None:
    """Kill and reap everything below this process; it must adopt orphans, or those of dead children are out of reach.

    Whoever loses its parent meanwhile becomes a child of this process, and its turn comes in a later round.
    """
    while True:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants(pid: int) -> list[int]:
    """Everything below a process, parents before their children."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found
