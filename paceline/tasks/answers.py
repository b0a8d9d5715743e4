"""How an answer is written and found: the last answer of a text is its final one, and only that one counts.

The procedural tasks write with `write_answer` and score with `final_answer`. The text is a model's: it may be huge or
hostile, so every search here takes time linear in its length and nothing in it is ever evaluated.
"""

from __future__ import annotations

import re

ANSWER_WORD = "answer"
"""The word that opens an answer line."""

MAX_ANSWER_LENGTH = 400
"""Longer final answers count as none: no right answer comes near it."""

_LINE = re.compile(rf"^[ \t]*{ANSWER_WORD}\b[ \t]*:?(.*)$", re.ASCII | re.IGNORECASE | re.MULTILINE)
_OPEN, _CLOSE = f"<{ANSWER_WORD}>", f"</{ANSWER_WORD}>"


def write_answer(answer: str) -> str:
    """The line a solution ends with."""
    return f"{ANSWER_WORD} {answer}"


def final_answer(text: str) -> str | None:
    """What the last answer of a text says: a line `answer X` or `Answer: X`, or the tag `<answer>X</answer>`."""
    start, answer = max(_last_line(text), _last_tag(text), key=lambda found: found[0])
    answer = answer.strip()
    return answer if start >= 0 and len(answer) <= MAX_ANSWER_LENGTH else None


def _last_line(text: str) -> tuple[int, str]:
    """Where the last answer line starts and what it says; (-1, "") without one."""
    found = (-1, "")
    for match in _LINE.finditer(text):
        found = (match.start(), match[1])
    return found


def _last_tag(text: str) -> tuple[int, str]:
    """Where the last closed answer tag starts and what it says; (-1, "") without one."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return (start, text[start + len(_OPEN) : end]) if start >= 0 else (-1, "")
