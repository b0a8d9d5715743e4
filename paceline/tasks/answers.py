"""The answer format: how solutions write their final answer and how scorers find it.

The procedural tasks write with `write_answer` and score with `final_answer`; only a text's last answer counts. The text
comes from a model and may be huge or hostile, so every search here is linear in its length and never evaluates it.
"""

from __future__ import annotations

import re

ANSWER_WORD = "answer"
"""The word that starts an answer line."""

MAX_ANSWER_LENGTH = 400
"""A longer final answer counts as none; no correct answer comes close to this."""

_LINE = re.compile(rf"^[ \t]*{ANSWER_WORD}\b[ \t]*:?(.*)$", re.ASCII | re.IGNORECASE | re.MULTILINE)
_OPEN, _CLOSE = f"<{ANSWER_WORD}>", f"</{ANSWER_WORD}>"


def write_answer(answer: str) -> str:
    """The last line of a solution."""
    return f"{ANSWER_WORD} {answer}"


def final_answer(text: str) -> str | None:
    """The content of a text's last answer: a line `answer X` or `Answer: X`, or the tag `<answer>X</answer>`."""
    start, answer = max(_last_line(text), _last_tag(text), key=lambda found: found[0])
    answer = answer.strip()
    return answer if start >= 0 and len(answer) <= MAX_ANSWER_LENGTH else None


def _last_line(text: str) -> tuple[int, str]:
    """The start and content of the last answer line; (-1, "") if there is none."""
    found = (-1, "")
    for match in _LINE.finditer(text):
        found = (match.start(), match[1])
    return found


def _last_tag(text: str) -> tuple[int, str]:
    """The start and content of the last closed answer tag; (-1, "") if there is none."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return (start, text[start + len(_OPEN) : end]) if start >= 0 else (-1, "")
