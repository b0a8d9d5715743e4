"""What a server remembers over a restart: which weights it had, and how often it was started.

    {"starts": 2, "weight_version": 12, "weight_dir": "step-12"}

The file is replaced atomically after new weights are in place and before their update is answered. A server that is
killed on the way therefore comes back with the old ones or the new ones, and `/weight_info` says which. Weights that a
trainer broadcast are not on disk: after those a restarted server begins with the model it was started for. Written by
`weights.py`, read by `paceline serve`.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from paceline.core.documents import read_json
from paceline.core.files import write_file
from paceline.core.schema import Schema, check


class _Record(Schema):
    starts: int = Field(ge=0, lt=2**62, description="how often the server was started")
    weight_version: int = Field(ge=0, lt=2**63, description="the version of the weights")
    weight_dir: str | None = Field(description="their folder below --weight-root, or null")


class Journal:
    """The file of one server; two servers must not share it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        found = check(_Record, read_json(file), str(file)) if file.exists() else None
        self.num_restarts = 0 if found is None else found.starts
        self.weight_dir = None if found is None else found.weight_dir
        """The folder to begin with; None: the model's own."""
        self.version = 0 if found is None or found.weight_dir is None else found.weight_version

    def begin(self) -> None:
        """Note a start; called when the weights are loaded."""
        self.note(self.version, self.weight_dir)

    def note(self, version: int, weight_dir: str | None) -> None:
        """Note which weights are in place."""
        record = {"starts": self.num_restarts + 1, "weight_version": version, "weight_dir": weight_dir}
        write_file(self._file, [json.dumps(record).encode() + b"\n"])
