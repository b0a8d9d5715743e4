"""Tasks from data files: JSONL, CSV, parquet and `datasets` folders, in the formats of TRL, verl and question banks.

`math.py` and `rewards.py` add a scorer. The format is inferred from the columns; the error says so where that fails.
Rows become items with a canonical key (the prompt without case and spacing). Unless the data has a test split, a hash
of the key decides which rows are held out, so other files, seeds and row orders never move one.

Data is read on the first call of `item`: grader processes make the same task and must not read it at all. It is read
to its last row, so that a bad one is found before a run begins, and every message names the file and the row.
"""

from __future__ import annotations

import heapq
import importlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, Self

from pydantic import Field

from paceline.core.config import Settings, SettingsError, nearest, validate
from paceline.core.documents import BadJson, brief, numbered_lines, open_regular, parse_json, plain
from paceline.core.extras import how_to_install
from paceline.core.noise import derive_key
from paceline.tasks.base import Item, Message, Split
from paceline.tasks.csv_rows import read_csv
from paceline.tasks.procedural import split_of
from paceline.tasks.settings import TaskSettings

DataRow = dict[str, Any]
RowShape = Literal["verl", "trl", "plain"]

QUESTION_COLUMNS = ("question", "problem")
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "solution")
"""Where to look for an answer, the barest column first: some datasets have an `answer` beside a worked `solution`."""

FILE_ENDINGS = (".jsonl", ".parquet", ".json", ".csv", ".arrow", ".txt")
"""Suffixes that mean a file even if none exists; a dataset's name may contain a dot too."""

MAX_ROWS = 10_000_000

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "validation", "eval", "dev")}

Sources = dict[Split, list[DataRow]]
"""Records by split; without "test", part of "train" is held out."""


class Scorer(Protocol):
    """Scores the items of a data file."""

    def prepare(self) -> None:
        """Load what scoring needs; grader processes call it."""

    def score(self, item: Item, text: str) -> float: ...

    def gold(self, item: Item) -> str: ...


class FileDials(Settings):
    """Dials of a task from a data file."""

    test_data: str | None = Field(None, description="Held-out items; null: a split or a part of task.data.")


@dataclass(frozen=True)
class Columns:
    """Which columns to use; None: infer it."""

    prompt: str | None = None
    answer: str | None = None


RowCheck = Callable[[Item], object]
"""Raises a ValueError about a row that can never be scored."""


def accept(item: Item) -> None:
    """The check of a scorer that takes every row."""


