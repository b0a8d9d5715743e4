"""The task `word_sums`: sound items, and a score that only the problem's own sum gets."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tasks.base import Item, LevelledTask
from paceline.tasks.checks import check
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings
from paceline.tasks.word_sums import LEVELS, REQUEST, WordSums, final_sum


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("style", ["compact", "chat"])
def test_every_level_is_sound(level: int, style: str) -> None:
    task = make_task(TaskSettings(name="word_sums", level=level, dials={"style": style}))
    report = check(task, num_items=60)
    assert report.problems == () and report.num_items == 60 and isinstance(task, LevelledTask)


def test_a_problem_has_its_amounts_and_its_sum() -> None:
    kinds = set()
    for index in range(200):
        item = WordSums(1, {"style": "chat"}).item(3, index)
        kind, a, b = item.key.split()
        kinds.add(kind)
        x, operator, y, value = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", item.answer["sums"][0]).groups()  # type: ignore[union-attr]
        assert (x, y) == (a, b) and int(value) == (int(a) + int(b) if operator == "+" else int(a) - int(b)) > 1
        assert re.findall(r"\d+", item.prompt) == [a, b] and item.prompt.endswith(f"? {REQUEST}")
        assert (operator == "-") == (kind in ("give", "more"))
    assert len(kinds) == 4


FIND = Item("", {"sums": ["7 + 5 = 12", "5 + 7 = 12"]}, "find 7 5")
GIVE = Item("", {"sums": ["17 - 5 = 12"]}, "give 17 5")


@pytest.mark.parametrize(
    ("item", "text", "score"),
    [
        (FIND, "Ben has 7 + 5 = 12 stamps now.", 1),
        (FIND, "5+7=12", 1),
        (FIND, "First 7 + 4 = 11. No: 7 + 5 = 12.", 1),
        (FIND, "12", 0),
        (FIND, "Ben has 12 stamps now.", 0),
        (FIND, "7 + 5 = 13", 0),
        (FIND, "6 + 6 = 12", 0),
        (FIND, "7 + 5 = 12.5", 0),
        (FIND, "7 + 5 = 12,000", 0),
        (FIND, "17 + 5 = 12", 0),
        (FIND, "7 + 5 = 12, or 13", 0),
        (FIND, "", 0),
        (FIND, "7 + 5 = 12" + " " * 5000, 0),
        (GIVE, "17 - 5 = 12 are left.", 1),
        (GIVE, "5 - 17 = 12", 0),
    ],
)
def test_only_the_problems_own_sum_scores(item: Item, text: str, score: float) -> None:
    assert WordSums().score(item, text) == score


@given(st.text(alphabet="0123456789+-=., a", max_size=60))
def test_any_text_has_a_final_sum_or_none(text: str) -> None:
    found = final_sum(text)
    assert found is None or re.sub(r"\s", "", found) in re.sub(r"\s", "", text)
