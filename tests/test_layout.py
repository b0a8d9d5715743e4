"""The shape of the code: folders import only those above them, functions fit a screen, and the docs list every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder or top-level file may import those with a lower rank and its own kind.
LAYERS = [
    {"__init__", "types", "config", "noise", "trace", "own_code", "extras"},
    {"tasks"},
    {"model"},
    {"drafters"},
    {"budget"},
    {"engine"},
    {"rl"},
    {"spot"},
    {"fleet"},
    {"report"},
    {"integrations"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MAX_FUNCTION_LINES = 80


def part_of(module: str) -> str:
    """The folder or top-level file that a dotted module name belongs to; `paceline` alone is its `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in RANKS else "__init__"


def module_of(file: Path) -> str:
    return ".".join(("paceline", *file.relative_to(PACKAGE).with_suffix("").parts))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every paceline module a file imports, inside functions too; `from paceline import x` counts as paceline.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            if node.module == "paceline":
                yield from (f"paceline.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def violations(importer: str, source: str) -> list[str]:
    """What a module imports from a layer below its own."""
    used = (name for name in imported_modules(ast.parse(source)) if name.split(".")[0] == "paceline")
    return [name for name in used if RANKS[part_of(name)] > RANKS[part_of(importer)]]


def long_functions(source: str) -> list[str]:
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [n.name for n in functions if (n.end_lineno or 0) - n.lineno + 1 > MAX_FUNCTION_LINES]


def test_every_part_has_a_place() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert not parts - set(RANKS), "a new folder needs a layer in LAYERS"


# The package's own __init__ names the public API of every layer, and looks it up only when asked.
@pytest.mark.parametrize("file", [f for f in FILES if f != PACKAGE / "__init__.py"], ids=module_of)
def test_folders_import_only_those_above(file: Path) -> None:
    assert not violations(module_of(file), file.read_text())


def test_the_layer_rule_sees_a_violation() -> None:
    assert violations("paceline.model.decoder", "def f():\n    from paceline.engine.engine import Engine") == [
        "paceline.engine.engine"
    ]
    assert violations("paceline.types", "from paceline import config, cli") == ["paceline.cli"]
    assert not violations("paceline.engine.engine", "import torch\nfrom paceline.model import decoder")


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_functions_fit_a_screen(file: Path) -> None:
    assert not long_functions(file.read_text())


def test_the_length_rule_sees_a_long_function() -> None:
    assert long_functions("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES) == ["f"]


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_every_file_says_what_it_is(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text()))


def first_sentence(file: Path) -> str:
    """What a file says it is."""
    docstring = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", docstring)[0]


def files_section() -> str:
    """One line per file, layer by layer, each in the file's own words. To renew it: python tests/test_layout.py"""

    def order(file: Path) -> tuple[int, str, bool, str]:
        rank = RANKS[part_of(module_of(file))] if file != PACKAGE / "__init__.py" else -1
        return rank, str(file.parent), file.stem != "__init__", file.stem

    rows = [f"| `{file.relative_to(ROOT)}` | {first_sentence(file)} |" for file in sorted(FILES, key=order)]
    return "\n".join(["| file | what it is |", "|---|---|", *rows]) + "\n"


def test_architecture_lists_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert text.endswith(files_section()), "docs/architecture.md is behind the code: run python tests/test_layout.py"


if __name__ == "__main__":
    page = ROOT / "docs" / "architecture.md"
    page.write_text(page.read_text().partition("| file | what it is |")[0] + files_section())
