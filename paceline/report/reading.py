"""Reads a run's folder for the report: whatever is readable, and how much is not.

`writing.py` calls it. The run loop refuses a damaged file because it would continue from it. A report shows what is
there: a run may be in progress, killed in the middle of a line, or partly copied. This module never writes, takes no
lock, and never lets a line of a file abort the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from paceline.core.config import read_yaml
from paceline.core.documents import MAX_DEPTH, MAX_LINE_BYTES, open_regular
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


@dataclass(frozen=True)
class Response:
    """What the length of a rollout is known by."""

    num_tokens: int
    is_cut: bool
    """Whether it ended because it had as many tokens as it may have."""


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

    def responses(self, step: int) -> list[Response]:
        """The lengths of a step's rollouts."""
        records, _ = read_lines(self.path / ROLLOUTS / f"{step_name(step)}.jsonl")
        return [
            Response(len(ids), record.get("finish_reason") == "length")
            for record in records
            if isinstance(ids := record.get("token_ids"), list)
        ]


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return str(record.get("draw")), str(record.get("sample"))


def read_run(path: Path) -> RunData:
    """A run as its folder is now. ValueError if there is none."""
    if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
        raise ValueError(f"{path} holds no run (neither {CONFIG} nor {METRICS}); give a run's folder, runs/NAME")
    run = RunData(path)
    try:
        run.config = read_yaml(path / CONFIG)
    except (ValueError, OSError) as error:
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

    A tail without a line end is still being written or was torn by a kill, so it does not count as a loss. What is no
    file (a pipe, a device) counts as one lost line.
    """
    found: list[RunRecord] = []
    num_bad = 0
    try:
        opened = open_regular(file)
    except FileNotFoundError:
        return [], 0
    except (OSError, ValueError):
        return [], 1
    with opened:
        while line := opened.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                return found, num_bad + 1  # no line of a run is as long: what follows is no longer its file
            record = _parse(line) if line.endswith(b"\n") else None
            if record is not None:
                found.append(record)
            else:
                num_bad += line.endswith(b"\n") and bool(line.strip())
    return found, num_bad


def _parse(line: bytes) -> RunRecord | None:
    """The object in a line; None if it is damaged, or nests deeper than anything that a run writes."""
    try:
        record = json.loads(line, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_deep(record):
        return None
    return record if isinstance(record, dict) else None


def _is_deep(record: Any) -> bool:
    """Whether a value nests too deep for code that walks it."""
    layer = [record]
    for _ in range(MAX_DEPTH):
        layer = [outer for outer in layer if isinstance(outer, dict | list)]
        layer = [inner for outer in layer for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return bool(layer)


def _finite(text: str) -> float | None:
    """A number, or None for one that other readers of our files could not take."""
    value = float(text)
    return value if math.isfinite(value) else None
