"""A filter on system calls: no sockets, no tracing or signalling of the sandbox's keepers, no way around the rest.

`enter.py` installs it last. The filter is a program for the kernel's packet filter (BPF), which sees the number and
the arguments of each call, but nothing behind a pointer. Children inherit it, and nothing can remove it.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.core.linux import call

_SECCOMP_SET_MODE_FILTER = 1
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Where the filter finds the call's number, the processor, and the low halves of its first two arguments."""

_NEW_NAMESPACES = 0x7E020080
"""Every flag of clone that makes a namespace: in a new one, a process would have root's rights again."""

_SHARED = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433},
    **{"pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442},
}
"""Calls of the same number on every processor."""

_NUMBERS = {
    "x86_64": {
        **{"socket": 41, "clone": 56, "kill": 62, "ptrace": 101, "syslog": 103, "setpriority": 141},
        **{"sched_setparam": 142, "sched_setscheduler": 144, "pivot_root": 155, "adjtimex": 159, "chroot": 161},
        **{"acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168},
        **{"reboot": 169, "sethostname": 170, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176},
        **{"quotactl": 179, "tkill": 200, "sched_setaffinity": 203, "clock_settime": 227, "tgkill": 234},
        **{"kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272},
        **{"rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "prlimit64": 302},
        **{"open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310},
        **{"process_vm_writev": 311, "finit_module": 313, "sched_setattr": 314, "kexec_file_load": 320, "bpf": 321},
        **{"userfaultfd": 323},
    },
    "aarch64": {
        **{"socket": 198, "clone": 220, "kill": 129, "ptrace": 117, "syslog": 116, "setpriority": 140},
        **{"sched_setparam": 118, "sched_setscheduler": 119, "pivot_root": 41, "adjtimex": 171, "chroot": 51},
        **{"acct": 89, "settimeofday": 170, "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225},
        **{"reboot": 142, "sethostname": 161, "init_module": 105, "delete_module": 106},
        **{"quotactl": 60, "tkill": 130, "sched_setaffinity": 122, "clock_settime": 112, "tgkill": 131},
        **{"kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97},
        **{"rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261},
        **{"open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270},
        **{"process_vm_writev": 271, "finit_module": 273, "sched_setattr": 274, "kexec_file_load": 294, "bpf": 280},
        **{"userfaultfd": 282},
    },
}

_AIMED_AT_FIRST = (
    *("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "prlimit64"),
    *("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"),
)
"""Calls whose first argument says which process they change."""
_AIMED_AT_SECOND = ("setpriority",)
_SPECIAL = ("socket", "clone", "clone3", *_AIMED_AT_FIRST, *_AIMED_AT_SECOND)


@dataclass(frozen=True)
class _Processor:
    audit_code: int
    seccomp: int
    largest: int | None
    """Numbers from here on are the same calls under another name (x32)."""


_PROCESSORS = {
    "x86_64": _Processor(0xC000003E, 317, 0x40000000),
    "aarch64": _Processor(0xC00000B7, 277, None),
}

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


def filter_calls(has_network: bool, keepers: Collection[int]) -> bool:
    """Filter this process's calls from now on; False where the filter's numbers are not known.

    `keepers` are processes that it must not touch, because they end it.
    """
    machine = platform.machine()
    if machine not in _PROCESSORS:
        return False
    program = b"".join(struct.pack("HBBI", *one) for one in _program(machine, has_network, keepers))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    call(_PROCESSORS[machine].seccomp, _SECCOMP_SET_MODE_FILTER, 0, header)
    return True


def _program(machine: str, has_network: bool, keepers: Collection[int]) -> Iterable[Instruction]:
    processor = _PROCESSORS[machine]
    numbers = _SHARED | _NUMBERS[machine]
    yield _load(_ARCHITECTURE)
    yield from _unless(processor.audit_code, errno.ENOSYS)
    yield _load(_NUMBER)
    if processor.largest is not None:
        yield _JUMP_IF_AT_LEAST, 0, 1, processor.largest
        yield _fail(errno.ENOSYS)
    for name, number in numbers.items():
        if name not in _SPECIAL or (name == "socket" and not has_network):
            yield from _when(number, errno.EPERM)
    # Its flags lie behind a pointer; without it, the C library falls back to clone.
    yield from _when(numbers["clone3"], errno.ENOSYS)
    yield from _no_namespaces(numbers["clone"])
    aims = {**dict.fromkeys(_AIMED_AT_FIRST, _FIRST), **dict.fromkeys(_AIMED_AT_SECOND, _SECOND)}
    for name, place in aims.items():
        if keepers:
            yield from _no_aiming(numbers[name], place, keepers)
    yield _RETURN, 0, 0, _ALLOW


def _no_namespaces(clone: int) -> Iterable[Instruction]:
    yield _JUMP_IF_EQUAL, 0, 4, clone
    yield _load(_FIRST)
    yield _JUMP_IF_BIT, 0, 1, _NEW_NAMESPACES
    yield _fail(errno.EPERM)
    yield _RETURN, 0, 0, _ALLOW


def _no_aiming(number: int, place: int, keepers: Collection[int]) -> Iterable[Instruction]:
    """Refuse the call for each keeper and its process group, and for "every process"."""
    targets = [-1, *(pid for keeper in keepers for pid in (keeper, -keeper))]
    yield _JUMP_IF_EQUAL, 0, 2 + 2 * len(targets), number
    yield _load(place)
    for target in targets:
        yield from _when(target & 0xFFFFFFFF, errno.EPERM)
    yield _RETURN, 0, 0, _ALLOW


def _when(operand: int, code: int) -> Iterable[Instruction]:
    yield _JUMP_IF_EQUAL, 0, 1, operand
    yield _fail(code)


def _unless(operand: int, code: int) -> Iterable[Instruction]:
    yield _JUMP_IF_EQUAL, 1, 0, operand
    yield _fail(code)


def _load(place: int) -> Instruction:
    return _LOAD, 0, 0, place


def _fail(code: int) -> Instruction:
    return _RETURN, 0, 0, _FAIL | code