class FileTask:
    """The rows of a data file, shuffled anew for every seed and epoch, scored by `scorer`.

    `Item.answer` is {"answer": as in the file, or None; "columns": all columns but the prompt's}.
    `instruction` is appended to questions that come without one: those of plain question-and-answer files.
    """

    def __init__(
        self,
        name: str,
        data: str,
        scorer: Scorer,
        columns: Columns = Columns(),  # noqa: B008  # frozen
        test_data: str | None = None,
        instruction: str = "",
        check: RowCheck = accept,
    ) -> None:
        self.name = name
        self.scorer = scorer
        self._data, self._test_data = data, test_data
        self._columns = columns
        self._instruction, self._check = instruction, check

    @classmethod
    def from_settings(
        cls, settings: TaskSettings, scorer: Scorer, instruction: str = "", check: RowCheck = accept
    ) -> Self:
        if settings.data is None:
            raise SettingsError(f"task.data: task {settings.name} needs a JSONL, CSV or parquet file, or a folder")
        try:
            dials = validate(FileDials, settings.dials)
        except SettingsError as error:
            raise SettingsError(f"task.dials of {settings.name}: {error}") from None
        columns = Columns(settings.prompt_column, settings.answer_column)
        return cls(settings.name, settings.data, scorer, columns, dials.test_data, instruction, check)

    @property
    def size(self) -> int:
        return len(self._items["train"])

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        items = self._items[split]
        if not items:
            raise ValueError(
                f"{self._data}: no row falls into the {split} split, which a hash of the prompt decides; add rows, or "
                "name a file of held-out rows: --task.dials.test_data=FILE (in Python, test_dataset=ROWS)"
            )
        epoch, place = divmod(index, len(items))
        return items[_order(seed, epoch, len(items))[place]]

    def longest(self, count: int, split: Split = "train") -> list[Item]:
        """The items with the longest prompts, the longest first."""
        return heapq.nlargest(count, self._items[split], key=prompt_length)

    def prepare(self) -> None:
        self.scorer.prepare()

    def score(self, item: Item, text: str) -> float:
        return self.scorer.score(item, text)

    def gold(self, item: Item) -> str:
        return self.scorer.gold(item)

    @cached_property
    def _items(self) -> dict[Split, list[Item]]:
        sources = read_data(self._data)
        places: dict[Split, str] = {"train": self._data, "test": self._test_data or self._data}
        if self._test_data is not None:
            given = read_data(self._test_data)
            sources["test"] = given.get("test", given["train"])
        items = {
            split: read_items(records, self._columns, places[split], self._instruction, self._check)
            for split, records in sources.items()
        }
        if "test" in items:
            return {"train": _without(items["train"], items["test"], self._data), "test": items["test"]}
        everything = items["train"]
        return {split: [item for item in everything if split_of("data", item.key) == split] for split in SPLIT_NAMES}


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    """A permutation of the rows, different for each seed and epoch."""
    return sorted(range(count), key=lambda row: derive_key(seed, "task/order", epoch, row))


def _without(train: list[Item], test: Iterable[Item], data: str) -> list[Item]:
    """The train items that are not test items."""
    held_out = {item.key for item in test}
    kept = [item for item in train if item.key not in held_out]
    if len(kept) < len(train):
        warnings.warn(f"{data}: {len(train) - len(kept)} train rows are test rows too and are left out", stacklevel=2)
    return kept


# ---- rows to items ----


def read_items(
    records: Sequence[DataRow],
    columns: Columns,
    place: str,
    instruction: str = "",
    check: RowCheck = accept,
) -> list[Item]:
    """One item per record; all records have the format of the first, and pass `check`."""
    shape, prompt_column, answer_column = detect_shape(records[0], columns, place)
    instruction = instruction if shape == "plain" else ""
    items = []
    for number, record in enumerate(records, 1):
        try:
            items.append(_make_item(record, shape, prompt_column, answer_column, instruction))
            check(items[-1])
        except ValueError as error:
            raise ValueError(f"{place}, row {number}: {error}") from error
    return items


def detect_shape(record: DataRow, columns: Columns, place: str) -> tuple[RowShape, str, str | None]:
    """The format of a record, and its prompt and answer columns (None: nested, or missing)."""
    for name in (columns.prompt, columns.answer):
        if name is not None and name not in record:
            guess = nearest(name, list(record))
            hint = f"did you mean {guess}?" if guess else f"it has {_names(record)}"
            raise ValueError(f"{place}: there is no column {name}: {hint}")
    answer = columns.answer or next((name for name in ANSWER_COLUMNS if name in record), None)
    if columns.prompt is not None:
        return ("trl" if columns.prompt == "prompt" else "plain"), columns.prompt, answer
    if "prompt" in record and isinstance(record.get("reward_model"), Mapping):
        return "verl", "prompt", columns.answer
    if "prompt" in record:
        return "trl", "prompt", answer
    question = next((name for name in QUESTION_COLUMNS if name in record), None)
    if question is not None and answer is not None:
        return "plain", question, answer
    raise ValueError(
        f"{place}: the columns are {_names(record)}; expected TRL's prompt (and columns for your reward), verl's "
        f"prompt and reward_model, or {' or '.join(QUESTION_COLUMNS)} with {' or '.join(ANSWER_COLUMNS)}; "
        "name yours with task.prompt_column and task.answer_column"
    )


