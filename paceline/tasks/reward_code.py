"""A reward function as code that a grader can import: where it is defined, or else its source as a file of its own.

`paceline.train(reward=function)` calls `reward_code`. A grader is another process, which must be able to start anew at
any time, long after the notebook that defined the reward has moved on. So the function is named by its module if that
can be imported. A function of a notebook, a script or another function is written out instead, with what it uses:
imports, functions and classes defined beside it, and plain values, as they are now. Nothing is pickled, because the
file is also the record of what a run was rewarded for. The function is never called here, and what cannot be written
as code is an error that names it.
"""

from __future__ import annotations

import builtins
import inspect
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paceline.core.documents import brief
from paceline.core.sources import sources
from paceline.tasks.reward_text import (
    IN_A_FILE,
    Scope,
    check_decorators,
    class_text,
    defined_name,
    function_text,
    global_names,
    late_defaults,
    parsed,
    scope_of,
    submodules,
)

MAX_CHARACTERS = 2**20
"""More is data, which belongs into columns."""
HEADER = '"""The reward of a run, with all that it uses, as paceline.train found it when the run began."""'


@dataclass(frozen=True)
class RewardCode:
    """Either a `spec` as task.reward takes it, or the `source` of a file that defines `name`."""

    name: str
    spec: str | None = None
    source: str = ""


def reward_code(reward: Callable[..., Any]) -> RewardCode:
    """How a grader finds a function; a ValueError says what stands in the way."""
    if not isinstance(inspect.unwrap(reward), FunctionType):
        raise ValueError(
            f"reward: {brief(reward)} is a {type(reward).__name__}, which has no source of its own; write a function "
            "that calls it: def reward(completions, **columns): ..."
        )
    if defined_name(reward) == "<lambda>":
        raise ValueError("reward: a lambda cannot be found again by a grader process; write it as a function with def")
    path = import_path(reward)
    if path is not None:
        return RewardCode(path[1], _spec(*path))
    writer, name = _Writer(), defined_name(reward)
    writer.add(name, reward, {}, "the reward")
    return RewardCode(name, source=writer.text())


def import_path(value: Any) -> tuple[str, str] | None:
    """The module and name by which another process can import a function or class; None if there are none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found = sys.modules.get(str(module))
    if module in (None, "__main__") or found is None or not isinstance(name, str) or found.__spec__ is None:
        return None
    return (str(module), name) if vars(found).get(name) is value else None


def _spec(module: str, name: str) -> str:
    """A module of the user's own by its file, which is found from any folder; one of a package by its name."""
    file = vars(sys.modules[module]).get("__file__")
    is_own = file is not None and file.endswith(".py") and bool(sources(f"{module}:{name}"))
    is_alone = is_own and not sys.modules[module].__package__
    return f"{Path(str(file)).absolute()}:{name}" if is_alone else f"{module}:{name}"


@dataclass
class _Writer:
    """Collects the code of a function and of everything that it uses."""

    imports: dict[str, None] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)
    """What each name stands for."""

    def text(self) -> str:
        blocks = [HEADER, "from __future__ import annotations", "\n".join(sorted(self.imports)), *self.parts]
        text = "\n\n".join(block for block in blocks if block) + "\n"
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"reward: with what it uses it has {len(text):,} characters of code, at most {MAX_CHARACTERS:,} are "
                "written; give large tables as columns of the dataset"
            )
        return text

    def add(self, name: str, value: Any, scope: Scope, user: str) -> None:
        """Write what a name stands for, unless it is there already; `user` uses it, and `scope` is around a class."""
        if name in self.known:
            if self.known[name] is not value and self.known[name] != value:
                raise ValueError(f"reward: it uses two different things named {name}; rename one, or {IN_A_FILE}")
            return
        self.known[name] = value
        if isinstance(value, ModuleType):
            self._import_module(name, value, user)
        elif (path := import_path(value)) is not None:
            self.imports[f"from {path[0]} import {path[1]}" + (f" as {name}" if name != path[1] else "")] = None
        elif isinstance(value, type) or isinstance(inspect.unwrap(value), FunctionType):
            self._add_definition(name, value, scope, user)
        elif isinstance(value, re.Pattern):
            self.add("re", re, {}, user)
            self.parts.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif (literal := written(value)) is not None:
            self.parts.append(f"{name} = {literal}")
        else:
            raise ValueError(
                f"reward: {user} uses {name}, a {type(value).__name__}, which cannot be written as code; make it "
                f"inside the function, or {IN_A_FILE}"
            )

    def _import_module(self, name: str, module: ModuleType, user: str) -> None:
        if module.__spec__ is None or module.__name__ == "__main__":
            raise ValueError(f"reward: {user} uses the module {name}, which cannot be imported elsewhere; {IN_A_FILE}")
        alias = f" as {name}" if name != module.__name__ else ""
        self.imports[f"import {module.__name__}{alias}"] = None

    def _add_definition(self, name: str, value: Any, scope: Scope, user: str) -> None:
        defined = defined_name(value)
        if defined != name:
            self.add(defined, value, scope, user)
            self.parts.append(f"{name} = {defined}")
        elif isinstance(value, type):
            source = class_text(value, user)
            self._add_used(name, source, scope)
            self.parts.append(source)
        else:
            own = inspect.unwrap(value)
            assert isinstance(own, FunctionType)
            source = function_text(own, user)
            check_decorators(own, value, source, user)
            self._add_used(name, source, scope_of(own))
            late = {key: written(given) for key, given in late_defaults(own, source).items()}
            lines = (f"{name}.{key} = {literal}" for key, literal in late.items() if literal is not None)
            self.parts.append("\n".join((source, *lines)))

    def _add_used(self, name: str, source: str, scope: Scope) -> None:
        """Write what a text names, which has to stand before it."""
        tree = parsed(source)
        for used in sorted(global_names(tree) - {name}):
            if used == "__file__":
                raise ValueError(f"reward: {name} uses __file__, which is another file to a grader; write the path")
            if used in scope and not used.startswith("__"):
                self.add(used, scope[used], scope, name)
            elif not hasattr(builtins, used):
                raise ValueError(f"reward: {name} uses {used}, which is not defined; define it first")
        for dotted in submodules(tree, scope):
            self.imports[f"import {dotted}"] = None


def written(value: Any) -> str | None:
    """A plain value as an expression, the same in every process; None for any other value."""
    try:
        return _literal(value)
    except RecursionError:  # it may hold itself
        return None


def _literal(value: Any) -> str | None:
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if type(value) is dict:
        pairs = [(_literal(key), _literal(inner)) for key, inner in value.items()]
        found = None if any(None in pair for pair in pairs) else ", ".join(f"{key}: {inner}" for key, inner in pairs)
        return None if found is None else f"{{{found}}}"
    if type(value) not in (list, tuple, set, frozenset):
        return None
    parts = [part for part in map(_literal, value) if part is not None]
    if len(parts) < len(value):
        return None
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(parts))}])"  # a set's own order is another in every process
    if isinstance(value, tuple):
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    return f"[{', '.join(parts)}]"
