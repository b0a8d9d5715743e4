"""User code named by a setting: `path/to/file.py:name`, or `module:name` where a setting takes modules.

`task.reward`, `task.name`, `engine.drafter` and `rl.algorithm` are resolved here; the caller checks what the name must
be. Importing runs the file with the rights of whoever started the command: a setting names the user's own code, as a
script would. Nothing that a model wrote may ever become a spec or part of one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dis import opname
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from paceline.core.config import SettingsError, nearest
from paceline.core.documents import brief

T = TypeVar("T")

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
    place, _, name = spec.rpartition(":")
    if not place or not name or len(spec) > MAX_SPEC:
        raise ValueError(f"{setting}: {brief(spec)} is not of the form module:{noun} or path/to/file.py:{noun}")
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


def _import_file(file: Path, spec: str, setting: str) -> ModuleType:
    if not file.is_file():
        guess = nearest(file.name, sorted(path.name for path in file.absolute().parent.glob("*.py")))
        hint = f"; did you mean {guess}?" if guess else ""
        raise ValueError(f"{setting}: there is no file {file.absolute()}{hint}")
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
        guess = nearest(name, sorted(path.stem for path in Path.cwd().glob("*.py")))
        hint = f"did you mean {guess}?" if guess else f"name a file as path/to/file.py:{noun}"
        raise ValueError(f"{setting}: found no module {error.name} here or installed: {hint}") from None
    except BaseException as error:
        raise _failed_import(spec, setting, error) from error


def _look_here_last() -> None:
    """Let user code import modules beside the user; last, so that a local file never shadows an installed module."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _failed_import(spec: str, setting: str, error: BaseException) -> BaseException:
    stop = find_signal(error)
    if stop is not None:
        return stop
    return ValueError(f"{setting}: importing {spec} raised {type(error).__name__}: {describe(error)}")
