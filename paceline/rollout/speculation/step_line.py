"""A straight line through the milliseconds of recent steps, by their number of sequences.

One line is the host gap: how long the GPU waits for the host before a drafted step. That wait is as real as the forward
itself, so the budget counts it: a saved step saves its gap, and a sequence that gets further takes part in fewer steps.
Another is the wall-clock time of steps without drafts: its slope is what one more sequence costs, on the host or on the
GPU, whichever is slower. The engine reports; there is no clock here.
"""

from __future__ import annotations

KEEP = 0.98
"""The share of past observations that survives a step: about fifty are remembered."""
MOST = 4.0
"""The longest a step can count as, in usual ones: now and then one is longer for unrelated reasons."""
SHORTEST = 0.05
"""Up to this many milliseconds always count as usual."""


class StepLine:
    """Least squares with decay; 0 until a step was observed."""

    def __init__(self) -> None:
        self._weight = self._count = self._count_count = self._ms = self._count_ms = 0.0
        self.step_ms = 0.0
        """The cost of a step, however few sequences it has."""
        self.sequence_ms = 0.0
        """The cost of each further sequence."""

    def ms(self, num_sequences: int) -> float:
        """The milliseconds of a step with this many sequences."""
        return self.step_ms + self.sequence_ms * num_sequences

    def observe(self, num_sequences: int, ms: float) -> None:
        """Record the milliseconds of a step with this many sequences."""
        if self._weight >= 1:
            ms = min(ms, MOST * max(self.ms(num_sequences), SHORTEST))
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
