"""The grader process: makes a task from its settings, then scores one (item, text) per input line.

`grader_start.py` calls `serve` inside the sandbox. It exchanges lines with `grader_worker.py`: settings in, welcome
out; then one request in and one reply out at a time. This is where rewards and parsers that nobody has proved safe may
loop, allocate and crash. The kernel enforces every limit, so code that never returns to Python is stopped as well.
The process must never import torch, and nothing a reward prints may become a reply.
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
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from paceline.tasks.base import Item, Message, Task
from paceline.tasks.grader_replies import GraderVerdict, GraderWelcome, encode_reply
from paceline.tasks.sandbox.advice import NetworkWatch, advise
from paceline.tasks.sandbox.limits import Sandbox
from paceline.tasks.settings import TaskSettings

CPU_LIMIT_SIGNAL = signal.SIGPROF
"""Kills the process when an item has used up its CPU time."""

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

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


def serve(start: Mapping[str, Any], requests: BinaryIO, replies: BinaryIO, sandbox: Sandbox) -> None:
    """Make the task and score requests until the input ends."""
    _limit_memory(start["memory_mb"])
    own, folder, state = os.getpid(), os.getcwd(), _process_state()
    task = _make_task(start, replies, sandbox)
    watch = NetworkWatch()
    replies.write(encode_reply(start["ticket"], GraderWelcome(missing="; ".join(sandbox.missing))))
    for line in requests:
        ticket, _, request = line.partition(b" ")
        item, text = decode_request(request)
        _seed_randomness(item, text)
        verdict = _score(task, item, text, start["cpu_seconds"], sandbox)
        if os.getpid() != own:  # the reward forked, and its child came back from the call as well
            os._exit(0)
        os.chdir(folder)
        verdict = replace(
            verdict,
            has_threads=_has_threads(),
            is_spoiled=_process_state() != state,
            wants_network=watch.take() and bool(sandbox.network),
        )
        replies.write(encode_reply(ticket.decode(), verdict))
    # Threads left behind by a reward must not keep the process alive.
    os._exit(0)


def _limit_memory(megabytes: int) -> None:
    """Make allocations beyond this fail. RLIMIT_DATA counts memory that is written; RLIMIT_AS would also count mapped
    libraries, and so forbid importing large ones."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = megabytes << 20
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _make_task(start: Mapping[str, Any], replies: BinaryIO, sandbox: Sandbox) -> Task:
    """The task, ready to score; if it cannot be made, tell the parent why and exit."""
    try:
        module, _, name = start["factory"].partition(":")
        task: Task = getattr(importlib.import_module(module), name)(TaskSettings.model_validate(start["settings"]))
        if isinstance(task, NeedsPreparation):
            task.prepare()
    except BaseException as error:  # a user's module may do anything at import, even exit
        reason = str(error) if isinstance(error, ValueError) else f"making the task {_describe(error)}"
        replies.write(encode_reply(start["ticket"], GraderWelcome(refusal=_with_advice(reason, error, sandbox))))
        os._exit(1)
    return task


def _seed_randomness(item: Item, text: str) -> None:
    """Make a randomized reward a function of what it scores, not of what this process scored before."""
    named = f"{item.key}\0{text}".encode(errors="surrogatepass")
    seed = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)


def _score(task: Task, item: Item, text: str, cpu_seconds: float, sandbox: Sandbox) -> GraderVerdict:
    """The verdict on one request.

    The timer counts the CPU time of all threads, in user code and in the kernel. Its signal keeps the default action,
    so the kernel kills the process and no Python has to run, as it would for a handler. Both are reset for every item,
    because a reward may have caught the signal; so is an alarm that the item before may have set.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(CPU_LIMIT_SIGNAL, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (CPU_LIMIT_SIGNAL,))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return _check_score(task.score(item, text))
    except MemoryError:
        return GraderVerdict(kind="memory", detail="ran out of memory")
    except BaseException as error:  # a reward that calls sys.exit fails this item like any other
        return GraderVerdict(kind="error", detail=_with_advice(_describe(error), error, sandbox))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _check_score(value: Any) -> GraderVerdict:
    """The verdict for a task's return value, which can be anything if the reward is a user's."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        return GraderVerdict(kind="not a number", detail=f"returned {_shorten(repr(value))}, not a finite number")
    return GraderVerdict(score)


def _has_threads() -> bool:
    """Whether there is more than this thread, also of libraries that Python does not know of."""
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:
        return threading.active_count() > 1


def _process_state() -> tuple[object, ...]:
    """What one reward can take from the next: limits, and the standard streams."""
    limits = tuple(resource.getrlimit(kind) for kind in _LIMITS)
    streams = tuple(stream is None or stream.closed for stream in (sys.stdin, sys.stdout, sys.stderr))
    return limits, streams, tuple(_is_open(descriptor) for descriptor in range(3))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _with_advice(detail: str, error: BaseException, sandbox: Sandbox) -> str:
    advice = advise(error, sandbox)
    return f"{detail} ({advice})" if advice else detail


def _describe(error: BaseException) -> str:
    """The error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    try:
        words = _shorten(str(error))
    except BaseException:  # a reward's own error may have bugs too
        words = "(its message cannot be read)"
    return f"raised {type(error).__name__}: {words}{place}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[:MAX_DETAIL] + "..."
