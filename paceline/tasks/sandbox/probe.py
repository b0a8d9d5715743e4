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


def probe() -> tuple[str, bool]:
    """One line for people, and whether everything is enforced."""
    command = [sys.executable, "-P", "-m", __name__]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MOST_SECONDS, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return f"did not start within {MOST_SECONDS:g} s", False
    verdict, _, line = done.stdout.strip().partition(" ")
    return (line, verdict == "whole") if line else (f"could not start: {done.stderr.strip()[-200:]}", False)


def main() -> None:
    """Enter a sandbox and say what holds."""
    sandbox = enter(SandboxLimits(), os.getppid())
    print("broken" if sandbox.missing else "whole", sandbox.describe(), flush=True)


if __name__ == "__main__":
    main()
