"""Renders chat templates in a process of its own, so that none can hang a run or fill its memory.

`Tokenizer.chat` calls `render_chat`. A template is a program by whoever made the model; jinja's sandbox keeps it from
files and from Python, but not from looping or allocating. All templates of this process share one helper
(`chat_process.py`), which starts with the first chat and is replaced when a template has broken it.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.core.documents import plain

RENDER_SECONDS = 10.0
"""Templates take milliseconds; this leaves room for a machine that is busy."""
START_SECONDS = 300.0
RESERVED = frozenset(
    {
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "return_assistant_tokens_mask",
        "continue_final_message",
        "add_generation_prompt",
    }
)
"""Names that rendering itself gives to a template."""

_lock = threading.Lock()
_helper: _Helper | None = None


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for the next assistant turn; a ValueError says why the template makes none.

    `variables` are what this template reads besides messages, tools and special tokens.
    """
    if taken := RESERVED.intersection(variables or ()):
        raise ValueError(f"{min(taken)} is not for callers to set")
    request: dict[str, Any] = {"template": template, "messages": list(messages)}
    request |= {"variables": {**(variables or {}), **special_tokens}, "tools": list(tools) if tools else None}
    line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode() + b"\n"
    with _lock:
        reply = _ask(line)
    if "error" in reply:
        raise ValueError(plain(" ".join(reply["error"].split()), most=400))
    return str(reply["text"])


def _ask(line: bytes) -> dict[str, Any]:
    """The helper's reply. One that has died is replaced once: it may have been killed between two requests."""
    for _ in range(2):
        helper = _running_helper()
        try:
            return helper.ask(line)
        except TimeoutError:
            helper.close()
            return {"error": f"it does not end within {RENDER_SECONDS:g} s"}
        except (EOFError, BrokenPipeError):
            helper.close()
    return {"error": "its process died twice, which takes a template that breaks jinja"}


def _running_helper() -> _Helper:
    global _helper
    # A forked child must not share its parent's pipes.
    if _helper is None or _helper.owner != os.getpid() or not _helper.is_alive:
        _helper = _Helper()
    return _helper


class _Helper:
    """One helper process. It ends with its input, so it never outlives this process by more than a rendering."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._unread = b""
        self._process = subprocess.Popen(
            # -P: a json.py in the user's working directory must not shadow Python's own.
            [sys.executable, "-P", "-m", "paceline.model.chat_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        atexit.register(self.close)
        self._read(START_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        # This cannot block for long: the helper reads requests whenever it is not rendering.
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._read(RENDER_SECONDS)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(deadline - time.monotonic()):
                    raise TimeoutError
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise EOFError
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.owner != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
