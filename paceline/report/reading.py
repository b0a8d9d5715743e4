"""Reads a run's folder for the report: whatever is readable, and how much is not.

`writing.py` calls it. The run loop refuses a damaged file because it would continue from it. A report shows what is
there: a run may be in progress, killed in the middle of a line, or partly copied. This module never writes, takes no
lock, and never lets a line of a file abort the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from paceline.core.config import SettingsError, read_yaml
from paceline.run.store.folder import EVENTS, METRICS, ROLLOUTS, step_name, step_of
from paceline.run.store.history import newest_history
from paceline.run.store.record import CONFIG
from paceline.run.ui.summary import Metrics, number

RunRecord = dict[str, Any]
MAX_STEP = 10**9
"""A larger number means damage."""


@dataclass(frozen=True)
class RecordedSpan:
    """One interval of a worker's time."""

    name: str
    worker: str
    step: int
    start: float
    seconds: float
    args: RunRecord

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass
class RunData:
    """The content of a folder when it was read."""

    path: Path
    config: RunRecord = field(default_factory=dict)
    rows: list[Metrics] = field(default_factory=list)
    """Metrics, in step order; the later of two rows for a step counts."""
    spans: list[RecordedSpan] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def steps(self) -> list[Metrics]:
        """Rows of training steps; row 0 is the evaluation before the first."""
        return [row for row in self.rows if row["step"] > 0]

    @property
    def num_steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def num_wanted(self) -> int | None:
        """Requested number of steps."""
        found = number(self.section("rl"), "steps")
        return None if found is None else int(found)

    @property
    def is_over(self) -> bool:
        return self.num_wanted is not None and self.num_steps >= self.num_wanted

    def section(self, name: str) -> RunRecord:
        """A section of the settings; empty if missing."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def rollout_steps(self) -> list[int]:
        """Steps whose rollouts were written."""
        names = (file.name for file in (self.path / ROLLOUTS).glob("step-*.jsonl"))
        found = (step_of(name) for name in names if not name.endswith(".spans.jsonl"))
        return sorted(step for step in found if step is not None)

    def rollouts(self, step: int) -> Iterator[tuple[RunRecord, list[Any]]]:
        """A step's rollouts, each with its spans of accepted draft tokens."""
        base = self.path / ROLLOUTS / step_name(step)
        lines, _ = read_lines(base.with_name(f"{base.name}.spans.jsonl"))
        spans = {_key(line): line.get("spans") for line in lines}
        for record in read_lines(base.with_name(f"{base.name}.jsonl"))[0]:
            found = spans.get(_key(record))
            yield record, found if isinstance(found, list) else []


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return str(record.get("draw")), str(record.get("sample"))


def read_run(path: Path) -> RunData:
    """A run as its folder is now. ValueError if there is none."""
    if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
        raise ValueError(f"{path} holds no run (neither {CONFIG} nor {METRICS}); give a run's folder, runs/NAME")
    run = RunData(path)
    try:
        run.config = read_yaml(path / CONFIG)
    except (SettingsError, OSError, UnicodeError) as error:
        run.problems.append(f"The settings could not be read ({error}).")
    run.problems += _history_problems(path)
    rows, num_bad = read_lines(path / METRICS)
    good = {row["step"]: row for row in rows if _is_step(row.get("step"))}
    run.rows = [good[step] for step in sorted(good)]
    _note_lost(run, METRICS, num_bad + sum(not _is_step(row.get("step")) for row in rows))
    events, num_bad = read_lines(path / EVENTS)
    run.spans = list(_spans(events))
    _note_lost(run, EVENTS, num_bad + len(events) - len(run.spans))
    return run


def _history_problems(path: Path) -> list[str]:
    """What was lost or altered up to the newest checkpoint, as far as its hashes tell."""
    found = newest_history(path)
    if found is None:
        return []
    step, history = found
    lines = (path / METRICS).read_bytes().splitlines(keepends=True) if (path / METRICS).is_file() else []
    return [f"{problem}." for problem in history.problems(lines, path / ROLLOUTS, step)]


def _note_lost(run: RunData, name: str, num_lost: int) -> None:
    if num_lost:
        lines = "line" if num_lost == 1 else "lines"
        run.problems.append(f"{num_lost} {lines} of {name} could not be read and were skipped.")


def _is_step(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_STEP


def _spans(events: Iterable[RunRecord]) -> Iterator[RecordedSpan]:
    for event in events:
        start, seconds = number(event, "start_s"), number(event, "dur_s")
        name, step, args = event.get("name"), event.get("step"), event.get("args")
        if isinstance(name, str) and _is_step(step) and start is not None and seconds is not None and seconds >= 0:
            worker = str(event.get("worker", "0"))
            yield RecordedSpan(name, worker, step, start, seconds, args if isinstance(args, dict) else {})


def read_lines(file: Path) -> tuple[list[RunRecord], int]:
    """The objects of a JSON lines file, and how many lines hold none.

    A tail without a line end is still being written or was torn by a kill, so it does not count as a loss.
    """
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError:
        return [], 0
    found: list[RunRecord] = []
    num_bad = 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            num_bad += bool(line.strip())
    return found, num_bad
