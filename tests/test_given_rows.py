"""Data given in Python: rows of every kind become lines of JSON, and what cannot be one is named."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.run.given import GivenInputs
from paceline.tasks import given_rows
from paceline.tasks.files import read_data
from paceline.tasks.given_rows import rows_by_split, to_lines

ROWS = [{"prompt": f"Say {i}: ", "word": i} for i in range(3)]


def read(lines: Any) -> list[Any]:
    return [json.loads(line) for line in lines]


def test_rows_of_every_kind_are_taken() -> None:
    assert read(to_lines(ROWS, "dataset")) == read(to_lines(tuple(ROWS), "dataset")) == ROWS
    assert read(to_lines((row for row in ROWS), "dataset")) == ROWS
    assert read(to_lines(["a", "b"], "dataset")) == [{"prompt": "a"}, {"prompt": "b"}]
    chat = [{"role": "user", "content": "é\n\u2028"}]
    row = {
        "prompt": chat,
        "n": np.int64(5),
        "x": np.float32(0.5),
        "list": np.arange(2),
        "day": datetime.date(2020, 1, 2),
    }
    (found,) = read(to_lines([{**row, "price": Decimal("1.50"), "file": Path("a/b"), "none": None}], "dataset"))
    numbers = {"n": 5, "x": 0.5, "list": [0, 1], "none": None}
    assert found == {"prompt": chat, **numbers, "day": "2020-01-02", "price": "1.50", "file": "a/b"}


def test_splits_keep_their_names() -> None:
    found = rows_by_split({"train": ROWS, "validation": ROWS[:1]}, "dataset")
    assert {split: read(rows) for split, rows in found.items()} == {"train": ROWS, "test": ROWS[:1]}
    assert rows_by_split("data.csv", "dataset") == rows_by_split(Path("data.csv"), "dataset") == {"train": "data.csv"}


class Table:
    """Iterates over the names of its columns, as a DataFrame does."""

    def __iter__(self) -> Iterator[str]:
        return iter(["prompt", "word"])


class Broken:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "dataset: it holds no rows"),
        (7, "dataset: 7 is a int, not rows: give a list of dicts, or a file"),
        (Table(), r"dataset, row 1: 'prompt' is no dict of columns .* give df\.to_dict\(\"records\"\)"),
        ([ROWS[0], 5], r"dataset, row 2: 5 is no dict of columns such as \{\"prompt\""),
        ([ROWS[0], {1: "a"}], "dataset, row 2: the column 1 has no text as its name"),
        ([{"prompt": "a", "x": math.nan}], r"dataset, row 1, x: nan is no JSON value .* write None for a missing one"),
        ([{"prompt": "a", "x": b"\0"}], "dataset, row 1, x: a bytes is no JSON value; use text, numbers"),
        ([{"prompt": "a", "x": {1, 2}}], "dataset, row 1, x: a set is no JSON value"),
        ([{"prompt": "a", "x": Broken()}], "dataset, row 1, x: a Broken is no JSON value"),
        (
            {"prompt": ["a"], "word": ["b"]},
            r"dataset: a mapping holds rows by split, and this one has no train but prompt",
        ),
        ({"train": []}, r"dataset\['train'\]: it holds no rows"),
    ],
)
def test_what_is_no_data_is_explained(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        rows_by_split(data, "dataset")


def test_rows_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_rows, "MAX_ROWS", 10)
    with pytest.raises(ValueError, match="more than 10 rows"):
        to_lines(iter(lambda: ROWS[0], None), "dataset")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_data_sets_are_taken() -> None:
    datasets = importlib.import_module("datasets")
    table = datasets.Dataset.from_list(ROWS)
    assert read(to_lines(table, "dataset")) == ROWS
    both = datasets.DatasetDict({"train": table, "test": table.select([0])})
    assert {split: read(rows) for split, rows in rows_by_split(both, "dataset").items()} == {
        "train": ROWS,
        "test": ROWS[:1],
    }


# --- as files of a run ------------------------------------------------------------------------------------------------


def reward(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def test_files_are_named_by_what_they_hold(tmp_path: Path) -> None:
    given = GivenInputs("own.py:f", {"train": ROWS, "test": ROWS[:1]}, None)
    settings = given.settings(tmp_path / "run")
    assert settings["task.reward"] == "own.py:f" and given.name == "f"
    with given.written(tmp_path / "run"):
        assert read_data(settings["task.data"]) == {"train": ROWS}
        assert read_data(settings["task.dials.test_data"]) == {"train": ROWS[:1]}
    assert GivenInputs(None, iter(ROWS), ROWS[:1]).settings(tmp_path / "run") == {
        key: value for key, value in settings.items() if key != "task.reward"
    }
    assert not list(given.changes(tmp_path / "moved", settings)), "an equal file in a folder that was moved"
    other = GivenInputs(reward, ROWS[:2], None)
    assert {argument for argument, _ in other.changes(tmp_path / "run", settings)} == {"dataset", "reward"}


def test_what_was_given_to_a_run_that_never_began_goes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "inputs").mkdir()
    (tmp_path / "mine" / "inputs" / "precious.txt").touch()
    for name, left in (("new", []), ("mine", ["inputs", "precious.txt"])):
        with pytest.raises(KeyError), GivenInputs(None, ROWS, None).written(tmp_path / name):
            assert len(list((tmp_path / name / "inputs").glob("train-*.jsonl"))) == 1
            raise KeyError
        assert sorted(path.name for path in (tmp_path / name).rglob("*")) == left
        assert (tmp_path / name).exists() == bool(left)


def test_what_was_given_to_a_run_that_began_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyError), GivenInputs(None, ROWS, None).written(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
        raise KeyError
    assert len(list((tmp_path / "run" / "inputs").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, None, None), r"reward: 5 is neither a function nor the name of one, as in 'file\.py:NAME'"),
        ((None, ROWS, {"train": ROWS}), "test_dataset: give rows or a file, not a mapping"),
        ((None, ROWS, []), "test_dataset: it holds no rows"),
    ],
)
def test_what_cannot_be_given_is_explained(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GivenInputs(*arguments)
