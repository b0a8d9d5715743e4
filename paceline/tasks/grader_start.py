"""The start of a grader process: `python -m paceline.tasks.grader_start` enters the sandbox, then grades.

`grader_worker.py` starts it and sends it one line of settings. This file loads next to nothing: its process stays
behind as the keeper of the sandbox (`sandbox/keeper.py`), and only what comes back from `enter` loads the task.
"""

from __future__ import annotations

import json
import os
from typing import BinaryIO

from paceline.tasks.sandbox.enter import enter
from paceline.tasks.sandbox.limits import limits_from


def main() -> None:
    """Read the settings, enter the sandbox, and serve requests until the input ends."""
    requests, replies = _take_over_pipes()
    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    sandbox = enter(limits_from(start["sandbox"]), start["parent"], start["has_namespaces"])
    from paceline.tasks.grader_process import serve

    serve(start, requests, replies, sandbox)


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, moved out of a reward's way: its stdin is empty and its prints go to stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    main()
