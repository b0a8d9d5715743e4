"""In which steps to draft at all: drafting takes time of its own, and that must come back.

`allocate` decides what a draft is worth in rows; this looks at what drafting as a whole has earned lately, the time to
make, check and weigh drafts included. Where it goes on losing, it is tried less and less often, never quite given up.
Milliseconds come from the caller; there is no clock here.
"""

from __future__ import annotations

import math

PATIENCE = 4
"""Losing steps in a row before the pause between tries doubles."""
LONGEST_REST = 128
SHARE = 0.01
"""Of all time, what tries that lose may take: a try that costs a whole step is followed by a rest of a hundred."""
WORST = 4.0
"""How many steps' time a single try can count as lost."""
FADE = 0.9
"""How much of the balance a step keeps: about ten steps are remembered."""


class DraftBackoff:
    """Call `is_due` once per step and `report` after each step that drafted."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._num_losses = 0
        self._rest = 0

    @property
    def is_next_due(self) -> bool:
        """What `is_due` would say."""
        return self._rest == 0

    def is_due(self) -> bool:
        """Whether to draft in this step."""
        if self._rest > 0:
            self._rest -= 1
            return False
        if self._num_losses >= PATIENCE:
            self._rest = 1  # on a GPU the next step is drafted before this one has reported
        return True

    def report(self, saved_ms: float, step_ms: float) -> None:
        """What a drafted step of `step_ms` saved against a plain one (negative: lost), drafting time taken off."""
        # Once in a while a step takes many times as long for reasons of its own, which says nothing of drafting.
        self._balance = FADE * self._balance + max(saved_ms, -WORST * step_ms)
        self._num_losses = 0 if self._balance >= 0 else self._num_losses + 1
        self._rest = 0
        if self._num_losses >= PATIENCE:
            affordable = math.ceil(-saved_ms / (SHARE * step_ms)) if saved_ms < 0 < step_ms else 0
            self._rest = min(max(2 ** (self._num_losses // PATIENCE), affordable), LONGEST_REST)

    def give_way(self, other: DraftBackoff) -> None:
        """Another one has just tried: what tries may take is for both together, if this one is losing too."""
        if self._num_losses >= PATIENCE:
            self._rest = max(self._rest, other._rest)
