"""Final answers of mathematics: a data file's questions, scored by what math-verify says of the last answer in a text.

`FileTask` makes the items; the scorer here reads the answer out of a text and asks math-verify whether it equals the
file's. Only one answer counts, the last `\\boxed{...}`, or without any box what math-verify finds at the end. Texts are
a model's and may be built to stall a computer algebra system, so this runs in grader processes, whose limits replace
the timers that math-verify would set itself (signals, which cannot stop code outside Python).
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from paceline.tasks.base import Item
from paceline.tasks.files import FileTask, import_extra
from paceline.tasks.settings import TaskSettings

INSTRUCTION = "\nReason step by step and put the final answer in \\boxed{}."
"""Below questions of plain files; prompts of TRL and verl files say themselves what they want."""

MAX_ANSWER_LENGTH = 500
"""Longer boxes hold no answer; a file's own answer may be longer, and then so may the model's."""

MAX_TAIL = 1000
"""Where there is no box, the final answer is looked for in so many characters at the end."""

_BOX = "\\boxed"
_GSM8K_MARK = "####"


class MathScorer:
    """1 for a text whose final answer math-verify calls equal to the item's, else 0."""

    def prepare(self) -> None:
        """Import math-verify, and let it compile its patterns before the first item's time runs."""
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
            raise ValueError(f"math-verify cannot read the answer {gold!r} of the data")
        return _verify(expected, _parse(answer))


def make_math_task(settings: TaskSettings) -> FileTask:
    """The task of a data file with final answers."""
    if settings.reward is not None:
        raise ValueError("task.reward: task math has a reward of its own; leave it out or choose a task that takes one")
    return FileTask.from_settings(settings, MathScorer(), INSTRUCTION)


def read_gold(item: Item) -> str:
    """The final answer of a file's answer: what follows GSM8K's ####, or the last box of a worked solution, or all."""
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
    """The part of a text that math-verify is to read; None if there is no final answer."""
    if _BOX not in text:
        return text[-MAX_TAIL:] if text.strip() else None
    box = last_box(text)
    return f"{_BOX}{{{box}}}" if box is not None and len(box) <= max_length else None


def last_box(text: str) -> str | None:
    """What the last `\\boxed{...}` holds; None if there is none or it is not closed."""
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
    """Math-verify, in the same state for every text."""
    module = import_extra("math_verify", "task math")
    # It warns that its timers are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Some comparisons try random points, which would depend on what was compared before.
    import_extra("sympy.core.random", "task math").seed(0)
    return module


def _parse(text: str) -> list[Any]:
    """What math-verify reads in a text: the last match of its first pattern that matches, or nothing."""
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
    except Exception:  # a text that it chokes on is no answer; what it raises then is of every kind
        return []
    return found


def _verify(expected: list[Any], found: list[Any]) -> bool:
    """Whether math-verify calls two answers equal."""
    math_verify = _load_math_verify()
    try:
        return bool(math_verify.verify(expected, found, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # as above
        return False
