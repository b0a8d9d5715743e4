"""Runs that an older version wrote go on, are shown and evaluated as that version would have done it.

data/older_runs holds two runs of 3 steps of commit 0a01706, as a process leaves them that is killed in step 3: the last
checkpoint is that of step 2. `plain` drafts with suffixes and has rollouts of later steps in its checkpoint; `spot`
trains a drafter as well. They were made with `paceline train recipe.yaml --run.dir=plain` and `paceline train
recipe.yaml --run.dir=spot --spot.enabled=true --spot.open_share=0.5 --engine.drafter=suffix,eagle`; expected.json holds
what `paceline eval` and `paceline train --resume --rl.steps=5` of that commit made of both.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.model.fingerprint import fingerprint
from paceline.report.reading import read_run
from paceline.run.store.folder import compared, read_metrics
from paceline.run.store.history import newest_history

DATA = Path(__file__).parent / "data" / "older_runs"
LAST = 2
"""The checkpoint's step."""


@pytest.fixture(params=["plain", "spot"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run in the working folder, where the paths in its settings lead."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / str(request.param)


@pytest.fixture
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
    return found


def call(*args: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 0


def computes_alike(run: Path) -> bool:
    """Whether numbers must be the same here, to the last bit. Sources of kernels differ; what they compute must not."""
    state = json.loads((run / "checkpoints" / f"step-{LAST:06d}" / "state.json").read_text())
    there, here = (
        {key: value.partition(", ")[2] if key == "kernels" else value for key, value in found.items()}
        for found in (state["fingerprint"], fingerprint())
    )
    return {**there, "paceline": ""} == {**here, "paceline": ""}


def lines_up_to(file: Path, step: int) -> str:
    return "".join(line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step)


def tokens_of(run: Path, step: int) -> list[list[int]]:
    lines = (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["token_ids"] for line in lines]


def known(row: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """A row without what the older version did not write: standard errors alone."""
    assert all(key.endswith("_se") for key in row.keys() - then.keys())
    return {key: row[key] for key in row if key in then}


def test_it_goes_on_as_it_would_have(run: Path, expected: dict[str, Any]) -> None:
    is_alike = computes_alike(run)
    kept = {run / name: lines_up_to(run / name, LAST) for name in ("metrics.jsonl", "events.jsonl")}
    with pytest.warns(RuntimeWarning, match=f"step-{LAST:06d} was made in another environment: .*kernels was"):
        call("train", "--resume", f"--run.dir={run.name}", "--rl.steps=5", "--quiet")
    assert all(file.read_text().startswith(text) for file, text in kept.items())
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(6))
    steps = [path.name for path in (run / "checkpoints").iterdir()]
    assert sorted(steps) == ["step-000004", "step-000005"]
    for step in (3, 4, 5):
        made, as_before = tokens_of(run, step), expected["token_ids"][str(step)]
        assert made == as_before if is_alike else len(made) == len(as_before)
    if is_alike:
        found = [compared(row) for row in rows[LAST + 1 :]]
        assert [known(row, then) for row, then in zip(found, expected["rows"], strict=True)] == expected["rows"]
    _, history = newest_history(run) or (None, None)  # from now on, the run knows its rows, old ones too
    assert history is not None and [step for step, _ in history.rows] == list(range(6))
    assert read_run(run).problems == []


@pytest.mark.parametrize("run", ["spot"], indirect=True)
def test_its_drafter_goes_on(run: Path) -> None:
    counts = json.loads((run / "drafter" / f"step-{LAST:06d}" / "trainer.json").read_text())
    log = (run / "drafter" / "log.jsonl").read_text().splitlines()[: counts["num_entries"]]
    with warnings.catch_warnings(action="ignore"):
        call("train", "--resume", f"--run.dir={run.name}", "--rl.steps=4", "--quiet")
    entries = (run / "drafter" / "log.jsonl").read_text().splitlines()
    assert entries[: len(log)] == log
    after = json.loads((run / "drafter" / "step-000004" / "trainer.json").read_text())
    assert after.keys() == counts.keys() and after["num_entries"] == len(entries) > len(log)
    assert after["num_micro_steps"] > counts["num_micro_steps"]


def test_it_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    call("report", run.name)
    assert "report.html" in capsys.readouterr().out
    assert "3 of 3 steps" in (run / "report.html").read_text() and json.loads((run / "trace.json").read_bytes())
    assert {file: file.read_bytes() for file in before} == before


def test_it_is_evaluated(run: Path, expected: dict[str, Any]) -> None:
    call("eval", run.name, "--json", "found.json")
    found = json.loads(Path("found.json").read_text())
    if computes_alike(run):
        assert known(found, expected["eval"]) == expected["eval"]
    assert found.keys() >= expected["eval"].keys()
