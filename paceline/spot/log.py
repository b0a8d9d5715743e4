"""The log of what was done to a drafter: one line per micro-step, publish and roll-back.

The trainer writes entries through `MicroLog.append`. Time decides how many micro-steps run; a drafter is a pure
function of its start, this list, and the texts and policies the list names.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.files import write_file
from paceline.spot.trainer import LogEntry

LOG = "log.jsonl"
"""Its file, in a folder of drafters."""


class MicroLog:
    """Entries in a file, in order. Written when `flush` is called: a micro-step does not wait for a disk."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.num_entries = self.begun_at = 0
        """Entries, and how many of them are of runs that were resumed since."""
        self._waiting: list[LogEntry] = []

    def cut_after(self, num_entries: int) -> None:
        """Go on behind this many entries of the file; those after them were of a future that is made again."""
        self.num_entries = self.begun_at = num_entries
        self._waiting = []
        if self._file is not None and self._file.exists():
            kept = self._file.read_text(encoding="utf-8").splitlines(keepends=True)[:num_entries]
            if len(kept) < num_entries:
                raise ValueError(f"{self._file} has {len(kept)} lines, fewer than the {num_entries} of the checkpoint")
            write_file(self._file, (line.encode() for line in kept))

    def append(self, entry: LogEntry) -> None:
        self._waiting.append(entry)
        self.num_entries += 1

    def drain(self) -> list[LogEntry]:
        """Entries since the last time, for whoever writes them elsewhere."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def flush(self) -> None:
        waiting = self.drain()
        if self._file is not None and waiting:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as opened:
                opened.writelines(json.dumps(entry) + "\n" for entry in waiting)
