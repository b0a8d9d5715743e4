"""The log of a drafter's training: one line per micro-step, publish and rollback.

The trainer adds entries with `MicroLog.append`. Time decides how many micro-steps run; a drafter is a pure function of
its initial weights, this log, and the texts and policies that the log names.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from paceline.core.documents import open_regular
from paceline.core.files import not_a_link, write_file
from paceline.spot.trainer import LogEntry

LOG = "log.jsonl"
"""Its file, in a drafter folder."""


class MicroLog:
    """Entries in a file, in order. Only `flush` writes: a micro-step does not wait for the disk."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.num_entries = self.begun_at = 0
        """Number of entries, and how many of them are from before the last resume."""
        self._waiting: list[LogEntry] = []

    def cut_after(self, num_entries: int) -> None:
        """Continue after this many entries of the file; discard later ones, which a resumed run makes again."""
        self.num_entries = self.begun_at = num_entries
        self._waiting = []
        if self._file is not None and self._file.exists():
            with open_regular(self._file) as opened:
                kept = list(islice(opened, num_entries))
            if len(kept) < num_entries:
                raise ValueError(f"{self._file} has {len(kept)} lines, but the checkpoint needs {num_entries}")
            write_file(self._file, kept)

    def append(self, entry: LogEntry) -> None:
        self._waiting.append(entry)
        self.num_entries += 1

    def drain(self) -> list[LogEntry]:
        """Remove and return the unwritten entries, for a caller that stores them elsewhere."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def flush(self) -> None:
        waiting = self.drain()
        if self._file is not None and waiting:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "a", encoding="utf-8", opener=not_a_link) as opened:
                opened.writelines(json.dumps(entry) + "\n" for entry in waiting)
