"""User code named by a setting: `path/to/file.py:name`, or `module:name` where a setting takes modules.

`task.reward`, `task.name`, `engine.drafter` and `rl.algorithm` are resolved here; the caller checks what the name must
be. `load_own` imports the file, which runs it with the rights of whoever started the command: a setting names the
user's own code, as a script would. `find_own` only reads it, to find a mistake before anything is loaded. Nothing that
a model wrote may ever become a spec or part of one.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dis import opname
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from paceline.core.config import SettingsError, nearest
from paceline.core.documents import brief

T = TypeVar("T")

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MAX_MESSAGE, MAX_SPEC = 300, 1000
"""How many characters of a user's error a message repeats, and how many may name the code."""


def names_file(value: str) -> bool:
    """Whether a setting that also takes plain names holds a user's file instead: `path/to/file.py:name`."""
    return value.rpartition(":")[0].endswith(".py")


def guess_name(value: str, names: Sequence[str], noun: str) -> str | None:
    """What an unknown value may have meant: a close name, or, for a file, the missing `noun` in it."""
    return f"{value}:{noun}" if value.endswith(".py") else nearest(value.lower(), names)


def load_own(spec: str, setting: str, noun: str, is_wanted: Callable[[Any], bool] = callable) -> Any:
    """The object a spec names, a `noun`; a ValueError that starts with the setting says which part is wrong."""
    place, name = _split(spec, setting, noun)
    is_file = place.endswith(".py")
    module = _import_file(Path(place), spec, setting) if is_file else _import_module(place, spec, setting, noun)
    found = getattr(module, name, None)
    if found is None:
        raise _unknown_name(spec, setting, noun, [known for known, value in vars(module).items() if is_wanted(value)])
    if not is_wanted(found):
        raise ValueError(
            f"{setting}: {name} in {place} is a {type(found).__name__}, not {'an' if noun[0] in 'AE' else 'a'} {noun}"
        )
    return found


def find_own(spec: str, setting: str, noun: str) -> ast.stmt | None:
    """Where the user's file defines what a spec names, a `noun`; a ValueError if the file or the name is not there.

    None if only importing it can tell: another file, a `*` import or code of the file's defines it.
    """
    place, name = _split(spec, setting, noun)
    file = Path(place) if place.endswith(".py") else _find_module(place, setting, noun)
    if file is None:
        return None
    _require_file(file, setting)
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{setting}: {place}{line} is not valid Python: {reason}") from None
    except RecursionError:
        return None
    found = next((one for one in reversed(body) if getattr(one, "name", None) == name), None)
    if found is None and name not in (known := _names_in(body)) and not known & {"*", "__getattr__", "globals"}:
        kinds = ast.ClassDef if noun == "class" else DEFINITIONS
        raise _unknown_name(spec, setting, noun, [one.name for one in body if isinstance(one, kinds)])
    return found


def _names_in(body: Sequence[ast.stmt]) -> set[str]:
    """Every name that the statements may bind; `*` for those of another module."""
    names = set[str]()
    for node in (inner for one in body for inner in ast.walk(one)):
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _find_module(name: str, setting: str, noun: str) -> Path | None:
    """The file of a module in the working directory; None if it is elsewhere. Imports no package to look into it."""
    top, here = name.partition(".")[0], Path.cwd()
    if top in sys.modules:
        return None
    found = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(here)])
    if found is None:
        raise _no_module(top, name, setting, noun)
    file = here.joinpath(*name.split(".")).with_suffix(".py")
    is_here = found.origin is not None and Path(found.origin) in (here / f"{top}.py", here / top / "__init__.py")
    return file if is_here and file.is_file() else None


def _split(spec: str, setting: str, noun: str) -> tuple[str, str]:
    """The place and the name in it."""
    place, _, name = spec.rpartition(":")
    if not place or not name or len(spec) > MAX_SPEC:
        raise ValueError(f"{setting}: {brief(spec)} is not of the form module:{noun} or path/to/file.py:{noun}")
    return place, name


def _unknown_name(spec: str, setting: str, noun: str, known: Sequence[str]) -> ValueError:
    place, _, name = spec.rpartition(":")
    names = [one for one in known if not one.startswith("_")]
    guess = nearest(name, names)
    hint = f"did you mean {guess}?" if guess else f"it defines {', '.join(sorted(names)) or f'no {noun}'}"
    return ValueError(f"{setting}: {place} has no {noun} {name}: {hint}")


