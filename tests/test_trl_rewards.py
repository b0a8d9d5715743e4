"""What goes wrong in a user's reward under TRL is named by file and line; what goes right is passed on unchanged."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl_trainer import make_trainer, needs_trl

from paceline.integrations.trl.rewards import guard, guard_rewards

SOURCE = """
import functools
import json


def parse(text):
    return json.loads(text)


def exact(completions, answer, **columns):
    return [float(parse(text) == wanted) for text, wanted in zip(completions, answer)]


async def late(completions, **columns):
    return [1.0 / columns["number"][0]] * len(completions)


class Judge:
    def __init__(self, value):
        self.value = value

    def __call__(self, completions, **columns):
        return self.value


class LateJudge(Judge):
    async def __call__(self, completions, **columns):
        return self.value


halved = functools.partial(exact, answer=[{}, {}])
"""
"""Line numbers count: `parse` is in line 7, `exact` begins in 10."""


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """A user's file as a module."""
    file = tmp_path / "my_rewards.py"
    file.write_text(SOURCE)
    description = importlib.util.spec_from_file_location("my_rewards", file)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def call(function: Callable[..., Any], **given: Any) -> Any:
    """As TRL calls it."""
    passed = {"prompts": ["a", "b"], "completions": ["{}", "{}"], "completion_ids": [[1], [2]], "trainer_state": None}
    found = guard(function, "exact")(**(passed | {"log_extra": None, "log_metric": None} | given))
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def message_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def test_an_error_keeps_its_type_and_names_the_user_s_line(own: Any) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        call(own.exact, completions=["{", "{}"], answer=[{}, {}])
    assert message_of(caught.value).endswith(
        "\nthe reward exact (my_rewards.py:10) raised this at my_rewards.py:7, in parse"
    )


def test_an_error_of_an_async_reward_names_the_line_too(own: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        call(own.late, number=[0, 0])
    assert message_of(caught.value).endswith("(my_rewards.py:14) raised this at my_rewards.py:15, in late")


def test_a_missing_column_is_explained(own: Any) -> None:
    with pytest.raises(TypeError, match="answer") as caught:
        call(own.exact, question=["?", "?"])
    assert message_of(caught.value).endswith(
        "the reward exact (my_rewards.py:10) was called with prompts, completions, completion_ids, trainer_state, "
        "log_extra, log_metric and the dataset's other columns (question)"
    )


def test_messages_taken_for_text_are_explained(own: Any) -> None:
    chat = [[{"role": "assistant", "content": "{}"}]] * 2
    with pytest.raises(TypeError) as caught:
        call(own.exact, completions=chat, answer=[{}, {}])
    assert message_of(caught.value).endswith('a list of messages, and its text is completion[0]["content"]')


@pytest.mark.parametrize("name", ["Judge", "LateJudge"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.0, r"returned 1\.0; it must return a list with a number, or None, for each of the 2 completions"),
        (None, "returned None; it must return a list"),
        ("10", "returned '10'; it must"),
        ({"score": 1}, r"returned \{'score': 1\}; it must"),
        ([1.0], "returned 1 rewards; it must return a list with a number, or None, for each of the 2"),
        ([1.0, "1"], "returned '1' for completion 1; it must"),
        ([float("inf"), 0], "returned inf for completion 0; it must"),
        (torch.ones(2, 2), r"returned tensor\("),
    ],
)
def test_a_wrong_result_is_named_by_its_function(own: Any, name: str, value: Any, said: str) -> None:
    line = {"Judge": 22, "LateJudge": 27}[name]
    with pytest.raises(ValueError, match=rf"the reward exact \(my_rewards.py:{line}\) {said}"):
        call(getattr(own, name)(value))


@pytest.mark.parametrize(
    "value",
    [
        [1, None], (0.5, True), np.array([0.5, 1]), np.array([True, False]), torch.tensor([1.0, 2.0]),
        [torch.tensor(1.0), 2], [float("nan"), 1.0], (number for number in (1.0, 2.0)),
    ],
)  # fmt: skip
def test_what_trl_takes_is_passed_on(own: Any, value: Any) -> None:
    found = call(own.Judge(value))
    assert len(found) == 2 and len(torch.tensor([0 if each is None else each for each in found])) == 2
    if isinstance(value, list | tuple):
        assert repr(found) == repr([each.item() if isinstance(each, torch.Tensor) else each for each in value])


def test_a_partial_function_is_found_and_a_reward_model_left_alone(own: Any) -> None:
    model = torch.nn.Linear(1, 1)
    assert guard_rewards([model], ["Linear"]) == [model]
    with pytest.raises(json.JSONDecodeError) as caught:
        call(functools.partial(own.exact, answer=[{}, {}]), completions=["{", "{}"])
    assert "my_rewards.py:10" in message_of(caught.value)


def test_ctrl_c_in_a_reward_stays_what_it_is() -> None:
    def interrupted(**columns: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        call(interrupted)
    assert message_of(caught.value) == "KeyboardInterrupt"


@needs_trl
def test_a_trainer_guards_all_its_rewards(own: Any, tmp_path: Path) -> None:
    given = {"reward_funcs": [own.Judge([1.0] * 8), own.late], "max_completion_length": 4}
    trainer = make_trainer("ours", tmp_path, **given)
    assert trainer.reward_func_names == ["Judge", "late"]
    with pytest.raises(KeyError, match="number") as caught:
        trainer.train()
    assert "the reward late (my_rewards.py:14) raised this at my_rewards.py:15, in late" in message_of(caught.value)
