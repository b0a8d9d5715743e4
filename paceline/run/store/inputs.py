"""The inputs of a run: hashes of the files that its tokens depend on, and the settings they were used with.

`run/inputs.py` names the files. They are hashed in the background, and every checkpoint keeps the hashes; a resumed run
compares them with the files of now (`run/resume.py`). A large file, such as a model's weights, is hashed again only if
its size, time or inode has changed. Nothing here decides what a change means.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

INPUTS = "inputs.json"
"""The inputs' file in a checkpoint."""
REMEMBERED_BYTES = 64 * 2**20
"""A file of this size or more keeps its hash while it looks untouched."""
Files = Mapping[str, Mapping[str, Path]]
"""Files by setting, then by name: paths may change, names may not."""

_CHUNK_BYTES = 4 * 2**20


class InputFile(BaseModel):
    """A file as it was when the run read it."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    mtime_ns: int
    inode: int
    sha256: str


class Inputs(BaseModel):
    """`INPUTS` in a checkpoint is its JSON."""

    model_config = ConfigDict(frozen=True)

    settings: dict[str, Any]
    """The run's settings, as in config.yaml."""
    files: dict[str, dict[str, InputFile]]
    """By setting, then by name."""

    def changes(self, now: Inputs) -> Iterator[tuple[str, str]]:
        """Settings whose files are not those of `now`, each with a file and what has become of it."""
        for setting in {**self.files, **now.files}:
            before, after = self.files.get(setting, {}), now.files.get(setting, {})
            for name in {**before, **after}:
                if name not in after:
                    yield setting, f"{name} is missing"
                elif name not in before:
                    yield setting, f"{name} is new"
                elif before[name].sha256 != after[name].sha256:
                    yield setting, f"{name} has changed"


class InputReader:
    """Hashes a run's input files in a thread; `result` waits for it, `close` ends it."""

    def __init__(self, settings: Mapping[str, Any], files: Files, known: Inputs | None = None) -> None:
        """`known` are the inputs of an earlier process of this run."""
        self._settings, self._files = dict(settings), files
        self._known = known.files if known is not None else {}
        self._found: dict[str, dict[str, InputFile]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="inputs", daemon=True)
        self._thread.start()

    def result(self) -> Inputs:
        self._thread.join()
        return Inputs(settings=self._settings, files=self._found)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _read(self) -> None:
        for setting, files in self._files.items():
            found = self._found[setting] = {}
            for name, file in files.items():
                with suppress(OSError, InterruptedError):  # one that cannot be read counts as missing
                    found[name] = describe(file, self._known.get(setting, {}).get(name), self._closed.is_set)


def describe(file: Path, known: InputFile | None = None, is_stopped: Callable[[], bool] = lambda: False) -> InputFile:
    """A file's hash, and what tells whether it has been touched since."""
    stat = file.stat()
    looks_same = known is not None and (known.bytes, known.mtime_ns, known.inode) == (
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ino,
    )
    if known is not None and looks_same and stat.st_size >= REMEMBERED_BYTES:
        return known
    sha256 = _hash(file, is_stopped)
    return InputFile(bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino, sha256=sha256)


def _hash(file: Path, is_stopped: Callable[[], bool]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(buffer):
            if is_stopped():
                raise InterruptedError(f"reading {file} was stopped")
            digest.update(buffer[:size])
    return digest.hexdigest()
