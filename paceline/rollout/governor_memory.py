"""The governor's memory across runs: a small file of what it learned, one per model, device, versions and drafter.

    memory = GovernorMemory(config, device, engine_settings, drafter)
    engine.restore_learned(memory.recall())     memory.remember(engine.learned())

It is a cache in a folder that only this user can write to. `run/local.py` recalls when a run opens and remembers while
it runs; the engine itself never touches the disk. A file that is damaged or hostile costs what was learned, never a
token. Without a trusted folder there is no memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core.documents import read_json
from paceline.core.files import write_file
from paceline.core.private_folder import private_folder
from paceline.kernels.cpu.pool import num_threads
from paceline.model.config import ModelConfig
from paceline.model.fingerprint import fingerprint
from paceline.rollout.settings import EngineSettings

FORMAT = 1
MAX_BYTES = 2**20
"""Several times what the governor learns about all numbers of sequences."""
MOST_FILES = 64
SETTINGS = ("exact", "precision", "max_sequences", "max_rows", "run_ahead", "graphs")
"""What of the engine's settings decides which way of running a step is fast."""


class GovernorMemory:
    """The file of one kind of engine. Weights are not part of its key: they change with every step."""

    def __init__(self, config: ModelConfig, device: str, settings: EngineSettings, drafter: str) -> None:
        shared = {"format": FORMAT, "model": repr(config), "drafter": drafter}
        if device == "cpu":
            shared["kernel_threads"] = num_threads()
        self.key = shared | settings.model_dump(mode="json", include=set(SETTINGS)) | fingerprint(device)
        text = json.dumps(self.key, sort_keys=True)
        self._name = f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"

    def recall(self) -> dict[str, Any]:
        """What was learned; empty if nothing was. Raises ValueError or OSError if the file is damaged."""
        folder = _trusted_folder()
        if folder is None or not os.path.lexists(folder / self._name):
            return {}
        return read_memory(folder / self._name, self.key)

    def remember(self, learned: Mapping[str, Any]) -> None:
        """Replace the file; of the other files, the newest stay."""
        folder = _trusted_folder()
        if folder is None:
            return
        data = json.dumps({"key": self.key, "learned": learned}, allow_nan=False).encode()
        if len(data) > MAX_BYTES:
            raise ValueError(f"what the governor learned takes {len(data):,} bytes, more than {MAX_BYTES:,}")
        write_file(folder / self._name, [data])
        _drop_oldest(folder)


def read_memory(file: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says was learned. Whether it makes sense, those who learned it decide."""
    content = read_json(file, MAX_BYTES)
    if content.get("key") != key:
        raise ValueError(f"{file} is of another model, device, version or drafter; remove it")
    learned = content.get("learned")
    if not isinstance(learned, dict):
        raise ValueError(f"{file} does not say what was learned; remove it")
    return learned


def _trusted_folder() -> Path | None:
    """The folder of all memories; None if there is none that only this user can write to."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return private_folder(Path(root), "paceline", "governor")
    except (OSError, ValueError, RuntimeError):  # the last one: there is no home
        return None


def _drop_oldest(folder: Path) -> None:
    with suppress(FileNotFoundError):  # another process drops them
        files = [entry for entry in folder.iterdir() if entry.is_file()]
        for file in sorted(files, key=lambda file: file.lstat().st_mtime_ns)[:-MOST_FILES]:
            file.unlink()
