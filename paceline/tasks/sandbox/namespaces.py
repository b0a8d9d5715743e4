"""Namespaces: a process tree with its own view of processes, network, mounts and users, which ends as one.

`enter.py` makes the tree's first process with `fork_into_namespaces`, and calls `set_up_mounts` in it. Any user may do
this where the kernel lets users make namespaces; then the process has root's rights over its own namespaces only, and
`enter.py` drops them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from paceline.core.linux import (
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_PROCESSES,
    NEW_USERS,
    bind,
    clone_process,
    mount,
    set_read_only,
)
from paceline.tasks.sandbox.limits import SandboxLimits

SCRATCH_PLACES = ("/dev/shm", "/tmp", "/var/tmp", "/mnt")
SCRATCH_OPTIONS = "size=25%,mode=1777"
"""A share of the machine's memory, where the files lie."""


def fork_into_namespaces(has_network: bool) -> int:
    """`os.fork` into new namespaces; the child must wait until its parent has called `map_users`."""
    network = 0 if has_network else NEW_NETWORK
    return clone_process(NEW_USERS | NEW_PROCESSES | NEW_MOUNTS | NEW_IPC | network)


def map_users(pid: int) -> None:
    """Let a child in its new namespaces keep its user and, for root, know all users, whose files it can then read."""
    folder = Path(f"/proc/{pid}")
    try:
        for kind in ("uid_map", "gid_map"):
            (folder / kind).write_text(_everybody(kind))
    except PermissionError:
        (folder / "setgroups").write_text("deny")
        for kind, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            with suppress(PermissionError):  # written above: a map is written once
                (folder / kind).write_text(f"{own} {own} 1")
        if not (folder / "uid_map").read_text() or not (folder / "gid_map").read_text():
            raise


def _everybody(kind: str) -> str:
    ranges = [line.split() for line in Path(f"/proc/self/{kind}").read_text().splitlines()]
    return "".join(f"{first} {first} {count}\n" for first, _, count in ranges)


def set_up_mounts(limits: SandboxLimits) -> tuple[str, bool]:
    """Make the disk read-only, but for a new temporary folder and the writable ones.

    Returns the temporary folder, and whether the number of processes is limited.
    """
    scratch = find_scratch([os.getcwd(), sys.prefix, sys.base_prefix, *sys.path, *limits.visible, *limits.writable])
    set_read_only("/", True, is_recursive=True)
    for folder in limits.writable:
        bind(folder)
        set_read_only(folder, False)
    mount("tmpfs", scratch, SCRATCH_OPTIONS)
    with suppress(OSError):  # a container may hide parts of /proc, and the kernel then refuses to show them
        mount("proc", "/proc")
        is_limited = limit_processes(limits.max_processes)
        set_read_only("/proc", True)  # root owns its switches for the whole machine
        return scratch, is_limited
    return scratch, False


def find_scratch(seen: Iterable[str]) -> str:
    """A folder that can be hidden by a temporary one; an OSError if everything is in use."""
    used = [os.path.realpath(path) for path in seen if path]
    for place in SCRATCH_PLACES:
        if os.path.isdir(place) and not any(path == place or path.startswith(f"{place}/") for path in used):
            return place
    raise OSError(f"no place for a temporary folder: all of {', '.join(SCRATCH_PLACES)} are in use")


def limit_processes(most: int) -> bool:
    """Limit how many processes exist in this PID namespace; False where the kernel counts only the machine's."""
    if kernel() < (6, 14):  # there, root would set the limit of the whole machine
        return False
    with suppress(OSError):
        Path("/proc/sys/kernel/pid_max").write_text(str(most))
        return True
    return False


def kernel() -> tuple[int, int]:
    """The kernel's version."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)
