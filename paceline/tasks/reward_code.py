"""A reward function as code that a grader can import: where it is defined, or else its source as a file of its own.

`paceline.train(reward=function)` calls `reward_code`. A grader is another process, which must be able to start anew at
any time, long after the notebook that defined the reward has moved on. So the function is named by its module if that
can be imported. A function of a notebook, a script or another function is written out instead, with what it uses:
imports, functions and classes defined beside it, and plain values, as they are now. Nothing is pickled, because the
file is also the record of what a run was rewarded for. The function is never called here, and what cannot be written
as code is an error that names it.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from paceline.core.documents import brief
from paceline.core.sources import sources

MAX_CHARACTERS = 2**20
"""More is data, which belongs into columns."""
HEADER = '"""The reward of a run, with all that it uses, as paceline.train found it when the run began."""'
IN_A_FILE = "put it into a file and name it: reward='file.py:NAME'"


class TooLarge(ValueError):
    """The code of a reward has the size of data."""


@dataclass(frozen=True)
class RewardCode:
    """Either a `spec` as task.reward takes it, or the `source` of a file that defines `name`."""

    name: str
    spec: str | None = None
    source: str = ""


def reward_code(reward: Callable[..., Any]) -> RewardCode:
    """How a grader finds a function; a ValueError says what stands in the way."""
    if not isinstance(reward, FunctionType):
        raise ValueError(
            f"reward: {brief(reward)} is a {type(reward).__name__}, which has no source of its own; write a function "
            "that calls it: def reward(completions, **columns): ..."
        )
    if reward.__name__ == "<lambda>":
        raise ValueError("reward: a lambda cannot be found again by a grader process; write it as a function with def")
    path = import_path(reward)
    if path is not None:
        return RewardCode(path[1], _spec(*path))
    written, name = _Writer(), _defined_name(reward)
    written.add(name, reward, {}, "the reward")
    return RewardCode(name, source=written.text())


def _defined_name(value: Any) -> str:
    """The name that the text of a function or class gives it."""
    own = inspect.unwrap(value)
    return own.__code__.co_name if isinstance(own, FunctionType) else str(own.__name__)


def import_path(value: Any) -> tuple[str, str] | None:
    """The module and name by which another process can import a function or class; None if there are none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found = sys.modules.get(str(module))
    if module in (None, "__main__") or found is None or not isinstance(name, str) or found.__spec__ is None:
        return None
    return (str(module), name) if vars(found).get(name) is value else None


def _spec(module: str, name: str) -> str:
    """A module of the user's own by its file, which is found from any folder; one of a package by its name."""
    file = sys.modules[module].__file__
    is_own = file is not None and file.endswith(".py") and bool(sources(f"{module}:{name}"))
    is_alone = is_own and not sys.modules[module].__package__
    return f"{Path(str(file)).absolute()}:{name}" if is_alone else f"{module}:{name}"


Scope = Mapping[str, Any]
"""What names mean where a function or class is defined."""


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
        _check_size(text, "it")
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
        elif isinstance(value, FunctionType | type):
            self._add_definition(name, value, scope, user)
        elif isinstance(value, re.Pattern):
            self.add("re", re, {}, user)
            self.parts.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif _is_plain(value):
            self.parts.append(f"{name} = {value!r}")
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

    def _add_definition(self, name: str, value: FunctionType | type, scope: Scope, user: str) -> None:
        defined = _defined_name(value)
        if defined != name:
            self.add(defined, value, scope, user)
            self.parts.append(f"{name} = {defined}")
        elif isinstance(value, type):
            source = _class_source(value, user)
            self._add_used(name, source, scope)
            self.parts.append(source)
        else:
            own = inspect.unwrap(value)
            assert isinstance(own, FunctionType)
            source = _function_source(own, user)
            _check_decorators(own, value, source, user)
            self._add_used(name, source, _scope_of(own))
            self.parts.append("\n".join((source, *_fixed_defaults(own, source))))

    def _add_used(self, name: str, source: str, scope: Scope) -> None:
        """Write what a text names, which has to stand before it."""
        tree = _parsed(source)
        for used in sorted(_global_names(tree) - {name}):
            if used == "__file__":
                raise ValueError(f"reward: {name} uses __file__, which is another file to a grader; write the path")
            if used in scope and not used.startswith("__"):
                self.add(used, scope[used], scope, name)
            elif not hasattr(builtins, used):
                raise ValueError(f"reward: {name} uses {used}, which is not defined; define it first")
        for dotted in _submodules(tree, scope):
            self.imports[f"import {dotted}"] = None


# --- reading functions and classes ------------------------------------------------------------------------------------


