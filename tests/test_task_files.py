"""Data files, mathematics and reasoning-gym: what is read, what is held out, what scores, and what is refused."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import documents
from paceline.tasks import csv_rows, files, gym
from paceline.tasks.base import Item, Message, Split
from paceline.tasks.checks import check
from paceline.tasks.files import Columns, FileTask, data_files, read_data, read_items
from paceline.tasks.grading import Grade, Grader
from paceline.tasks.gym import ALLOWED, EXCLUDED, GymTask, make_gym_task
from paceline.tasks.math import MathScorer, find_answer, last_box, make_math_task, read_gold
from paceline.tasks.procedural import split_of
from paceline.tasks.rewards import make_reward_task
from paceline.tasks.settings import TaskSettings


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


class TextScorer:
    """1 for the answer itself; mathematics without math-verify."""

    def prepare(self) -> None: ...

    def score(self, item: Item, text: str) -> float:
        return float(text == self.gold(item))

    def gold(self, item: Item) -> str:
        return str(item.answer["answer"])


def write_jsonl(file: Path, records: list[Any]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def make_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + {i}?", "answer": f"{2 * i}"} for i in range(start, start + count)]


def make_task(data: str, **changed: Any) -> FileTask:
    return FileTask("file", data, TextScorer(), **changed)


def all_items(task: FileTask, split: Split, count: int, seed: int = 0) -> list[Item]:
    return [task.item(seed, index, split) for index in range(count)]


# ---- shapes ----

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
MESSAGES = (Message("system", "Be brief."), Message("user", "6 * 7?"))


@pytest.mark.parametrize(
    ("record", "prompt", "answer", "messages", "columns"),
    [
        ({"question": "6 * 7?", "answer": "42"}, "6 * 7?!", "42", (), {"answer": "42"}),
        ({"problem": "6 * 7?", "solution": "s"}, "6 * 7?!", "s", (), {"solution": "s"}),
        ({"problem": "6 * 7?", "solution": "s", "answer": 42}, "6 * 7?!", 42, (), {"solution": "s", "answer": 42}),
        ({"prompt": "6 * 7?", "level": 3}, "6 * 7?", None, (), {"level": 3}),
        ({"prompt": "6 * 7?", "answer": "42"}, "6 * 7?", "42", (), {"answer": "42"}),
        ({"prompt": CHAT, "solution": "s"}, "6 * 7?", "s", MESSAGES, {"solution": "s"}),
        (
            {"prompt": CHAT, "data_source": "d", "reward_model": {"style": "rule", "ground_truth": ["42"]}},
            "6 * 7?",
            ["42"],
            MESSAGES,
            {"data_source": "d", "reward_model": {"style": "rule", "ground_truth": ["42"]}},
        ),
    ],
)
def test_the_shape_of_a_file_is_recognised(
    record: dict[str, Any], prompt: str, answer: Any, messages: tuple[Message, ...], columns: dict[str, Any]
) -> None:
    (item,) = read_items([record], Columns(), "data", instruction="!")
    assert (item.prompt, item.messages) == (prompt, messages)
    assert item.answer == {"answer": answer, "columns": columns}
    assert item.key == ("be brief. 6 * 7?" if messages else "6 * 7?")


def test_columns_can_be_named() -> None:
    record = {"text": "6 * 7?", "prompt": "something else", "answer": "no", "value": "42"}
    (item,) = read_items([record], Columns("text", "value"), "data")
    assert (item.prompt, item.answer["answer"]) == ("6 * 7?", "42")
    verl = {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "no"}, "value": "42"}
    assert read_items([verl], Columns(answer="value"), "data")[0].answer["answer"] == "42"


@pytest.mark.parametrize(
    ("records", "columns", "message"),
    [
        (
            [{"text": "?", "label": "!"}],
            Columns(),
            r"data: the columns are text, label; expected TRL's prompt .*name yours",
        ),
        ([{"question": "?"}], Columns(), "the columns are question; expected"),
        ([{}], Columns(), "the columns are none at all"),
        ([{"question": "?", "answer": "!"}], Columns("questoin"), "no column questoin: did you mean question"),
        ([{"question": "?", "answer": "!"}], Columns(answer="zzz"), "no column zzz: it has question, answer"),
        ([{"prompt": ""}], Columns(), "data, row 1: prompt must be text or a list of messages, and not empty; got ''"),
        ([{"prompt": " \n"}], Columns(), "row 1: prompt must be text"),
        ([{"prompt": 7}], Columns(), "row 1: prompt must be text .* got 7"),
        ([{"prompt": []}], Columns(), "row 1: prompt must be text"),
        ([{"prompt": "?"}, {"promt": "?"}], Columns(), "row 2: it has no prompt, unlike the first row; it has promt"),
        ([{"prompt": [{"role": "user"}]}], Columns(), "row 1: prompt must hold messages"),
        ([{"prompt": ["hello"]}], Columns(), "row 1: prompt must hold messages"),
        ([{"prompt": CHAT[:1]}], Columns(), "row 1: prompt is a conversation without a user turn"),
        (
            [{"prompt": CHAT, "reward_model": {"style": "rule"}}],
            Columns(),
            "row 1: verl's reward_model must hold a ground",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_named(records: list[Any], columns: Columns, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_items(records, columns, "data")


# ---- files ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "?", "answer": "1"}\n{"question": \n', r"rows\.jsonl:2: not valid JSON: .* at column"),
        ("\n\n[1]\n", r"rows\.jsonl:3: expected an object"),
        ("", "holds no train rows"),
        ("\n \n", "holds no train rows"),
    ],
)
def test_bad_jsonl_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        make_task(str(file)).item(0, 0)
    assert str(file) in str(caught.value)


ROW = b'{"question": "?", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"question": "a\\ud800", "answer": "1"}', r"rows\.jsonl:2: .*\\ud800, half of a surrogate pair"),
        (b'{"question": "?", "answer": NaN}', r"rows\.jsonl:2: .*NaN, which is not JSON"),
        (b'{"question": "?", "answer": 1e999}', r"rows\.jsonl:2: .*beyond the range"),
        (b'{"question": "?", "answer": ' + b"9" * 5000 + b"}", r"rows\.jsonl:2: .*number of more than 4,300 digits"),
        (b'{"question": "?", "question": "!", "answer": "1"}', r"rows\.jsonl:2: .*key 'question' twice"),
        (b'{"question": "?", "answer": ' + b"[" * 100_000, r"rows\.jsonl:2: .*nests deeper"),
        (b'{"question": "?", "answer": "\xff"}', r"rows\.jsonl is not UTF-8 text: line 2"),
        (b'{"question": "?",\0 "answer": "1"}', r"rows\.jsonl: line 2 holds a NUL"),
        (b'{"question": "?"}', r"rows\.jsonl, row 2: it has no answer, unlike the first row"),
        (b'{"question": {"a": 1}, "answer": "1"}', r"rows\.jsonl, row 2: question must be text"),
        (b'{"a\\nb": 1}', r"rows\.jsonl, row 2: .*it has 'a\\nb'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_row_is_found_when_the_data_is_read(tmp_path: Path, bad: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROW + bad + b"\n" + ROW)
    with pytest.raises(ValueError, match=message) as caught:
        _ = make_task(str(tmp_path / "rows.jsonl")).size
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_data_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "train.jsonl")
    for name in ("a.jsonl", "b.jsonl", "folder"):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_data(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"cannot be read|no file or folder"):
        read_data("ab " * 5000)


def test_math_rows_without_an_answer_are_found_when_the_data_is_read(tmp_path: Path) -> None:
    rows = [*make_rows(3), {"question": "?", "answer": None}]
    settings = TaskSettings(name="math", data=write_jsonl(tmp_path / "rows.jsonl", rows))
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 4: the row has no answer"):
        make_math_task(settings).item(0, 0)


@pytest.mark.parametrize(
    ("signature", "needs_hint"),
    [
        ("prompts, completions, hint", True),
        ("completions, *, hint", True),
        ("completions, hint=None", False),
        ("completions, **columns", False),
        ("solution_str, ground_truth, hint=None", False),
    ],
)
def test_a_column_that_a_reward_needs_is_missed_when_the_data_is_read(
    tmp_path: Path, signature: str, needs_hint: bool
) -> None:
    (tmp_path / "reward.py").write_text(f"raise SystemExit('never run here')\ndef reward({signature}): ...\n")
    rows = [{"prompt": "a", "hint": 1}, {"prompt": "b"}]
    data, reward = write_jsonl(tmp_path / "rows.jsonl", rows), f"{tmp_path / 'reward.py'}:reward"
    task = make_reward_task(TaskSettings(name="file", data=data, reward=reward))
    if needs_hint:
        with pytest.raises(ValueError, match=r"rows\.jsonl, row 2: the reward .* needs a column hint"):
            _ = task.size
    else:
        assert task.size + len(task._items["test"]) == 2


def test_jsonl_is_read_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes('\ufeff{"question": "é\u2028?", "answer": null}\r\n\n{"question": "b", "answer": 1}'.encode())
    assert read_data(str(file)) == {"train": [{"question": "é\u2028?", "answer": None}, {"question": "b", "answer": 1}]}
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_data(str(file))


CSV = "question,answer,why\r\n"


def test_csv_is_read_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    text = f'\ufeff{CSV}"a, ""b""\nand é",007,\r\n\r\n  \r\nc,1,"x\r\n\r\ny"'
    file.write_bytes(text.encode())
    rows = [
        {"question": 'a, "b"\nand é', "answer": "007", "why": ""},
        {"question": "c", "answer": "1", "why": "x\r\n\r\ny"},
    ]
    assert read_data(str(file)) == {"train": rows}
    file.write_bytes(text.replace("\r\n", "\r").encode())
    assert [row["answer"] for row in read_data(str(file))["train"]] == ["007", "1"], "as a Mac once wrote it"
    long = "x" * 200_000
    file.write_text(f"{CSV}{long},1,\n")
    assert read_data(str(file))["train"][0]["question"] == long, "longer than Python's own limit"


def test_csv_and_jsonl_make_the_same_items(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {i}, please: ", "word": f"w{i}"} for i in range(40)]
    (tmp_path / "rows.csv").write_text("prompt,word\n" + "".join(f'"{r["prompt"]}",{r["word"]}\n' for r in rows))
    tasks = [make_task(str(tmp_path / "rows.csv")), make_task(write_jsonl(tmp_path / "rows.jsonl", rows))]
    for split in ("train", "test"):
        assert tasks[0]._items[split] == tasks[1]._items[split]
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.csv").rename(tmp_path / "folder" / "train.csv")
    assert read_data(str(tmp_path / "folder")) == {"train": rows}
    assert data_files(str(tmp_path / "folder")) == [tmp_path / "folder" / "train.csv"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no train rows"),
        (CSV.encode(), "holds no train rows"),
        (CSV.encode() + b"a,1,x\nb,2\n", r":3: the row has 2 fields, the header 3 fields; put .* in quotes"),
        (CSV.encode() + b'"a\nb",1,x\nb,2,y,z\n', r":4: the row has 4 fields, the header 3 fields"),
        (
            CSV.encode() + b'a,1,x\n"b,2,y\nc,3,z\n',
            r":3: not valid CSV: a quote that opens in this row is never closed",
        ),
        (CSV.encode() + b'a,1,"x" y\n', r":2: not valid CSV: text follows a closing quote"),
        (CSV.encode() + b"a,\xff,x\n", r"is not UTF-8 text: line 2 holds the byte 0xff at position 3"),
        (CSV.encode() + b"a,\0,x\n", "line 2 holds a NUL; save the file as UTF-8 text"),
        (CSV.encode("utf-16"), "is not UTF-8 text: line 1"),
        (b"question,answer,question\na,1,b\n", r":1: the header names the column 'question' 2 times; rename one"),
        (b"question,,answer\na,1,b\n", r":1: the header has a column without a name"),
        (b"question;answer\na;1\n", r":1: question;answer is separated by semicolons; save the file with commas"),
        (b"prompt\tanswer\na\t1\n", r"is separated by tabs; save the file with commas"),
        (b"," * 20_000, r":1: the header has 20,001 fields; at most 10,000"),
        (b"text,label\na,1\n", r"rows\.csv: the columns are text, label; expected TRL's prompt"),
        (CSV.encode() + b"a,1,x\n ,2,y\n", r"rows\.csv, row 2: question must be text .* and not empty; got ' '"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_csv_is_named_by_line(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(data)
    limit = csv.field_size_limit()
    with pytest.raises(ValueError, match=message) as caught:
        _ = make_task(str(file)).size
    assert str(file) in str(caught.value) and len(str(caught.value)) < 500 and csv.field_size_limit() == limit


def test_a_csv_line_has_the_bound_of_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(CSV.encode() + b'"' + b"x" * 300 + b"\n" + b"y" * 300 + b"\n")
    monkeypatch.setattr(csv_rows, "MAX_LINE_BYTES", 500)
    with pytest.raises(ValueError, match=r":2: not valid CSV: a field is longer than 500 characters; is a quote never"):
        read_data(str(file))
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 200)
    with pytest.raises(ValueError, match="line 2 is longer than 200 bytes"):
        read_data(str(file))


def test_csv_that_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    (tmp_path / "b.csv").symlink_to("/dev/zero")
    for name in ("a.csv", "b.csv"):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_data(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", r"there is no file or folder .*missing\.jsonl"),
        ("missing/folder/deep", "there is no file or folder"),
        ("rows.txt", r"rows\.txt is not a \.jsonl, \.csv or \.parquet file"),
        ("empty", r"empty has no train\.jsonl, train\.csv .*it holds no \.jsonl, \.csv or \.parquet file"),
        ("wrong", r"wrong has no train\.jsonl, .*it holds rows\.jsonl"),
    ],
)
def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("What?\n")
    (tmp_path / "empty").mkdir()
    write_jsonl(tmp_path / "wrong" / "rows.jsonl", make_rows(3))
    with pytest.raises(ValueError, match=message):
        read_data(name)


def test_a_folder_of_files_has_the_splits_their_names_say(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", make_rows(3, 3))
    write_jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", make_rows(3))
    write_jsonl(tmp_path / "data" / "validation-00000-of-00001.jsonl", make_rows(2, 6))
    write_jsonl(tmp_path / "training_notes.jsonl", make_rows(9, 50))
    assert read_data(str(tmp_path)) == {"train": make_rows(6), "test": make_rows(2, 6)}


@needs("pyarrow")
def test_parquet_is_read_and_survives_json(tmp_path: Path) -> None:
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    date = importlib.import_module("datetime").date(2020, 1, 2)
    rows = [{"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "42"}, "when": date}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (item,) = read_items(read_data(str(tmp_path / "rows.parquet"))["train"], Columns(), "data")
    assert item.messages == MESSAGES and item.answer["answer"] == "42"
    assert item.answer["columns"]["when"] == "2020-01-02"
    assert json.loads(json.dumps(item.answer)) == item.answer
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a readable parquet file"):
        read_data(str(tmp_path / "bad.parquet"))


@needs("datasets")
def test_folders_that_datasets_saved_are_read(tmp_path: Path) -> None:
    datasets = importlib.import_module("datasets")
    train, test = datasets.Dataset.from_list(make_rows(4)), datasets.Dataset.from_list(make_rows(2, 4))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"other": test}).save_to_disk(tmp_path / "neither")
    assert read_data(str(tmp_path / "one")) == {"train": make_rows(4)}
    assert read_data(str(tmp_path / "both")) == {"train": make_rows(4), "test": make_rows(2, 4)}
    with pytest.raises(ValueError, match="neither has no train split; it has other"):
        read_data(str(tmp_path / "neither"))


def test_a_name_of_the_hub_is_looked_up_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, configuration: str | None) -> Any:
        asked.append((name, configuration))
        if name == "nobody/nothing":
            raise ConnectionError("no such data set")
        return {"train": make_rows(2), "test": make_rows(1, 2)}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_data("openai/gsm8k:main") == {"train": make_rows(2), "test": make_rows(1, 2)}
    assert read_data("some/thing")["train"] == make_rows(2)
    assert asked == [("openai/gsm8k", "main"), ("some/thing", None)]
    with pytest.raises(ValueError, match="nobody/nothing is not a local file, and the hub says: no such data set"):
        read_data("nobody/nothing")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("pyarrow", lambda folder: read_data(str(folder / "rows.parquet"))),
        ("datasets", lambda folder: read_data(str(folder / "saved"))),
        ("datasets", lambda folder: read_data("openai/gsm8k")),
        ("math_verify", lambda folder: MathScorer().prepare()),
        ("reasoning_gym", lambda folder: GymTask("gsm_symbolic")),
    ],
)
def test_a_missing_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, use: Callable[[Path], Any]
) -> None:
    def find_nothing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    monkeypatch.setattr(importlib, "import_module", find_nothing)
    with pytest.raises(ValueError, match=rf"needs {module}.*pip install -e '\.\[tasks\]'"):
        use(tmp_path)


def test_jsonl_needs_no_extra(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows(40))
    script = f"""
