"""Settings machinery: a YAML file and dotted overrides in, one validated, frozen settings object out.

The command line and readers of run folders call it. It knows no section: each folder owns its settings class (a
subclass of `Settings`) and `run/settings.py` assembles the root. It never ignores anything: an unknown key is an error
that names the full dotted key and the nearest valid one.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.core.bounded_yaml import parse_yaml
from paceline.core.documents import brief, plain, read_text

MAX_MESSAGE = 3500
"""A message may quote a value of any length; so many characters of it are shown."""


class SettingsError(ValueError):
    """A setting the user can correct; the message names its dotted key."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")


class Settings(BaseModel):
    """Base of every settings class: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Settings)

MAX_COMPLAINT, MAX_COMPLAINTS = 1500, 3000
"""What a validator says may quote a value of any length, and a list may have any number of wrong items; a message shows
so many characters of one complaint, and of all.
"""
PLAIN_TYPES = ("bool", "int", "float", "str")
"""If a value may be any of these, pydantic reports an error for each, under a key of its own."""


def load(root: type[S], file: Path | None = None, overrides: Mapping[str, str] | None = None) -> S:
    """The settings in `file` (all defaults if None), with the overrides applied."""
    tree = read_yaml(file) if file is not None else {}
    for key, text in (overrides or {}).items():
        _set(tree, key, _parse(root, key, text))
    return validate(root, tree)


def overlay(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Set values in a tree of sections. Keys may be dotted (`rl.steps`) or nested (`rl: {steps: ...}`).

    Below a section, a value replaces the one before it as a whole.
    """
    for key, value in given.items():
        if not isinstance(key, str):
            raise SettingsError(f"{brief(key)} names no setting; settings have names such as rl.steps")
        if isinstance(value, Mapping) and "." not in key:
            for name, inner in value.items():
                _set(tree, f"{key}.{name}", _as_written(inner))
        else:
            _set(tree, key, _as_written(value))


def _as_written(value: Any) -> Any:
    """A value as YAML would hold it: paths are text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_yaml(file: Path) -> dict[str, Any]:
    """A settings file as a nested dict; an empty file gives an empty one."""
    text = _read_text(file)
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise SettingsError(f"{file} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        wanted = "sections with keys (`engine:` / `  drafter: suffix`)"
        raise SettingsError(f"{file} must contain {wanted}, not {brief(tree)}")
    for name in tree:
        if not isinstance(name, str):
            raise SettingsError(f"{file} names a section {brief(name)}; put it in quotes if it is meant as text")
    return tree


def _read_text(file: Path) -> str:
    try:
        return read_text(file)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def validate(root: type[S], tree: Mapping[str, Any]) -> S:
    """The settings object for a nested dict, or a SettingsError that lists everything wrong with it."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        found = dict.fromkeys(_explain(root, detail) for detail in error.errors())  # each once, in order
        raise SettingsError(_joined([plain(each, MAX_COMPLAINT) for each in found])) from None


def _joined(complaints: Sequence[str]) -> str:
    """As many of the complaints as one line has room for, and how many it leaves out."""
    lengths = itertools.accumulate(map(len, complaints))
    shown = complaints[: max(1, sum(length <= MAX_COMPLAINTS for length in lengths))]
    left_out = len(complaints) - len(shown)
    return "; ".join([*shown, f"and {left_out} more"] if left_out else shown)


def dump(settings: Settings) -> str:
    """The settings as YAML that `load` reads back into an equal object."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def fields_of(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below `root` with its dotted key, in order of declaration."""
    for name, field in root.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields_of(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def nearest(key: str, choices: Sequence[str]) -> str | None:
    """The choice `key` most likely means: by spelling first, then by the same last name in another section."""
    close = difflib.get_close_matches(key, choices, n=1, cutoff=0.75)
    if not close:
        last = key.rpartition(".")[2]
        names = {choice.rpartition(".")[2]: choice for choice in reversed(choices)}
        close = [names[name] for name in difflib.get_close_matches(last, list(names), n=1, cutoff=0.75)]
    return close[0] if close else None


def _parse(root: type[Settings], key: str, text: str) -> Any:
    """An override's text as YAML, except that a string setting takes it literally (`--model.path=007`).

    So does a setting that is a list of strings, unless written as a list (`--sampling.stop=###` is one stop string).
    """
    field = dict(fields_of(root)).get(key)
    if field is not None and (field.annotation is str or (_holds_texts(field.annotation) and text[:1] not in "[\"'")):
        return text
    try:
        return parse_yaml(text)
    except ValueError as error:
        fix = "quote it or write a list as [a, b]"
        raise SettingsError(f"{key}: {brief(text)} is not a YAML value ({error}); {fix}") from error


def _holds_texts(annotation: Any) -> bool:
    """Whether an annotation is a tuple of strings, plain or with constraints."""
    inner = get_args(annotation)[0] if get_origin(annotation) is tuple else None
    return inner is str or (get_origin(inner) is Annotated and get_args(inner)[0] is str)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for depth, section in enumerate(sections, 1):
        inner = tree.setdefault(section, {})
        if inner is None:  # a section whose keys are all commented out
            inner = tree[section] = {}
        if not isinstance(inner, dict):
            raise SettingsError(f"{key}: {'.'.join(sections[:depth])} holds {brief(inner)}, not a section with keys")
        tree = inner
    tree[name] = value


def _explain(root: type[Settings], detail: ErrorDetails) -> str:
    """One pydantic error in the user's terms."""
    path, value = [str(part) for part in detail["loc"]], detail["input"]
    if detail["type"] == "extra_forbidden":
        return "; ".join(_explain_unknown(root, leaf) for leaf in _leaves(".".join(path), value))
    message = detail["msg"].removeprefix("Value error, ")
    if path and path[-1] in PLAIN_TYPES:
        path, message = path[:-1], "should be a number, text, true or false"
    if path and ":" in path[-1] and value is None:
        return _explain_unspaced(".".join(path[:-1]), path[-1])
    key = plain(".".join(path))
    if detail["type"] == "model_type":
        message = "must be a section with keys"
    if detail["type"] == "dict_type":
        message = f"needs names with values: {_spelling(key, 'NAME', 'VALUE')}"
    return f"{key}: {message[:1].lower()}{message[1:]}, got {brief(value)}"


def _explain_unspaced(key: str, text: str) -> str:
    """YAML reads `{digits:2}` as a name, because the space is missing."""
    name, _, value = text.partition(":")
    return f"{key}: {text!r} was read as a name without a value; write {_spelling(key, name, value)}"


def _spelling(key: str, name: str, value: str) -> str:
    return f"{{{name}: {value}}}, with a space after the colon and, in a shell, in quotes, or --{key}.{name}={value}"


def _explain_unknown(root: type[Settings], key: str) -> str:
    keys = [name for name, _ in fields_of(root)]
    sections = list(root.model_fields)
    guess = nearest(key, keys if "." in key else [*sections, *keys])
    siblings = [name for name in keys if name.startswith(key.partition(".")[0] + ".")]
    hint = f"did you mean {guess}?" if guess else f"there are {', '.join(siblings or sections)}"
    return f"unknown setting {plain(key)}: {hint}"


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The dotted keys that the user wrote below an unknown key."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key
