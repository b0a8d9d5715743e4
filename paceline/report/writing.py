"""Writes the report files for a run's folder. Called by `paceline report`.

    reading -> learning, timeline, speculation, browser -> page.html
            -> perfetto                                 -> trace.json

A report only reads the run, and writes its two files atomically, so that a browser never sees half of one. `watch`
rewrites it whenever the run has written something, until the run has finished and released its folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.core.files import write_file
from paceline.report import learning, speculation, timeline
from paceline.report.browser import Decode, find_decoder, rollouts
from paceline.report.charts import ChartData, Column
from paceline.report.comparing import compare, verdict
from paceline.report.page import render
from paceline.report.perfetto import trace
from paceline.report.reading import RunData, read_run
from paceline.run.standard_errors import SE
from paceline.run.store.folder import EVENTS, METRICS, is_held
from paceline.run.ui.summary import Metrics, counted, format_duration, number, with_error

PAGE, TRACE = "report.html", "trace.json"
SECTIONS = (
    learning.rewards,
    learning.lengths,
    timeline.workers,
    timeline.steps,
    speculation.speedup,
    speculation.acceptance,
    speculation.choices,
    speculation.rows_used,
    speculation.drafter,
    learning.metrics,
)


def write_report(run: Path, out: Path | None = None, refresh_s: float | None = None) -> list[Path]:
    """Write the page and the trace of a run, in its folder or in `out`; returns the written files."""
    found = read_run(run)
    folder = _folder(out or run)
    data: ChartData = {"runs": [describe(found, find_decoder(found))], "compare": None, "refresh_s": refresh_s}
    write_file(folder / PAGE, [render(f"{found.name} - paceline", data).encode()])
    write_file(folder / TRACE, [trace(found)])
    return [folder / PAGE, folder / TRACE]


def write_comparison(first: Path, second: Path, out: Path | None = None) -> tuple[list[Path], str]:
    """Write a page that compares two runs, in the first one's folder or in `out`; returns it and the verdict."""
    runs = [read_run(first), read_run(second)]
    folder = _folder(out or first)
    data: ChartData = {"runs": [describe(run, find_decoder(run)) for run in runs], "compare": compare(*runs)}
    file = folder / f"compare-{runs[1].name}.html"
    write_file(file, [render(f"{runs[0].name} and {runs[1].name} - paceline", data).encode()])
    return [file], verdict(*runs)


def watch(
    run: Path, out: Path | None, every_s: float, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> list[Path]:
    """Rewrite the report whenever the run has written something; return when the run is over.

    After its last step a run may measure its speedup (`run.compare`), so it is over once its folder is released.
    """
    seen: tuple[int, ...] | None = None
    is_done = False
    while True:
        size = tuple((run / name).stat().st_size if (run / name).exists() else 0 for name in (METRICS, EVENTS))
        if size != seen:
            is_done = read_run(run).is_over
        if is_done and not is_held(run):
            files = write_report(run, out)
            say(f"the run is over, wrote {files[0]}")
            return files
        if size != seen:
            say(f"wrote {write_report(run, out, every_s)[0]}")
            seen = size
        sleep(every_s)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def describe(run: RunData, decode: Decode | None = None) -> ChartData:
    """A run as page data."""
    return {
        "name": run.name,
        "status": _status(run),
        "problems": run.problems,
        "thinned": Column(run.steps).note,
        "tiles": [{"label": label, "value": value, "note": note} for label, value, note in _tiles(run)],
        "sections": [make(run).to_json() for make in SECTIONS],
        "browser": rollouts(run, decode),
        "settings": _settings(run),
    }


def _status(run: RunData) -> str:
    wanted = run.num_wanted
    done = counted(run.num_steps, "step") if wanted is None else f"{run.num_steps:,} of {counted(wanted, 'step')}"
    model, task = (str(run.section(name).get(key, "")) for name, key in (("model", "path"), ("task", "name")))
    what = " on ".join(filter(None, (model, task)))
    state = "finished" if run.is_over else "in progress or stopped"
    return f"{done}, {state}" + (f". {what}" if what else "")


def _tiles(run: RunData) -> Iterator[tuple[str, str, str]]:
    """The run in a handful of numbers."""
    rewards = _known(run, "reward")
    if rewards:
        size = max(1, len(rewards) // 10)
        last, first = math.fsum(rewards[-size:]) / size, math.fsum(rewards[:size]) / size
        yield "reward", f"{last:.3f}", f"from {first:.3f}, mean of {counted(size, 'step')}"
    solved = [row for row in run.rows if number(row, "eval/accuracy") is not None]
    if solved:
        yield "held out", _accuracy(solved[-1]), f"from {_accuracy(solved[0])}" if len(solved) > 1 else "once"
    seconds = _known(run, "timing_s/step")
    if seconds:
        yield "step", f"{math.fsum(seconds) / len(seconds):.2f} s", f"{format_duration(math.fsum(seconds))} in total"
        shares = math.fsum(_known(run, "timing_s/gen")) / max(math.fsum(seconds), 1e-9)
        yield "generating", f"{100 * shares:.0f} %", "of step time"
    waiting = _known(run, "perf/fleet_waiting_share")
    if waiting:
        yield "idle", f"{100 * math.fsum(waiting) / len(waiting):.0f} %", "of worker time"
    lengths = _known(run, "rollout/spec_accept_length")
    if lengths:
        size = max(1, len(lengths) // 10)
        yield "accept length", f"{math.fsum(lengths[-size:]) / size:.2f}", "tokens per engine step, latest"
    measured = speculation.measured_seconds(run)
    if measured is not None:
        without, with_it = measured
        yield "speculation", f"{without / with_it:.2f}x", "as fast as plain decoding, measured at the end"


def _accuracy(row: Metrics) -> str:
    return with_error(number(row, "eval/accuracy") or 0.0, number(row, f"eval/accuracy{SE}"))


def _known(run: RunData, name: str) -> list[float]:
    return [value for row in run.rows if (value := number(row, name)) is not None]


def _settings(run: RunData) -> list[list[str]]:
    """Dotted names and values, in file order."""
    found: list[list[str]] = []
    for section, keys in run.config.items():
        if isinstance(keys, dict):
            found += [[f"{section}.{key}", str(value)[:300]] for key, value in keys.items()]
    return found
