"""Decides in which steps to draft at all: drafting takes time, which has to pay off.

`allocate` decides what a draft is worth in rows; this tracks what drafting as a whole has earned lately, including the
time to make, check and weigh drafts. While it keeps losing, it is tried less and less often, but never given up.
Milliseconds come from the caller; there is no clock here.
"""

from __future__ import annotations

import math

PATIENCE = 4
"""Losing steps in a row before the pause between attempts doubles."""
LONGEST_REST = 128
SHARE = 0.01
"""The share of all time that losing attempts may take: an attempt that costs a whole step rests for a hundred."""
WORST = 4.0
"""The most that a single attempt can count as losing, in steps."""
FADE = 0.9
"""The share of the balance that survives a step: about ten steps are remembered."""


class DraftBackoff:
    """Call `is_due` once per step and `report` after each step that drafted."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._num_losses = 0
        self._rest = 0

    @property
    def is_next_due(self) -> bool:
        """What `is_due` would return."""
        return self._rest == 0

    def is_due(self) -> bool:
        """Whether to draft in this step."""
        if self._rest > 0:
            self._rest -= 1
            return False
        if self._num_losses >= PATIENCE:
            self._rest = 1  # on a GPU, the next step is drafted before this one has reported
        return True

    def report(self, saved_ms: float, step_ms: float) -> None:
        """Record what a drafted step of `step_ms` saved over a plain one (negative: lost), net of drafting time."""
        # Now and then a step takes many times as long for unrelated reasons, which says nothing about drafting.
        self._balance = FADE * self._balance + max(saved_ms, -WORST * step_ms)
        self._num_losses = 0 if self._balance >= 0 else self._num_losses + 1
        self._rest = 0
        if self._num_losses >= PATIENCE:
            affordable = math.ceil(-saved_ms / (SHARE * step_ms)) if saved_ms < 0 < step_ms else 0
            self._rest = min(max(2 ** (self._num_losses // PATIENCE), affordable), LONGEST_REST)

    def give_way(self, other: DraftBackoff) -> None:
        """Yield to another backoff that has just tried: if both are losing, they share the time for attempts."""
        if self._num_losses >= PATIENCE:
            self._rest = max(self._rest, other._rest)
