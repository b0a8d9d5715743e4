"""Ray's own processes stop or die: the driver says so once, ends in bounded time, and leaves nothing behind.

Each test has a driver and a Ray of its own, in another process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]
VICTIM = Path(__file__).with_name("ray_victim.py")
TIMEOUT_S = 15
"""The victim's `fleet.ray_timeout_s`."""
GRACE_S = 45
"""For a busy machine."""


def processes_of(session: str) -> list[str]:
    """Command lines that name a session: every process of its Ray but the workers."""
    found = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if session in line]


@pytest.mark.parametrize("doing", ["wait", "put"])
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize(("kind", "name"), [("raylet", "node daemon (raylet)"), ("gcs_server", "control server (GCS)")])
def test_a_ray_that_breaks_ends_the_run(kind: str, name: str, fault: str, doing: str) -> None:
    """While the driver waits for its workers, or gives them something."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, str(VICTIM), kind, fault, doing], capture_output=True, text=True, timeout=240, env=environment
    )
    said = dict(line.split(" ", 1) for line in ended.stdout.splitlines() if " " in line)
    session = said["session"]
    time.sleep(1)
    assert processes_of(session) == []
    if ended.returncode == 1 and (kind, fault) == ("raylet", "SIGKILL"):
        return  # Ray itself ends a process in the middle of a transfer to its store, before anybody can say why
    assert ended.returncode == 0, ended.stderr
    assert f"Ray's {name}" in said["error"] and "continue the run with --resume" in said["error"]
    assert int(said["noticed"]) <= (0 if fault == "SIGKILL" else TIMEOUT_S) + GRACE_S
    assert not Path(session).parent.exists()
    assert "Traceback" not in ended.stderr and "Raylet is terminated" not in ended.stderr
