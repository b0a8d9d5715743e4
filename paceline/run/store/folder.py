"""The folder of a run: its settings, metrics, events and rollouts, and a lock for the process that writes them.

The run loop writes through `RunFolder`; everything that shows a run only reads the files. Two equal runs write equal
bytes, except for metrics that `is_compared` excludes. A file is replaced atomically or grows by whole lines, so that a
process killed at any moment leaves a folder that `open` can read; `cut_after` removes what steps after the last
checkpoint wrote. Nothing may be written without the lock, and every disk error names its file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import socket
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import yaml

from paceline.core.config import read_yaml
from paceline.core.documents import brief, open_regular
from paceline.core.files import make_folder, named_errors, not_a_link, remove_leftovers, sync, write_file
from paceline.run.store.history import RunHistory, hashing
from paceline.run.store.record import CONFIG, RECORD, FolderRecord, differing, flatten, read_record, write_record

METRICS, EVENTS, ROLLOUTS, LOCK = "metrics.jsonl", "events.jsonl", "rollouts", ".lock"
CHECKPOINTS = "checkpoints"
DRAFTER = "drafter"
"""The trained drafter, in a run's folder."""
GIVEN = "inputs"
"""Data and the code of a reward that were given in Python (`run/given.py`), written before the run opens."""
MODEL = ".model"
"""The model that a resumed run uses if its base model's config or tokenizer has changed (`run/resume.py`)."""
TENSORBOARD = "tensorboard"
"""A logger's folder, which it writes to as soon as a run is open."""
NOT_COMPARED = ("timing_s/", "perf/", "rollout/spec_", "drafter/", "budget/")
"""Prefixes of metrics that depend on time or on drafts: equal runs may differ only in these."""

_STEP_NAME = re.compile(r"step-(\d{6,})(?:\.|$)")


def is_compared(key: str) -> bool:
    """Whether a metric must be equal in equal runs."""
    return not key.startswith(NOT_COMPARED)


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a metrics row that must be equal in equal runs."""
    return {key: value for key, value in row.items() if is_compared(key)}


def step_name(step: int) -> str:
    """The name of a step's files and folders: step-000012."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a name that begins with `step_name`; None for any other name."""
    match = _STEP_NAME.match(name)
    return int(match[1]) if match else None


def free_name(parent: Path, stem: str) -> Path:
    """The first of `stem-1`, `stem-2`, ... that is free in `parent`."""
    return next(path for n in itertools.count(1) if not (path := parent / f"{stem}-{n}").exists())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows in a run's folder; safe while the run writes, since it ignores an incomplete line."""
    file = path / METRICS
    return [_parse(file, number, line) for number, line in enumerate(_complete_lines(file), 1)]


def read_events(path: Path, name: str) -> list[dict[str, Any]]:
    """The events of a name in a run's folder, in order; only lines that mention it are parsed."""
    file, quoted = path / EVENTS, json.dumps(name).encode()
    lines = enumerate(_complete_lines(file), 1)
    events = [_parse(file, number, line) for number, line in lines if quoted in line]
    return [event for event in events if event.get("name") == name]


def read_rollouts(path: Path, step: int) -> list[dict[str, Any]] | None:
    """The texts that a step wrote into a run's folder; None if it wrote none."""
    file = path / ROLLOUTS / f"{step_name(step)}.jsonl"
    if not file.is_file():
        return None
    return [_object(file, number, line) for number, line in enumerate(_complete_lines(file), 1)]


def earlier_seconds(path: Path, worker: str, names: Iterable[str], before_s: float) -> dict[str, float]:
    """Seconds by span name of a worker's events that began before a moment of the run."""
    sums = dict.fromkeys(names, 0.0)
    for name in sums:
        events = (event for event in read_events(path, name) if event.get("worker") == worker)
        sums[name] = math.fsum(_seconds(event, "dur_s") for event in events if _seconds(event, "start_s") < before_s)
    return sums


