"""The files of user code that a setting names: the named file, and the user's own files that it imports.

`run/inputs.py` hashes them, so that a resumed run notices that its reward has changed. Imports are read from the source
and looked up where Python would find them; nothing here runs user code. Installed packages are not the user's own.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

_INSTALLED = {"site-packages", "dist-packages"}
_TOP = PurePosixPath()
_PACKAGE = Path(__file__).parent.parent


def sources(spec: str) -> dict[str, Path]:
    """The files behind `path/to/file.py:name` or `module:name` by the names they are imported by, the named one first.

    Empty if it is an installed package's.
    """
    place = spec.rpartition(":")[0]
    if not place:
        return {}
    waiting = [(Path(place).name, Path(place).absolute())] if place.endswith(".py") else list(_find(place))[-1:]
    found: dict[str, Path] = {}
    while waiting:
        name, file = waiting.pop()
        if file not in found.values() and _is_file(file):
            found[name] = file
            waiting += _imported(name, file)
    return found


def _is_file(file: Path) -> bool:
    """A name that no file can have, such as one that is too long, is for whoever imports it to refuse."""
    try:
        return file.is_file()
    except OSError:
        return False


def _imported(name: str, file: Path) -> Iterator[tuple[str, Path]]:
    """The user's own files that a file imports, by name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    around = list(PurePosixPath(name).parents)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(around):
            for alias in node.names:
                module = ".".join(filter(None, (node.module, alias.name)))
                if node.level:
                    yield from _find(module, [str(file.parents[node.level - 1])], around[node.level - 1])
                else:
                    yield from _find(module)


def _find(
    module: str, folders: Sequence[str] | None = None, around: PurePosixPath = _TOP
) -> Iterator[tuple[str, Path]]:
    """The files of a module and of the packages it is in, as far as they are the user's own, by name."""
    parts = module.split(".")
    locations = list(folders) if folders is not None else [*sys.path, os.getcwd()]
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), locations)
        if spec is None:
            return
        is_package = spec.submodule_search_locations is not None
        if spec.origin is not None and spec.origin.endswith(".py") and _is_own(Path(spec.origin)):
            name = around.joinpath(*parts[:depth], *(["__init__"] if is_package else []))
            yield f"{name}.py", Path(spec.origin).absolute()
        locations = list(spec.submodule_search_locations or ())


def _is_own(file: Path) -> bool:
    standard = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    return _INSTALLED.isdisjoint(file.parts) and not any(map(file.absolute().is_relative_to, (*standard, _PACKAGE)))
