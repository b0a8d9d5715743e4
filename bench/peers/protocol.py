"""The protocol between a bench and a peer process: one JSON object per line, request in, reply out.

Every worker in this folder calls `serve` with its own loader; `bench/peer.py` is the other end. Standard library only,
because a worker's environment may have nothing of ours. A worker never computes without a request, so that a bench can
keep several loaded and let one compute at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """What to generate: exactly `num_tokens` tokens per prompt, ignoring end-of-sequence tokens."""

    prompts: list[list[int]]
    num_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Generated:
    """The new tokens per prompt; `accept_length` includes the policy's own token, None without drafts."""

    token_ids: list[list[int]]
    accept_length: float | None = None


class Contender(Protocol):
    """A loaded model that generates."""

    versions: dict[str, str]
    settings: dict[str, Any]

    def generate(self, request: Request) -> Generated: ...


def serve(load: Callable[[dict[str, Any]], Contender]) -> None:
    """Answer "load" and "generate" requests until standard input ends."""
    # Replies own the real standard output: what libraries print goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contender: Contender | None = None
    for line in sys.stdin:
        message = json.loads(line)
        reply: dict[str, Any]
        try:
            if message.pop("op") == "load":
                contender = load(message)
                reply = {"versions": contender.versions, "settings": contender.settings}
            else:
                assert contender is not None, "generate was requested before load"
                reply = _timed(contender, Request(**message))
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")


def _timed(contender: Contender, request: Request) -> dict[str, Any]:
    """Wall seconds, and CPU seconds of all threads: above the wall seconds, several threads worked."""
    wall, cpu = time.perf_counter(), time.process_time()
    generated = contender.generate(request)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "token_ids": generated.token_ids,
        "accept_length": generated.accept_length,
    }
