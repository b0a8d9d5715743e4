"""The bench of optimizers: its parts run, and its tables say what the rows hold."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from celo2_weights import momentum_tensors, written


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("optimizers")


def test_the_sweep_chooses_rates(bench: Any) -> None:
    rows = [{"part": "sweep", "optimizer": "muon", "lr": lr, "loss": loss} for lr, loss in ((1.0, 3.0), (2.0, 1.0))]
    assert bench.best_rates(rows) == {"adamw": 5e-4, "muon": 2.0, "celo2": 1.6e-3}


def test_tables_are_means_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = importlib.import_module("tables")
    rows = [
        {"part": "drafter", "optimizer": "muon", "accept_length": 2.0 + seed, "micro_steps": 10 + seed}
        for seed in range(3)
    ]
    rows += [{"part": "policy", "optimizer": "muon", "before": 0.5, "after": 0.52, "num_steps": 4}]
    rows += [{"part": "step", "model": "a model", "form": "muon", "ms": 1.25, "state_bytes": 10, "parameters": 4}]
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / f"optimizers-{tables.GPU}.json").write_text(json.dumps({"rows": rows}))
    assert tables.optimizers().splitlines()[2:] == ["| `muon` | H200 | 3.00 ± 0.58 | 11 | +2.0 | 4 |"]
    (tmp_path / f"optimizers-{tables.GPU}.json").write_text(json.dumps({"rows": [r for r in rows if "after" not in r]}))
    assert tables.optimizers().splitlines()[2:] == ["| `muon` | H200 | 3.00 ± 0.58 | 11 |"]
    assert tables.optimizer_steps().splitlines()[2:] == ["| a model, H200 | muon | 1.2 | 2.50 |"]


@pytest.mark.slow
def test_all_parts_run(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = written(tmp_path, momentum_tensors())
    bench.main(["--celo2", str(weights), "--quick"])
    said = capsys.readouterr().out
    for part in ("celo2, plain", "sweep: celo2", "drafter: muon, seed 0", "policy: celo2, seed 0"):
        assert part in said
