"""Reads tool calls out of an answer, for the families of chat templates that write them as tagged JSON.

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

Qwen2.5, Qwen3 and Hermes write them so. `reads_calls` recognises the family by its template; the text of any other
stays as it is. The text is a model's and not trusted: what is no well-formed call stays text, and nothing is ever run.
Called by `generation.py`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import NamedTuple

from paceline.core.documents import BadJson, parse_json

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPENING}\s*(\{{.*?\}})\s*{CLOSING}", re.DOTALL)
_JSON_FORM = re.compile(r'\{\\?"name\\?":')


class ToolCall(NamedTuple):
    """One call; the arguments are JSON, as clients expect."""

    call_id: str
    name: str
    arguments: str


def reads_calls(template: object) -> bool:
    """Whether answers to this chat template are known to write calls as tagged JSON."""
    return isinstance(template, str) and OPENING in template and _JSON_FORM.search(template) is not None


def split_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """The text before the first call, and the calls of these tools; the whole text if any part is not well-formed."""
    start = text.find(OPENING)
    if start < 0:
        return text, []
    calls = [_read(match, names) for match in _CALL.finditer(text, start)]
    if not calls or None in calls or _CALL.sub("", text[start:]).strip():
        return text, []
    return text[:start].rstrip(), [call for call in calls if call is not None]


def _read(match: re.Match[str], names: Collection[str]) -> ToolCall | None:
    try:
        found = parse_json(match[1])
    except BadJson:
        return None
    if not isinstance(found, dict) or set(found) != {"name", "arguments"} or not isinstance(found["name"], str):
        return None
    if found["name"] not in names or not isinstance(found["arguments"], dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex}", found["name"], json.dumps(found["arguments"], ensure_ascii=False))
