"""A run's events as a trace for ui.perfetto.dev and chrome://tracing: one track per worker, counters per step.

`writing.py` calls it. Times are microseconds since the start of the run. The trace holds numbers and phase names, never
the text of a rollout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from paceline.report.charts import ChartData
from paceline.report.reading import RunData
from paceline.report.texts import all_visible
from paceline.run.ui.summary import number

COUNTERS = {
    "reward": "reward",
    "accept length": "rollout/spec_accept_length",
    "mean length": "completions/mean_length",
    "tokens per second": "perf/throughput",
}
PROCESS = 1


def trace(run: RunData) -> bytes:
    """The whole trace file."""
    lines = (json.dumps(all_visible(event), allow_nan=False) for event in _events(run))
    return ('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def _events(run: RunData) -> Iterator[ChartData]:
    names = sorted({span.worker for span in run.spans}, key=lambda name: (name != "0", len(name), name))
    threads = {name: i + 1 for i, name in enumerate(names)}
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": f"paceline {run.name}"}}
    for name, thread in threads.items():
        label = "run loop" if name == "0" else name
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": thread, "args": {"name": label}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": thread, "args": {"sort_index": thread}}
    ends: dict[int, float] = {}
    for span in run.spans:
        ends[span.step] = max(ends.get(span.step, 0.0), span.end)
        if span.name != "budget":
            yield {
                "ph": "X",
                "name": span.name,
                "cat": "fleet" if span.worker != "0" else "run",
                "ts": round(1e6 * span.start, 1),
                "dur": round(1e6 * span.seconds, 1),
                "pid": PROCESS,
                "tid": threads[span.worker],
                "args": {"step": span.step, **span.args},
            }
    for row in run.steps:
        for label, name in COUNTERS.items():
            value = number(row, name)
            if value is not None and row["step"] in ends:
                at = round(1e6 * ends[row["step"]], 1)
                yield {"ph": "C", "name": label, "pid": PROCESS, "ts": at, "args": {label: value}}