def _function_source(function: FunctionType, user: str) -> str:
    """The text of a function, which must be what it was compiled from; indented text goes below `if True:`."""
    if function.__name__ == "<lambda>":
        raise ValueError(f"reward: {user} uses a lambda; write it as a function with def")
    file = function.__code__.co_filename
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not lines:
        raise ValueError(
            f"reward: {user} has no source that can be read, like all that is typed at Python's prompt; {IN_A_FILE}"
        )
    if not _is_compiled_from(function.__code__, lines):
        raise ValueError(
            f"reward: the source of {function.__name__} has changed since Python read it; import or run it again"
        )
    source = inspect.getsource(function).rstrip()
    return f"if True:\n{source}" if source[0].isspace() else source


def _is_compiled_from(code: CodeType, lines: Sequence[str]) -> bool:
    """Whether a function is what its file says, which may have been edited since."""
    flags = (code.co_flags & __future__.annotations.compiler_flag) | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in notebooks
    try:
        compiled = compile("".join(lines), "", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    found = (one for one in _codes_in(compiled) if one.co_firstlineno == code.co_firstlineno)
    return any(_is_same(code, one) for one in found)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for found in code.co_consts:
        if isinstance(found, CodeType):
            yield found
            yield from _codes_in(found)


def _is_same(a: CodeType, b: CodeType) -> bool:
    mine, others = ((one.co_code, one.co_names, one.co_varnames, len(one.co_consts)) for one in (a, b))
    if mine != others:
        return False
    return all(
        _is_same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else repr(x) == repr(y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _class_source(kind: type, user: str) -> str:
    """The text of a class. Until Python 3.13 only its methods know where one in a notebook is defined."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            lines = linecache.getlines(method.__code__.co_filename)
            for node in ast.walk(_parsed("".join(lines))):
                if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
                    continue
                if node.lineno <= method.__code__.co_firstlineno <= (node.end_lineno or 0):
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    try:
        return textwrap.dedent(inspect.getsource(kind)).rstrip()
    except (OSError, TypeError):
        raise ValueError(
            f"reward: {user} uses the class {kind.__name__}, whose source cannot be found; {IN_A_FILE}"
        ) from None


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _scope_of(function: FunctionType) -> dict[str, Any]:
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            scope.pop(name, None)
    return scope


def _definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in ast.walk(_parsed(source)) if isinstance(node, kinds)), None)


def _check_decorators(own: FunctionType, function: FunctionType, source: str, user: str) -> None:
    """The text has the decorators, so what it defines is the decorated function, not the one below them."""
    node = _definition(source)
    is_bare = own is function and function.__globals__.get(own.__name__) is not own
    if node is not None and node.decorator_list and is_bare:
        raise ValueError(
            f"reward: {user} uses {own.__name__} without its decorator; let the decorator use functools.wraps, or "
            f"{IN_A_FILE}"
        )


def _fixed_defaults(function: FunctionType, source: str) -> Iterator[str]:
    """Lines that keep default arguments which may be others if evaluated again, as in `def f(texts, limit=limit)`."""
    node = _definition(source)
    if node is None or node.decorator_list:
        return
    if not all(isinstance(one, ast.Constant) for one in (*node.args.defaults, *filter(None, node.args.kw_defaults))):
        given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        yield from (f"{node.name}.{name} = {value!r}" for name, value in given.items() if value and _is_plain(value))


# --- reading code -----------------------------------------------------------------------------------------------------


class _WithoutAnnotations(ast.NodeTransformer):
    """Annotations are never evaluated in the file, so what they name is not needed."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(0)
        self.generic_visit(node)
        return node


def _global_names(tree: ast.Module) -> set[str]:
    """The names that code looks up outside of itself."""
    bare = _WithoutAnnotations().visit(ast.parse(ast.unparse(tree)))
    top = symtable.symtable(ast.unparse(ast.fix_missing_locations(bare)), "reward", "exec")
    found = {one.get_name() for one in top.get_symbols() if one.is_referenced() and not one.is_assigned()}
    queue = top.get_children()
    while queue:
        table = queue.pop()
        queue += table.get_children()
        found |= {one.get_name() for one in table.get_symbols() if one.is_global()}
    return found - {one.get_name() for one in top.get_symbols() if one.is_assigned()}


def _submodules(tree: ast.Module, scope: Scope) -> Iterator[str]:
    """Modules that code reaches through the package above them, as in `import xml.etree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *names = ast.unparse(node).split(".")
            value = scope.get(root)
            dotted = ".".join([value.__name__, *names]) if isinstance(value, ModuleType) else ""
            if dotted in sys.modules and isinstance(sys.modules[dotted], ModuleType):
                yield dotted


def _check_size(text: str, what: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise TooLarge(
            f"reward: {what} has {len(text):,} characters of code, at most {MAX_CHARACTERS:,} are written; give large "
            "tables as columns of the dataset"
        )
    return text


def _is_plain(value: Any) -> bool:
    """Whether `repr` gives a literal that stands for the same value."""
    try:
        again = ast.literal_eval(_check_size(repr(value), "what it uses"))
    except TooLarge:
        raise
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(again) is type(value) and bool(again == value)
