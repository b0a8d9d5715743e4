"""The rows of a CSV file within bounds: a header with the columns' names, and one record of texts per row.

`files.py` reads `task.data` through it. A file that readers could understand in two ways is refused: a row that is
longer or shorter than the header, a column without a name or named twice, text behind a closing quote. Every value is
text, as the file has it: whether 007 is a number is for the reward to say.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.documents import MAX_LINE_BYTES, brief, plain, whole_lines

MAX_COLUMNS = 10_000
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def read_csv(file: Path) -> list[dict[str, Any]]:
    """The rows of a comma-separated UTF-8 file, by the names in its header; a ValueError names file and line."""
    with _long_fields():
        records = _records(file)
        _, names = next(records, (1, []))
        _check_header(file, names)
        return [_by_name(file, line, names, values) for line, values in records]


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a field be as long as a line of any text: Python's own limit, one for the process, is below a long prompt."""
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _records(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The fields of every row that is not blank, and the line that it begins in."""
    reader = csv.reader(whole_lines(file), strict=True)
    while True:
        first = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{file}:{first}: not valid CSV: {_explain(error)}") from error
        if len(values) > 1 or "".join(values).strip():
            yield first, values


def _by_name(file: Path, line: int, names: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    if len(values) != len(names):
        raise ValueError(
            f"{file}:{line}: the row has {_count(len(values))}, the header {_count(len(names))}; put a field that "
            'holds a comma, a quote or a line break in quotes, with "" for a quote in it'
        )
    return dict(zip(names, values, strict=True))


def _explain(error: csv.Error) -> str:
    """The error in the user's terms; Python's words where they are clear."""
    words = str(error)
    if "unexpected end of data" in words:
        return "a quote that opens in this row is never closed"
    if "expected after" in words:
        return 'text follows a closing quote; write a quote within a field as ""'
    if "field larger" in words:
        return f"a field is longer than {MAX_LINE_BYTES:,} characters; is a quote never closed?"
    return words


def _check_header(file: Path, names: Sequence[str]) -> None:
    if len(names) > MAX_COLUMNS:
        raise ValueError(f"{file}:1: the header has {_count(len(names))}; at most {MAX_COLUMNS:,} are accepted")
    for name, count in Counter(names).items():
        if not name.strip():
            raise ValueError(f"{file}:1: the header has a column without a name; name every column")
        if count > 1:
            raise ValueError(f"{file}:1: the header names the column {brief(name)} {count} times; rename one")
    other = next((words for mark, words in OTHER_SEPARATORS.items() if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        raise ValueError(f"{file}:1: {plain(names[0])} is separated by {other}; save the file with commas")


def _count(count: int) -> str:
    return f"{count:,} field{'s' * (count != 1)}"
