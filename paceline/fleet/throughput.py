"""Speed estimates: each worker measures its own, and the driver estimates each worker's progress on its parts.

`Throughput` belongs to a worker and turns its work into a `Speed`; `PartClock` belongs to the driver, which learns of a
part only from its sum. Both are estimates for the rules: they decide who gets which work, never a number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.fleet.view import Speed
from paceline.rollout.stats import Stats

FIRST_SPEED = Speed(step_s=0.005, row_s=0.001, prefill_s=0.0002, learn_s=0.001, num_slots=1)
"""Used before anything is measured; all that matters is that it is the same for all workers."""
FADE = 0.5
"""The weight that old measurements keep when new weights arrive."""


class Throughput:
    """One worker's speed. Measurements are added up, not averaged, so a short piece of work counts for little."""

    def __init__(self, num_slots: int) -> None:
        self._first = replace(FIRST_SPEED, num_slots=num_slots)
        self._expected_s = self._generate_s = self._num_rows = self._learn_s = 0.0

    @property
    def speed(self) -> Speed:
        """Only the total time of a step is measured, so all its prices scale alike."""
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
        """Add a measurement of rollouts."""
        # Accepted drafts yield several tokens per sequence and step; the rules count per token.
        steps = stats.steps * max(stats.accept_length, 1.0)
        self._expected_s += self._first.step_s * steps + self._first.row_s * stats.tokens
        self._generate_s += seconds

    def learned(self, num_rows: int, seconds: float) -> None:
        """Add a measurement of summed parts."""
        self._num_rows += num_rows
        self._learn_s += seconds


class PartClock:
    """Which worker sums which part, and since when."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._queues: dict[int, deque[int]] = {}
        self._since: dict[int, float] = {}

    def begin(self) -> None:
        """Start an epoch: no worker has a part."""
        self._queues.clear()

    def told(self, worker: int, parts: Iterable[int]) -> None:
        queue = self._queues.setdefault(worker, deque())
        if not queue:
            self._since[worker] = self._clock()
        queue.extend(parts)

    def summed(self, worker: int, part: int) -> None:
        """A sum arrived: the worker has started its next part."""
        queue = self._queues.get(worker, deque())
        if part in queue:
            queue.remove(part)
            self._since[worker] = self._clock()

    def progress(self, worker: int, speed: Speed) -> tuple[int, float] | None:
        """A worker's current part and how many of its rows should be done; None if it has no part."""
        queue = self._queues.get(worker)
        return (queue[0], (self._clock() - self._since[worker]) / speed.learn_s) if queue else None
