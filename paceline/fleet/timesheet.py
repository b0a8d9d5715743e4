"""Where the time of a fleet's workers goes: each worker keeps a timesheet, and the driver collects them.

Every moment of a worker's life is on its `Timesheet` under one name: waiting, unless it does something. The driver's
`Attendance` turns timesheets into spans for `events.jsonl` and into shares of a step (`perf/fleet_*`). These are
measurements only: they may decide who gets which work, and nothing else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.core.trace import LOST, Trace
from paceline.fleet.reports import Spent, Stretch

WAIT, GENERATE, LEARN, PUBLISH = "wait", "generate", "learn", "publish"
RUN_AHEAD, SPOT_TRAIN = "run_ahead", "spot_train"
NEEDED = (GENERATE, LEARN, PUBLISH)
"""Work that a step needs."""
SPARE = (RUN_AHEAD, SPOT_TRAIN)
SHORTEST_S = 1e-4
"""Shorter stretches are not recorded."""


class Timesheet:
    """One worker's timesheet."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._name, self._since, self._amount = WAIT, clock(), 0
        self._stretches: list[Stretch] = []

    def turn_to(self, name: str, amount: int = 0) -> None:
        """Switch to this activity; `amount` of it is done already."""
        if name != self._name:
            self._close()
            self._name = name
        self._amount += amount

    def drain(self) -> tuple[float, list[Stretch]]:
        """The current time, and all stretches since the last call."""
        self._close()
        found, self._stretches = self._stretches, []
        return self._since, found

    def _close(self) -> None:
        now = self._clock()
        if now - self._since >= SHORTEST_S or self._amount:
            self._stretches.append(Stretch(self._name, self._since, now - self._since, self._amount))
        self._since, self._amount = now, 0


class Attendance:
    """The driver's view of all timesheets."""

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.trace: Trace | None = None
        """Receives every stretch."""
        self._num_workers, self._clock = num_workers, clock
        self._offsets: dict[int, float] = {}
        """Our clock minus theirs, by worker: the minimum seen, since messages take time."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.dealing_s = 0.0
        """The driver's own time for scheduling and for handling reports."""
        self._begun = clock()

    def begin(self) -> None:
        """Start a step."""
        self._seconds.clear()
        self.dealing_s, self._begun = 0.0, self._clock()

    @contextmanager
    def dealing(self) -> Iterator[None]:
        """Count the block as the driver's own work, without the time it waits, which leaves a core free."""
        begun = time.thread_time()
        yield
        self.dealing_s += time.thread_time() - begun

    def hear(self, number: int, spent: Spent) -> None:
        """Add a worker's report."""
        offset = min(self._clock() - spent.now_s, self._offsets.get(number, float("inf")))
        self._offsets[number] = offset
        for stretch in spent.stretches:
            start = stretch.start_s + offset
            # A late report may include work from before the step, which does not count.
            self._seconds[stretch.name] += max(start + stretch.seconds - max(start, self._begun), 0.0)
            if self.trace is not None:
                args = {"amount": stretch.amount} if stretch.amount else {}
                self.trace.add(f"w{number}", stretch.name, start, stretch.seconds, args)

    def lose(self, number: int, reason: str) -> None:
        """Mark a worker as lost; what it has not reported is lost too."""
        if self.trace is not None:
            self.trace.add(f"w{number}", LOST, self._clock(), 0.0, {"reason": reason})

    def metrics(self, survival: float = 0.0) -> dict[str, float]:
        """Shares of all workers' time since the step began; lost workers and those yet to join count as waiting.

        Useful time is what a step needs plus the share of run-ahead that lately survived (`survival`). The drafter's
        training is not counted: whether it pays shows in the accept length.
        """
        wall_s = self._clock() - self._begun
        total_s = max(wall_s * self._num_workers, 1e-9)
        share = {name: self._seconds[name] / total_s for name in (*NEEDED, *SPARE)}
        needed, spare = (sum(share[name] for name in names) for names in (NEEDED, SPARE))
        return {f"perf/fleet_{name}_share": value for name, value in share.items()} | {
            "perf/fleet_waiting_share": max(1.0 - needed - spare, 0.0),
            "perf/fleet_useful_share": min(needed + survival * share[RUN_AHEAD], 1.0),
            "perf/fleet_dealing_share": self.dealing_s / max(wall_s, 1e-9),
        }
