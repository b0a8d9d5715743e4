"""Data given in Python as rows, turned into the lines of a JSONL file.

`run/given.py` writes them into a run's folder, so that a run always has its data as a file: to resume, to hash, to look
at. Rows are dicts, or plain prompts; a value that a line of JSON cannot hold as it is, is an error that names its row.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paceline.core.documents import brief, plain
from paceline.tasks.base import Split
from paceline.tasks.files import MAX_ROWS, SPLIT_NAMES

GivenData = str | os.PathLike[str] | Iterable[Any] | Mapping[str, Iterable[Any]]
"""The name of a file, folder or data set; rows, as a list or a `datasets.Dataset`; or rows by split."""
AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, os.PathLike)
"""What becomes text in JSON."""


def rows_by_split(data: GivenData, noun: str) -> dict[Split, str | list[bytes]]:
    """A name as it is, or the lines of a file, for every split that the data has."""
    if isinstance(data, str | os.PathLike):
        return {"train": os.fspath(data)}
    if not isinstance(data, Mapping):
        return {"train": to_lines(data, noun)}
    names = {split: next((name for name in known if name in data), None) for split, known in SPLIT_NAMES.items()}
    if names["train"] is None:
        raise ValueError(
            f"{noun}: a mapping holds rows by split, and this one has no train but {_names(data)}; give rows as a list "
            "of dicts, and columns as datasets.Dataset.from_dict(columns)"
        )
    return {split: to_lines(data[name], f"{noun}[{name!r}]") for split, name in names.items() if name is not None}


def to_lines(rows: Iterable[Any], noun: str) -> list[bytes]:
    """Rows as lines of JSON; a ValueError names the first that cannot be one."""
    if not isinstance(rows, Iterable):
        raise ValueError(f"{noun}: {brief(rows)} is a {type(rows).__name__}, not rows: give a list of dicts, or a file")
    takes_texts = isinstance(rows, list | tuple)  # of a table, iteration may give the names of its columns
    lines = []
    for number, row in enumerate(rows, 1):
        if number > MAX_ROWS:
            raise ValueError(f"{noun}: it holds more than {MAX_ROWS:,} rows, which do not fit in memory; give a part")
        lines.append(_line({"prompt": row} if takes_texts and isinstance(row, str) else row, f"{noun}, row {number}"))
    if not lines:
        raise ValueError(f"{noun}: it holds no rows")
    return lines


def _line(row: Any, place: str) -> bytes:
    if not isinstance(row, Mapping):
        raise ValueError(
            f'{place}: {brief(row)} is no dict of columns such as {{"prompt": ..., "answer": ...}}; of a pandas '
            'DataFrame, give df.to_dict("records")'
        )
    cells = (f"{json.dumps(_name(key, place))}: {_cell(value, f'{place}, {plain(key)}')}" for key, value in row.items())
    return f"{{{', '.join(cells)}}}\n".encode()


def _name(key: Any, place: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{place}: the column {brief(key)} has no text as its name")
    return key


def _cell(value: Any, place: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, default=_as_json)
    except TypeError as error:
        raise ValueError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {brief(value)} is no JSON value ({error}); write None for a missing one") from None


def _as_json(value: Any) -> Any:
    """What stands for a value that JSON does not know."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, AS_TEXT):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value; use text, numbers, lists and dicts")


def _names(data: Mapping[Any, Any]) -> str:
    return plain(", ".join(map(str, data)), most=200) or "nothing"
