"""How many cores this process may use. Asked by whatever starts threads or processes; it only looks."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
LIMIT = "OMP_NUM_THREADS"
"""What users set to limit the threads of numeric libraries, and Ray for its workers."""

MAX_THREADS = 256
ROOM_FROM = 4
"""From so many cores on, one is left to graders, drafters and the rest of the machine."""


def num_cores(groups: Path = GROUPS) -> int:
    """Cores that this process may use: those it may run on, within its container's share of CPU time."""
    # macOS does not tell where a process may run.
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(groups)
    return found if quota is None else max(min(found, int(quota)), 1)


def auto_threads(num_processes: int = 1) -> int:
    """Threads for each of so many processes that compute at the same time on this machine."""
    cores = num_cores()
    given = os.environ.get(LIMIT, "").partition(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return max(min(cores // num_processes, int(given)), 1)
    return max(min((cores - (cores >= ROOM_FROM)) // num_processes, MAX_THREADS), 1)


def _quota(groups: Path) -> float | None:
    """Cores' worth of CPU time that the container grants; None without a limit."""
    try:
        if (groups / "cpu.max").exists():
            quota, period = (groups / "cpu.max").read_text().split()
        else:
            quota, period = ((groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no cgroups, or `max`
        return None
