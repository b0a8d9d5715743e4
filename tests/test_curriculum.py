"""Curricula: levels known one step early, from recorded statistics alone, and the same after a restart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import SettingsError
from paceline.tasks.base import Item, Split
from paceline.tasks.curriculum import LAG, MIN_SHARE, WINDOW, AdaptiveCurriculum, EvenCurriculum, make_curriculum
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

LEVELS = range(4)
Rewards = dict[int, list[float]]


def rewards_at(*solve_rates: float) -> Rewards:
    """Ten rewards for each level, so many of them right."""
    return {level: [1.0] * round(10 * rate) + [0.0] * round(10 - 10 * rate) for level, rate in enumerate(solve_rates)}


def counts(levels: Sequence[int]) -> list[int]:
    counter = Counter(levels)
    return [counter[level] for level in LEVELS]


history = st.lists(
    st.dictionaries(st.sampled_from(LEVELS), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=9)),
    min_size=LAG + WINDOW + 4,
    max_size=LAG + WINDOW + 6,
)


def test_easy_is_one_level_and_mixed_is_all_alike() -> None:
    task = make_task(TaskSettings())
    easy = make_curriculum(TaskSettings(level=1), task)
    assert {easy.level(step, draw) for step in range(3) for draw in range(200)} == {1}
    mixed = make_curriculum(TaskSettings(curriculum="mixed", max_level=3), task)
    assert all(
        abs(count - 1000) < 4.5 * (4000 * 3 / 16) ** 0.5 for count in counts([mixed.level(0, d) for d in range(4000)])
    )
    assert {mixed.level(step, 17) for step in range(50)} == {mixed.level(0, 17)}, "the step plays no part"
    part = make_curriculum(TaskSettings(curriculum="mixed", level=1, max_level=2), task)
    assert {part.level(0, draw) for draw in range(99)} == {1, 2}


def test_mixed_reaches_the_last_level_and_seeds_differ() -> None:
    task = make_task(TaskSettings(name="graph"))
    first, second = (
        make_curriculum(TaskSettings(name="graph", curriculum="mixed", seed=seed), task) for seed in (0, 1)
    )
    levels = [[one.level(0, draw) for draw in range(200)] for one in (first, second)]
    assert set(levels[0]) == set(levels[1]) == {0, 1, 2, 3} and levels[0] != levels[1]


def test_adaptive_starts_even_and_moves_to_what_teaches() -> None:
    curriculum = AdaptiveCurriculum(0, LEVELS)
    assert curriculum.shares(0) == curriculum.shares(1) == [0.25] * 4
    for step in range(20):
        curriculum.record(step, rewards_at(1.0, 0.9, 0.5, 0.0))
    shares = curriculum.shares(21)
    assert sum(shares) == pytest.approx(1) and shares[2] > 0.5 > shares[1] > shares[0] >= MIN_SHARE / 4
    assert shares[3] == pytest.approx(shares[0])
    drawn = counts([curriculum.level(21, draw) for draw in range(4000)])
    for share, count in zip(shares, drawn, strict=True):
        assert abs(count - 4000 * share) < 4.5 * (4000 * share * (1 - share)) ** 0.5


def test_adaptive_forgets_what_left_the_window() -> None:
    curriculum = AdaptiveCurriculum(0, LEVELS)
    for step in range(WINDOW):
        curriculum.record(step, rewards_at(0.5, 0.0, 0.0, 0.0))
    assert curriculum.shares(WINDOW + LAG - 1)[0] > 0.5
    for step in range(WINDOW, 2 * WINDOW):
        curriculum.record(step, rewards_at(0.0, 0.0, 0.0, 0.5))
    assert curriculum.shares(2 * WINDOW + LAG - 1)[3] > 0.5
    assert curriculum.shares(2 * WINDOW + LAG - 1)[0] < 0.1


@settings(max_examples=25)
@given(history)
def test_levels_of_a_step_are_known_one_step_early(steps: list[Rewards]) -> None:
    """What step t + 1 draws is the same before and after the steps t and t + 1 are recorded."""
    curriculum = AdaptiveCurriculum(5, LEVELS)
    early: dict[int, list[float]] = {0: curriculum.shares(0), 1: curriculum.shares(1)}
    for step, rewards in enumerate(steps):
        assert curriculum.shares(step) == early[step]
        assert curriculum.shares(step + 1) == early[step + 1]
        curriculum.record(step, rewards)
        assert curriculum.shares(step) == early[step] and curriculum.shares(step + 1) == early[step + 1]
        early[step + LAG] = curriculum.shares(step + LAG)


def test_a_step_hangs_on_the_last_one_it_may_see() -> None:
    """The control of the test above: the newest statistics a step may see do change it."""
    first, second = AdaptiveCurriculum(0, LEVELS), AdaptiveCurriculum(0, LEVELS)
    first.record(0, rewards_at(0.5, 0.5, 0.5, 0.5))
    second.record(0, rewards_at(0.5, 0.0, 0.5, 0.5))
    assert first.shares(1) == second.shares(1) and first.shares(2) != second.shares(2)


@settings(max_examples=25)
@given(history)
def test_a_restart_changes_no_level(steps: list[Rewards]) -> None:
    whole = AdaptiveCurriculum(7, LEVELS)
    resumed = AdaptiveCurriculum(7, LEVELS)
    for step, rewards in enumerate(steps):
        assert [whole.level(step + 1, draw) for draw in range(8)] == [
            resumed.level(step + 1, draw) for draw in range(8)
        ]
        whole.record(step, rewards)
        resumed.record(step, rewards)
        state = json.loads(json.dumps(resumed.state()))
        resumed = AdaptiveCurriculum(7, LEVELS)
        resumed.restore(state)
        assert resumed.state() == whole.state()
    assert len(whole.state()["steps"]) == LAG + WINDOW, "what no step can see any more is dropped"


def test_the_even_curriculum_has_no_state() -> None:
    curriculum = EvenCurriculum(0, range(3))
    before = [curriculum.level(0, draw) for draw in range(20)]
    curriculum.record(0, rewards_at(1.0, 1.0, 1.0))
    curriculum.restore(json.loads(json.dumps(curriculum.state())))
    assert [curriculum.level(5, draw) for draw in range(20)] == before


def test_rewards_beyond_right_and_wrong_leave_shares_sane() -> None:
    curriculum = AdaptiveCurriculum(0, LEVELS)
    curriculum.record(0, {0: [-9.0] * 50, 1: [40.0] * 50, 2: [0.5] * 50, 3: []})
    shares = curriculum.shares(2)
    assert sum(shares) == pytest.approx(1) and min(shares) >= MIN_SHARE / 4 and shares[0] == pytest.approx(shares[1])


def test_steps_are_recorded_once_and_in_order() -> None:
    curriculum = AdaptiveCurriculum(0, LEVELS)
    curriculum.record(3, {})
    for wrong in (3, 2, 5):
        with pytest.raises(AssertionError, match="out of order"):
            curriculum.record(wrong, {})
    with pytest.raises(AssertionError, match="step 6 was planned before step 4 was recorded"):
        curriculum.level(6, 0)


class Flat:
    """A task without levels."""

    name = "flat"
    size = None

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        return Item("", "", "")

    def score(self, item: Item, text: str) -> float:
        return 0.0

    def gold(self, item: Item) -> str:
        return ""


def test_a_task_without_levels_has_level_0() -> None:
    curriculum = make_curriculum(TaskSettings(), Flat())
    assert {curriculum.level(0, draw) for draw in range(50)} == {0}
    for section in (TaskSettings(curriculum="mixed"), TaskSettings(level=2)):
        with pytest.raises(
            SettingsError, match=r"task\.curriculum: flat has no levels; use curriculum easy with level 0"
        ):
            make_curriculum(section, Flat())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (TaskSettings(curriculum="mixed", max_level=6), r"task\.max_level: countdown has levels 0 to 5, got 6"),
        (
            TaskSettings(curriculum="adaptive", level=3, max_level=2),
            r"task\.max_level: must not be below task\.level 3",
        ),
    ],
)
def test_levels_that_are_not_there_are_errors(section: TaskSettings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_curriculum(section, make_task(section))


def test_an_adaptive_curriculum_knows_what_it_can_plan() -> None:
    adaptive, even = AdaptiveCurriculum(0, range(3)), EvenCurriculum(0, range(3))
    assert [adaptive.is_planned(step) for step in (1, 2, 3)] == [True, True, False]
    adaptive.record(1, {0: [1.0]})
    assert [adaptive.is_planned(step) for step in (2, 3, 4)] == [True, True, False]
    assert even.is_planned(1000)
