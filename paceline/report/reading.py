"""A run's folder as a report reads it: whatever can be read of it, and how much could not.

Called by `writing.py`. Unlike the run loop, which refuses a damaged file because it would go on from it, a report shows
what is there: a run may be going on, may have been killed in the middle of a line, or may have been copied in part.
It never writes, takes no lock, and never lets a line of a file end the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from paceline.core.config import SettingsError, read_yaml
from paceline.run.store.folder import CONFIG, EVENTS, METRICS, ROLLOUTS, step_name, step_of
from paceline.run.ui.summary import Metrics, number

RunRecord = dict[str, Any]
MAX_STEP = 10**9
"""A larger one is damage."""


@dataclass(frozen=True)
class RecordedSpan:
    """One stretch of a worker's time."""

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
    """What a folder held when it was read."""

    path: Path
    config: RunRecord = field(default_factory=dict)
    rows: list[Metrics] = field(default_factory=list)
    """Of metrics, in order of steps; of two for one step the later counts."""
    spans: list[RecordedSpan] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def steps(self) -> list[Metrics]:
        """Rows of steps that learned; row 0 is the evaluation before the first."""
        return [row for row in self.rows if row["step"] > 0]

    @property
    def num_steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def num_wanted(self) -> int | None:
        """Steps that were asked for."""
        found = number(self.section("rl"), "steps")
        return None if found is None else int(found)

    @property
    def is_over(self) -> bool:
        return self.num_wanted is not None and self.num_steps >= self.num_wanted

    def section(self, name: str) -> RunRecord:
        """A section of the settings; empty where it is missing."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def rollout_steps(self) -> list[int]:
        """Steps whose texts are there."""
        names = (file.name for file in (self.path / ROLLOUTS).glob("step-*.jsonl"))
        found = (step_of(name) for name in names if not name.endswith(".spans.jsonl"))
        return sorted(step for step in found if step is not None)

    def rollouts(self, step: int) -> Iterator[tuple[RunRecord, list[Any]]]:
        """A step's texts, each with the stretches of it that were guessed."""
        base = self.path / ROLLOUTS / step_name(step)
        lines, _ = read_lines(base.with_name(f"{base.name}.spans.jsonl"))
        spans = {_key(line): line.get("spans") for line in lines}
        for record in read_lines(base.with_name(f"{base.name}.jsonl"))[0]:
            found = spans.get(_key(record))
            yield record, found if isinstance(found, list) else []


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return str(record.get("draw")), str(record.get("sample"))


def read_run(path: Path) -> RunData:
    """A run as its folder has it now. ValueError where there is none."""
    if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
        raise ValueError(f"{path} holds no run (neither {CONFIG} nor {METRICS}); give the folder of one, runs/NAME")
    run = RunData(path)
    try:
        run.config = read_yaml(path / CONFIG)
    except (SettingsError, OSError, UnicodeError) as error:
        run.problems.append(f"The settings could not be read ({error}).")
    rows, num_bad = read_lines(path / METRICS)
    good = {row["step"]: row for row in rows if _is_step(row.get("step"))}
    run.rows = [good[step] for step in sorted(good)]
    _note_lost(run, METRICS, num_bad + sum(not _is_step(row.get("step")) for row in rows))
    events, num_bad = read_lines(path / EVENTS)
    run.spans = list(_spans(events))
    _note_lost(run, EVENTS, num_bad + len(events) - len(run.spans))
    return run


def _note_lost(run: RunData, name: str, num_lost: int) -> None:
    if num_lost:
        lines = "line" if num_lost == 1 else "lines"
        run.problems.append(f"{num_lost} {lines} of {name} could not be read and are left out.")


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
    """The objects of a file of JSON lines, and how many lines were none.

    What comes after the last end of a line is being written, or was torn by a kill: it is no loss to speak of.
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
