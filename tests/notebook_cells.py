"""Runs the code cells of a notebook as Jupyter would, without Jupyter: `python notebook_cells.py FILE OUT`.

A process of its own, started by `test_notebook.py`. OUT gets a JSON list of what each code cell printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(sources: list[str]) -> list[str]:
    """What each cell prints. Cells share `__main__`, and tracebacks find their text, as in a kernel."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, source in enumerate(sources, 1):
        place, out = f"<cell {number}>", io.StringIO()
        linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
        with contextlib.redirect_stdout(out):
            exec(compile(source, place, "exec", dont_inherit=True), names)
        printed.append(out.getvalue())
    return printed


if __name__ == "__main__":
    found = run_cells(code_cells(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    Path(sys.argv[2]).write_text(json.dumps(found))
