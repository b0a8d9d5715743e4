"""`paceline settings`: every setting with its default and what it does, or those that a word is about."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import show
from paceline.cli.hints import SECTIONS, find_keys, settings_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Row = tuple[str, str, str]
"""A setting, its default and its description."""
MAX_WIDTH = 100


def command(
    word: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="List only settings that this is about.")
    ] = None,
    warmup: Annotated[bool, typer.Option("--warmup", help="The settings of `paceline warmup`.")] = False,
) -> None:
    """List the settings, or search them.

    A setting is found by its name, by words of its description, or by what other tools call it (learning-rate,
    batch-size). Set it as --section.key=value, or in a file. In a pipe, prints one setting per line: name, default and
    description, with tabs in between.
    """
    command_name = "warmup" if warmup else "train"
    rows = list_settings(command_name)
    found = search(rows, word, command_name) if word else rows
    for row in found:
        show(_paragraph(row) if sys.stdout.isatty() else "\t".join(row))


def list_settings(command_name: str = "train") -> list[Row]:
    """All settings that a command may read, in the order of their sections."""
    from paceline.core.config import fields_of

    fields = fields_of(settings_of(command_name))
    return [(key, shown_default(field), field.description or "") for key, field in fields]


def shown_default(field: FieldInfo) -> str:
    """A default as the user would write it."""
    value = field.get_default(call_default_factory=True)
    default = "null" if value is None else str(value).lower()
    return {"()": "[]"}.get(default, default)


def search(rows: Sequence[Row], words: Sequence[str], command_name: str) -> list[Row]:
    """The settings that all words are about, those that are called so first; a ValueError if there are none."""
    wanted = [word.lstrip("-").lower().replace("-", "_") for word in words]
    found = [row for row in rows if all(word in _text(row) for word in wanted)]
    named = [row for row in found if all(word in row[0].lower() for word in wanted)]
    keys = find_keys(words[0], settings_of(command_name), SECTIONS[command_name]) if len(words) == 1 else []
    meant = [row for row in rows if row[0] in keys]
    is_guess = bool(named) and not any(row in named for row in meant)
    ordered = list(dict.fromkeys([*named, *found, *meant] if is_guess else [*meant, *named, *found]))
    if not ordered:
        raise ValueError(f"no setting is about {' '.join(words)}; paceline settings lists them all")
    return ordered


def _text(row: Row) -> str:
    key, _, description = row
    return f"{key} {description} {description.replace('-', '_').replace(' ', '_')}".lower()


def _paragraph(row: Row) -> str:
    """For a terminal: the setting, and below it what it does."""
    key, default, description = row
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    text = textwrap.fill(description, width, initial_indent="    ", subsequent_indent="    ")
    return f"--{key}={default}\n{text}"
