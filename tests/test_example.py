"""The held-out item that ends a training: which one is shown, how, and that a resume does not lose it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import make_model, make_settings, quiet, train, write_task

from paceline.run.open import open_run
from paceline.run.recipes import prepare
from paceline.run.ui.example import MAX_KEPT_CHARS, NUM_KEPT, find_example, kept_answers
from paceline.run.ui.summary import Outcome, summarise


def evaluation(step: int, *answers: tuple[str, str, float]) -> dict[str, Any]:
    return {"step": step, "args": {"answers": kept_answers(answers)}}


def test_the_example_is_one_that_only_training_solved() -> None:
    right = "1+2=3=\nanswer 1+2"
    before = evaluation(0, ("1 2 > 3\n", "1*2=2<", 0.0), ("2 2 > 4\n", "answer 2*2", 1.0), ("5 5 > 0", "", 0.0))
    during = evaluation(2, ("1 2 > 3\n", "1-2", 0.0), ("2 2 > 4\n", "2-2", 0.0), ("5 5 > 0", "5", 0.0))
    after = evaluation(4, ("1 2 > 3\n", right, 1.0), ("2 2 > 4\n", "2-2=0<", 0.0), ("5 5 > 0", "5", 0.25))
    lines = find_example([before, during, after])
    assert lines == [
        ("example", "1 2 > 3"),
        ("  before", "1*2=2<  (wrong)"),
        ("  after", "1+2=3= answer 1+2  (right)"),
        ("", "of the first 3 held-out items, 1 solved only after training, 1 only before"),
    ]
    assert "example       1 2 > 3" in summarise([{"step": 4}], {}, Outcome(example=lines))


def test_without_such_an_item_the_first_is_shown() -> None:
    long = "word " * 100
    lines = find_example([evaluation(0, (long, long, 0.5)), evaluation(1, (long, long, 0.5))])
    assert lines[0][1].startswith("word word") and lines[0][1].endswith("...")
    assert lines[1][1].startswith("...") and lines[1][1].endswith("word  (score 0.5)")
    assert lines[3][1].startswith("of the first 1 held-out item, 0 ")


@pytest.mark.parametrize(
    "events",
    [
        [],
        [evaluation(0, ("a", "b", 0.0))],
        [evaluation(3, ("a", "b", 0.0)), evaluation(6, ("a", "c", 1.0))],
        [evaluation(0, ("a", "b", 0.0)), evaluation(1, ("other data", "c", 1.0))],
        [{"step": 0, "args": {}}, {"step": 1, "args": {}}],
    ],
)
def test_there_is_none_unless_both_ends_are_known(events: list[dict[str, Any]]) -> None:
    assert find_example(events) == []


def test_an_event_holds_little() -> None:
    kept = kept_answers([("p" * 10_000, "t" * 10_000, 0.0)] * 1_000)
    assert len(kept) == NUM_KEPT and all(len(each["prompt"]) == len(each["text"]) == MAX_KEPT_CHARS for each in kept)


def test_a_resumed_run_shows_it_and_a_run_without_texts_does_not(tmp_path: Path) -> None:
    make_model(tmp_path)
    write_task(tmp_path)
    train(make_settings(tmp_path, rl={"steps": 1}), tmp_path / "run")
    settings = prepare(make_settings(tmp_path, rl={"steps": 2}))
    with open_run(settings, settings.model.path, tmp_path / "run", quiet(), is_resumed=True) as run:
        run.train()
        lines = run.summary()
    assert any(line.startswith("example       Word number ") for line in lines)
    assert any(line.startswith("  before") for line in lines) and any(line.startswith("  after") for line in lines)
    bare = train(make_settings(tmp_path, rl={"steps": 1}, run={"rollouts": False}), tmp_path / "bare")
    assert not any(line.startswith("example") for line in bare.summary())
