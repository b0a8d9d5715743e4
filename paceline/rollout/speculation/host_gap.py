"""How long a machine waits for its host before a step that is drafted for: so much per step, so much per sequence.

On a GPU that wait is as real as the forward itself, so the budget counts it: a step that is saved saves its wait, and
a sequence that gets further has fewer visits to come. The engine reports every wait; a straight line is fitted to the
latest ones. It has no clock of its own.
"""

from __future__ import annotations

KEEP = 0.98
"""How much of what was seen a step keeps: about fifty are remembered."""
MOST = 4.0
"""A wait counts as no longer than so many usual ones: now and then one is, for reasons of its own."""
SHORTEST = 0.05
"""Milliseconds that a wait may always be taken for."""


class HostGap:
    """Least squares with a memory; nothing is waited for until it was seen."""

    def __init__(self) -> None:
        self._weight = self._count = self._count_count = self._ms = self._count_ms = 0.0
        self.step_ms = 0.0
        """What a step costs however few sequences there are."""
        self.sequence_ms = 0.0
        """What each adds."""

    def observe(self, num_sequences: int, ms: float) -> None:
        """A step for so many sequences was waited for."""
        if self._weight >= 1:
            ms = min(ms, MOST * max(self.step_ms + self.sequence_ms * num_sequences, SHORTEST))
        terms = (1.0, num_sequences, num_sequences**2, ms, num_sequences * ms)
        sums = (self._weight, self._count, self._count_count, self._ms, self._count_ms)
        self._weight, self._count, self._count_count, self._ms, self._count_ms = (
            KEEP * old + new for old, new in zip(sums, terms, strict=True)
        )
        self._fit()

    def _fit(self) -> None:
        mean, mean_ms = self._count / self._weight, self._ms / self._weight
        spread = self._count_count / self._weight - mean**2
        slope = (self._count_ms / self._weight - mean * mean_ms) / spread if spread > 1 else 0.0
        self.sequence_ms = min(max(slope, 0.0), mean_ms / max(mean, 1.0))
        self.step_ms = max(mean_ms - self.sequence_ms * mean, 0.0)
