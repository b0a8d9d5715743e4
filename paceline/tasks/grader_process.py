"""The grader process: makes a task from its settings, then scores one (item, text) per input line.

`grading.Grader` starts it as `python -m paceline.tasks.grader_process` and exchanges lines of JSON with it: settings
in, "ready" or "refused" out; then one request in and one reply out at a time. This is where rewards and parsers that
nobody has proved safe may loop, allocate and crash. The kernel enforces every limit, so code that never returns to
Python is stopped as well. The process must never import torch, and nothing a reward prints may reach the reply pipe.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import random
import resource
import signal
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from paceline.core.linux import die_with_parent
from paceline.tasks.base import Item, Message, Task
from paceline.tasks.settings import TaskSettings

CPU_LIMIT_SIGNAL = signal.SIGPROF
"""Kills the process when an item has used up its CPU time."""

MAX_DETAIL = 400
"""How many characters of an error are passed on: a message may contain all of a hostile text."""


@runtime_checkable
class NeedsPreparation(Protocol):
    """A task that must load something before it can score, such as a user's reward."""

    def prepare(self) -> None:
        """Load it now; a ValueError says what the user can fix."""


def encode_request(item: Item, text: str) -> bytes:
    """The line that requests the score of a text."""
    messages = [[message.role, message.content] for message in item.messages]
    record = {"prompt": item.prompt, "answer": item.answer, "key": item.key, "level": item.level, "messages": messages}
    return json.dumps({"item": record, "text": text}).encode() + b"\n"


def decode_request(line: bytes) -> tuple[Item, str]:
    """The item and the text of a request line."""
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
    die_with_parent(start["parent"])
    _limit_memory(start["memory_mb"])
    task = _make_task(start["factory"], start["settings"], replies)
    _reply(replies, {"ready": True})
    for line in requests:
        item, text = decode_request(line)
        _seed_randomness(item, text)
        _reply(replies, _score(task, item, text, start["cpu_seconds"]))
    # Threads left behind by a reward must not keep the process alive.
    os._exit(0)


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, moved out of a reward's reach: its stdin is empty and its prints go to stderr."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _limit_memory(megabytes: int) -> None:
    """Make allocations beyond this fail. RLIMIT_DATA counts memory that is written; RLIMIT_AS would also count mapped
    libraries, and so forbid importing large ones."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = megabytes << 20
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _make_task(factory: str, settings: Mapping[str, Any], replies: BinaryIO) -> Task:
    """The task, ready to score; if it cannot be made, tell the parent why and exit."""
    try:
        module, _, name = factory.partition(":")
        task: Task = getattr(importlib.import_module(module), name)(TaskSettings.model_validate(settings))
        if isinstance(task, NeedsPreparation):
            task.prepare()
    except BaseException as error:  # a user's module may do anything at import, even exit
        reason = str(error) if isinstance(error, ValueError) else f"making the task {_describe(error)}"
        _reply(replies, {"refused": reason})
        os._exit(1)
    return task


def _seed_randomness(item: Item, text: str) -> None:
    """Make a randomized reward a function of what it scores, not of what this process scored before."""
    named = f"{item.key}\0{text}".encode(errors="surrogatepass")
    seed = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)


def _score(task: Task, item: Item, text: str, cpu_seconds: float) -> dict[str, Any]:
    """The reply to one request.

    The timer counts the CPU time of all threads, in user code and in the kernel. Its signal keeps the default action,
    so the kernel kills the process and no Python has to run, as it would for a handler. Both are reset for every item,
    because a reward may have caught the signal.
    """
    signal.signal(CPU_LIMIT_SIGNAL, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return _check_score(task.score(item, text))
    except MemoryError:
        return {"kind": "memory", "detail": "ran out of memory"}
    except BaseException as error:  # a reward that calls sys.exit fails this item like any other
        return {"kind": "error", "detail": _describe(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _check_score(value: Any) -> dict[str, Any]:
    """The reply for a task's return value, which can be anything if the reward is a user's."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        return {"kind": "not a number", "detail": f"returned {_shorten(repr(value))}, not a finite number"}
    return {"score": score}


def _describe(error: BaseException) -> str:
    """The error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {_shorten(str(error))}{place}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[:MAX_DETAIL] + "..."


def _reply(replies: BinaryIO, record: dict[str, Any]) -> None:
    replies.write(json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
