"""Whole runs of a fleet: the rows, texts and weights of a run with one worker, for any number of workers.

Here workers take turns in this process; under Ray they do in `test_fleet_ray_run.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import (
    assert_equal_runs,
    compared_rows,
    make_model,
    make_settings,
    quiet,
    same_weights,
    train,
    weights,
    write_task,
)

from paceline.core.config import SettingsError
from paceline.core.trace import Trace
from paceline.fleet.driver import FleetBackend
from paceline.fleet.reports import Spent, Stretch
from paceline.fleet.throughput import FIRST_SPEED
from paceline.fleet.timesheet import Attendance, Timesheet
from paceline.model.eagle.files import load_eagle
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.rollout.run_ahead.store import RunAheadText
from paceline.run import open as opening
from paceline.run.recipes import describe, prepare, training_sampling
from paceline.run.store.folder import read_metrics

RL = {"epochs": 2, "virtual_workers": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    write_task(folder)
    return folder


def settings_of(home: Path, workers: int, **sections: dict[str, Any]) -> Any:
    fleet = {"workers": workers, "in_process": workers > 0} if workers else {}
    rl = {**make_settings(home).rl.model_dump(), **RL, **sections.pop("rl", {})}
    return make_settings(home, rl=rl, eval={"items": 4, "every": 2, "samples": 2}, fleet=fleet, **sections)


@pytest.fixture(scope="module")
def alone(home: Path) -> Path:
    """Without a fleet."""
    train(settings_of(home, 0), home / "alone")
    return home / "alone"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_workers_makes_the_same_run(home: Path, alone: Path, tmp_path: Path, count: int) -> None:
    train(settings_of(home, count), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", alone)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_running_ahead_changes_no_number(home: Path, alone: Path, tmp_path: Path, count: int) -> None:
    """Whoever is idle writes for later steps; how much of it depends on time, and nothing on how much."""
    train(settings_of(home, count, engine={"max_sequences": 3, "kv_tokens": 2048, "run_ahead": True}), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", alone)


def test_text_made_ahead_is_in_the_checkpoint(home: Path, alone: Path, tmp_path: Path) -> None:
    path, settings = tmp_path / "run", settings_of(home, 2, engine={"run_ahead": True})
    with opening.open_run(prepare(settings), settings.model.path, path, quiet()) as run:
        assert isinstance(run.backend, FleetBackend) and run.backend.ahead is not None
        written = RunAheadText(5, np.array([1, 2, 3], np.int32), is_whole=True)
        run.backend.ahead.put(training_sampling(settings), (900, 1), written)
        run.step()
        run.step()
    with opening.open_run(prepare(settings), settings.model.path, path, quiet(), is_resumed=True) as run:
        assert isinstance(run.backend, FleetBackend) and run.backend.ahead is not None
        text = run.backend.ahead.find(training_sampling(settings), (900, 1), 5)
        assert text is not None and text.tokens.tolist() == [1, 2, 3] and text.is_whole
        run.train()
    assert same_weights(weights(path, 3), weights(alone, 3))


def test_a_run_that_trains_a_drafter_is_the_same_and_keeps_it(home: Path, alone: Path, tmp_path: Path) -> None:
    """How much it is trained depends on time; here a version is given, so that there is one to keep."""
    path, sections = tmp_path / "run", {"spot": {"enabled": True}, "budget": {"always": True, "calibrate": False}}
    with opening.open_run(prepare(settings_of(home, 2, **sections)), str(home / "model"), path, quiet()) as run:
        assert isinstance(run.backend, FleetBackend)
        config = EagleConfig.for_policy(run.learner.decoder.config)
        run.backend.drafter = replace(Eagle.fresh(config, run.learner.weights), version=7)
        run.step()
        run.step()
    kept = load_eagle(path / "drafter" / "fleet" / "step-000002" / "eagle3")
    assert kept.version >= 7
    with opening.open_run(
        prepare(settings_of(home, 3, **sections)), str(home / "model"), path, quiet(), is_resumed=True
    ) as run:
        assert isinstance(run.backend, FleetBackend) and run.backend.drafter is not None
        assert run.backend.drafter.version == kept.version
        run.train()
    assert same_weights(weights(path, 3), weights(alone, 3))
    assert compared_rows(path)[1:] == compared_rows(alone)[2:]
    assert read_metrics(path)[-1].get("rollout/spec_eagle_proposed", 0) > 0


def test_a_run_goes_on_with_another_number_of_workers(home: Path, alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(settings_of(home, 3, rl={"steps": 1}), path)
    train(settings_of(home, 2, rl={"steps": 2}), path, is_resumed=True)
    train(settings_of(home, 0), path, is_resumed=True)
    # What is evaluated after the last step of a shorter run is not evaluated in a longer one.
    assert compared_rows(path)[3:] == compared_rows(alone)[3:]
    assert same_weights(weights(path, 3), weights(alone, 3))


def test_a_step_without_anything_to_learn_from_is_a_step(home: Path, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "model").symlink_to(home / "model")
    write_task(tmp_path / "task", "def reward(prompts, completions, **columns):\n    return [0.0]\n")
    for workers in (0, 2):
        rl = {"algorithm": "dapo", "draw_limit": 2.0, "steps": 2}
        train(settings_of(tmp_path / "task", workers, rl=rl), tmp_path / f"{workers}")
    assert_equal_runs(tmp_path / "2", tmp_path / "0", last=2)


def test_another_seed_is_seen(home: Path, alone: Path, tmp_path: Path) -> None:
    """The control: equality is not what any two runs have."""
    train(settings_of(home, 2, rl={"seed": 1, "steps": 1}), tmp_path / "run")
    assert compared_rows(tmp_path / "run")[1] != compared_rows(alone)[1]


def test_where_the_time_went_is_told(home: Path, tmp_path: Path) -> None:
    train(settings_of(home, 2, rl={"steps": 1}), tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    for worker in ("w0", "w1"):
        assert {event["name"] for event in events if event["worker"] == worker} >= {"generate", "learn", "publish"}
    assert all(event["start_s"] >= 0 and event["dur_s"] >= 0 for event in events)
    row = read_metrics(tmp_path / "run")[-1]
    names = ("waiting", "useful", "generate", "learn", "publish", "dealing")
    shares = [row[f"perf/fleet_{name}_share"] for name in names]
    assert all(0.0 <= share <= 1.0 for share in shares) and sum(shares[:2]) == pytest.approx(1.0)
    assert row["rollout/spec_accept_length"] >= 1.0


# --- time -------------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_moment_is_on_a_sheet_once() -> None:
    clock = Clock()
    sheet = Timesheet(clock)
    for name, amount, seconds in (("learn", 5, 1.0), ("learn", 6, 2.0), ("wait", 0, 0.5), ("publish", 0, 0.25)):
        sheet.turn_to(name, amount)
        clock.now += seconds
    now, stretches = sheet.drain()
    assert now == 103.75
    assert stretches == [("learn", 100.0, 3.0, 11), ("wait", 103.0, 0.5, 0), ("publish", 103.5, 0.25, 0)]
    clock.now += 1
    assert sheet.drain() == (104.75, [Stretch("publish", 103.75, 1.0, 0)])


def test_shares_are_those_of_all_workers_whatever_their_clocks_say() -> None:
    clock = Clock()
    attendance = Attendance(2, clock)
    attendance.begin()
    clock.now += 10
    stretches = [Stretch("generate", 5000.0, 6.0, 9), Stretch("wait", 5006.0, 4.0, 0)]
    attendance.hear(0, Spent(5010.0, stretches, FIRST_SPEED))
    attendance.hear(1, Spent(10.0, [Stretch("learn", 2.0, 8.0, 7)], FIRST_SPEED))
    found = attendance.metrics()
    assert found["perf/fleet_generate_share"] == pytest.approx(0.3)
    assert found["perf/fleet_waiting_share"] == pytest.approx(0.3)
    assert found["perf/fleet_useful_share"] == pytest.approx(0.7)


def test_spans_of_others_are_those_of_this_clock_and_not_before_the_trace() -> None:
    trace = Trace(begin_s=7.0)
    attendance = Attendance(1)
    attendance.trace = trace
    attendance.hear(0, Spent(50.0, [Stretch("wait", 40.0, 10.5, 0), Stretch("learn", 50.5, 2.0, 3)], FIRST_SPEED))
    _, wait, learn = trace.drain()  # the first says that the run was resumed
    assert wait["start_s"] == pytest.approx(7.0, abs=1e-5) and wait["dur_s"] < 10.0
    assert learn["start_s"] - wait["start_s"] == pytest.approx(wait["dur_s"], abs=1e-5) and learn["dur_s"] == 2.0
    assert learn["worker"] == "w0" and learn["args"] == {"amount": 3}


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections, said",
    [
        ({"run": {"ahead_worker": True}, "engine": {"run_ahead": True}}, "run.ahead_worker"),
        ({"rl": {"epochs": 2, "exact": False}}, "rl.epochs"),
    ],
)
def test_what_a_fleet_cannot_do_is_refused(home: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make_settings(home, fleet={"workers": 2}, **sections)


def test_without_ray_the_extra_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = make_settings(home, fleet={"workers": 2})
    with (
        pytest.raises(SettingsError, match=r"pip install -e '\.\[ray\]'"),
        opening.open_run(prepare(settings), settings.model.path, tmp_path / "run", quiet()),
    ):
        raise AssertionError("it must not open")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "fleet, device, is_said",
    [
        ({"workers": 3}, "cpu", True),
        ({"workers": 2}, "cpu", False),
        ({"workers": 3}, "cuda", False),
        ({"workers": 3, "in_process": True}, "cpu", False),
        ({"workers": 3, "address": "far:1"}, "cpu", False),
    ],
)
def test_more_workers_than_cores_are_said_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: dict[str, Any], device: str, is_said: bool
) -> None:
    def stop(*args: Any) -> Any:
        raise ValueError("before workers start")

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5})
    monkeypatch.setattr(opening, "open_fleet", stop)
    path, display, notes = home / "model", quiet(), list[str]()
    monkeypatch.setattr(display, "note", notes.append)
    settings = make_settings(home, fleet=fleet, model={"path": str(path), "device": device})
    assert describe(settings, tmp_path / "run")[0].startswith(f"starting {fleet['workers']} workers")
    with (
        pytest.raises(ValueError, match="before workers start"),
        opening.open_run(settings.resolved(), str(path), tmp_path / "run", display),  # Ray need not be installed,
    ):
        raise AssertionError("it must not open")
    assert len(notes) == is_said and all("workers (3) than cores (2)" in note for note in notes)


def test_one_worker_imports_no_ray() -> None:
    code = "import sys, paceline.run.open, paceline.run.worker_process; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