class RunFolder:
    """An open run folder, locked against other processes until `close`. Use `create` or `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = RunHistory()
        """Of the rows and rollouts that checkpoints cover; a resumed run continues an earlier one's."""
        self._lock = _take_lock(path)
        for name in (CONFIG, METRICS, EVENTS, RECORD, MODEL):
            remove_leftovers(path, name)

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Start a run in a folder that is new, empty or `is_unused`; `config` is a plain tree of resolved settings."""
        with named_errors("make", path):
            make_folder(path.absolute())
        refuse_used(path)
        folder = cls(path)
        try:
            refuse_used(path)  # again: another process may have started one before we got the lock
            folder._write_config(config)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run; removes a line that a killed process left half-written."""
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} holds no run ({CONFIG} is missing); start one there without --resume")
        folder = cls(path)
        try:
            for name in (METRICS, EVENTS):
                _refuse_foreign(path / name)
                _drop_torn_line(path / name)
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read_config(self) -> dict[str, Any]:
        """The run's settings, as a plain tree."""
        return read_yaml(self.path / CONFIG)

    def update_config(self, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Update the settings on resume. Returns what differs: dotted key -> (old value, new value)."""
        # Compare values as YAML returns them, where a tuple is a list.
        old, new = self.read_config(), yaml.safe_load(_to_yaml(config))
        found = differing(flatten(old), flatten(new))
        record = read_record(self.path)
        if found or record is None or record.settings != (new,):
            self._write_config(config)
        return found

    def _write_config(self, config: Mapping[str, Any]) -> None:
        text = _to_yaml(config)
        record, new = read_record(self.path) or FolderRecord(), yaml.safe_load(text)
        write_record(self.path, record.model_copy(update={"settings": (*record.settings, new)}))
        write_file(self.path / CONFIG, [text.encode()])
        write_record(self.path, record.model_copy(update={"settings": (new,)}))

    def note_saved(self, step: int) -> None:
        """Remember that the checkpoint of `step` is complete."""
        record = read_record(self.path) or FolderRecord()
        write_record(self.path, record.model_copy(update={"saved": step}))

    def last_step(self) -> int:
        """The step of the last row of metrics; -1 without any."""
        return max((row["step"] for row in read_metrics(self.path)), default=-1)

    def history_problems(self, step: int) -> list[str]:
        """What was lost or altered of the rows and rollouts up to `step`, in sentences."""
        return self.history.problems(_complete_lines(self.path / METRICS), self.path / ROLLOUTS, step)

    def adopt_history(self, step: int) -> None:
        """Take the rows up to `step` as they are: a run of an older version did not hash them."""
        for number, line in enumerate(_complete_lines(self.path / METRICS), 1):
            found = _parse(self.path / METRICS, number, line)["step"]
            if found <= step:
                self.history.add_row(found, line)

    def start_over(self) -> Path | None:
        """Move everything that the run wrote to `before-1` or the next free one, with a copy of its settings.

        The checkpoints go first: a run killed in here is refused, not resumed from half of its records.
        """
        names = (CHECKPOINTS, METRICS, EVENTS, ROLLOUTS, DRAFTER, TENSORBOARD)
        aside = free_name(self.path, "before")
        if not any(os.path.lexists(self.path / name) for name in names):
            return None
        record = read_record(self.path) or FolderRecord(saved=0)
        write_record(self.path, record)
        with named_errors("make", aside):
            make_folder(aside)
        write_file(aside / CONFIG, [(self.path / CONFIG).read_bytes()])
        for name in names:
            if os.path.lexists(self.path / name):
                with named_errors("move", self.path / name):
                    os.rename(self.path / name, aside / name)
                    sync(aside)
        sync(self.path)
        write_record(self.path, record.model_copy(update={"saved": None}))
        return aside

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row durably. `step` comes first, the rest by name; NaN and infinities are null."""
        assert type(row.get("step")) is int, f"a row needs its step; got {row.get('step')!r}"
        ordered = {key: _metric(key, row[key]) for key in sorted(row, key=lambda key: (key != "step", key))}
        line = _to_line(ordered)
        self._append(METRICS, line, is_durable=True)
        self.history.add_row(row["step"], line)

    def append_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Append what `Trace.drain` returned."""
        self._append(EVENTS, b"".join(map(_to_line, events)), is_durable=False)

    def write_rollouts(
        self, step: int, records: Iterable[Mapping[str, Any]], spans: Iterable[Mapping[str, Any]]
    ) -> None:
        """Write a step's texts, and which drafter drafted which span of them; the texts' file comes last."""
        folder = self.path / ROLLOUTS
        with named_errors("make", folder):
            make_folder(folder)
        for kind, lines in ((".spans.jsonl", spans), (".jsonl", records)):
            file, digest = folder / f"{step_name(step)}{kind}", hashlib.sha256()
            write_file(file, hashing(map(_to_line, lines), digest))
            self.history.add_rollouts(step, file, digest.hexdigest())

    def cut_after(self, step: int) -> None:
        """Remove what later steps wrote, so that the run can resume after `step`; -1 removes everything.

        Rows up to `step` keep every byte. A kill in here is harmless: the next resume cuts again.
        """
        self.history.cut_after(step)
        for name in (METRICS, EVENTS):
            _keep_rows(self.path / name, step)
        for file in sorted((self.path / ROLLOUTS).glob("*step-*")):
            found = step_of(file.name)
            if found is None or found > step:  # None: a hidden file left by a process killed while writing
                with named_errors("remove", file):
                    file.unlink()

    def elapsed_s(self) -> float:
        """The end of the run's events, in seconds since it began; the next process's `Trace` begins there."""
        file = self.path / EVENTS
        events = (_parse(file, number, line) for number, line in enumerate(_complete_lines(file), 1))
        return max((_seconds(event, "start_s") + _seconds(event, "dur_s") for event in events), default=0.0)

    def _append(self, name: str, lines: bytes, is_durable: bool) -> None:
        assert not self._lock.closed, "the folder is closed"
        file = self.path / name
        with named_errors("write", file), file.open("ab", buffering=0) as opened:
            size = opened.seek(0, os.SEEK_END)
            try:
                _write_all(opened, lines)
                if is_durable:
                    os.fsync(opened.fileno())
            except OSError:
                with suppress(OSError):  # on a full disk; the next `open` drops a torn line anyway
                    opened.truncate(size)
                raise


def _take_lock(path: Path) -> IO[str]:
    """The lock file, locked: the lock ends with the file handle or the process, however that ends."""
    file = path / LOCK
    with named_errors("write", file):
        opened = open(file, "a+", encoding="utf-8", opener=not_a_link)  # noqa: SIM115  # held as long as the lock
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            opened.seek(0)
            holder = opened.read().strip() or "another process"
            opened.close()
            raise ValueError(
                f"{holder} is working in {path}; wait for it or stop it, or choose another folder with --run.dir"
            ) from None
        warnings.warn(
            f"{path} cannot be locked ({error}): make sure that no second process works in it",
            RuntimeWarning,
            stacklevel=4,
        )
    with named_errors("write", file):
        opened.truncate(0)
        opened.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        opened.flush()
    return opened


def is_held(path: Path) -> bool:
    """Whether a process is working in a run's folder. Takes the lock for a moment, which would fail a run that starts
    just then: call it only if the run looks finished."""
    try:
        with open(path / LOCK, encoding="utf-8", opener=_at_once) as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


def _at_once(file: str, flags: int) -> int:
    """Opener that never waits for the other end of a pipe."""
    return os.open(file, flags | os.O_NONBLOCK)


def _refuse_foreign(file: Path) -> None:
    """Raise if a run that appends to its file would write somewhere else."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise ValueError(f"{file} is not a regular file; a run writes only into its own folder, so put a file there")


def refuse_used(path: Path) -> None:
    """Raise unless a run may start here: the folder must be empty, except for hidden files of a killed attempt."""
    names = sorted(entry.name for entry in _shown(path) if entry.name != GIVEN)
    if is_unused(path):
        return
    if CONFIG in names:
        raise ValueError(
            f"{path} already holds a run: resume it (paceline train --resume --run.dir={path}) or choose another "
            "folder (--run.dir=FOLDER)"
        )
    if names:
        raise ValueError(
            f"{path} is not empty (it holds {names[0]}); choose a new folder for the run (--run.dir=FOLDER)"
        )


def is_unused(path: Path) -> bool:
    """Whether a folder has the settings of a run that began there, but no row, text or checkpoint."""
    if not (path / CONFIG).is_file() or not (path / LOCK).is_file():  # without a lock these are not a run's settings
        return False
    return all(_is_empty(entry) for entry in _shown(path) if entry.name not in (CONFIG, TENSORBOARD, GIVEN))


def _shown(path: Path) -> list[Path]:
    with named_errors("read", path):
        return [entry for entry in path.iterdir() if not entry.name.startswith(".")]


def _is_empty(entry: Path) -> bool:
    return not any(entry.iterdir()) if entry.is_dir() else entry.stat().st_size == 0


def _to_yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)


