"""In which steps to draft at all: drafting takes time of its own, and that must come back.

`allocate` decides what a draft is worth in rows; this looks at what drafting as a whole has earned lately, the time to
make, check and weigh drafts included. Where it goes on losing, it is tried less and less often, never quite given up.
Milliseconds come from the caller; there is no clock here.
"""

from __future__ import annotations

PATIENCE = 4
"""Losing steps in a row before the pause between tries doubles."""
LONGEST_REST = 32
FADE = 0.9
"""How much of the balance a step keeps: about ten steps are remembered."""


class Pace:
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
        return True

    def report(self, saved_ms: float) -> None:
        """What a drafted step saved against a plain one (negative: lost), drafting time taken off."""
        self._balance = FADE * self._balance + saved_ms
        self._num_losses = 0 if self._balance >= 0 else self._num_losses + 1
        is_losing = self._num_losses >= PATIENCE
        self._rest = min(2 ** (self._num_losses // PATIENCE), LONGEST_REST) if is_losing else 0

    def try_now(self) -> None:
        """Something has changed (a new call): look at once, without forgetting what was learned."""
        self._rest = 0
