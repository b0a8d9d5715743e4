"""The bench of easy against mixed data, in a tiny setting: equal sizes, true floors, a file that is gone on with."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.tasks.answers import write_answer
from paceline.tasks.curriculum import make_curriculum
from paceline.tasks.registry import make_task

BENCH = Path(__file__).resolve().parent.parent / "bench"
QUICK = ["--quick", "--tasks", "counting"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The script as a module; the bench folder is no package."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("curriculum")
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def result(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that one seed leaves."""
    path: Path = tmp_path_factory.mktemp("result") / "curriculum.json"
    bench.main([*QUICK, "--seeds", "1", "--out", str(path)])
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.endswith("seconds")}


@pytest.mark.slow
def test_cases_have_equal_size_and_every_level(bench: Any, result: Path) -> None:
    start, easy, mixed = rows_of(result)
    assert [(row["data"], row["seed"]) for row in (start, easy, mixed)] == [
        ("warm start", None),
        ("easy", 1),
        ("mixed", 1),
    ]
    for row in (start, easy, mixed):
        assert [each["level"] for each in row["eval"]] == list(bench.LEVELS)
    quick = bench.QUICK
    for row in (easy, mixed):
        assert row["train"]["num_prompts"] == quick.steps * quick.prompts_per_step
        assert row["train"]["num_responses"] == quick.steps * quick.prompts_per_step * quick.group_size
        assert len(row["train"]["rewards"]) == quick.steps
    assert start["num_parameters"] > 0 and start["warmup"]["result"]["steps"] == quick.warm_steps


def test_easy_data_has_the_first_level_alone_and_mixed_data_all(bench: Any) -> None:
    levels = {}
    for data in bench.KINDS:
        task = bench.run_settings(bench.QUICK, Path("model"), "graph", data, 3, "cpu").task
        chosen = make_curriculum(task, make_task(task))
        levels[data] = {chosen.level(1, draw) for draw in range(100)}
    assert levels == {"easy": {0}, "mixed": set(bench.LEVELS)}


def test_seeds_change_items_and_rollouts_of_training_and_nothing_of_evaluation(bench: Any) -> None:
    one, two = (bench.run_settings(bench.QUICK, Path("model"), "graph", "easy", seed, "cpu") for seed in (1, 2))
    assert (one.task.seed, one.rl.seed) == (1, 1) and (two.task.seed, two.rl.seed) == (2, 2)
    assert bench.EVAL_SEED not in (1, 2, 3) and bench.held_out("graph", 1).seed == bench.EVAL_SEED


@pytest.mark.parametrize("task", ["counting", "graph", "spatial"])
def test_the_floor_is_what_the_constant_answer_scores(bench: Any, task: str) -> None:
    setup = replace(bench.QUICK, eval_items=60)
    for level in bench.LEVELS:
        floor = bench.best_constant(setup, task, level)
        made = make_task(bench.held_out(task, level))
        items = [made.item(bench.EVAL_SEED, index, "test") for index in range(60)]
        scores = {text: sum(made.score(item, write_answer(text)) for item in items) / 60 for text in answers(items)}
        assert floor["accuracy"] == pytest.approx(scores[floor["answer"]]) == pytest.approx(max(scores.values()))
        assert all(item.level == level for item in items)


def answers(items: list[Any]) -> set[str]:
    return {item.answer["value"] for item in items}


def test_a_file_is_gone_on_with_and_equal_cases_are_equal(bench: Any, result: Path, tmp_path: Path) -> None:
    path = tmp_path / "curriculum.json"
    first = json.loads(result.read_text())
    first["rows"].pop()  # as if stopped before the last case
    path.write_text(json.dumps(first))
    bench.main([*QUICK, "--seeds", "1", "--out", str(path)])
    again = rows_of(path)
    assert again[:2] == first["rows"], "cases in the file are left as they are, times included"
    assert [without_times(row) for row in again] == [without_times(row) for row in rows_of(result)]


def test_a_file_of_another_setup_is_refused(bench: Any, result: Path) -> None:
    before = result.read_bytes()
    with pytest.raises(ValueError, match="another setup"):
        bench.main([*QUICK, "--seeds", "1", "--steps", "3", "--out", str(result)])
    assert result.read_bytes() == before


def test_a_warm_start_that_was_stopped_is_made_again(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.warm_start(bench.QUICK, "counting", tmp_path, "cpu")
    settings = bench.warmup_settings(bench.QUICK, "counting", "cuda")
    assert bench.is_made(settings, model)
    monkeypatch.setattr(bench, "warm_up", lambda *_: pytest.fail("a complete one is not made again"))
    assert bench.warm_start(bench.QUICK, "counting", tmp_path, "cpu") == model
    longer = bench.warmup_settings(replace(bench.QUICK, warm_steps=3), "counting", "cpu")
    assert not bench.is_made(longer, model)
    recipe = model / bench.RECIPE
    recipe.write_text(recipe.read_text().replace("steps: 2\n    loss", "steps: 1\n    loss"))
    assert not bench.is_made(settings, model)


def test_an_unknown_task_is_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--tasks", "chess"])
    assert "chess" in capsys.readouterr().err
