"""Evaluation: pass@k against counting, standard errors, and figures of made-up answers."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import Rollout
from paceline.run.evaluate import Evaluation, pass_at_k
from paceline.run.prompts import Question
from paceline.run.standard_errors import gain_error, solved_event, standard_error
from paceline.tasks.base import Item
from paceline.tasks.grading import Grade


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_subsets(num_samples: int, data: st.DataObject) -> None:
    solved = data.draw(st.lists(st.integers(0, num_samples), min_size=1, max_size=4))
    k = data.draw(st.integers(1, num_samples))
    shares = []
    for count in solved:
        subsets = list(combinations([True] * count + [False] * (num_samples - count), k))
        shares.append(sum(any(subset) for subset in subsets) / len(subsets))
    assert pass_at_k(solved, num_samples, k) == pytest.approx(shares)


def rollout(prompt: int, sample: int, length: int, reason: str = "stop") -> Rollout:
    return Rollout(prompt, sample, prompt, [5] * length, [-1.0] * length, "", reason)  # type: ignore[arg-type]


def test_figures_of_an_evaluation() -> None:
    questions = [Question(i, Item("?", 1, str(i)), 0, [1]) for i in range(2)]
    rollouts = [rollout(0, 0, 4), rollout(0, 1, 8, "length"), rollout(1, 0, 2), rollout(1, 1, 2)]
    grades = [Grade(1.0), Grade(0.0), Grade(0.0), Grade(0.5)]
    found = Evaluation(questions, rollouts, grades, 2).metrics((1, 2))
    assert [found.pop(name) for name in list(found) if "grader" in name] == [0.0] * 5
    assert found == {
        "eval/accuracy": 0.25,
        "eval/reward": 0.375,
        "eval/mean_length": 4.0,
        "eval/max_length": 8.0,
        "eval/clipped_ratio": 0.25,
        "eval/pass@1": 0.25,
        "eval/pass@2": 0.5,
        "eval/accuracy_se": 0.25,
        "eval/reward_se": 0.125,
        "eval/pass@1_se": 0.25,
        "eval/pass@2_se": 0.5,
    }


# --- standard errors --------------------------------------------------------------------------------------------------


def test_the_standard_error_is_that_of_the_field() -> None:
    """One answer per item: the textbook's, with n - 1."""
    solved = [1.0] * 30 + [0.0] * 70
    assert standard_error(solved) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert standard_error([0.5, 0.5, 0.5]) == 0.0
    assert standard_error([1.0]) is None and standard_error([]) is None


def test_more_samples_of_an_item_are_no_more_items() -> None:
    """If all samples of an item agree, four of them tell as much as one; counted as independent they would halve it."""

    def figures(num_samples: int) -> dict[str, float]:
        questions = [Question(i, Item("?", 1, str(i)), 0, [1]) for i in range(6)]
        rollouts = [rollout(i, sample, 3) for i in range(6) for sample in range(num_samples)]
        grades = [Grade(float(made.prompt_index % 2)) for made in rollouts]
        return Evaluation(questions, rollouts, grades, num_samples).metrics()

    one, four = figures(1), figures(4)
    assert one["eval/accuracy_se"] == four["eval/accuracy_se"] == pytest.approx(math.sqrt(0.25 / 5))


def test_a_single_item_has_no_standard_error() -> None:
    found = Evaluation([Question(0, Item("?", 1, "0"), 0, [1])], [rollout(0, 0, 4)], [Grade(1.0)], 1).metrics((1,))
    assert found["eval/accuracy"] == 1.0 and not [name for name in found if name.endswith("_se")]


def test_it_covers_the_truth_about_as_often_as_it_says() -> None:
    """Drawn from a known accuracy, with items of unequal difficulty and several samples: two errors cover 95 %."""
    chance = np.random.default_rng(0)
    num_covered = 0
    for _ in range(400):
        difficulty = chance.beta(0.5, 0.5, 60)
        by_item = chance.binomial(4, difficulty) / 4
        error = standard_error(by_item.tolist())
        assert error is not None
        num_covered += abs(by_item.mean() - 0.5) < 1.96 * error
    assert 0.90 < num_covered / 400 < 0.98


def test_a_gain_on_the_same_items_is_paired() -> None:
    """Most items keep their answer: what varies is the gain of an item, not the items."""
    before = [1] * 50 + [0] * 50
    after = [1] * 60 + [0] * 40
    paired = gain_error(solved_event(before, 1), solved_event(after, 1))
    alone = standard_error([float(value) for value in before])
    assert paired is not None and alone is not None and paired == pytest.approx(math.sqrt(0.1 * 0.9 / 99))
    assert paired < alone, "as if they were independent, it would be larger than either's own"


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"solved": [1, 0], "samples": 1},
        {"solved": [1, 0, 2], "samples": 1},
        {"solved": [1, 0, None], "samples": 1},
        {"solved": [1, 0, 1], "samples": 0},
        {"solved": "101", "samples": 1},
    ],
)
def test_events_that_cannot_be_paired_give_no_error(args: dict[str, object]) -> None:
    good = solved_event([1, 0, 1], 1)
    assert gain_error(good, good) == 0.0
    assert gain_error(good, args) is None and gain_error(args, good) is None