def call_own(call: Callable[[], T], spec: str, setting: str) -> T:
    """The result of a user's code; if it raises, a ValueError names the code, the error and its line.

    That includes SystemExit, which would end a run as if it had succeeded; only a signal's exception passes.
    """
    try:
        return call()
    except BaseException as error:
        stop = find_signal(error)
        if stop is not None:
            raise stop from None
        place = place_of(error, spec)
        if isinstance(error, SettingsError) or (isinstance(error, ValueError) and not place):
            raise  # our own error, which explains itself
        raise ValueError(f"{setting}: {spec} raised {type(error).__name__}: {describe(error)}{place}") from error


def find_signal(error: BaseException, *ignored: type[BaseException]) -> BaseException | None:
    """What a signal's handler raised, as for Ctrl-C, be it the error or what it replaced; None if none did.

    User code may raise the same types on its own.
    """
    handlers = set(map(_code_of, map(signal.getsignal, signal.valid_signals()))) - {None}
    found = (seen for seen in _chain(error) if not isinstance(seen, ignored) and _is_raised_by(seen, handlers))
    return next(found, None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those it replaced, without any that our callers are handling."""
    callers = list(walk_up(sys._getframe()))
    seen: BaseException | None = error
    while seen is not None and (seen is error or next((frame for frame, _ in _frames(seen)), None) not in callers):
        yield seen
        seen = seen.__context__


def _is_raised_by(error: BaseException, handlers: Collection[CodeType | None]) -> bool:
    frames = list(_frames(error))
    if any(frame.f_code in handlers for frame, _ in frames):
        return True
    # Python's own handler for Ctrl-C has no frame: its exception comes up at an instruction that raises none.
    return isinstance(error, KeyboardInterrupt) and bool(frames) and not _raises(*frames[-1])


def walk_up(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code_of(handler: Any) -> CodeType | None:
    function = handler.__func__ if isinstance(handler, MethodType) else handler
    return function.__code__ if isinstance(function, FunctionType) else None


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an error passed through, outermost first, each with its instruction."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti
        trace = trace.tb_next


def _raises(frame: FrameType, instruction: int) -> bool:
    return opname[frame.f_code.co_code[instruction]] == "RAISE_VARARGS"


def describe(error: BaseException | None) -> str:
    """An error's message on one line, whatever its `__str__` does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        return "(it has no readable message)"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def place_of(error: BaseException, spec: str) -> str:
    """The last line of the user's file that the error passed through, and its function."""
    place = spec.rpartition(":")[0]
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).stem == stem]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _require_file(file: Path, setting: str) -> None:
    if not file.is_file():
        guess = nearest(file.stem, sorted(path.stem for path in file.absolute().parent.glob("*.py")))
        hint = f"; did you mean {guess}.py?" if guess else ""
        raise ValueError(f"{setting}: there is no file {file.absolute()}{hint}")


def _import_file(file: Path, spec: str, setting: str) -> ModuleType:
    _require_file(file, setting)
    name = f"paceline_own_{file.stem}"
    description = importlib.util.spec_from_file_location(name, file)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    _look_here_last()
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        description.loader.exec_module(module)
    except BaseException as error:
        raise _failed_import(spec, setting, error) from error
    return module


def _import_module(name: str, spec: str, setting: str, noun: str) -> ModuleType:
    _look_here_last()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed_import(spec, setting, error) from error
        raise _no_module(error.name, name, setting, noun) from None
    except BaseException as error:
        raise _failed_import(spec, setting, error) from error


def _no_module(missing: str, name: str, setting: str, noun: str) -> ValueError:
    guess = nearest(name, sorted(path.stem for path in Path.cwd().glob("*.py")))
    hint = f"did you mean {guess}?" if guess else f"name a file as path/to/file.py:{noun}"
    return ValueError(f"{setting}: found no module {missing} here or installed: {hint}")


def _look_here_last() -> None:
    """Let user code import modules beside the user; last, so that a local file never shadows an installed module."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _failed_import(spec: str, setting: str, error: BaseException) -> BaseException:
    stop = find_signal(error)
    if stop is not None:
        return stop
    return ValueError(f"{setting}: importing {spec} raised {type(error).__name__}: {describe(error)}")
