"""The guard of a Ray: it ends whatever carries the Ray's mark, and nothing else, however the driver ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.fleet.transport.ray_guard import end_all, guarded_folder, mark_of, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LONG_S = 30.0

DRIVER = """
import os, subprocess, sys, time
from paceline.fleet.transport.ray_guard import guarded_folder, mark_of

AGENT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(100)"
with guarded_folder(sys.argv[1]) as folder:
    (folder / "ray").mkdir()
    (folder / "ray" / "log").write_text("hello")
    # In a session of its own, and soon without a parent: Ray's agents are both.
    daemon = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {AGENT!r}])"],
        env={**os.environ, **mark_of(folder)}, stdout=subprocess.PIPE, start_new_session=True,
    )
    daemon.stdout.readline()
    print(folder, flush=True)
    time.sleep(100 if sys.argv[2] == "waits" else 0)
"""


def start_driver(parent: Path, how: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(parent), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    process.stdout.close()
    return process, folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """With its whole group, and although agents hear no signal."""
    process, folder = start_driver(tmp_path, "waits")
    assert len(marked(str(folder))) == 1 and (folder / "ray" / "log").exists()
    os.killpg(process.pid, number)
    process.wait(LONG_S)
    deadline = time.monotonic() + LONG_S
    while (folder.exists() or marked(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists() and not marked(str(folder))


def test_the_end_of_the_block_waits_until_all_is_gone(tmp_path: Path) -> None:
    process, folder = start_driver(tmp_path, "ends")
    assert process.wait(LONG_S) == 0
    assert not folder.exists() and not marked(str(folder))


def test_another_ray_is_left_alone(tmp_path: Path) -> None:
    with guarded_folder(str(tmp_path)) as one, guarded_folder(str(tmp_path)) as other:
        sleeper = subprocess.Popen(["sleep", "100"], env={**os.environ, **mark_of(other)})
        end_all(one)
        assert sleeper.poll() is None and marked(str(other)) == [sleeper.pid] and other.exists()
    assert sleeper.wait(LONG_S) == -signal.SIGKILL


def test_the_folder_is_private(tmp_path: Path) -> None:
    with guarded_folder(str(tmp_path)) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
