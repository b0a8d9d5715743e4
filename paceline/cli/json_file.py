"""The file of `--json FILE`, for `compare` and `eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.files import write_file

SPECIAL = Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")
"""`/dev/stdout` and the like are written to, never replaced."""


def check_result_file(file: Path) -> None:
    """Raise a ValueError if a result cannot go into this file, before it has been computed."""
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--json {file}: there is no folder {file.parent}; create it, or name another file")
    if file.is_dir():
        raise ValueError(f"--json {file} is a folder; name a file for the result")


def write_result(file: Path, content: Any) -> None:
    """Write a result. A pipe is written to; any other file is replaced whole, and a link too, not its target."""
    text = f"{json.dumps(content, indent=2)}\n"
    if file.is_fifo() or file.absolute().parent in SPECIAL:
        file.write_text(text)
    else:
        write_file(file, [text.encode()])
