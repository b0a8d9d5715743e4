"""Calls to the Linux kernel that Python lacks, and what they do on other systems: nothing.

Whatever starts child processes uses it, so that none outlives a run. Each function returns whether the kernel did it,
so that a caller can fall back or say what is missing; none raises.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> bool:
    """From now on, die at once when the process `parent` does; call it in the child, with the parent's id.

    Linux reacts to the death of the *thread* that started this process, so start children from a long-lived one.
    """
    is_set = prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(0)
    return is_set


def adopt_orphans() -> bool:
    """From now on, processes below this one whose parent dies become its children, so that it can end them."""
    return prctl(_PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> bool:
    """Set one attribute of this process."""
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
