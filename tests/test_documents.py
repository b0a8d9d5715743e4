"""Documents from strangers: whatever a file holds, it is read in a moment, and a refusal is one line that names it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from paceline.core import documents
from paceline.core.bounded_yaml import parse_yaml
from paceline.core.config import SettingsError, fields_of, load, validate
from paceline.core.documents import brief, numbered_lines, open_regular, parse_json, plain, read_json, read_text
from paceline.core.schema import Schema, check, number, whole
from paceline.run.settings import RootSettings
from paceline.warmup.settings import WarmupSettings

# Files.


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for place in (tmp_path / "fifo", tmp_path / "zero", tmp_path):
        with pytest.raises((ValueError, OSError), match=r"not a regular file|is a directory"):
            open_regular(place)
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link") == "text"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot read .*missing: no such file"):
        read_text(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match=r"cannot read .*loop: too many levels"):
        read_text(tmp_path / "loop")
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        read_text(tmp_path / "a\0b")


def test_a_file_that_is_too_large_or_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(2**40)  # sparse: it takes no room on disk
    with pytest.raises(ValueError, match=r"file is larger than 1,000 bytes"):
        read_text(file, 1000)
    file.write_bytes(b"good\nbad \xff\n")
    with pytest.raises(ValueError, match="file is not UTF-8 text: line 2 holds the byte 0xff"):
        read_text(file)


def test_lines_are_those_that_python_reads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("\ufeffa\r\nb\u2028c\rd\n\n \n\x0be\nf".encode())
    with file.open(encoding="utf-8-sig") as opened:
        expected = [(i, line.rstrip("\n")) for i, line in enumerate(opened, 1) if line.strip()]
    assert list(numbered_lines(file)) == expected == [(1, "a"), (2, "b\u2028c"), (3, "d"), (6, "\x0be"), (7, "f")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\nb\xff\n", "file is not UTF-8 text: line 2 holds the byte 0xff at position 2"),
        (b"a\n\nb\0c\n", "file: line 3 holds a NUL"),
        ("a\nb\n".encode("utf-16"), "file is not UTF-8 text: line 1"),
        (b"a\n" + b"b" * 2000, "file: line 2 is longer than 1,000 bytes"),
    ],
)
def test_a_line_that_is_no_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(numbered_lines(tmp_path / "file"))


# JSON.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name .* at column 2"),
        ("[1,\n2", "at line 2, column 2"),
        ('{"a": 1, "b": 2, "a": 3}', "gives the key 'a' twice"),
        ("{" + '"a": 1,' * 100_000 + '"b": 2}', "gives the key 'a' twice"),
        ("[NaN]", "holds NaN, which is not JSON"),
        ("[-Infinity]", "holds -Infinity"),
        ("[1e999]", "1e999, which is beyond the range"),
        ("9" * 5000, "number of more than 4,300 digits"),
        ('["x\\ud800"]', r"holds \\ud800, half of a surrogate pair, in 'x"),
        ('{"\\uDC00": 1}', r"holds \\udc00, half of a surrogate pair"),
        ("[" * 65 + "]" * 65, "nests deeper than 64"),
        ("[" * 100_000, "nests deeper than 64"),
        ('{"a":' * 500 + "1" + "}" * 500, "nests deeper than 64"),
    ],
    ids=lambda value: value[:24],
)
def test_json_that_readers_disagree_about_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=rf"file\.json is not valid JSON \(.*{message}.*\); copy the file again"):
        read_json(tmp_path / "file.json")


def test_json_within_the_bounds_is_what_python_reads() -> None:
    for text in ('{"a": [1, -2.5e10, "\\ud83d\\ude00", null, true]}', "[" * 64 + "]" * 64, '"{[{["', "1" * 4000):
        assert parse_json(text) == json.loads(text)


# YAML.

LAUGHS = "\n".join(["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60))])
CHAIN = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1, *x]", "line 1, column 11: the alias stands inside the value it stands for"),
        ("a: &x {b: *x}", "the alias stands inside"),
        ("a: &x {<<: *x}", "the alias stands inside"),
        (LAUGHS, "aliases included"),
        (MERGES, "aliases included"),
        (CHAIN, "64 levels, aliases included"),
        ("[" * 100_000, "nest deeper than 64"),
        ("- " * 100_000, "nest deeper than 64"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' stands twice"),
        ("a: 2001-01-01", "'timestamp' is not a type of settings"),
        ("a: !!python/object/apply:os.system [ls]", "python/object/apply:os.system' is not a type"),
        ("a: !!binary x", "'binary' is not a type"),
        ("a: !!int x", "'x' is no int"),
        ("a: !!bool x", "'x' is no bool"),
        ("a: " + "9" * 5000, "more than 100 digits"),
        ("a: " + ":".join(["1"] * 100_000), "more than 100 digits"),
        ("? [1]\n: 2", "unhashable key"),
        ('a: "\\ud800"', "half of a surrogate pair"),
        ("a: \0", "unacceptable character"),
        ("a: *b", "undefined alias 'b'"),
        ("#" * 300_000, "longer than 262,144 characters"),
    ],
    ids=lambda value: value[:24],
)
def test_yaml_beyond_the_bounds_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)
    (tmp_path / "file.yaml").write_bytes(text.encode())
    with pytest.raises(SettingsError, match=rf"file\.yaml is not valid YAML: .*{message}"):
        load(RootSettings, tmp_path / "file.yaml")


def test_yaml_within_the_bounds_is_what_a_safe_loader_reads() -> None:
    text = "a: &x {b: [1, 2.5, .inf, null, on, 'c']}\nd: *x\ne: {<<: *x, f: 0x10, b: 3}\n0: |\n  text\n"
    inner = [1, 2.5, float("inf"), None, True, "c"]
    assert parse_yaml(text) == {"a": {"b": inner}, "d": {"b": inner}, "e": {"b": 3, "f": 16}, 0: "text\n"}


def test_an_override_is_held_to_the_same_bounds() -> None:
    for text, message in (("&x [*x]", "inside the value"), ("[" * 1000, "nest deeper"), ("9" * 200, "100 digits")):
        with pytest.raises(SettingsError, match=f"engine.max_rows: .* is not a YAML value .*{message}"):
            load(RootSettings, None, {"engine.max_rows": text})


def test_a_recipe_that_is_a_folder_or_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").mkdir()
    (tmp_path / "b.yaml").write_bytes(b"a: \xff")
    (tmp_path / "c.yaml").write_text("7: {a: 1}")
    for name, message in (("a", "regular file|directory"), ("b", "not UTF-8 text"), ("c", "names a section 7")):
        with pytest.raises((SettingsError, OSError), match=rf"{name}\.yaml.*{message}|{message}"):
            load(RootSettings, tmp_path / f"{name}.yaml")


# Schemas.


class Example(Schema):
    layers: int = whole(1, 100)
    theta: float | None = number(10.0)
    ids: int | list[int] | None = Field(None, description="an id or a list of them")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "file must give layers as a positive integer up to 100; it is missing"),
        ({"layers": 10**9}, "layers as a positive integer up to 100; found 1000000000"),
        ({"layers": 0}, "found 0"),
        ({"layers": "3"}, "found '3'"),
        ({"layers": True}, "found True"),
        ({"layers": 3.0}, r"found 3\.0"),
        ({"layers": 10**5000}, "found a int that is too large to print"),
        ({"layers": ["\x1b[31m" * 100]}, r"found \['\\x1b\[31m.*characters\)$"),
        ({"layers": 1, "theta": 11}, "theta as a number above 0, up to 10; found 11"),
        ({"layers": 1, "theta": 10**5000}, "theta as a number"),
        ({"layers": 1, "ids": [1, "x"]}, r"ids as an id or a list of them; found \[1, 'x'\]"),
    ],
)
def test_a_schema_names_document_key_value_and_what_is_accepted(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(Example, content, "file")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_schema_passes_what_it_does_not_know() -> None:
    assert check(Example, {"layers": 3, "other": object()}, "file").layers == 3


def test_values_in_messages_are_short_and_printable() -> None:
    assert brief("a\nb") == "'a\\nb'" and len(brief("x" * 10**6)) < 120
    assert plain("a b") == "a b" and plain("\x1b[2J") == "'\\x1b[2J'"


# Settings.


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


HARMLESS = ("max_grad_norm", "clip_high", "dual_clip")
"""Bounds themselves: a huge one bounds nothing, which is a choice."""


@pytest.mark.parametrize("root", [RootSettings, WarmupSettings])
@pytest.mark.parametrize(
    "value",
    [2**63, -(2**70), 10**5000, 1e308, float("nan")],
    ids=lambda value: f"{value!s:.9}" if not isinstance(value, int) or value.bit_length() < 99 else "huge",
)
def test_every_number_in_the_settings_has_bounds(root: type[Any], value: float) -> None:
    for key, field in fields_of(root):
        kind = str(field.annotation)
        if ("int" not in kind and "float" not in kind) or "dict" in kind or key.endswith(HARMLESS):
            continue
        with pytest.raises(SettingsError, match=key.replace(".", r".*")) as caught:
            validate(root, nested(key, value))
        assert len(str(caught.value)) < 600
