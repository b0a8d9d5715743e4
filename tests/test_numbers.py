"""Figures in the documents are those of the result files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "bench"


def test_tables_in_the_documents_are_made_from_the_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", BENCH / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for document in tables.DOCUMENTS:
        text = document.read_text()
        assert tables.renewed(text) == text, "run `python bench/tables.py`"