import sys
for name in ("pyarrow", "pandas", "datasets", "torch"):
    sys.modules[name] = None
from paceline.tasks.files import read_data
assert len(read_data({data!r})["train"]) == 40
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_graders_do_not_read_the_data() -> None:
    task = make_task("/nowhere/at/all.jsonl")
    task.prepare()
    item = Item("?", {"answer": "42", "columns": {}}, "?")
    assert task.score(item, "42") == 1.0
    with pytest.raises(ValueError, match=r"there is no file .*all\.jsonl"):
        _ = task.size


# ---- order and splits ----


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", make_rows(200))


def test_items_are_a_pure_function_of_seed_and_index(data: str) -> None:
    first, again = make_task(data), make_task(data)
    places = [(seed, index) for seed in (0, 1, -5) for index in (0, 7, 1000, 3)]
    assert [first.item(*place) for place in places] == [again.item(*place) for place in reversed(places)][::-1]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(data: str) -> None:
    task = make_task(data)
    epochs = [[task.item(3, epoch * task.size + i).key for i in range(task.size)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == task.size for epoch in epochs)
    assert [task.item(4, i).key for i in range(task.size)] not in epochs, "another seed, another order"


def test_held_out_rows_are_no_train_rows_and_stay_held_out(data: str, tmp_path: Path) -> None:
    task = make_task(data)
    train = {item.key for item in all_items(task, "train", task.size)}
    test = {item.key for item in all_items(task, "test", 200 - task.size)}
    assert len(train) + len(test) == 200 and not train & test
    assert 5 <= len(test) <= 60
    # Other rows around them, in another order and dress, change nothing.
    rows = [{"question": f"  what   IS {i} + {i}? ", "answer": "0"} for i in reversed(range(400))]
    other = make_task(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert not {item.key for item in all_items(other, "train", other.size)} & test


def test_a_test_file_is_the_test_split_and_leaves_the_train_split(data: str, tmp_path: Path) -> None:
    test_data = write_jsonl(tmp_path / "test.jsonl", make_rows(30, 190))
    task = make_task(data, test_data=test_data)
    with pytest.warns(UserWarning, match="10 train rows are test rows too"):
        assert task.size == 190
    test = {item.key for item in all_items(task, "test", 30)}
    assert test == {f"what is {i} + {i}?" for i in range(190, 220)}
    assert not {item.key for item in all_items(task, "train", 190)} & test


def test_an_empty_split_says_how_to_fill_it(tmp_path: Path) -> None:
    rows = [row for row in make_rows(50) if split_of("data", row["question"].casefold()) == "train"][:3]
    task = make_task(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert task.size == 3
    with pytest.raises(ValueError, match=r"no row falls into the test split.*test_data"):
        task.item(0, 0, "test")


def test_a_file_task_is_sound(data: str) -> None:
    report = check(make_task(data), num_items=50)
    assert report.is_sound, report.problems


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6), st.integers(1, 40))
def test_orders_are_permutations(seed: int, epoch: int, count: int) -> None:
    assert sorted(files._order(seed, epoch, count)) == list(range(count))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": None}, "task.data: task math needs a JSONL, CSV or parquet file"),
        ({"reward": "a:b"}, "task.reward: task math has a reward of its own"),
        ({"dials": {"test_dta": "x"}}, "task.dials of math: unknown setting test_dta: did you mean test_data"),
    ],
)
def test_settings_of_a_file_task_are_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_math_task(TaskSettings(**{"name": "math", "data": "rows.jsonl"} | changed))


