"""The sanity check of training in a tiny setting: picks what is solved sometimes, trains on it, and judges by it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.tasks.base import Item, Message
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; the bench folder is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("sanity")


def test_picked_items_are_those_written(bench: Any, tmp_path: Path) -> None:
    settings = TaskSettings(name="word_sums", level=1)
    other = make_task(settings)
    items = [other.item(0, index) for index in range(3)]
    items.append(Item("a", {"sums": ["1 + 2 = 3"]}, "find 1 2", messages=(Message("user", "a"),)))
    bench.write_picked(tmp_path / "picked.jsonl", settings, items)
    own = TaskSettings(name=f"{bench.PICKED}:Picked", data=str(tmp_path / "picked.jsonl"))
    task = make_task(own)
    assert task.size == 4 and [task.item(7, index, "test") for index in range(4)] == items
    assert task.item(0, 5) == items[1]
    assert [task.score(item, task.gold(item)) for item in items] == [1.0] * 4 and task.score(items[0], "") == 0


def test_a_run_passes_when_nearly_all_is_solved(bench: Any) -> None:
    steps = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "rollout/logp_abs_diff": 0.25}]
    steps += [{"step": 5, "eval/accuracy": 0.95}, {"step": 10, "eval/accuracy": 0.96}]
    found = bench.verdict({"steps": steps})
    assert found == {"before": 0.5, "after": 0.96, "passed_at": 10, "largest_logp_abs_diff": 0.25}
    assert bench.verdict({"steps": steps[:3]})["passed_at"] is None


@pytest.mark.slow
def test_the_demos_model_is_trained_exactly_and_not(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    given = ("rl.prompts_per_step=2", "rl.group_size=8", "sampling.max_new_tokens=64", "engine.max_sequences=32")
    pairs = [word for pair in given for word in ("--set", pair)]
    sizes = ["--items", "3", "--candidates", "16", "--samples", "2", "--steps", "2", "--every", "1"]
    bench.main(["--recipe", "countdown-cpu", "--model", "shipped:countdown", *sizes, *pairs, "--out", str(path)])
    picked, exact, control = json.loads(path.read_text())["rows"]
    assert 1 <= picked["items"] <= 3 and all(0.2 <= share <= 0.8 for share in picked["shares"])
    assert (exact["case"], control["case"]) == ("exact", "not exact")
    assert exact["largest_logp_abs_diff"] == 0 < control["largest_logp_abs_diff"]
    assert [step["step"] for step in exact["steps"] if "eval/accuracy" in step] == [0, 1, 2]
