"""The bench of adapters runs on a CPU, and what it reports as exact is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; the bench folder is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    import lora

    yield lora
    sys.modules.pop("lora", None)


def test_a_shape_is_measured(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "8", "--kv-tokens", "2048", "--pack-tokens", "256", "--prompts", "2", "--samples", "4"]
    args = ["--device", "cpu", "--shapes", "tiny", *sizes]
    found = bench.measure("tiny", bench.parse(args))
    assert found["equal"] and found["logp_abs_diff"] == 0 and 0 < found["moved_share"] < 1
    assert found["planned_gib"] > 0 and not found["base_on_host"]
    bench.main(args)
    assert "rank 16" in capsys.readouterr().out
