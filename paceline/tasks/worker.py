"""The grader process: makes a task from its settings, then scores one (item, text) per line until its input ends.

`grading.Grader` starts it as `python -m paceline.tasks.worker` and talks to it in lines of JSON: settings in, "ready"
or "refused" out; then one request in and one reply out at a time. It is the place where rewards and parsers that nobody
has proved safe may loop, allocate and crash: every limit is the kernel's, so code that never comes back to Python is
stopped as well. It must never import torch, and nothing a reward prints may reach the line of replies.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import math
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from paceline.tasks.base import Item, Message, Task
from paceline.tasks.settings import TaskSettings

CPU_LIMIT_SIGNAL = signal.SIGPROF
"""Ends the process when an item has used up its CPU time."""

MAX_DETAIL = 400
"""Characters of an error that are passed on: a message may hold all of a hostile text."""

_PR_SET_PDEATHSIG = 1


@runtime_checkable
class NeedsPreparation(Protocol):
    """A task with something to load before it can score, such as a user's reward."""

    def prepare(self) -> None:
        """Load it now; a ValueError says what the user can mend."""


def encode_request(item: Item, text: str) -> bytes:
    """One line that asks for the score of a text."""
    messages = [[message.role, message.content] for message in item.messages]
    record = {"prompt": item.prompt, "answer": item.answer, "key": item.key, "level": item.level, "messages": messages}
    return json.dumps({"item": record, "text": text}).encode() + b"\n"


def decode_request(line: bytes) -> tuple[Item, str]:
    """The item and the text of such a line."""
    request = json.loads(line)
    record = request["item"]
    messages = tuple(Message(role, content) for role, content in record.pop("messages"))
    return Item(**record, messages=messages), request["text"]


def main() -> None:
    """Serve requests until the input ends."""
    requests, replies = _take_over_pipes()
    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    _die_with_parent(start["parent"])
    _limit_memory(start["memory_mb"])
    task = _make_task(start["factory"], start["settings"], replies)
    _reply(replies, {"ready": True})
    for line in requests:
        item, text = decode_request(line)
        _seed_randomness(item, text)
        _reply(replies, _score(task, item, text, start["cpu_seconds"]))
    # Threads that a reward left behind must not keep the process alive.
    os._exit(0)


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, moved out of reach: what reads stdin finds nothing, what prints goes to stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _die_with_parent(parent: int) -> None:
    """End with the process that asked for grades, even in the middle of an item.

    The end of the input does the same between items, on every system. Linux counts the death of the *thread* that
    started this process, so a grader is best used by a thread that lasts.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(0)


def _limit_memory(megabytes: int) -> None:
    """Let allocations fail beyond this. RLIMIT_DATA counts what is written to, unlike RLIMIT_AS, which counts libraries
    that are merely mapped and would forbid importing the large ones."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = megabytes << 20
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _make_task(factory: str, settings: Mapping[str, Any], replies: BinaryIO) -> Task:
    """The task, ready to score; if it cannot be made, the parent is told why and this process ends."""
    try:
        module, _, name = factory.partition(":")
        task: Task = getattr(importlib.import_module(module), name)(TaskSettings.model_validate(settings))
        if isinstance(task, NeedsPreparation):
            task.prepare()
    except BaseException as error:  # the user's module may do anything while it is imported, exit included
        reason = str(error) if isinstance(error, ValueError) else f"making the task {_describe(error)}"
        _reply(replies, {"refused": reason})
        os._exit(1)
    return task


def _seed_randomness(item: Item, text: str) -> None:
    """Make rewards that roll dice a function of what they score, not of what this process scored before."""
    named = f"{item.key}\0{text}".encode(errors="surrogatepass")
    seed = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)


def _score(task: Task, item: Item, text: str, cpu_seconds: float) -> dict[str, Any]:
    """The reply to one request.

    The timer counts CPU time of all threads, in user code and in the kernel, and its signal ends the process by the
    kernel's own default: no Python has to run for it, as it would with a handler. It is set anew for every item because
    a reward may have caught the signal.
    """
    signal.signal(CPU_LIMIT_SIGNAL, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return _check_score(task.score(item, text))
    except MemoryError:
        return {"kind": "memory", "detail": "ran out of memory"}
    except BaseException as error:  # a reward that calls sys.exit has failed this item like any other
        return {"kind": "error", "detail": _describe(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _check_score(value: Any) -> dict[str, Any]:
    """The reply for what a task returned, which for a user's reward may be anything."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        return {"kind": "not a number", "detail": f"returned {_shorten(repr(value))}, not a finite number"}
    return {"score": score}


def _describe(error: BaseException) -> str:
    """What was raised, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {_shorten(str(error))}{place}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[:MAX_DETAIL] + "..."


def _reply(replies: BinaryIO, record: dict[str, Any]) -> None:
    replies.write(json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
