"""Strangers' texts as a reader may see them: in which nothing is invisible and nothing turns the direction of a line.

The report passes every text it shows through `visible`: rollouts, names of metrics, workers and settings, error
messages. Text never becomes HTML here or later; the page inserts it as text.
"""

from __future__ import annotations

import re
from typing import Any

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
"""Control codes, unusual line breaks, bidirectional marks, lone surrogates."""


def visible(text: str) -> str:
    """The text with invisible characters written as their code: an escape as ⟨1B⟩."""
    return _HIDDEN.sub(lambda match: f"⟨{ord(match[0]):02X}⟩", text)


def all_visible(value: Any) -> Any:
    """Plain data with every text in it, keys too, made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): all_visible(inner) for key, inner in value.items()}
    return [all_visible(inner) for inner in value] if isinstance(value, list | tuple) else value
