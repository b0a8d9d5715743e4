"""A user's own reward: found or explained, called as TRL or verl would call it, and never with a batch's luck."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.tasks.base import Item, Message
from paceline.tasks.rewards import RewardScorer, check_reward, detect_style, load_function, make_reward_task
from paceline.tasks.settings import TaskSettings

REWARDS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Kept:
    value: float = 0.5

limit = 3

def trl(prompts, completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]

def trl_without_columns(completions):
    return [len(text) / 10 for text in completions]

def trl_echo(prompts, completions, **columns):
    return [(prompts, completions, columns)]

def trl_of_trainer(completions, completion_ids, **columns):
    return [0.0]

def trl_of_trainer_with_default(completions, trainer_state=None, **columns):
    return [0.5]

def trl_bare_number(completions, **columns):
    return 1.0

def trl_too_many(completions, **columns):
    return [1.0, 2.0]

def trl_text(completions, **columns):
    return "1"

async def trl_async(completions, **columns):
    return [1.0]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source, solution_str, ground_truth, extra_info)

def verl_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 0.25, "accuracy": True}

def verl_dict_without_score(solution_str, ground_truth):
    return {"reward": 1.0}

def verl_short(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def verl_needy(solution_str, ground_truth, tokenizer):
    return 0.0

def singular(prompt, completion, **columns):
    return 1.0

def catch_all(**everything):
    return [1.0]

class Graded:
    def __call__(self, completions, **columns):
        return [Kept().value]

instance = Graded()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def make_item(answer: Any = "42", messages: tuple[Message, ...] = (), **columns: Any) -> Item:
    return Item("What is 6 * 7?", {"answer": answer, "columns": columns}, "what is 6 * 7?", messages=messages)


def score(folder: Path, name: str, item: Item, text: str = "42") -> Any:
    return RewardScorer(f"{folder}/my_rewards.py:{name}").score(item, text)


def test_a_reward_is_found_by_path(folder: Path) -> None:
    assert load_function(f"{folder}/my_rewards.py:trl").__name__ == "trl"
    assert load_function("my_rewards.py:trl").__name__ == "trl"


def test_a_reward_is_found_as_a_module_where_the_user_is(folder: Path) -> None:
    (folder / "a_package").mkdir()
    (folder / "a_package" / "inner.py").write_text("def f(completions): return [1.0]")
    assert load_function("a_package.inner:f").__name__ == "f"


def test_installed_modules_come_before_those_where_the_user_is(folder: Path) -> None:
    (folder / "colorsys.py").write_text("def mine(completions): return [1.0]")
    with pytest.raises(ValueError, match="colorsys has no function mine"):
        load_function("colorsys:mine")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_rewards.py:verl_sort", "my_rewards.py has no function verl_sort: did you mean verl_short"),
        ("my_rewards.py:zzzzzzzz", "has no function zzzzzzzz: it defines .*catch_all.*verl_short"),
        ("my_reward.py:trl", r"there is no file .*my_reward\.py; did you mean my_rewards\.py"),
        ("nowhere/at_all.py:f", r"there is no file .*nowhere/at_all\.py"),
        ("my_reward_s:trl", "no module my_reward_s here .*: did you mean my_rewards"),
        ("zzz.yyy:f", r"no module zzz here .*: name a file as path/to/file\.py:function"),
        ("os.zzz:f", r"no module os\.zzz here"),
        ("my_rewards.py:limit", "limit in my_rewards.py is a int, not a function"),
        ("no_colon", "'no_colon' is not of the form module:function"),
        (":f", "not of the form"),
        ("my_rewards.py:", "not of the form"),
        ("broken.py:f", "importing broken.py:f raised SyntaxError"),
        ("importing.py:f", "importing importing.py:f raised ModuleNotFoundError: No module named 'not_there'"),
        ("importing:f", "importing importing:f raised ModuleNotFoundError: No module named 'not_there'"),
        ("raising.py:f", "importing raising.py:f raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_explained(folder: Path, spec: str, message: str) -> None:
    (folder / "broken.py").write_text("def f(:")
    (folder / "importing.py").write_text("import not_there")
    (folder / "raising.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=message):
        load_function(spec)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("trl", "trl"),
        ("trl_without_columns", "trl"),
        ("trl_of_trainer_with_default", "trl"),
        ("instance", "trl"),
        ("verl", "verl"),
        ("verl_dict", "verl"),
        ("verl_short", "verl"),
    ],
)
def test_the_signature_is_told_by_its_names(folder: Path, name: str, style: str) -> None:
    assert detect_style(load_function(f"my_rewards.py:{name}"), name) == style


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("singular", r"takes \(prompt, completion, columns\), which is not TRL's .*did you mean completions for"),
        ("catch_all", r"takes \(everything\), which is not TRL's"),
        ("trl_async", "is async"),
        ("trl_of_trainer", "needs completion_ids, which graders do not have"),
        ("verl_needy", "needs tokenizer, which verl's signature does not have"),
    ],
)
def test_a_wrong_signature_is_explained(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"task.reward: .*{message}"):
        RewardScorer(f"my_rewards.py:{name}").prepare()


def test_a_function_without_a_signature_is_explained() -> None:
    with pytest.raises(ValueError, match="hides its parameters"):
        detect_style(max, "builtins:max")


def test_trl_gets_texts_and_columns_as_lists_of_one(folder: Path) -> None:
    item = make_item(answer="42", level="easy")
    assert score(folder, "trl_echo", item, "41") == (["What is 6 * 7?"], ["41"], {"level": ["easy"]})


def test_trl_gets_a_conversation_as_messages(folder: Path) -> None:
    item = make_item(messages=(Message("system", "Be brief."), Message("user", "What is 6 * 7?")))
    prompts, completions, _ = score(folder, "trl_echo", item, "41")
    assert prompts == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"}],
    ]
    assert completions == [[{"role": "assistant", "content": "41"}]]


@pytest.mark.parametrize(("text", "expected"), [("42", 1.0), ("41", 0.0)])
def test_trl_scores(folder: Path, text: str, expected: float) -> None:
    item = Item("?", {"answer": "42", "columns": {"answer": "42", "other": 1}}, "?")
    assert score(folder, "trl", item, text) == expected
    assert score(folder, "trl_without_columns", item, text) == 0.2
    assert score(folder, "trl_of_trainer_with_default", item, text) == 0.5
    assert score(folder, "instance", item, text) == 0.5


def test_a_missing_column_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="needs a column answer; the data has level, topic"):
        score(folder, "trl", make_item(topic="sums", level=1))


@pytest.mark.parametrize("name", ["trl_bare_number", "trl_too_many", "trl_text"])
def test_trl_must_return_one_reward_for_one_completion(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="must return a list of one number"):
        score(folder, name, make_item())


def test_verl_gets_its_four_arguments(folder: Path) -> None:
    item = make_item(answer=["42"], data_source="gsm8k", extra_info={"index": 3})
    assert score(folder, "verl", item, "41") == ("gsm8k", "41", ["42"], {"index": 3})
    assert score(folder, "verl", make_item(), "41") == ("", "41", "42", None)


def test_verl_scores(folder: Path) -> None:
    assert score(folder, "verl_short", make_item(), "42") == 1.0
    assert score(folder, "verl_short", make_item(), "41") == 0.0
    assert score(folder, "verl_dict", make_item()) == 0.25
    with pytest.raises(ValueError, match='a dict without "score"; it has reward'):
        score(folder, "verl_dict_without_score", make_item())


def test_gold_is_the_answer_column(folder: Path) -> None:
    scorer = RewardScorer("my_rewards.py:verl_short")
    item = make_item(answer=42)
    assert scorer.gold(item) == "42"
    with pytest.raises(ValueError, match="no answer column"):
        scorer.gold(make_item(answer=None))


def test_making_the_task_runs_none_of_the_users_code(folder: Path) -> None:
    (folder / "raising.py").write_text("1 / 0")
    task = make_reward_task(TaskSettings(name="file", data="nothing.jsonl", reward="raising:f"))
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        task.prepare()


def test_a_reward_that_is_no_number_passes_through_unchanged(folder: Path) -> None:
    """The grader process names it; here nothing may turn it into a score."""
    (folder / "odd.py").write_text("def f(completions): return [float('nan')]")
    assert math.isnan(RewardScorer("odd.py:f").score(make_item(), ""))


@pytest.mark.parametrize(
    "parameters",
    [
        "prompts, completions, **columns",
        "completions",
        "*, completions, answer",
        "completions, trainer_state",
        "completions, trainer_state=None, *, log_metric",
        "completions, /, completion_ids=()",
        "data_source, solution_str, ground_truth, extra_info=None",
        "solution_str, *args, **kwargs",
        "solution_str, more",
        "solution_str, *, more=1",
        "text",
        "completion, **columns",
        "",
    ],
)
def test_a_signature_is_judged_from_the_source_as_when_it_is_loaded(tmp_path: Path, parameters: str) -> None:
    file = tmp_path / "own.py"
    for kind in ("def", "async def"):
        file.write_text(f"{kind} f({parameters}): return [1.0]\n")
        spec = f"{file}:f"
        verdicts = []
        for judge in (check_reward, lambda spec: detect_style(load_function(spec), spec)):
            try:
                judge(spec)
                verdicts.append("")
            except ValueError as error:
                verdicts.append(str(error))
        assert verdicts[0] == verdicts[1] and bool(verdicts[0]) == (kind != "def" or parameters in REFUSED)


REFUSED = {
    "completions, trainer_state",
    "completions, trainer_state=None, *, log_metric",
    "solution_str, more",
    "text",
    "completion, **columns",
    "",
}
