"""Evaluation: pass@k against counting, and figures of made-up answers."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import Rollout
from paceline.run.evaluate import Evaluation, pass_at_k
from paceline.run.prompts import Question
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
    assert pass_at_k(solved, num_samples, k) == pytest.approx(sum(shares) / len(shares))


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
    }
