"""The shape of the code: imports run one way, names are unique, functions fit a screen, the docs list every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder or top-level file may import those with a lower rank and its own kind.
LAYERS = [
    {"__init__"},
    {"core"},
    {"kernels"},
    {"tasks"},
    {"model"},
    {"rollout"},
    {"serving"},
    {"rl"},
    {"spot"},
    {"fleet"},
    {"run"},
    {"warmup"},
    {"report"},
    {"integrations"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Of a folder's subfolders each may import those before it; the files beside them may stand anywhere in between.
SUBFOLDERS = {
    "kernels": ["cpu", "triton"],
    "tasks": ["sandbox"],
    "model": ["gpu", "ops", "lora", "eagle", "backward"],
    "rollout": ["drafters", "speculation", "run_ahead"],
    "fleet": ["transport"],
    "run": ["store", "ui"],
    "integrations": ["trl", "verl"],
}
MAX_FUNCTION_LINES = 80


def part_of(module: str) -> str:
    """The folder or top-level file that a dotted module name belongs to; `paceline` alone is its `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in RANKS else "__init__"


def subfolder_rank(module: str) -> tuple[str, int] | None:
    """The folder of a module in a subfolder, and the subfolder's place in it; None for one that is in none."""
    names = module.split(".")
    order = SUBFOLDERS.get(names[1], []) if len(names) > 2 else []
    return (names[1], order.index(names[2])) if len(names) > 2 and names[2] in order else None


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
    """What a module imports from a layer below its own, or from a later subfolder of its folder."""
    used = (name for name in imported_modules(ast.parse(source)) if name.split(".")[0] == "paceline")
    return [name for name in used if is_below(importer, name)]


def is_below(importer: str, name: str) -> bool:
    if RANKS[part_of(name)] > RANKS[part_of(importer)]:
        return True
    own, other = subfolder_rank(importer), subfolder_rank(name)
    return own is not None and other is not None and own[0] == other[0] and other[1] > own[1]


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Who imports whom, inside functions too. The package itself is left out: it looks its names up when asked."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        used = set[str]()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[module] = (used & set(sources)) - {module, "paceline"}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        queue = [start]
        while queue:
            new = graph[queue.pop()] - found
            found |= new
            queue += new
        return found

    reach = {name: reached(name) for name in graph}
    groups = {frozenset({name} | {n for n in reach[name] if name in reach[n]}) for name in graph if name != "paceline"}
    return [set(group) for group in groups if len(group) > 1]


def public_types(source: str) -> set[str]:
    """Classes and type aliases that a module defines for others."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and any(letter.islower() for letter in name):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


def homonyms(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Public type names with more than one definition."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in public_types(source):
            homes.setdefault(name, []).append(module)
    return {name: found for name, found in sorted(homes.items()) if len(found) > 1}


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
    assert violations("paceline.model.decoder", "def f():\n    from paceline.rollout.engine import Engine") == [
        "paceline.rollout.engine"
    ]
    assert violations("paceline.core.types", "from paceline import core, cli") == ["paceline.cli"]
    assert violations("paceline.model.ops.gpu", "from paceline.model.backward import layer") == [
        "paceline.model.backward"
    ]
    assert not violations("paceline.rollout.engine", "import torch\nfrom paceline.model import decoder")


def all_sources() -> dict[str, str]:
    return {module_of(file).removesuffix(".__init__"): file.read_text() for file in FILES}


def test_every_subfolder_has_a_place() -> None:
    found = {(f.parent.parent.name, f.parent.name) for f in FILES if len(f.relative_to(PACKAGE).parts) == 3}
    assert found == {(folder, name) for folder, names in SUBFOLDERS.items() for name in names}


def test_no_module_imports_itself_in_a_circle() -> None:
    assert not cycles(import_graph(all_sources()))


def test_the_cycle_rule_sees_a_circle_through_a_function() -> None:
    sources = {
        "paceline.a": "import paceline.b",
        "paceline.b": "def f():\n    from paceline import c",
        "paceline.c": "from paceline.a import x",
        "paceline.d": "import paceline.a",
    }
    assert cycles(import_graph(sources)) == [{"paceline.a", "paceline.b", "paceline.c"}]


def test_a_public_type_has_one_meaning() -> None:
    assert not homonyms(all_sources())


def test_the_name_rule_sees_a_name_defined_twice() -> None:
    sources = {"paceline.a": "class Report: ...\nKey = int", "paceline.b": "Report = str\nclass _Key: ...\nKEY = 1"}
    assert homonyms(sources) == {"Report": ["paceline.a", "paceline.b"]}


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
