"""The text of functions and classes as they are defined in a session, and what names it needs from around it.

`reward_code.py` writes files from it. A text is taken only if Python would compile it to the very function that it is
asked about: a script may have been edited since it was started. Nothing here runs any of it.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

IN_A_FILE = "put it into a file and name it: reward='file.py:NAME'"

Scope = Mapping[str, Any]
"""What names mean where a function or class is defined."""


def defined_name(value: Any) -> str:
    """The name that the text of a function or class gives it."""
    own = inspect.unwrap(value)
    return own.__code__.co_name if isinstance(own, FunctionType) else str(own.__name__)


def function_text(function: FunctionType, user: str) -> str:
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
    first = _line_of(function, lines)
    source = "".join(inspect.getblock(lines[first - 1 :])).rstrip()
    return f"if True:\n{source}" if source[0].isspace() else source


def _line_of(function: FunctionType, lines: Sequence[str]) -> int:
    """Where a file defines a function as it was compiled. The file may have been edited since, here or elsewhere."""
    code = function.__code__
    flags = (code.co_flags & __future__.annotations.compiler_flag) | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in notebooks
    found = []
    with suppress(SyntaxError, ValueError):
        compiled = compile("".join(lines), "", "exec", flags, dont_inherit=True)
        found = [one.co_firstlineno for one in _codes_in(compiled) if _is_same(code, one)]
    if not found:
        raise ValueError(
            f"reward: the source of {function.__name__} has changed since Python read it; import or run it again"
        )
    return min(found, key=lambda line: abs(line - code.co_firstlineno))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for found in code.co_consts:
        if isinstance(found, CodeType):
            yield found
            yield from _codes_in(found)


def _is_same(a: CodeType, b: CodeType) -> bool:
    mine, others = ((one.co_name, one.co_code, one.co_names, one.co_varnames, len(one.co_consts)) for one in (a, b))
    if mine != others:
        return False
    return all(
        _is_same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else _is_equal(x, y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two constants are one; 1, 1.0 and True are three."""
    return a == b if isinstance(a, frozenset) and isinstance(b, frozenset) else repr(a) == repr(b)


def class_text(kind: type, user: str) -> str:
    """The text of a class. Until Python 3.13 only its methods know where one in a notebook is defined."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            lines = linecache.getlines(method.__code__.co_filename)
            for node in ast.walk(parsed("".join(lines))):
                if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
                    continue
                if node.lineno <= method.__code__.co_firstlineno <= (node.end_lineno or 0):
                    _line_of(method, lines)  # raises if it has changed
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    try:
        return textwrap.dedent(inspect.getsource(kind)).rstrip()
    except (OSError, TypeError):
        raise ValueError(
            f"reward: {user} uses the class {kind.__name__}, whose source cannot be found; {IN_A_FILE}"
        ) from None


def parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def scope_of(function: FunctionType) -> dict[str, Any]:
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            scope.pop(name, None)
    return scope


def _definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in ast.walk(parsed(source)) if isinstance(node, kinds)), None)


def check_decorators(own: FunctionType, function: FunctionType, source: str, user: str) -> None:
    """The text has the decorators, so what it defines is the decorated function, not the one below them."""
    node = _definition(source)
    is_bare = own is function and function.__globals__.get(own.__name__) is not own
    if node is not None and node.decorator_list and is_bare:
        raise ValueError(
            f"reward: {user} uses {own.__name__} without its decorator; let the decorator use functools.wraps, or "
            f"{IN_A_FILE}"
        )


def late_defaults(function: FunctionType, source: str) -> dict[str, Any]:
    """Default arguments by attribute, if evaluating them again may give others, as for `def f(texts, limit=limit)`."""
    node = _definition(source)
    if node is None or node.decorator_list:
        return {}
    if all(isinstance(one, ast.Constant) for one in (*node.args.defaults, *filter(None, node.args.kw_defaults))):
        return {}
    given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return {name: value for name, value in given.items() if value}


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


def global_names(tree: ast.Module) -> set[str]:
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


def submodules(tree: ast.Module, scope: Scope) -> Iterator[str]:
    """Modules that code reaches through the package above them, as in `import xml.etree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *names = ast.unparse(node).split(".")
            value = scope.get(root)
            dotted = ".".join([value.__name__, *names]) if isinstance(value, ModuleType) else ""
            if dotted in sys.modules and isinstance(sys.modules[dotted], ModuleType):
                yield dotted
