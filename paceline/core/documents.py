"""Files from strangers, read within bounds: text, lines and JSON. Whatever is wrong is one line that names the file.

    read_text(file)        the whole text           numbered_lines(file)     one line at a time, for data
    read_json(file)        one JSON object          parse_json(text)         one JSON value
    whole_lines(file)      the same with blank lines and line ends, for CSV

Model folders, settings, data and prompt files are read through it. It opens regular files only (a FIFO or a device
would never end), reads no more than a bound, and accepts no JSON that readers disagree about: repeated keys, NaN,
numbers beyond a double, lone surrogates. What a document may say is not decided here but by its schema (`schema.py`).
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MAX_BYTES = 2**26
"""Default size limit of a document that is read as a whole."""
MAX_LINE_BYTES = 2**26
"""A longer line holds no row: the file is of another kind."""
MAX_DEPTH = 64
"""How deep lists and objects may nest. Python's own limit, a thousand, is partly used up by whoever calls."""


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading; refuses folders, FIFOs, sockets and devices, also behind a link."""
    try:
        # A FIFO without a writer would block in `open` itself.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise type(error)(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{str(file)!r} cannot be the name of a file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{file} is not a regular file; give one, not a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def read_text(file: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file, which must be UTF-8, with or without a byte order mark."""
    with open_regular(file) as opened:
        data = opened.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{file} is larger than {max_bytes:,} bytes, which no file of its kind is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file} is not UTF-8 text: line {line} holds the byte 0x{data[error.start]:02x}") from error


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 text file that are not blank, without line ends, each with its number from 1."""
    for number, line in enumerate(whole_lines(file), 1):
        if line.strip():
            yield number, line.rstrip("\r\n")


def whole_lines(file: Path) -> Iterator[str]:
    """Every line of a UTF-8 text file, with its line end."""
    with open_regular(file) as opened:
        number = 0
        while chunk := opened.readline(MAX_LINE_BYTES + 1):
            if len(chunk) > MAX_LINE_BYTES:
                raise ValueError(f"{file}: line {number + 1} is longer than {MAX_LINE_BYTES:,} bytes; is it text?")
            for line in chunk.splitlines(keepends=True):  # at \n, \r\n and \r, as Python reads text
                number += 1
                yield _decode_line(file, number, line)


def _decode_line(file: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        bad = f"line {number} holds the byte 0x{line[error.start]:02x} at position {error.start + 1}"
        raise ValueError(f"{file} is not UTF-8 text: {bad}") from error
    if "\0" in text:
        raise ValueError(f"{file}: line {number} holds a NUL; save the file as UTF-8 text")
    return text


def read_json(file: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = parse_json(read_text(file, max_bytes))
    except BadJson as error:
        raise ValueError(f"{file} is not valid JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, but holds a {type(content).__name__}")
    return content


class BadJson(ValueError):
    """Text that is no JSON or beyond the bounds; the message says where and why, and names no file."""


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises `BadJson`."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadJson(f"{error.msg} at {place}") from error
    except RecursionError as error:
        raise BadJson(_TOO_DEEP) from error
    except BadJson:
        raise
    except ValueError as error:  # the only other one is Python's limit on digits
        raise BadJson(f"it holds a number of more than {sys.get_int_max_str_digits():,} digits") from error
    if text.count("[") + text.count("{") > MAX_DEPTH or "\\ud" in text or "\\uD" in text:
        check_values(value)
    return value


def check_values(value: Any) -> None:
    """Raise `BadJson` if a parsed value nests too deep or holds a lone surrogate."""
    open_values = [(value, 0)]
    while open_values:
        found, depth = open_values.pop()
        if isinstance(found, str):
            refuse_surrogates(found)
        elif isinstance(found, dict | list):
            if depth == MAX_DEPTH:
                raise BadJson(_TOO_DEEP)
            inner = [*found, *found.values()] if isinstance(found, dict) else found
            open_values += [(one, depth + 1) for one in inner]


def refuse_surrogates(text: str) -> None:
    """Raise `BadJson` if a text holds half a surrogate pair, which no tokenizer and no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadJson(f"it holds {half}, half of a surrogate pair, in {brief(text)}; remove or repair it") from error


def brief(value: Any, most: int = 100) -> str:
    """A stranger's value for a message: printable, on one line, and not longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with more digits than Python prints
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= most else f"{text[: most - 20]}... ({len(text):,} characters)"


def plain(text: str, most: int = 100) -> str:
    """A stranger's name or words for a message: as they stand if short and printable, else as `brief` shows them."""
    return text if text.isprintable() and len(text) <= most else brief(text, most)


_TOO_DEEP = f"it nests deeper than {MAX_DEPTH} levels"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise BadJson(f"it gives the key {brief(twice)} twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadJson(f"it holds {text:.40}, which is beyond the range of a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadJson(f"it holds {name}, which is not JSON; write null")
