"""Run-ahead as an investment: what it cost in earlier calls, and what its text saved in the calls that requested it.

Both are measured wall-clock time. After a call in which text came back, the account says whether to go on: if not, the
loss was more than a small share of the calls' time, and run-ahead is tried again in one of PROBE calls. What it cost in
the call that has just ended is not due yet: its text is still to come back. The governor keeps one account, and there
is no clock here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FADE = 0.6
"""The share of past cost and gain that survives a call."""
TOLERATED = 0.01
"""The share of all time that run-ahead may lose before it stops: text that was too short to pay may grow longer."""
PROBE = 16
SANE_MS = 1e15
"""Milliseconds beyond this are not a measurement."""


class Account:
    """Milliseconds spent and gained."""

    def __init__(self) -> None:
        self._spent = self._gained = self._total = 0.0
        """For text whose call has come; and the time of those calls."""
        self._due = 0.0
        """Spent in earlier calls, for text that is still to come back."""
        self._open = self._returned = self._elapsed = 0.0
        """Spent, gained and passed in this call."""
        self._num_idle = 0
        self._is_known = False
        self.may_run = True
        """Whether to run ahead in this call."""

    def pass_time(self, ms: float) -> None:
        """A step took this long."""
        self._elapsed += ms

    def charge(self, ms: float) -> None:
        """Run-ahead has made a step this much longer."""
        self._open += ms

    def credit(self, ms: float) -> None:
        """Text that was made ahead has saved this much in a step; negative: its rows cost more than they saved."""
        self._returned += ms

    def close_call(self, num_offered: int) -> None:
        """A call is over, in which so many tokens of run-ahead text were offered."""
        if num_offered:
            self._is_known = True
            self._spent = FADE * self._spent + self._due
            self._gained = FADE * self._gained + self._returned
            self._total = FADE * self._total + self._elapsed
            self._due = 0.0
        self._due += self._open
        self._open = self._returned = self._elapsed = 0.0
        is_paying = not self._is_known or self._spent - self._gained <= TOLERATED * self._total
        self._num_idle = 0 if is_paying or self.may_run else self._num_idle + 1
        self.may_run = is_paying or self._num_idle >= PROBE

    def state(self) -> dict[str, Any]:
        """What was learned."""
        known = {"spent": self._spent, "gained": self._gained, "total": self._total}
        return known | {"is_known": self._is_known, "may_run": self.may_run}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; one that does not fit is ignored."""
        try:
            spent, gained, total = (float(state[name]) for name in ("spent", "gained", "total"))
            is_known, may_run = bool(state["is_known"]), bool(state["may_run"])
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            return
        if all(abs(ms) < SANE_MS for ms in (spent, gained, total)):
            self._spent, self._gained, self._total = spent, gained, total
            self._is_known, self.may_run = is_known, may_run
