"""Finds what a test has left running, in any session, process group or namespace: by a mark in its environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

MARK = "PACELINE_TEST_TAG"


def tagged(tag: str) -> list[int]:
    """The processes, other than this one, that were started with this value in their environment."""
    wanted = f"{MARK}={tag}".encode()
    return [pid for pid in _processes() if pid != os.getpid() and wanted in _environment(pid).split(b"\0")]


def _processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""


def wait_until_gone(tag: str, seconds: float = 20.0) -> None:
    """Wait for every process with the tag to end; zombies have."""
    deadline = time.monotonic() + seconds
    while left := tagged(tag):
        if time.monotonic() > deadline:
            pytest.fail(f"processes {left} are still there")
        time.sleep(0.02)
