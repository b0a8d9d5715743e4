"""Landlock: a process gives up writing to the disk outside some folders, and TCP, without any privilege.

`enter.py` calls it, beside the read-only mounts and also where there are none: it keeps root from writing to the raw
disk devices in /dev, which mounts do not. Reading stays free.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress

from paceline.core.linux import call

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION = 1
_BENEATH = 1
_WRITE_FILE = 1 << 1
_WRITES = _WRITE_FILE | 0b1_1111_1111 << 4  # remove and make files, folders, links, sockets, pipes and devices
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TCP, _OUTSIDE = 0b11, 0b11
"""Bind and connect; abstract sockets of, and signals to, processes that are not restricted like this one."""

_SHARED_MEMORY = ("shm", "mqueue", "hugepages")
"""Folders in /dev that hold other programs' files and no devices."""


def version() -> int:
    """Which version of Landlock the kernel has; 0 for none."""
    with suppress(OSError):
        return call(_CREATE, 0, 0, _VERSION)
    return 0


def restrict(writable: Iterable[str], has_network: bool) -> int:
    """Give up writing outside these folders; the version that enforces it, 0 for none. Needs `gain_no_privileges`."""
    known = version()
    if not known:
        return 0
    writes = _WRITES | (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    tcp = 0 if has_network or known < 4 else _TCP
    handled = struct.pack("QQQ", writes, tcp, _OUTSIDE if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    rules = call(_CREATE, handled[:size], size, 0)
    try:
        for folder in writable:
            _allow(rules, folder, writes)
        for device in _devices():
            _allow(rules, device, writes & (_WRITE_FILE | _TRUNCATE))
        call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)
    return known


def _allow(rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        call(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


def _devices() -> Iterable[str]:
    """What stays writable in /dev: null, terminals and other character devices; not disks."""
    for entry in os.scandir("/dev"):
        with suppress(OSError):
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISCHR(mode) or (stat.S_ISDIR(mode) and entry.name not in (*_SHARED_MEMORY, "block", "mapper")):
                yield entry.path
