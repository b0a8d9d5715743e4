"""User code named by a setting: `path/to/file.py:name`, or `module:name` where a setting takes modules.

`task.reward`, `task.name`, `engine.drafter` and `rl.algorithm` are resolved here; the caller checks what the name must
be. Importing runs the file with the rights of whoever started the command: a setting names the user's own code, as a
script would. Nothing that a model wrote may ever become a spec or part of one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.core.config import SettingsError, nearest


def names_file(value: str) -> bool:
    """Whether a setting that also takes plain names holds a user's file instead: `path/to/file.py:name`."""
    return value.rpartition(":")[0].endswith(".py")


def guess_name(value: str, names: Sequence[str], noun: str) -> str | None:
    """What an unknown value may have meant: a close name, or, for a file, the missing `noun` in it."""
    return f"{value}:{noun}" if value.endswith(".py") else nearest(value.lower(), names)


def load_own(spec: str, setting: str, noun: str, is_wanted: Callable[[Any], bool] = callable) -> Any:
    """The object a spec names, a `noun`; a ValueError that starts with the setting says which part is wrong."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"{setting}: {spec!r} is not of the form module:{noun} or path/to/file.py:{noun}")
    is_file = place.endswith(".py")
    module = _import_file(Path(place), spec, setting) if is_file else _import_module(place, spec, setting, noun)
    found = getattr(module, name, None)
    if found is None:
        names = [known for known, value in vars(module).items() if is_wanted(value) and not known.startswith("_")]
        guess = nearest(name, names)
        hint = f"did you mean {guess}?" if guess else f"it defines {', '.join(sorted(names)) or f'no {noun}'}"
        raise ValueError(f"{setting}: {place} has no {noun} {name}: {hint}")
    if not is_wanted(found):
        raise ValueError(
            f"{setting}: {name} in {place} is a {type(found).__name__}, not {'an' if noun[0] in 'AE' else 'a'} {noun}"
        )
    return found


def call_own(call: Callable[[], Any], spec: str, setting: str) -> Any:
    """The result of a user's code; if it raises, a ValueError names the code, the error and its line."""
    try:
        return call()
    except Exception as error:
        place = _place(error, spec)
        if isinstance(error, SettingsError) or (isinstance(error, ValueError) and not place):
            raise  # our own error, which explains itself
        raise ValueError(f"{setting}: {spec} raised {type(error).__name__}: {error}{place}") from error


def _place(error: Exception, spec: str) -> str:
    """The last line of the user's file that the error passed through, and its function."""
    place = spec.rpartition(":")[0]
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).stem == stem]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _import_file(file: Path, spec: str, setting: str) -> ModuleType:
    if not file.is_file():
        guess = nearest(file.name, sorted(path.name for path in file.absolute().parent.glob("*.py")))
        hint = f"; did you mean {guess}?" if guess else ""
        raise ValueError(f"{setting}: there is no file {file.absolute()}{hint}")
    name = f"paceline_own_{file.stem}"
    description = importlib.util.spec_from_file_location(name, file)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        description.loader.exec_module(module)
    except Exception as error:
        raise _failed_import(spec, setting, error) from error
    return module


def _import_module(name: str, spec: str, setting: str, noun: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # last, so that a local file never shadows an installed module
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed_import(spec, setting, error) from error
        guess = nearest(name, sorted(path.stem for path in Path.cwd().glob("*.py")))
        hint = f"did you mean {guess}?" if guess else f"name a file as path/to/file.py:{noun}"
        raise ValueError(f"{setting}: found no module {error.name} here or installed: {hint}") from None
    except Exception as error:
        raise _failed_import(spec, setting, error) from error


def _failed_import(spec: str, setting: str, error: Exception) -> ValueError:
    return ValueError(f"{setting}: importing {spec} raised {type(error).__name__}: {error}")
