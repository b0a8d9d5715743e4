"""How many cores this process may use. Asked by whatever starts threads or processes; it only looks."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
LIMIT = "OMP_NUM_THREADS"
"""What users set to limit the threads of numeric libraries, and Ray for its workers."""


def num_cores(groups: Path = GROUPS) -> int:
    """Cores that this process may use: those it may run on, within its container's share of CPU time."""
    # macOS does not tell where a process may run.
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(groups)
    return found if quota is None else max(min(found, int(quota)), 1)


def num_threads_allowed() -> int:
    """`num_cores`, or fewer if OMP_NUM_THREADS says so."""
    given = os.environ.get(LIMIT, "").partition(",")[0].strip()
    return min(num_cores(), max(int(given), 1)) if given.isdecimal() else num_cores()


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
