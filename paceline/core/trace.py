"""Spans: timed intervals, as events for `events.jsonl` and as seconds per phase for a step's metrics.

The run loop opens them around its phases and passes the result of `drain` to the run folder. A trace belongs to one
thread of one worker and holds no global state. It only observes: none of its numbers may influence what is trained on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from types import TracebackType
from typing import Any

Event = dict[str, Any]
"""name, worker, step, start_s (since the run started), dur_s, args."""

RESUMED, LOST = "resumed", "lost"
"""Instants rather than intervals: a process resumed the run, a worker was lost."""


class Trace:
    """The spans of one worker. Spans opened from now on belong to `step`."""

    def __init__(self, worker: str = "0", begin_s: float = 0.0) -> None:
        """`begin_s` is the age of the run: 0, or the end of a resumed run's events."""
        self.worker = worker
        self.step = 0
        self.begin_s = begin_s
        self._created = time.perf_counter()
        self._origin = self._created - begin_s
        self._events: list[tuple[int, Event]] = []
        """Each with the serial number of its span."""
        self._num_begun = 0
        self._open_names: list[str] = []
        self._seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        if begin_s > 0:  # in step 0, so that it survives when a later process drops steps
            self._note(0, worker, RESUMED, 0, self._created, 0.0, {})

    def span(self, name: str, **args: Any) -> Span:
        """`with trace.span("gen", draws=8) as args:` times the block; the block may add to `args`."""
        return Span(self, name, args)

    def add(self, worker: str, name: str, start: float, seconds: float, args: dict[str, Any]) -> None:
        """An interval of another worker's time, which began at `start` on this process's `perf_counter`.

        It counts for no phase of a step: others work while this one waits for them. The part before this trace began
        is cut off.
        """
        cut = max(self._created - start, 0.0)
        start, seconds = start + cut, max(seconds - cut, 0.0)
        self._num_begun += 1
        self._note(self._num_begun, worker, name, self.step, start, seconds, args)

    def drain(self) -> list[Event]:
        """The events that ended since the last call, in the order they began; open spans come in a later call."""
        events, self._events = self._events, []
        return [event for _, event in sorted(events, key=lambda entry: entry[0])]

    def seconds(self, step: int) -> dict[str, float]:
        """Seconds by name over a step's finished spans; a span inside one of the same name is not counted twice."""
        return dict(self._seconds.get(step, {}))

    @property
    def age_s(self) -> float:
        """Seconds since the run began, without the time between its processes."""
        return time.perf_counter() - self._origin

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by name over all steps."""
        sums: defaultdict[str, float] = defaultdict(float)
        for found in self._seconds.values():
            for name, seconds in found.items():
                sums[name] += seconds
        return dict(sums)

    def _begin(self, name: str) -> tuple[int, float]:
        self._open_names.append(name)
        self._num_begun += 1
        return self._num_begun, time.perf_counter()

    def _end(self, name: str, step: int, begun: tuple[int, float], args: dict[str, Any]) -> None:
        serial, start = begun
        duration = time.perf_counter() - start
        ended = self._open_names.pop()
        assert ended == name, f"span {name!r} ends before {ended!r}, which began inside it"
        if name not in self._open_names:
            self._seconds[step][name] += duration
        self._note(serial, self.worker, name, step, start, duration, args)

    def _note(
        self, serial: int, worker: str, name: str, step: int, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        event = {
            "name": name,
            "worker": worker,
            "step": step,
            "start_s": round(start - self._origin, 6),
            "dur_s": round(seconds, 6),
            "args": args,
        }
        self._events.append((serial, event))


class Span:
    """A timed interval, from `with` to the end of its block, however the block ends."""

    __slots__ = ("_args", "_begun", "_name", "_step", "_trace")

    def __init__(self, trace: Trace, name: str, args: dict[str, Any]) -> None:
        self._trace, self._name, self._args = trace, name, args

    def __enter__(self) -> dict[str, Any]:
        self._step = self._trace.step
        self._begun = self._trace._begin(self._name)
        return self._args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._args["error"] = kind.__name__
        self._trace._end(self._name, self._step, self._begun, self._args)
