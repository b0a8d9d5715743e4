"""Writes the result of a bench: one JSON file with the command, date, hardware, versions and rows.

Benches call it at the end. It never writes a machine's own paths: a result is read far from where it was measured.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def result_path(bench: str, gpu: str | None = None) -> Path:
    """`bench/results/<bench>-<hardware>.json`."""
    machine = gpu or f"{cpu_name()} {os.cpu_count()} core"
    return RESULTS / f"{bench}-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"


def write_result(
    path: Path,
    bench: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    argv: Sequence[str],
    versions: Mapping[str, str],
    gpu: str | None = None,
    commit_hash: str | None = None,
    **extra: Any,
) -> None:
    """Write the file atomically; `extra` holds what only this bench records (a note, what was skipped).

    `commit_hash` is for machines that have the code but not its history.
    """
    result = {
        "bench": bench,
        "command": command_line(argv),
        "commit": commit_hash or commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(gpu),
        "versions": dict(sorted(versions.items())),
        **extra,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def hardware(gpu: str | None = None) -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1)}
    return {**found, "gpu": gpu} if gpu else found


def cpu_name() -> str:
    """The processor's name if Linux tells it, else the architecture."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0].strip() if names else platform.machine()


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the installed ones among these packages, and of Python."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit measured, with `-dirty` if code (not an earlier result) differs from it."""
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return f"{head}-dirty" if head and changed else head or "none"


def command_line(argv: Sequence[str]) -> str:
    """The command as typed at the root of the repository."""
    script, *options = argv
    return shlex.join(["python", *map(_without_machine_path, (str(Path(script).resolve()), *options))])


def _without_machine_path(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(ROOT)
    return f"{option}{equals}{path.relative_to(ROOT) if inside else Path('...') / path.name}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
