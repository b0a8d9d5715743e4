"""`make lint` finds the same whatever extras are installed: mypy follows no import of a package that may be missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [file for folder in PROJECT["tool"]["mypy"]["files"] for file in (ROOT / folder).rglob("*.py")]
MODULES = {"pyyaml": "yaml", "pytest_xdist": "xdist", "types_pyyaml": "yaml"}
"""Modules of packages that are called otherwise."""
COME_ALONG = {"llvmlite", "pydantic_core"}
"""With numba and pydantic."""


def modules_of(requirements: Iterable[str]) -> set[str]:
    names = (re.split(r"[^\w.-]", text, maxsplit=1)[0].lower().replace("-", "_") for text in requirements)
    return {MODULES.get(name, name) for name in names}


def always_installed() -> set[str]:
    project = PROJECT["project"]
    return modules_of([*project["dependencies"], *project["optional-dependencies"]["dev"]]) | COME_ALONG


def of_extras() -> set[str]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    return {name for extra in extras for name in modules_of(extra)} - always_installed()


def skipped() -> set[str]:
    overrides = PROJECT["tool"]["mypy"]["overrides"]
    found = [entry["module"] for entry in overrides if entry.get("follow_imports") == "skip"]
    return {name.removesuffix(".*") for names in found for name in names}


def imported(source: str) -> set[str]:
    """The packages that a file imports by a statement, which mypy would follow."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_mypy_follows_no_import_that_may_be_missing() -> None:
    beside = [file for file in SOURCES if (ROOT / "paceline") not in file.parents]
    own = {"paceline", *(file.stem for file in beside), *(file.parent.name for file in beside)}
    known = always_installed() | own | set(sys.stdlib_module_names)
    found = {name for file in SOURCES for name in imported(file.read_text(encoding="utf-8"))}
    assert {"trl", "datasets"} <= found - known, "the check itself sees nothing"
    assert not found - known - skipped()
    assert {"trl", "ray", "reasoning_gym", "wandb"} <= of_extras()
    assert not of_extras() - skipped()


def run_mypy(folder: Path, config: str) -> str:
    (folder / "config.toml").write_text(config)
    command = [sys.executable, "-m", "mypy", "--config-file", "config.toml", "--no-incremental", "probe.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_what_an_extra_says_about_its_types_changes_nothing(tmp_path: Path) -> None:
    """Every such package, present with types that the probe contradicts; and the control: followed, they are errors."""
    probe = ["def look() -> None:"]
    for name in sorted(skipped()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py.typed").touch()
        (tmp_path / name / "__init__.py").write_text("import os\n\n\ndef call(number: int) -> None: ...\n")
        probe += [f"    from {name} import Missing, call as call_{name}, os as os_{name}"]
        probe += [f"    number_{name}: int = Missing(call_{name}('text'), os_{name})"]
    (tmp_path / "probe.py").write_text("\n".join(probe) + "\n")
    text = (ROOT / "pyproject.toml").read_text()
    assert "Success" in run_mypy(tmp_path, text)
    followed = run_mypy(tmp_path, text.replace('follow_imports = "skip"', ""))
    assert all(f'Module "{name}" has no attribute "Missing"' in " ".join(followed.split()) for name in skipped())