def _names(record: DataRow) -> str:
    return plain(", ".join(map(str, record)), most=400) or "none at all"


def _make_item(
    record: DataRow, shape: RowShape, prompt_column: str, answer_column: str | None, instruction: str
) -> Item:
    for column in (prompt_column, answer_column):
        if column is not None and column not in record:
            raise ValueError(f"it has no {column}, unlike the first row; it has {_names(record)}")
    prompt, messages = _read_prompt(record[prompt_column], prompt_column)
    columns = {name: value for name, value in record.items() if name != prompt_column}
    if shape == "verl" and answer_column is None:
        answer = _read_ground_truth(record)
    else:
        answer = None if answer_column is None else record[answer_column]
    everything = "\n".join(message.content for message in messages) or prompt
    return Item(
        prompt=prompt if messages else prompt + instruction,
        answer={"answer": answer, "columns": columns},
        key=" ".join(everything.split()).casefold(),
        messages=messages,
    )


def prompt_length(item: Item) -> int:
    """The length of all that the policy is given, in characters."""
    return sum(len(message.content) for message in item.messages) or len(item.prompt)


def _read_ground_truth(record: DataRow) -> Any:
    rules = record.get("reward_model")
    if not isinstance(rules, Mapping) or "ground_truth" not in rules:
        raise ValueError(f"verl's reward_model must hold a ground_truth, got {brief(rules)}")
    return rules["ground_truth"]


def _read_prompt(value: Any, column: str) -> tuple[str, tuple[Message, ...]]:
    """A prompt's text, and its messages if it is a conversation."""
    if isinstance(value, str) and value.strip():
        return value, ()
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column} must be text or a list of messages, and not empty; got {brief(value)}")
    messages = tuple(_read_message(message, column) for message in value)
    asked = [message.content for message in messages if message.role == "user"]
    if not asked:
        raise ValueError(f"{column} is a conversation without a user turn")
    return asked[-1], messages


def _read_message(value: Any, column: str) -> Message:
    is_message = isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))
    if not is_message:
        raise ValueError(f'{column} must hold messages {{"role": text, "content": text}}, got {brief(value)}')
    return Message(value["role"], value["content"])


# ---- files to rows ----


def read_data(data: str) -> Sources:
    """The records of a file, a folder, or a dataset on the hub (`owner/name`, or `owner/name:configuration`)."""
    path = Path(data).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ValueError(f"task.data: {brief(data)} cannot be read: {error.strerror}") from error
    if is_folder:
        sources = _read_folder(path)
    elif is_file:
        sources = {"train": _read_file(path)}
    elif path.exists():
        raise ValueError(f"task.data: {path.absolute()} is not a regular file; give one, not a pipe or a device")
    elif path.suffix in FILE_ENDINGS or data.count("/") != 1:
        raise ValueError(f"task.data: there is no file or folder {plain(str(path.absolute()), 400)}")
    else:
        sources = _read_hub(data)
    for split, records in sources.items():
        if not records:
            raise ValueError(f"task.data: {data} holds no {split} rows")
    return sources


def data_files(data: str) -> list[Path]:
    """The files that `read_data` reads: the one file, those of a folder, or a hub dataset's in the local cache."""
    path = Path(data).expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in FILE_ENDINGS and file.is_file())
    return [path] if path.is_file() else _cached_files(_load_hub(data))


