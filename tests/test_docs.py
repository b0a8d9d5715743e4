"""What the pages of docs/ claim beside their commands: examples are short and work, tests and messages exist.

Their commands and snippets are run by `test_readme.py`.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from test_readme import FILE_NAME, PAGES, blocks

import paceline
from paceline.cli import main
from paceline.run.recipes import recipe_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MOST_LINES = 40


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def examples(name: str) -> dict[str, str]:
    """The files that a page shows whole, by their names."""
    found = ((FILE_NAME.match(text), text) for language, text in blocks(f"docs/{name}.md") if language == "python")
    return {named[1]: text for named, text in found if named}


# --- bring your own ---------------------------------------------------------------------------------------------------


def test_every_example_is_short() -> None:
    found = examples("extend")
    assert set(found) == {"reward.py", "reverse.py", "bigram.py", "median.py", "cautious.py"}
    assert all(len(text.splitlines()) < MOST_LINES for text in found.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in examples("extend").items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_a_drafter_guesses_and_changes_no_token(folder: Path, tiny_model: Path) -> None:
    sampling = paceline.Sampling(temperature=0.2, max_new_tokens=48, n=2, ignore_eos=True)
    budget = paceline.BudgetSettings(always=True)
    engine = paceline.Engine.from_pretrained(tiny_model, drafter="bigram.py:Bigram", budget=budget)
    drafted = engine.generate(["tick tock", "a b a b"], sampling)
    assert engine.stats.drafters["bigram"].accepted > 0
    assert drafted == paceline.Engine.from_pretrained(tiny_model, drafter=None).generate(
        ["tick tock", "a b a b"], sampling
    )


def train(*settings: str) -> list[float]:
    """Rewards of the steps of a small run."""
    few = ("--sampling.max_new_tokens=3", "--rl.lr=2e-3", "--rl.steps=12", "--eval.items=0", "--run.compare=false")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--model", "random:tiny", "--quiet", "--run.dir=run", *few, *settings])
    assert ended.value.code in (0, None)
    return [json.loads(line)["reward"] for line in Path("run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "median.py:MEDIAN"])
def test_the_examples_of_a_task_and_an_algorithm_learn(folder: Path, algorithm: str) -> None:
    rewards = train("--task.name=reverse.py:Reverse", f"--rl.algorithm={algorithm}")
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])


@pytest.mark.slow
def test_the_example_of_an_algorithm_is_another_one(folder: Path) -> None:
    own = train("--task.name=reverse.py:Reverse", "--rl.algorithm=median.py:MEDIAN")
    (folder / "run").rename(folder / "first")
    assert own != train("--task.name=reverse.py:Reverse", "--rl.algorithm=grpo")


# --- the quick start --------------------------------------------------------------------------------------------------


def test_the_way_that_is_timed_is_that_of_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    newcomer = importlib.import_module("newcomer")
    commands = list(newcomer.write_files(page("quickstart"), tmp_path))
    assert [command[:2] for command in commands] == [["python", "make_data.py"], ["paceline", "train"]]
    assert "--task.reward=reward.py:reward" in commands[1]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == examples("quickstart")


# --- what pages refer to ----------------------------------------------------------------------------------------------


def test_the_index_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.(?:md|ipynb))\)", page("README")))
    assert linked == {file.name for ending in ("md", "ipynb") for file in DOCS.glob(f"*.{ending}")} - {"README.md"}


def test_the_page_of_recipes_lists_every_recipe() -> None:
    table = page("recipes").partition("Which one:")[0]
    listed = re.findall(r"^\| `([\w.-]+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted([*recipe_names(), *recipe_names(is_warmup=True)])


# --- code that pages name ---------------------------------------------------------------------------------------------

WALK = re.compile(r"^### ([^\n]+): (\d+) hops\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
HOP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
SCREEN = 35
"""Lines that a walk may have."""


@cache
def definitions(file: str) -> frozenset[str]:
    """Functions, classes, methods (`Class.method`) and variables that a file of the package defines."""
    found = set()
    path = ROOT / "paceline" / file
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        found |= _names(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(found)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def test_the_walks_follow_the_code() -> None:
    walks = WALK.findall(page("architecture"))
    assert len(walks) == 3
    for title, count, text in walks:
        hops = HOP.findall(text)
        assert len(hops) == int(count) and len(text.splitlines()) <= SCREEN, title
        assert not [hop for hop in hops if hop[1] not in definitions(hop[0])], title


def test_what_contributing_points_to_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)` (?:in |of |\()`([\w/]+\.py)`", text.partition("## Add something")[2])
    assert len(named) > 10
    own = [(name, file) for name, file in named if not file.startswith("tests/")]
    assert not [pair for pair in own if pair[0] not in definitions(pair[1])]


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_a_page_names_exists(name: str) -> None:
    """Paths are relative to the clone or the package. Placeholders (`path/to/file.py`, `tasks/NAME.py`) are skipped."""
    text = (ROOT / name).read_text(encoding="utf-8").partition("| file | what it is |")[0]
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)(?=[`:])", text))
    given = {path for path in paths if not path.startswith("path/to/") and "NAME" not in path}
    code = {path for path in given if path.endswith(".py") or (ROOT / "paceline" / path.partition("/")[0]).is_dir()}
    assert not [path for path in code if not any((place / path).exists() for place in (ROOT, ROOT / "paceline"))]


@pytest.mark.parametrize("name", ["guarantees", "trl-options"])
def test_every_test_that_a_promise_names_exists(name: str) -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`(?: \(\*(\w+)\*)?", page(name))
    assert len(named) > 10
    assert not [f"{file}::{test}" for file, test, mark in named if marks(file).get(test) != mark]


@cache
def marks(file: str) -> dict[str, str]:
    """The tests of a file, each with what such a page calls the mark that keeps it from `make test`."""
    tree = ast.parse((ROOT / file).read_text())
    common = " ".join(ast.unparse(node.value) for node in tree.body if _assigns(node, "pytestmark"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            # A mark inside of a decorator is that of one case; others of the test are left.
            own = " ".join([common, *(text for text in map(ast.unparse, node.decorator_list) if "(" not in text)])
            found[node.name] = "slow" if "mark.slow" in own else "GPU" if "mark.gpu" in own else ""
    return found


def _assigns(node: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name


@cache
def strings_of_the_package() -> tuple[str, ...]:
    """Every text in the source, with what is filled in as a null character."""
    found = []
    for file in sorted((ROOT / "paceline").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_said(message: str) -> bool:
    """Whether the package says this somewhere; ... stands for anything."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.strip(". ").split("...")), re.DOTALL)
    return any(map(pattern.search, strings_of_the_package()))


def quoted_messages(text: str) -> list[str]:
    """What a page quotes in running text and tables: spans of code that are sentences rather than names."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [span for span in spans if len(span.split()) > 3 and not span.startswith("paceline ")]


def test_messages_that_are_explained_are_said() -> None:
    messages = quoted_messages(page("troubleshooting"))
    assert len(messages) > 20
    assert not [message for message in messages if not is_said(message)]
    assert not is_said("the moon is out of memory; lower engine.kv_tokens")


def test_every_extra_that_is_recommended_exists() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "paceline").rglob("*.py"))
    named = set(re.findall(r"how_to_install\(['\"](\w+)['\"]\)", source))
    assert named == {"gpu", "ray", "serve", "tasks", "trl"} and named <= set(known)
    assert "pip install 'paceline[" not in source, "nothing of that name can be installed but from a clone"
