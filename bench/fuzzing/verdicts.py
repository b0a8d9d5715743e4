"""The verdict on what a loader did with a case: it loaded, it refused as a user can read it, or it is a fault.

A refusal is a ValueError or an OSError whose message is one line of moderate length, free of control characters, and
names the file (or, for settings, the key). Everything else that is raised is a traceback for the user: also a
ValueError of some library that says where in a text it failed, but not in which file.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FAULTS = {
    "traceback": "an exception that no command turns into a message",
    "unnamed": "a message that names neither file nor setting",
    "unreadable": "a message of several lines, with control characters, or without end",
    "exit": "the process would have ended",
    "hang": "no end within the time limit",
    "memory": "much more memory than the files take",
    "crash": "the process died",
    "outside": "a file outside the run was written, or code imported",
    "accepted": "a document that says two things, or leads elsewhere, was loaded",
    "refused": "a valid document was refused",
}
MAX_MESSAGE = 4000
"""A message may quote a part of a file, never a whole one."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_KEY = re.compile(r"\b[a-z_]+\.[a-z_0-9]+\b|unknown setting|--[a-z]|^[a-z_]+: |unknown drafter")
_ROOT = re.compile(r".*?/(paceline/[\w/]+\.py)$")


@dataclass(frozen=True)
class Verdict:
    """`kind` is "loaded", "refused well" or a key of FAULTS."""

    kind: str
    error: str = ""
    """The exception's type."""
    message: str = ""
    frame: str = ""
    """The last of our own functions in the traceback."""
    num_parsed: int = 0
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS

    def signature(self, target: str) -> str:
        """Equal for findings with one cause."""
        return f"{self.kind} {self.error} {self.frame or target}".replace("  ", " ")


LOADED, REFUSED = "loaded", "refused well"


def judge(error: BaseException, names: Sequence[str], has_settings: bool, is_named_badly: bool) -> Verdict:
    """The verdict on an exception; `names` are file names of which the message must hold one."""
    found = Verdict(_kind(error, names, has_settings, is_named_badly), type(error).__name__, message_of(error)[:600])
    return Verdict(found.kind, found.error, found.message, _frame(error))


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(str() raised {type(failure).__name__})"


def _kind(error: BaseException, names: Sequence[str], has_settings: bool, is_named_badly: bool) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if not isinstance(error, Exception):
        return "exit"
    if not isinstance(error, ValueError | OSError):
        return "traceback"
    text = message_of(error)
    if not (any(name in text for name in names) or (has_settings and _KEY.search(text))):
        return "unnamed"
    if len(text) > MAX_MESSAGE or (_CONTROL.search(text) and not is_named_badly):
        return "unreadable"
    return REFUSED


def _frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [(match[1], frame.name) for frame in frames if (match := _ROOT.match(frame.filename))]
    return ":".join(ours[-1]) if ours else ""


@dataclass
class Watched:
    """A folder in which nothing may change, as it was."""

    folder: Path
    before: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self._entries()

    def changed(self) -> list[str]:
        now = self._entries()
        return sorted(name for name in self.before.keys() | now.keys() if self.before.get(name) != now.get(name))

    def _entries(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in (self.folder, *self.folder.rglob("*")):
            stat = path.lstat()
            size = 0 if path.is_dir() else stat.st_size
            found[str(path.relative_to(self.folder))] = (stat.st_mode, size, stat.st_mtime_ns, stat.st_ino)
        return found
