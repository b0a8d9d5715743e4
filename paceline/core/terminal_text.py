"""Text that is safe to show on a terminal: control characters are visible, not obeyed.

A model, a dataset or somebody's run folder may hold escape sequences, which can retitle a terminal, hide text in it or
type for its user. Whatever prints such text to a terminal passes it through `escaped`; files and pipes get it as it is.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all but tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these reorder the text around them
    "\u2028\u2029\ud800-\udfff]"  # line ends of some programs; lone surrogates, which cannot be encoded
)


def escaped(text: str) -> str:
    r"""The text with control characters written as escapes (`\x1b`); text that is valid JSON stays so, and equal."""
    return _CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    if found[0] < " ":  # never in JSON
        return found[0].encode("unicode_escape").decode()
    return f"\\u{ord(found[0]):04x}"
