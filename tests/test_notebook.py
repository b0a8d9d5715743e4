"""The notebook in docs/: its cells run from top to bottom in a fresh process, and its outputs are a run's.

To renew the outputs: python tests/test_notebook.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from notebook_cells import code_cells
from test_readme import anchors

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "first-training.ipynb"
SHORTER = {'"steps": 10': '"steps": 1', '"prompts_per_step": 8': '"prompts_per_step": 1', "puzzles[:64]": "puzzles[:4]"}


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return found


def run(notebook: dict[str, Any], folder: Path) -> list[str]:
    """What its code cells print, run in an empty folder."""
    (folder / "notebook.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    script = Path(__file__).with_name("notebook_cells.py")
    command = [sys.executable, str(script), "notebook.ipynb", "printed.json"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed: list[str] = json.loads((folder / "printed.json").read_text())
    return printed


def accuracies(printed: list[str]) -> list[float]:
    """Before and after training, as the notebook prints them."""
    line = next(line for text in printed for line in text.splitlines() if line.startswith("held out: "))
    return [float(number) for number in re.findall(r"([\d.]+)(?: ± [\d.]+)? %", line)]


def test_the_notebook_has_the_outputs_of_a_run() -> None:
    notebook = read()
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in cells]
    assert all(
        bool(text) == ("print(" in source or ".train(" in source)
        for text, source in zip(printed, code_cells(notebook), strict=True)
    )
    before, after = accuracies(printed)
    assert after > before + 20 and not re.search("/tmp/|/home/|/work/|Traceback", "".join(printed))


def test_links_of_the_notebook_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in read()["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text)
    assert len(links) > 3
    for page, anchor in links:
        assert (NOTEBOOK.parent / page).is_file() and (not anchor or anchor in anchors(NOTEBOOK.parent / page)), page


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """With fewer and smaller steps."""
    notebook = read()
    for long, short in SHORTER.items():
        assert any(long in source for source in code_cells(notebook)), long
        for cell in notebook["cells"]:
            cell["source"] = [line.replace(long, short) for line in cell["source"]]
    printed = run(notebook, tmp_path)
    assert len(accuracies(printed)) == 2 and "speculation" in printed[-1]


@pytest.mark.slow
def test_the_notebook_trains(tmp_path: Path) -> None:
    before, after = accuracies(run(read(), tmp_path))
    assert after > before + 20


def write_outputs() -> None:
    """Run the notebook and keep what it prints."""
    notebook = read()
    with tempfile.TemporaryDirectory() as folder:
        printed = run(notebook, Path(folder))
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_outputs()