def _read_file(file: Path) -> list[DataRow]:
    readers = {".jsonl": _read_jsonl, ".csv": read_csv, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise ValueError(f"task.data: {file} is not a .jsonl, .csv or .parquet file")
    return readers[file.suffix](file)


def _read_jsonl(file: Path) -> list[DataRow]:
    records = []
    for number, line in numbered_lines(file):
        try:
            record = parse_json(line)
        except BadJson as error:
            raise ValueError(f"{file}:{number}: not valid JSON: {error}") from error
        if not isinstance(record, dict):
            wanted = 'an object {"question": ..., "answer": ...}'
            raise ValueError(f"{file}:{number}: expected {wanted}, got {brief(record)}")
        records.append(record)
    return records


def _read_parquet(file: Path) -> list[DataRow]:
    open_regular(file).close()
    parquet = import_extra("pyarrow.parquet", f"reading {file}")
    try:
        # A few bytes can stand for billions of equal rows.
        num_rows = parquet.read_metadata(file).num_rows
        rows = parquet.read_table(file).to_pylist() if num_rows <= MAX_ROWS else []
    except Exception as error:  # a damaged file raises many kinds of errors
        raise ValueError(f"{file} is not a readable parquet file: {error}") from error
    if num_rows > MAX_ROWS:
        raise ValueError(f"{file} holds {num_rows:,} rows; at most {MAX_ROWS:,} fit in memory, so give a part of it")
    return [_as_json(row) for row in rows]


def _read_folder(folder: Path) -> Sources:
    """A folder saved by `datasets`, or one with files named by split (train.jsonl, data/train-00000.parquet)."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        datasets = import_extra("datasets", f"reading {folder}")
        try:
            loaded = datasets.load_from_disk(str(folder))
        except Exception as error:  # a damaged folder raises many kinds of errors
            raise ValueError(f"task.data: {folder} is not a readable folder of datasets: {error}") from error
        return _from_datasets(loaded, str(folder))
    files = sorted(file for suffix in ("jsonl", "csv", "parquet") for file in folder.rglob(f"*.{suffix}"))
    sources: Sources = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            found = [file for file in files if file.name.startswith((f"{name}.", f"{name}-", f"{name}_"))]
            if found:
                sources[split] = [record for file in found for record in _read_file(file)]
                break
    if "train" not in sources:
        names_found = ", ".join(file.name for file in files) or "no .jsonl, .csv or .parquet file"
        raise ValueError(f"task.data: {folder} has no train.jsonl, train.csv or train.parquet; it holds {names_found}")
    return sources


def _read_hub(data: str) -> Sources:
    return _from_datasets(_load_hub(data), data)


def _load_hub(data: str) -> Any:
    name, _, configuration = data.partition(":")
    datasets = import_extra("datasets", f"task.data: there is no file {data}, and reading it from the hub")
    try:
        return datasets.load_dataset(name, configuration or None)
    except Exception as error:  # the hub raises many kinds of errors
        raise ValueError(f"task.data: {data} is not a local file, and the hub says: {error}") from error


def _cached_files(loaded: Any) -> list[Path]:
    """The files behind a Dataset, or behind the splits of a DatasetDict."""
    parts = loaded.values() if isinstance(loaded, Mapping) else [loaded]
    return sorted(Path(file["filename"]) for part in parts for file in part.cache_files)


def _from_datasets(loaded: Any, place: str) -> Sources:
    """The records of a Dataset, or of a DatasetDict by its splits."""
    if not isinstance(loaded, Mapping):
        return {"train": [_as_json(row) for row in loaded]}
    sources: Sources = {}
    for split, names in SPLIT_NAMES.items():
        name = next((name for name in names if name in loaded), None)
        if name is not None:
            sources[split] = [_as_json(row) for row in loaded[name]]
    if "train" not in sources:
        raise ValueError(f"task.data: {place} has no train split; it has {', '.join(loaded)}")
    return sources


def _as_json(record: Any) -> DataRow:
    """A record as JSON carries it to a grader; types unknown to JSON, such as dates, become text."""
    plain: DataRow = json.loads(json.dumps(record, default=str))
    return plain


def import_extra(name: str, purpose: str) -> ModuleType:
    """A module of the optional extra `tasks`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        missing = f"{purpose} needs {package}, which is not installed"
        raise ValueError(f"{missing}: {how_to_install('tasks')}") from None
