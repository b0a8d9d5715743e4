"""The history of a run: a hash of every metrics row and rollout file it wrote, to notice what was lost or altered.

`RunFolder` adds to it, every checkpoint keeps it, and a resumed run and the report compare it with the folder. It only
covers rows up to its checkpoint; a resumed run writes the later ones again. Nothing here changes a file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

HISTORY = "history.json"
"""The history's file in a checkpoint."""
MAX_HASHED_BYTES = 4 * 2**30
"""Of changed files, the contents of the newest up to so many bytes are compared; of the others, the sizes."""

_DIGITS = 32


class WrittenFile(BaseModel):
    """A file as the run wrote it."""

    model_config = ConfigDict(frozen=True)

    step: int
    bytes: int
    mtime_ns: int
    sha256: str


class RunHistory(BaseModel):
    """Grows with the run; `HISTORY` in a checkpoint is its JSON."""

    rows: list[tuple[int, str]] = []
    """Step and hash of every row of metrics, in file order."""
    rollouts: dict[str, WrittenFile] = {}
    """By name in `rollouts/`."""

    def add_row(self, step: int, line: bytes) -> None:
        self.rows.append((step, _hash(line)))

    def add_rollouts(self, step: int, file: Path, sha256: str) -> None:
        stat = file.stat()
        self.rollouts[file.name] = WrittenFile(
            step=step, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256[:_DIGITS]
        )

    def snapshot(self) -> RunHistory:
        """A copy that does not grow."""
        return RunHistory.model_construct(rows=self.rows.copy(), rollouts=self.rollouts.copy())

    def cut_after(self, step: int) -> None:
        """Forget later steps."""
        self.rows = [row for row in self.rows if row[0] <= step]
        self.rollouts = {name: file for name, file in self.rollouts.items() if file.step <= step}

    def problems(self, metrics: Iterable[bytes], rollouts: Path, step: int) -> list[str]:
        """What is wrong with the lines of metrics and the files in `rollouts/` up to `step`, in sentences."""
        return [*self._row_problems(metrics, step), *self._rollout_problems(rollouts)]

    def _row_problems(self, lines: Iterable[bytes], last: int) -> Iterator[str]:
        known = dict(self.rows)
        found = [(step, _hash(line)) for line in lines if (step := _step_of(line)) is None or step <= last]
        steps = [step for step, _ in found if step is not None]
        if lost := known.keys() - set(steps):
            yield f"metrics.jsonl has lost the row of {_steps(lost)}"
        if altered := {step for step, row in found if step in known and known[step] != row}:
            yield f"metrics.jsonl has an altered row of {_steps(altered)}"
        repeated = {step for step in steps if steps.count(step) > 1} if len(set(steps)) < len(steps) else set()
        if foreign := (set(steps) - known.keys()) | repeated:
            yield f"metrics.jsonl has a row of {_steps(foreign)} that the run did not write"
        if not lost and not foreign and steps != [step for step, _ in self.rows]:
            yield "metrics.jsonl has its rows in another order"

    def _rollout_problems(self, folder: Path) -> Iterator[str]:
        lost, altered, room = set(), set(), MAX_HASHED_BYTES
        for name, written in reversed(self.rollouts.items()):
            try:
                stat = (folder / name).stat()
                if stat.st_size != written.bytes:
                    altered.add(written.step)
                elif stat.st_mtime_ns != written.mtime_ns and stat.st_size <= room:
                    room -= stat.st_size
                    if _hash_file(folder / name) != written.sha256:
                        altered.add(written.step)
            except OSError:
                lost.add(written.step)
        if lost:
            yield f"rollouts/ has lost a file of {_steps(lost)}"
        if altered:
            yield f"rollouts/ has an altered file of {_steps(altered)}"


def newest_history(run: Path) -> tuple[int, RunHistory] | None:
    """The step and the history of a run's newest checkpoint, for readers; None if it cannot be read."""
    folders = (run / "checkpoints").glob("step-*")
    for folder in sorted(folders, key=lambda path: (len(path.name), path.name), reverse=True):
        try:
            return int(folder.name.removeprefix("step-")), RunHistory.model_validate_json(
                (folder / HISTORY).read_bytes()
            )
        except (OSError, ValueError):
            continue
    return None


def hashing(parts: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    """The same parts; `digest` takes them on their way."""
    for part in parts:
        digest.update(part)
        yield part


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:_DIGITS]


def _hash_file(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:_DIGITS]


def _step_of(line: bytes) -> int | None:
    """The step of a row; None if it is no row."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None


def _steps(steps: set[int]) -> str:
    """Steps as ranges: `step 3` or `steps 1-4, 7`."""
    runs = itertools.groupby(enumerate(sorted(steps)), lambda pair: pair[1] - pair[0])
    bounds = [[step for _, step in run] for _, run in runs]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in bounds)
    return f"step{'s' * (len(steps) > 1)} {named}"