def _metric(key: str, value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise ValueError(f"metric {key!r} must be a number or a string; got a {type(value).__name__}")


def _to_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON. Python's floats round-trip bit for bit."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_from_numpy)
    except ValueError:  # NaN or an infinity, which JSON cannot express
        text = json.dumps(_without_nan(record), ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8 form; backslashreplace writes the escape JSON itself would use.
    return text.encode(errors="backslashreplace") + b"\n"


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    if value is None or isinstance(value, int | str):
        return value
    return _without_nan(_from_numpy(value))


def _write_all(opened: IO[bytes], content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[opened.write(rest) :]


def _complete_lines(file: Path) -> list[bytes]:
    """The lines of a file, each with its newline; without a last line that a kill left incomplete."""
    if not file.exists():
        return []
    with open_regular(file) as opened:
        content = opened.read()
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _drop_torn_line(file: Path) -> None:
    if not file.exists():
        return
    with named_errors("write", file), file.open("rb+") as opened:
        opened.truncate(opened.read().rfind(b"\n") + 1)


def _keep_rows(file: Path, step: int) -> None:
    """Keep only the rows of steps up to `step`."""
    lines = _complete_lines(file)
    kept = [line for number, line in enumerate(lines, 1) if _parse(file, number, line)["step"] <= step]
    if len(kept) < len(lines):
        write_file(file, kept)


def _parse(file: Path, number: int, line: bytes) -> dict[str, Any]:
    row = _object(file, number, line)
    if type(row.get("step")) is not int:
        raise ValueError(f"{file}, line {number} must have a step; it is {brief(row.get('step'))}; remove the line")
    return row


def _object(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {number} is not valid JSON ({error}); remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{file}, line {number} must hold a JSON object; remove the line")
    return row


def _seconds(event: Mapping[str, Any], key: str) -> float:
    """A time in an event; 0 if it has none, since only the next process's clock depends on it."""
    value = event.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else 0.0