# ---- mathematics ----


def math_item(answer: Any) -> Item:
    return Item("?", {"answer": answer, "columns": {}}, "?")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("42", "42"),
        (42, "42"),
        (0.5, "0.5"),
        (" 42\n", "42"),
        ("6 * 7 = <<6*7=42>>42\n#### 42", "42"),
        ("#### 1,234", "1,234"),
        (r"so it is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"(1, \frac{1}{2})", r"(1, \frac{1}{2})"),
    ],
)
def test_the_final_answer_of_a_file_is_found(answer: Any, gold: str) -> None:
    assert read_gold(math_item(answer)) == gold


def test_a_row_without_an_answer_cannot_be_graded() -> None:
    with pytest.raises(ValueError, match=r"no answer; name its column with task\.answer_column"):
        read_gold(math_item(None))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("no box", None),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} or so {", r"\frac{1}{2}"),
        (r"\boxed {1}", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{", None),
        (r"\boxed{1} then \boxed", None),
        (r"\boxed 1", None),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{3}}", "3"),
    ],
)
def test_the_last_box_is_the_answer(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_only_the_end_of_a_text_without_a_box_is_looked_at() -> None:
    assert find_answer("42 " + "and so on " * 1000) == ("42 " + "and so on " * 1000)[-1000:]
    assert find_answer(" \n") is None
    assert find_answer(rf"\boxed{{{'1' * 600}}}") is None
    assert find_answer(rf"\boxed{{{'1' * 600}}}", max_length=600) is not None


RIGHT = [
    ("42", r"\boxed{42}"),
    ("42", "The answer is 42."),
    ("42", "so x = 42"),
    ("#### 1,234", r"\boxed{1234}"),
    ("1234", r"\boxed{1,234}"),
    ("$12.50", r"\boxed{\$12.5}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    ("x^2+1", r"\boxed{1 + x^2}"),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
    ("Evelyn", r"\boxed{\text{Evelyn}}"),
    ("10", r"\boxed{10\text{ apples}}"),
]
WRONG = [
    ("42", r"\boxed{41}"),
    ("42", ""),
    ("42", "no idea"),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{42} is wrong, it is \boxed{41}"),
    ("42", r"42, or rather \boxed{41}"),
    ("42", r"\boxed{41, 42}"),
    ("42", r"\boxed{41 \text{ or } 42}"),
    ("42", r"\boxed{\{41, 42\}}"),
    ("42", r"$41$ or $42$"),
    ("42", "the answer is 42, no, the answer is 41"),
    ("42", r"the answer is $42$, no, the answer is $\left($"),
    ("42", r"\boxed{x}"),
    ("42", r"\boxed{-42}"),
    ("42", r"\boxed{42"),
    ("42", r"\boxed{42.001}"),
    ("x", r"\boxed{y}"),
    ("(1,234)", r"\boxed{1234}"),
]


@needs("math_verify")
@pytest.mark.parametrize(("expected", "pairs"), [(1.0, RIGHT), (0.0, WRONG)])
def test_only_an_equal_final_answer_scores(expected: float, pairs: list[tuple[str, str]]) -> None:
    scorer = MathScorer()
    assert [(pair, scorer.score(math_item(pair[0]), pair[1])) for pair in pairs] == [(pair, expected) for pair in pairs]


@needs("math_verify")
def test_an_answer_of_the_file_that_cannot_be_read_is_said() -> None:
    with pytest.raises(ValueError, match="cannot read the answer"):
        MathScorer().score(math_item("}"), r"\boxed{1}")


@needs("math_verify")
def test_math_verify_sets_no_timer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a timer that a grader process would inherit")

    monkeypatch.setattr("signal.alarm", refuse)
    monkeypatch.setattr("signal.setitimer", refuse)
    assert MathScorer().score(math_item("42"), r"\boxed{42}") == 1.0


@needs("math_verify")
def test_right_answers_of_a_math_task_pass_and_cheap_ones_do_not(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_rows(60))
    task = make_math_task(TaskSettings(name="math", data=data))
    assert task.item(0, 0).prompt.endswith("put the final answer in \\boxed{}.")
    items = [task.item(0, i, split) for split in ("train", "test") for i in range(10)]
    assert [task.score(item, task.gold(item)) for item in items] == [1.0] * 20
    for texts in ([item.prompt for item in items], [""] * 20, [task.gold(item) for item in items[1:] + items[:1]]):
        scores = [task.score(item, text) for item, text in zip(items, texts, strict=True)]
        assert scores == [float(text == task.gold(item)) for item, text in zip(items, texts, strict=True)]


# ---- reasoning-gym ----


def test_no_name_is_both_allowed_and_excluded() -> None:
    assert not ALLOWED & EXCLUDED.keys()
    assert "gsm_symbolic" in ALLOWED and "countdown" in EXCLUDED


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("countdown", "gym:countdown is not offered: its scorer runs the model's text as Python code"),
        ("gsm_symbolik", "gym:gsm_symbolik is unknown.*did you mean gym:gsm_symbolic"),
        ("qqqqqqq", "gym:qqqqqqq is unknown.*there are ab, acre"),
    ],
)
def test_names_that_are_not_allowed_are_explained(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gym_task(TaskSettings(name=f"gym:{name}"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("<answer>41</answer> no, <answer> 42\n</answer> there", "42"),
        ("<answer>1\n2</answer>\nAnswer: 3", "1\n2"),
        ("Answer: 41\nfinal answer: 42\nbye", "42"),
        ("Answer: 41\nSo the answer is 42.\nbye", "42"),
        ("The answer is 41. No, the final answer is: 42", "42"),
        ("<answer>42</answer> The answer is 41.", "42"),
        ("An answer is not 41, and an answers is 43", "not 41, and an answers is 43"),
        ("<answer>42", None),
        ("42</answer>", None),
        ("the answers are 42", None),
        ("", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert gym.find_answer(text) == answer


class LaxDataset:
    """A data set whose scorer does what some of reasoning-gym's do."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"Which  Number is {self.seed % 50}?", "answer": str(self.seed % 50), "metadata": {1: {2}}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        entry["metadata"].clear()
        scores = {"overshoot": 1.0000000000000002, "partly": 0.9}
        return scores[answer] if answer in scores else float(int(answer) == int(entry["answer"]))


@pytest.fixture
def lax_gym(monkeypatch: pytest.MonkeyPatch) -> GymTask:
    def create_dataset(name: str, seed: int, size: int) -> LaxDataset:
        assert size == 1
        return LaxDataset(seed)

    factory = SimpleNamespace(create_dataset=create_dataset, DATASETS={})
    monkeypatch.setattr(gym, "import_extra", lambda *_: factory)
    return GymTask("chain_sum")


def test_gym_items_are_pure_disjoint_and_survive_json(lax_gym: GymTask) -> None:
    report = check(lax_gym, num_items=30)
    assert report.is_sound, report.problems
    assert lax_gym.size is None
    assert lax_gym.item(0, 1) != lax_gym.item(1, 0), "neighbouring seeds must not share items"
    assert lax_gym.item(0, 0).prompt.endswith(gym.INSTRUCTION)


@pytest.mark.parametrize(
    ("answer", "score"), [("{}", 1.0), ("0{}", 1.0), ("1{}", 0.0), ("overshoot", 0.0), ("partly", 0.0), ("chokes", 0.0)]
)
def test_gym_gives_full_marks_or_none(lax_gym: GymTask, answer: str, score: float) -> None:
    item = lax_gym.item(0, 0)
    assert lax_gym.score(item, f"<answer>{answer.format(item.answer['gold'])}</answer>") == score
    assert lax_gym.score(item, answer.format(item.answer["gold"])) == 0.0, "without its tags"


def test_another_version_of_the_gym_is_noticed(lax_gym: GymTask) -> None:
    item = lax_gym.item(0, 0)
    other = Item(item.prompt, {**item.answer, "gold": "elsewhere"}, item.key)
    with pytest.raises(ValueError, match="another item from the same seed"):
        lax_gym.score(other, "<answer>1</answer>")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("42", "42"),
        ("$1,234.50", "1234.50"),
        ("42 apples", "42"),
        ("41 or 42", None),
        ("-42", None),
        ("", None),
        ("1,2", None),
    ],
)
def test_an_answer_that_must_be_a_number_holds_exactly_one(answer: str, number: str | None) -> None:
    assert gym._only_number(answer) == number


@needs("reasoning_gym")
def test_gsm_symbolic_works() -> None:
    task = make_gym_task(TaskSettings(name="gym:gsm_symbolic"))
    report = check(task, num_items=25)
    assert report.is_sound, report.problems
    item = task.item(0, 0)
    gold = item.answer["gold"]
    assert [task.score(item, text.format(gold)) for text in ("Answer: {}", "<answer>${}.</answer>")] == [1.0, 1.0]
    assert [task.score(item, text.format(gold)) for text in ("<answer>-{}</answer>", "Answer: {} or 7")] == [0.0, 0.0]
    assert len({task.item(seed, i).key for seed in (0, 1) for i in range(20)}) > 35


@needs("reasoning_gym")
def test_graders_make_gym_items_again() -> None:
    settings = TaskSettings(name="gym:gsm_symbolic", grader_workers=1)
    task = make_gym_task(settings)
    items = [task.item(0, i) for i in range(4)]
    with Grader(settings, factory="paceline.tasks.gym:make_gym_task") as grader:
        grades = grader.score([(item, text) for item in items for text in (task.gold(item), "Answer: 0.125")])
    assert grades == [Grade(1.0), Grade(0.0)] * 4


@needs("reasoning_gym")
def test_dials_configure_the_data_set() -> None:
    settings = TaskSettings(name="gym:chain_sum", dials={"min_terms": 5, "max_terms": 5})
    assert (
        make_gym_task(settings).item(0, 0).prompt.count(" + ") + make_gym_task(settings).item(0, 0).prompt.count(" - ")
        == 4
    )
    for dials in ({"min_trems": 5}, {"min_terms": -1}):
        with pytest.raises(ValueError, match=r"task\.dials of gym:chain_sum: .*its dials are .*min_terms"):
            make_gym_task(TaskSettings(name="gym:chain_sum", dials=dials))


@needs("reasoning_gym")
def test_every_data_set_was_reviewed() -> None:
    """A new release may bring new ones; they stay out until somebody reads their scorers."""
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    assert datasets.keys() >= ALLOWED
    assert not datasets.keys() - ALLOWED - EXCLUDED.keys(), "review these and put them in ALLOWED or EXCLUDED"


MAKE_ALL = """
import sys
from paceline.tasks.gym import ALLOWED, GymTask
for name in sorted(ALLOWED):
    task = GymTask(name)
    for index in range(2):
        item = task.item(0, index)
        scores = [task.score(item, text) for text in (task.gold(item), "<answer>?</answer>", item.prompt)]
        print(ascii((name, item, scores)))
"""


@pytest.mark.slow
@needs("reasoning_gym")
def test_every_allowed_data_set_keeps_its_promises() -> None:
    """Its own answers pass, others do not, and another process with another hash seed makes the same items."""
    path = os.pathsep.join(sys.path)
    runs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MAKE_ALL],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    made = [[line for line in run if line.startswith("(")] for run in runs]
    assert made[0] == made[1]
    assert len(made[0]) == 2 * len(ALLOWED)
    assert [line for line in made[0] if not line.endswith("[1.0, 0.0, 0.0])")] == []


RUNNERS = {"eval", "exec", "compile", "parse_expr", "sympify", "lambdify", "__import__", "system"}
OWN_TEXT = {("bitwise_arithmetic", "eval(problem)")}
"""Calls that run the data set's own problem, never the model's text."""


@needs("reasoning_gym")
def test_no_allowed_scorer_runs_a_text_as_code() -> None:
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    found = {name: set(runs_code(datasets[name][0])) for name in sorted(ALLOWED)}
    assert {(name, call) for name, calls in found.items() for call in calls} == OWN_TEXT


@needs("reasoning_gym")
def test_the_search_finds_every_scorer_that_is_known_to_run_code() -> None:
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    known = {name for name, reason in EXCLUDED.items() if "as Python code" in reason}
    assert len(known) == 9
    assert all(list(runs_code(datasets[name][0])) for name in known)


def runs_code(dataset: type) -> Iterator[str]:
    """Calls that may run code in a data set's scorer, and in what it calls in its own module."""
    module = sys.modules[dataset.__module__]
    waiting: list[Any] = [dataset.score_answer]  # type: ignore[attr-defined]
    seen = set()
    while waiting:
        function = waiting.pop()
        if function in seen or not inspect.isroutine(function):
            continue
        seen.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in RUNNERS and not ast.unparse(call.func).startswith("re."):
                yield ast.unparse(call)
            for place in (dataset, module):
                callee = inspect.getattr_static(place, name, None)
                callee = getattr(callee, "__func__", callee)
                if getattr(callee, "__module__", None) == module.__name__:
                    waiting.append(callee)


def test_a_hub_dataset_is_the_files_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {"train": SimpleNamespace(cache_files=[{"filename": "/cache/b"}, {"filename": "/cache/a"}])}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name, configuration: loaded))
    assert data_files("owner/name") == [Path("/cache/a"), Path("/cache/b")]
