"""The guard of a Ray that this process starts: when the process ends, however it does, so does everything of that Ray.

    with guarded_folder() as folder: ray.init(_temp_dir=folder)   nothing of it outlives the block or the process

Ray's own daemons die with their driver, but what these have started notices only after a minute. The guard is a process
of its own, run as `python -m`, which waits for its parent's end. Whatever inherited its mark belongs to this Ray.
Used by `ray_cluster.py`. It needs Linux; elsewhere it only removes the folder. It must never touch another Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "PACELINE_FLEET"
"""Variable in the environment of every process of a Ray; its value is the Ray's folder."""
END_S = 10.0
"""How long killing them may take; a process in the kernel's hands dies when it returns."""


@contextmanager
def guarded_folder(parent: str | None = None) -> Iterator[Path]:
    """A private folder for a Ray, whose processes must start with the mark `mark_of(folder)`."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=parent))
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        start_new_session=True,  # what ends this process's group must not end its guard
    )
    assert guard.stdin is not None
    try:
        yield folder
    finally:
        guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            guard.wait(2 * END_S)


def mark_of(folder: Path) -> dict[str, str]:
    """What must be in the environment while a Ray with this folder starts."""
    return {MARK: str(folder)}


def main() -> None:
    """Wait for the end of the parent, then end its Ray."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # nobody writes: it ends when the parent closes it or dies
    end_all(Path(sys.argv[1]))


def end_all(folder: Path) -> None:
    """Kill all processes of a Ray and remove its folder."""
    deadline = time.monotonic() + END_S
    while (found := marked(str(folder))) and time.monotonic() < deadline:
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def marked(value: str) -> list[int]:
    """The living processes of this user that carry the mark with this value."""
    wanted, found = f"{MARK}={value}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):  # a zombie's is empty
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
