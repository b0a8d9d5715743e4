"""Where the time of a fleet's workers goes: each writes a sheet of its own, the driver reads all of them.

Every moment of a worker's life is on its `Timesheet` under one name: waiting, unless it does something. The driver's
`Attendance` turns sheets into spans for `events.jsonl` and into the shares of a step (`perf/fleet_*`). Both only watch:
no number of theirs may decide anything but who is dealt what.
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
"""What a step cannot do without."""
SPARE = (RUN_AHEAD, SPOT_TRAIN)
SHORTEST_S = 1e-4
"""A stretch below that is not worth a line in a file."""


class Timesheet:
    """One worker's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._name, self._since, self._amount = WAIT, clock(), 0
        self._stretches: list[Stretch] = []

    def turn_to(self, name: str, amount: int = 0) -> None:
        """From now on it does this; `amount` of it is done at once."""
        if name != self._name:
            self._close()
            self._name = name
        self._amount += amount

    def drain(self) -> tuple[float, list[Stretch]]:
        """The time, and what was done until now since the last call."""
        self._close()
        found, self._stretches = self._stretches, []
        return self._since, found

    def _close(self) -> None:
        now = self._clock()
        if now - self._since >= SHORTEST_S or self._amount:
            self._stretches.append(Stretch(self._name, self._since, now - self._since, self._amount))
        self._since, self._amount = now, 0


class Attendance:
    """What the driver has heard of all sheets."""

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.trace: Trace | None = None
        """Who is told of every stretch."""
        self._num_workers, self._clock = num_workers, clock
        self._offsets: dict[int, float] = {}
        """Ours minus theirs, by worker: the least that was seen, for a message takes time."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.dealing_s = 0.0
        """The driver's own time for who does what, and for what it is told."""
        self._begun = clock()

    def begin(self) -> None:
        """A step begins."""
        self._seconds.clear()
        self.dealing_s, self._begun = 0.0, self._clock()

    @contextmanager
    def dealing(self) -> Iterator[None]:
        """The block is the driver's own work; where it waits, a core is free for others."""
        begun = time.thread_time()
        yield
        self.dealing_s += time.thread_time() - begun

    def hear(self, number: int, spent: Spent) -> None:
        """A worker says what it did."""
        offset = min(self._clock() - spent.now_s, self._offsets.get(number, float("inf")))
        self._offsets[number] = offset
        for stretch in spent.stretches:
            start = stretch.start_s + offset
            # What was done before the step began is heard of late, and no part of it.
            self._seconds[stretch.name] += max(start + stretch.seconds - max(start, self._begun), 0.0)
            if self.trace is not None:
                args = {"amount": stretch.amount} if stretch.amount else {}
                self.trace.add(f"w{number}", stretch.name, start, stretch.seconds, args)

    def lose(self, number: int, reason: str) -> None:
        """A worker is gone, and with it what it has not told."""
        if self.trace is not None:
            self.trace.add(f"w{number}", LOST, self._clock(), 0.0, {"reason": reason})

    def metrics(self, survival: float = 0.0) -> dict[str, float]:
        """Shares of all workers' time since the step began; whoever is lost or not there yet waits.

        Useful is what a step needs and, of what was made ahead, as much as lately came true (`survival`). Whether the
        drafter's training pays is seen in the accept length, and not counted.
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
