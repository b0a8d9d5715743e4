"""Counts what became of drafts, by source: steps leave one number per draft, and many of them are counted at once.

A step of a small model takes less time than counting its drafts by name does, so `feedback.py` only notes them here,
and they reach the statistics every so many drafts and at the end of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import host_loop
from paceline.rollout.stats import Stats

CAPACITY = 1 << 14
"""Drafts noted before they are counted."""
MOST_ROWS = 1 << 20
"""More rows than a step has."""
_compiled: Any = host_loop


@_compiled
def _note(
    noted: Any,
    at: int,
    sources: Any,
    num_drafted: Any,
    counts: Any,
    is_counted: Any,
    starts: Any,
    path: Any,
    is_proposed: int,
) -> int:
    """Write one number per draft: source, rows, accepted tokens, whether the first node was, and who proposed it."""
    for i in range(len(is_counted)):
        if is_counted[i] and num_drafted[i] > 0:
            accepted = max(counts[i] - 1, 0)
            is_first = 1 if accepted > 0 and path[starts[i] + 1] == 1 else 0
            number = (sources[i] * MOST_ROWS + num_drafted[i]) * MOST_ROWS + accepted
            noted[at] = (number * 2 + is_first) * 2 + is_proposed
            at += 1
    return at


class DraftCounts:
    """One per engine."""

    def __init__(self, max_entries: int) -> None:
        """`max_entries`: more drafts than a step has."""
        self._noted = np.zeros(CAPACITY + max_entries, np.int64)
        self._num_noted = 0

    def note(
        self,
        sources: NDArray[np.int64],
        num_drafted: NDArray[np.int64],
        counts: NDArray[np.int64],
        is_counted: NDArray[np.bool_],
        starts: NDArray[np.int32],
        path: NDArray[np.int64],
        is_proposed: bool,
    ) -> bool:
        """Note a step's drafts; returns whether it is time to count. `is_proposed`: the host has counted the nodes that
        were proposed, of which the rows may be a part."""
        self._num_noted = _note(
            self._noted, self._num_noted, sources, num_drafted, counts, is_counted, starts, path, int(is_proposed)
        )
        return self._num_noted >= CAPACITY

    def count(self, names: list[str], stats: Stats) -> None:
        """Add everything noted to the statistics. `names`: the sources by number."""
        numbers, repeats = np.unique(self._noted[: self._num_noted], return_counts=True)
        self._num_noted = 0
        for number, repeat in zip(numbers.tolist(), repeats.tolist(), strict=True):
            number, is_proposed = divmod(number, 2)
            number, is_first = divmod(number, 2)
            number, accepted = divmod(number, MOST_ROWS)
            source, rows = divmod(number, MOST_ROWS)
            counters = stats.drafters[names[source]]
            counters.verified += repeat * rows
            counters.accepted += repeat * accepted
            counters.firsts += repeat * is_first
            counters.pieces[rows, accepted] += repeat
            counters.proposed += 0 if is_proposed else repeat * rows
