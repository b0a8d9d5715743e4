"""Says what a sandbox on this machine enforces: `python -m paceline.tasks.sandbox.probe` enters one and prints it.

`paceline doctor` calls `probe`, which runs that command, because entering is for good.
"""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.tasks.sandbox.enter import enter
from paceline.tasks.sandbox.limits import SandboxLimits

MOST_SECONDS = 60.0


def probe() -> str:
    """One line for people."""
    command = [sys.executable, "-P", "-m", __name__]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MOST_SECONDS, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return f"did not start within {MOST_SECONDS:g} s"
    return done.stdout.strip() or f"could not start: {done.stderr.strip()[-200:]}"


def main() -> None:
    """Enter a sandbox and say what holds."""
    print(enter(SandboxLimits(), os.getppid()).describe(), flush=True)


if __name__ == "__main__":
    main()
