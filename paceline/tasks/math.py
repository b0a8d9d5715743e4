"""Task `math`: questions from a data file, final answers judged by math-verify.

`FileTask` makes the items; the scorer here extracts the answer from a text and asks math-verify whether it equals the
file's. Only one answer counts: the last `\\boxed{...}`, or what math-verify finds at the end if there is no box. Texts
come from a model and may be built to stall a computer algebra system, so this runs in grader processes, whose limits
replace math-verify's own timers (signals, which cannot stop code outside Python).
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from paceline.tasks.base import Item
from paceline.tasks.files import FileTask, import_extra
from paceline.tasks.settings import TaskSettings

INSTRUCTION = "\nReason step by step and put the final answer in \\boxed{}."
"""Appended to questions of plain files; prompts of TRL and verl files carry their own instruction."""

MAX_ANSWER_LENGTH = 500
"""A longer box holds no answer, unless the file's own answer is long as well."""

MAX_TAIL = 1000
"""Without a box, the final answer is searched for in this many characters at the end."""

_BOX = "\\boxed"
_GSM8K_MARK = "####"


class MathScorer:
    """1 for a text whose final answer equals the item's according to math-verify, else 0."""

    def prepare(self) -> None:
        """Import math-verify and let it compile its patterns before the first item's clock starts."""
        assert self._is_equal("\\boxed{1}", "\\boxed{1}"), "math-verify is broken"

    def score(self, item: Item, text: str) -> float:
        gold = read_gold(item)
        answer = find_answer(text, max(MAX_ANSWER_LENGTH, 2 * len(gold)))
        return float(answer is not None and self._is_equal(f"{_BOX}{{{gold}}}", answer))

    def gold(self, item: Item) -> str:
        return f"{_BOX}{{{read_gold(item)}}}"

    def _is_equal(self, gold: str, answer: str) -> bool:
        expected = _parse(gold)
        if not expected:
            raise ValueError(f"math-verify cannot read the answer {gold!r} in the data")
        return _verify(expected, _parse(answer))


def make_math_task(settings: TaskSettings) -> FileTask:
    """The task for a data file with final answers."""
    if settings.reward is not None:
        raise ValueError("task.reward: task math has a reward of its own; leave it out or choose a task that takes one")
    return FileTask.from_settings(settings, MathScorer(), INSTRUCTION, check=read_gold)


def read_gold(item: Item) -> str:
    """The final answer in a file's answer: the part after GSM8K's ####, or a worked solution's last box, or all."""
    answer = item.answer["answer"]
    if answer is None:
        raise ValueError("the row has no answer; name its column with task.answer_column")
    text = str(answer)
    if _GSM8K_MARK in text:
        text = text.rpartition(_GSM8K_MARK)[2]
    elif (box := last_box(text)) is not None:
        text = box
    return text.strip()


def find_answer(text: str, max_length: int = MAX_ANSWER_LENGTH) -> str | None:
    """The part of a text for math-verify to read; None if there is no final answer."""
    if _BOX not in text:
        return text[-MAX_TAIL:] if text.strip() else None
    box = last_box(text)
    return f"{_BOX}{{{box}}}" if box is not None and len(box) <= max_length else None


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None if there is none or it is not closed."""
    _, mark, rest = text.rpartition(_BOX)
    rest = rest.lstrip()
    if not mark or not rest.startswith("{"):
        return None
    depth = 0
    for end, letter in enumerate(rest):
        is_escaped = end > 0 and rest[end - 1] == "\\"
        depth += (letter == "{") - (letter == "}") if not is_escaped else 0
        if depth == 0:
            return rest[1:end].strip()
    return None


def _load_math_verify() -> ModuleType:
    """The math-verify module, in the same state for every text."""
    module = import_extra("math_verify", "task math")
    # It warns that its timers are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Some comparisons try random points; without a fixed seed they would depend on earlier comparisons.
    import_extra("sympy.core.random", "task math").seed(0)
    return module


def _parse(text: str) -> list[Any]:
    """What math-verify extracts from a text: the last match of its first matching pattern, or nothing."""
    math_verify = _load_math_verify()
    try:
        found: list[Any] = math_verify.parse(
            text,
            [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:  # a text that it chokes on is not an answer, and it may raise anything then
        return []
    return found


def _verify(expected: list[Any], found: list[Any]) -> bool:
    """Whether math-verify considers two answers equal."""
    math_verify = _load_math_verify()
    try:
        return bool(math_verify.verify(expected, found, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # as above
        return False
