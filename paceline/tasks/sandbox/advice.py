"""Turns an error that the sandbox caused into advice: which setting allows what the code tried to do.

The grader process adds it to the message of a reward that raised. `watch_network` also notices a reward that tries to
reach the network and hides the error, whose scores would be silently wrong.
"""

from __future__ import annotations

import errno
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from paceline.tasks.sandbox.limits import Sandbox

NETWORK_ADVICE = "rewards run without network; set task.grader_network=true if yours needs it"
DISK_ADVICE = (
    "rewards see the disk read-only; name a folder in task.grader_writable if yours must keep files, or use tempfile"
)
GPU_ADVICE = "CUDA does not start in the sandbox of rewards; set task.grader_sandbox=false if yours needs a GPU"
_MAX_CAUSES = 20


def advise(error: BaseException, sandbox: Sandbox) -> str:
    """What to set if the sandbox is why this error was raised, else nothing."""
    for cause in _causes(error):
        if sandbox.disk and isinstance(cause, RuntimeError) and "cuda" in str(cause).lower():
            return GPU_ADVICE
        if isinstance(cause, OSError):
            if sandbox.network and _is_about_network(cause):
                return NETWORK_ADVICE
            if sandbox.disk and _is_about_disk(cause, sandbox):
                return DISK_ADVICE
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_about_network(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, PermissionError) and any(frame.filename.endswith("socket.py") for frame in frames)


def _is_about_disk(error: OSError, sandbox: Sandbox) -> bool:
    is_hidden_by_landlock = error.errno == errno.EACCES and error.filename is not None and "mounts" not in sandbox.disk
    return error.errno == errno.EROFS or is_hidden_by_landlock


class NetworkWatch:
    """Whether code in this process tried to open a network socket since it was last asked."""

    def __init__(self) -> None:
        self._was_tried = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" or (
            event == "socket.__new__" and arguments[1] in (socket.AF_INET, socket.AF_INET6)
        ):
            self._was_tried = True

    def take(self) -> bool:
        was_tried, self._was_tried = self._was_tried, False
        return was_tried
