"""What a grader process answers, as lines of JSON, and the strict reader of these lines.

A reward shares its process with the writer, so it can reach the pipe: by mistake, or on purpose. Every request
carries a ticket that nobody can guess, and only a well-formed line with that ticket is an answer. So junk is noticed,
and no line that was written before an item was sent can score it. A reward that digs up the ticket of its own item
only gains the score that it could have returned.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass
from typing import Any, Literal, get_args

FailureKind = Literal["timeout", "crash", "memory", "error", "not a number"]

MAX_REPLY_BYTES = 1 << 16
MAX_DETAIL = 8000


@dataclass(frozen=True)
class GraderWelcome:
    """The first reply: the task is made, or why it cannot be."""

    refusal: str = ""
    missing: str = ""
    """What the sandbox does not enforce."""


@dataclass(frozen=True)
class GraderVerdict:
    """The reply to a request: a score, or the kind of failure."""

    score: float = 0.0
    kind: FailureKind | Literal[""] = ""
    detail: str = ""
    has_threads: bool = False
    """Whether it leaves threads behind, which use up the CPU time of later items."""
    is_spoiled: bool = False
    """Whether the reward took limits or streams away from the process, which the next item would miss."""
    wants_network: bool = False
    """Whether it tried to open a socket where that is not allowed."""


_TYPES = {kind: {name: type(one) for name, one in vars(kind()).items()} for kind in (GraderWelcome, GraderVerdict)}


def new_ticket() -> str:
    return secrets.token_hex(16)


def encode_reply(ticket: str, reply: GraderWelcome | GraderVerdict) -> bytes:
    """The line that answers the request with this ticket."""
    return json.dumps({"ticket": ticket} | vars(reply)).encode() + b"\n"


def decode_welcome(line: bytes, ticket: str) -> GraderWelcome | None:
    """The first reply, if this line is one."""
    fields = _fields(line, ticket, GraderWelcome)
    return GraderWelcome(**fields) if fields is not None else None


def decode_verdict(line: bytes, ticket: str) -> GraderVerdict | None:
    """The reply to a request, if this line is one."""
    fields = _fields(line, ticket, GraderVerdict)
    if fields is None or not math.isfinite(fields["score"]) or fields["kind"] not in ("", *get_args(FailureKind)):
        return None
    return GraderVerdict(**fields)


def _fields(line: bytes, ticket: str, kind: type[GraderWelcome] | type[GraderVerdict]) -> dict[str, Any] | None:
    """The fields of a reply of this kind, each of exactly its type; texts without control characters."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.pop("ticket", None) != ticket:
        return None
    if {name: type(value) for name, value in record.items()} != _TYPES[kind]:
        return None
    return {name: printable(value) if isinstance(value, str) else value for name, value in record.items()}


def printable(text: str) -> str:
    """A text that is safe on a terminal: control characters as escapes, and not too long."""
    safe = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:MAX_DETAIL])
    return "".join(safe)
