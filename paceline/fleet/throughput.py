"""How fast workers are: what a worker measures of itself, and how far the driver believes each is with its parts.

`Throughput` belongs to a worker and turns what it did into a `Speed`; `PartClock` belongs to the driver, which hears of
a part only when its sum is there. Both are estimates for the rules: they decide who is dealt what, and no number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.fleet.view import Speed
from paceline.rollout.stats import Stats

FIRST_SPEED = Speed(step_s=0.005, row_s=0.001, prefill_s=0.0002, learn_s=0.001, num_slots=1)
"""Before anything was measured; what counts is that it is the same for all."""
FADE = 0.5
"""How much of what was measured a new version of the weights leaves."""


class Throughput:
    """One worker's. A short piece of work counts for little: what is measured is added up, not averaged."""

    def __init__(self, num_slots: int) -> None:
        self._first = replace(FIRST_SPEED, num_slots=num_slots)
        self._expected_s = self._generate_s = self._num_rows = self._learn_s = 0.0

    @property
    def speed(self) -> Speed:
        """Of a step's prices only their sum is seen, so all change alike."""
        first, ratio = self._first, self._generate_s / self._expected_s if self._expected_s else 1.0
        return replace(
            first,
            step_s=first.step_s * ratio,
            row_s=first.row_s * ratio,
            prefill_s=first.prefill_s * ratio,
            learn_s=self._learn_s / self._num_rows if self._num_rows else first.learn_s,
        )

    def fade(self) -> None:
        self._expected_s *= FADE
        self._generate_s *= FADE
        self._num_rows *= FADE
        self._learn_s *= FADE

    def generated(self, stats: Stats, seconds: float) -> None:
        """Rollouts are made."""
        # Guesses that come true make several tokens of a sequence in one step; the rules count by the token.
        steps = stats.steps * max(stats.accept_length, 1.0)
        self._expected_s += self._first.step_s * steps + self._first.row_s * stats.tokens
        self._generate_s += seconds

    def learned(self, num_rows: int, seconds: float) -> None:
        """Parts are summed."""
        self._num_rows += num_rows
        self._learn_s += seconds


class PartClock:
    """Who sums which part, and since when."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._queues: dict[int, deque[int]] = {}
        self._since: dict[int, float] = {}

    def begin(self) -> None:
        """An epoch: nobody has a part."""
        self._queues.clear()

    def told(self, worker: int, parts: Iterable[int]) -> None:
        queue = self._queues.setdefault(worker, deque())
        if not queue:
            self._since[worker] = self._clock()
        queue.extend(parts)

    def summed(self, worker: int, part: int) -> None:
        """A sum is there: the worker has begun its next part."""
        queue = self._queues.get(worker, deque())
        if part in queue:
            queue.remove(part)
            self._since[worker] = self._clock()

    def progress(self, worker: int, speed: Speed) -> tuple[int, float] | None:
        """The part that a worker is at, and how many rows of it it has done by now; None where it has none."""
        queue = self._queues.get(worker)
        return (queue[0], (self._clock() - self._since[worker]) / speed.learn_s) if queue else None
