"""The bench of what speculation may not cost, on tiny models: every part measures, and another token ends it."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Imports a module of the bench folder, which is no package, by its name."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module
    sys.path.remove(str(BENCH))


def measure(bench: Any, folder: Path, part: str, *options: str) -> list[dict[str, Any]]:
    """The rows that a quick run of one part writes."""
    bench("never_slower").main(["--quick", "--device", "cpu", "--parts", part, "--out", str(folder), *options])
    [path] = folder.glob(f"never-slower-{part}-*.json")
    result = json.loads(path.read_text())
    assert result["bench"] == f"never-slower-{part}" and result["minutes"] >= 0
    rows: list[dict[str, Any]] = result["rows"]
    assert all(row["equal"] for row in rows)
    return rows


def test_every_temperature_and_kind_of_prompts_is_a_case(bench: Any, tmp_path: Path) -> None:
    rows = measure(bench, tmp_path, "smollm2", "--repeats", "1", "--contenders", "off,default,ngram+suffix")
    cases = [f"{kind} prompts, T = {temperature}" for kind in ("own", "other") for temperature in ("1", "0.6", "0")]
    names = ("off", "default", "ngram+suffix")
    assert [(row["case"], row["contender"]) for row in rows] == [(case, name) for case in cases for name in names]
    for row in rows:
        assert row["ratio"] >= row["worst"] > 0 and 0 < row["gpu_share"] < 1 and 0 < row["row_share"] <= 1
        assert row["looping"] == 0 and len(row["calls"]) == 1
    assert all(row["ratio"] == 1 for row in rows if row["contender"] == "off")


def test_steps_are_held_against_their_forwards(bench: Any, tmp_path: Path) -> None:
    rows = measure(bench, tmp_path, "forward", "--repeats", "1")
    assert [row["contender"] for row in rows] == ["off", "suffix"] * 2
    assert all(row["call_over_forward"] >= 1 and row["step_ms"] > 0 for row in rows)


def test_run_ahead_text_of_a_call_is_used_by_the_next(bench: Any, tmp_path: Path) -> None:
    off, ours = measure(bench, tmp_path, "idle", "--calls", "2", "--max-new-tokens", "24")
    assert (off["contender"], ours["contender"]) == ("off", "all") and off["ratio_later"] == 1
    assert 0 < ours["idle"] <= ours["idle_worst"] < 1 and len(ours["calls"]) == 2


def test_steps_times_subtract_the_prompts(bench: Any) -> None:
    first = {"seconds": 1.0, "machine_seconds": 0.5, "steps": 1}
    whole = {"seconds": 4.0, "machine_seconds": 2.5, "steps": 11}
    found = bench("never_slower").step_times([(first, whole)])
    assert found["step_over_forward"] == 1.5 and found["call_over_forward"] == 1.6
    assert found["step_ms"] == 300 and found["forward_ms"] == 200


@pytest.mark.slow
def test_the_first_calls_of_processes_are_paired(bench: Any, tmp_path: Path) -> None:
    off, default = measure(bench, tmp_path, "first")
    assert off["time_over_plain"] == 1 and default["time_over_plain"] > 0
    assert len(default["processes"][0]["calls"]) == 2
    assert default["processes"][0]["digest"] == off["processes"][0]["digest"]


def test_another_token_fails_the_bench(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineup = bench("lineup")
    timed = lineup.timed_call

    def spoil(engine: Any, *given: Any) -> Any:
        call = timed(engine, *given)
        if engine is spoilt[0]:
            call.rollouts[0].token_ids[-1] ^= 1
        return call

    spoilt: list[Any] = []
    opened = lineup.Lineup.__init__

    def remember(self: Any, *given: Any) -> None:
        opened(self, *given)
        spoilt[:] = [self._engines["default"]]

    monkeypatch.setattr(lineup, "timed_call", spoil)
    monkeypatch.setattr(lineup.Lineup, "__init__", remember)
    options = ("--repeats", "1", "--prompts", "other", "--temperatures", "1")
    with pytest.raises(SystemExit, match="differ"):
        measure(bench, tmp_path, "smollm2", *options)
    [path] = tmp_path.glob("*.json")
    assert [row["equal"] for row in json.loads(path.read_text())["rows"]] == [True, False]


def test_a_part_that_is_late_says_so(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not everything"):
        measure(bench, tmp_path, "idle", "--limit", "0")
    [path] = tmp_path.glob("*.json")
    assert "not begun" in json.loads(path.read_text())["rows"][0]["error"]


@pytest.mark.parametrize("period", [1, 5, 16, 17])
def test_a_loop_has_a_short_period(bench: Any, period: int) -> None:
    text = [1, 2, 3, *(i % period for i in range(80))]
    is_looping = bench("never_slower").is_looping
    assert is_looping(text) == (period <= 16)
    assert not is_looping(text[-63:]) and not is_looping([*text, 99])


def test_prompts_are_distinct_in_every_round(bench: Any, tmp_path: Path) -> None:
    first_calls, decode = bench("first_calls"), bench("decode")
    assert len(set(decode.read_prompts("everyday"))) == 128
    model = bench("never_slower").make_random_model(tmp_path / "tiny", size="tiny")
    prompts = first_calls.everyday_prompts(model)
    made = [tuple(prompt) for index in range(24) for prompt in prompts(index, 128)]
    assert len(set(made)) == len(made) == 24 * 128


def test_plain_decoding_must_be_named(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parse = bench("never_slower").parse
    for options in (["--contenders", "default"], ["--parts", "smollm2"], ["--parts", "nothing"], ["--shapes", "9b"]):
        with pytest.raises(SystemExit):
            parse(options)
    assert replace(parse(["--quick", "--repeats", "3"]).sizes, repeats=2) == bench("never_slower").QUICK


@pytest.mark.slow
def test_tables_are_empty_until_there_are_results(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, known = bench("tables"), BENCH / "results"
    for path in known.glob(f"ablation-*-{tables.GPU}.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.gpu_waits() == tables.never_slower() == ""
    monkeypatch.setattr(bench("never_slower"), "result_path", lambda name, gpu: Path(f"{name}-{tables.GPU}.json"))
    measure(bench, tmp_path, "forward", "--repeats", "1")
    measure(bench, tmp_path, "idle", "--calls", "1")
    measure(bench, tmp_path, "smollm2", "--repeats", "1", "--prompts", "own")
    assert len(tables.gpu_waits().splitlines()) == 2 + 4 + 2
    assert len(tables.never_slower().splitlines()) == 2 + 3 + 1 + 5
