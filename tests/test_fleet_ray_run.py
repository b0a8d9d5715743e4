"""Whole runs of a fleet under a real Ray, quiet and with real faults: always the rows, texts and weights of one worker.

All tests but those of the command line share one Ray on this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from drafter_replay import read_log
from sabotage import (
    OF_CLUSTER,
    Nodes,
    Sabotage,
    Strike,
    enlarge,
    kill,
    save_and_strike,
    small_disk,
    starve,
    stop,
    two_nodes,
)
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

from paceline.fleet.commands import Generate, Learn, Publish, RunAhead, SpotTrain
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_cluster import open_cluster
from paceline.fleet.transport.ray_guard import MARK, marked
from paceline.run import open_fleet as fleet_opening
from paceline.run.open import open_run
from paceline.run.recipes import prepare
from paceline.run.store.checkpoints import Checkpoints
from paceline.run.store.folder import read_metrics
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.log import LOG

HAS_RAY = importlib.util.find_spec("ray") is not None  # to import it here would be too early: see `ray_cluster.py`
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install -e '.[ray]'"),
]
MOST_WORKERS = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    write_task(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with open_cluster(FleetSettings(workers=MOST_WORKERS)):
        yield


def settings_of(home: Path, workers: int, steps: int = 3, **sections: dict[str, Any]) -> Any:
    fleet = {"workers": workers, "answer_timeout_s": 2.0, "quiet_timeout_s": 30.0}
    rl = {"steps": steps, "prompts_per_step": 4, "group_size": 4, "lr": 1e-3, "pack_tokens": 128, "epochs": 2}
    return make_settings(home, sampling={"max_new_tokens": 40}, rl=rl, fleet=fleet, **sections)


@pytest.fixture(scope="module")
def alone(home: Path) -> Path:
    train(settings_of(home, 1), home / "alone")
    return home / "alone"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_number_of_processes_makes_the_same_run(home: Path, alone: Path, tmp_path: Path, count: int) -> None:
    train(settings_of(home, count), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", alone)


def test_running_ahead_changes_no_number(home: Path, alone: Path, tmp_path: Path) -> None:
    train(settings_of(home, 2, engine={"run_ahead": True}), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", alone)
    assert sum(row.get("rollout/spec_ahead_offered", 0) for row in read_metrics(tmp_path / "run")) > 0


def test_a_run_goes_on_with_other_processes(home: Path, alone: Path, tmp_path: Path) -> None:
    train(settings_of(home, 2, steps=1), tmp_path / "run")
    train(settings_of(home, 2), tmp_path / "run", is_resumed=True)
    assert compared_rows(tmp_path / "run")[2:] == compared_rows(alone)[2:]
    assert same_weights(weights(tmp_path / "run", 3), weights(alone, 3))


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> type[Sabotage]:
    """Nobody is struck before there is a plan."""
    monkeypatch.setattr(fleet_opening, "ProcessCarrier", Sabotage)
    Sabotage.plan()
    return Sabotage


@pytest.mark.parametrize("strike", [kill, stop])
@pytest.mark.parametrize("moment", [Publish, Generate, Learn, RunAhead])
def test_a_fault_costs_time_only(
    home: Path, alone: Path, tmp_path: Path, sabotage: type[Sabotage], moment: type[Any], strike: Strike
) -> None:
    """Killed, or standing still, while it fetches weights, generates, learns or runs ahead."""
    sabotage.plan(moment, strike)
    train(settings_of(home, 2, engine={"run_ahead": True}), tmp_path / "run")
    assert len(sabotage.latest.struck) == 1
    assert_equal_runs(tmp_path / "run", alone)


@pytest.mark.parametrize("num_times", [0, 2])
def test_training_the_drafter_changes_no_number(
    home: Path, alone: Path, tmp_path: Path, sabotage: type[Sabotage], num_times: int
) -> None:
    """By whoever is idle; also when the trainer is killed, and the one after it."""
    sabotage.plan(SpotTrain, num_times=num_times)
    budget = {"always": True, "calibrate": False}
    train(settings_of(home, 2, spot={"enabled": True}, budget=budget), tmp_path / "run")
    assert len(sabotage.latest.struck) == num_times
    assert_equal_runs(tmp_path / "run", alone)
    drafters = tmp_path / "run" / "drafter" / "fleet"
    saved = DrafterCheckpoints(drafters).load(3)
    if saved is None:  # both were lost before they told of anything, and three short steps had no time for a third
        assert num_times == 2 and not (drafters / LOG).exists()
        return
    entries = read_log(drafters / LOG)
    assert len(entries) == saved.counts["num_entries"]
    # Micro-steps of those who were lost before they told of them are neither in the log nor in the drafter.
    assert sum(entry["do"] == "train" for entry in entries) == saved.counts["num_micro_steps"] > 0


def test_many_faults_cost_time_only(home: Path, alone: Path, tmp_path: Path, sabotage: type[Sabotage]) -> None:
    """Every worker that is told to learn is killed, six times: once in the middle of everything."""
    sabotage.plan(Learn, num_times=6)
    train(settings_of(home, 3), tmp_path / "run")
    assert len(sabotage.latest.struck) == 6
    assert_equal_runs(tmp_path / "run", alone)


def test_a_worker_without_memory_is_replaced(home: Path, alone: Path, tmp_path: Path, sabotage: type[Sabotage]) -> None:
    sabotage.plan(Learn, starve)
    settings = settings_of(home, 2)
    notes: list[str] = []
    display = quiet()
    display.note = notes.append  # type: ignore[method-assign, assignment]
    with open_run(prepare(settings), settings.model.path, tmp_path / "run", display) as run:
        run.train()
    (number,) = sabotage.latest.struck
    assert any(f"worker {number} was lost" in note for note in notes), notes
    assert_equal_runs(tmp_path / "run", alone)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 2 MB, less than two checkpoints take."""
    with small_disk(tmp_path / "disk", 2) as can_mount:
        if not can_mount:
            pytest.skip("only who may mount can have a small disk")
        yield tmp_path / "disk"


def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(home: Path, alone: Path, disk: Path) -> None:
    path = disk / "run"
    with pytest.raises(OSError, match=r"(?i)no space left on device"):
        train(settings_of(home, 2), path)
    enlarge(disk, 64)
    train(settings_of(home, 2), path, is_resumed=True)
    assert_equal_runs(path, alone)


def test_killed_while_a_checkpoint_is_written(
    home: Path, alone: Path, tmp_path: Path, sabotage: type[Sabotage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "save", save_and_strike)
    train(settings_of(home, 2), tmp_path / "run")
    assert len(sabotage.latest.struck) == 1
    assert_equal_runs(tmp_path / "run", alone)


# --- the command line -------------------------------------------------------------------------------------------------


def start_train(path: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    errors = (path.parent / "errors").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *arguments, "--quiet"],
        stdout=errors,
        stderr=errors,
        cwd=path.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        start_new_session=True,
    )


def wait_for_rows(process: subprocess.Popen[bytes], path: Path, count: int) -> None:
    while process.poll() is None and not (path / "metrics.jsonl").is_file():
        time.sleep(0.05)
    while process.poll() is None and len(read_metrics(path)) < count:
        time.sleep(0.05)
    assert process.poll() is None, (path.parent / "errors").read_text()


LONG = 80
"""Steps of a run that something can happen in."""


@pytest.fixture(scope="module")
def alone_for_long(home: Path) -> Path:
    train(settings_of(home, 1, LONG), home / "long")
    return home / "long"


def write_recipe(home: Path, path: Path, **fleet: Any) -> str:
    settings = settings_of(home, 2, LONG, run={"dir": str(path), "checkpoint_every": 1, "keep": 2, "loggers": "none"})
    tree = settings.model_dump(mode="json")
    tree["fleet"] |= fleet
    (path.parent / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return str(path.parent / "recipe.yaml")


def test_a_driver_that_is_killed_is_resumed(home: Path, alone_for_long: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = start_train(path, write_recipe(home, path))
    wait_for_rows(process, path, 2)
    process.kill()
    process.wait()
    process = start_train(path, "--resume", f"--run.dir={path}", "--fleet.workers=3")
    assert process.wait() == 0, (tmp_path / "errors").read_text()
    assert_equal_runs(path, alone_for_long, LONG)


def ray_folder(driver: int) -> str:
    """The folder that marks the processes of a driver's Ray."""
    children = (Path("/proc") / str(driver) / "task" / str(driver) / "children").read_text().split()
    lines = [Path(f"/proc/{child}/environ").read_text().split("\0") for child in children]
    [found] = {line.partition("=")[2] for own in lines for line in own if line.startswith(f"{MARK}=")}
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_of_a_ray_outlives_its_driver(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "run"
    process = start_train(path, write_recipe(home, path))
    wait_for_rows(process, path, 2)
    folder = ray_folder(process.pid)
    assert len(marked(folder)) > 5
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    assert process.wait() == (-number if number == signal.SIGKILL else 128 + number), (tmp_path / "errors").read_text()
    deadline = time.monotonic() + 30
    while (marked(folder) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not marked(folder) and not Path(folder).exists()
    if number != signal.SIGKILL:
        last = read_metrics(path)[-1]["step"]
        assert (path / "checkpoints" / f"step-{last:06d}").is_dir()


def workers_seen(path: Path) -> set[str]:
    """Those who have had weights."""
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines(keepends=True)[:-1]]
    return {event["worker"] for event in events if event["name"] == "publish"}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as opened:
        yield opened


def test_a_node_that_is_lost_costs_time_only(home: Path, alone_for_long: Path, tmp_path: Path, nodes: Nodes) -> None:
    """Four workers on two nodes that the run has joined; the second node is killed with all that is on it."""
    path = tmp_path / "run"
    process = start_train(path, write_recipe(home, path, workers=4, address=nodes.address), **OF_CLUSTER)
    wait_for_rows(process, path, 2)
    while process.poll() is None and len(workers_seen(path)) < 3:  # a node has room for two
        time.sleep(0.05)
    nodes.lose()
    assert process.wait() == 0, (tmp_path / "errors").read_text()
    nodes.wait()
    assert (tmp_path / "errors").read_text().count("was lost") >= 1
    assert_equal_runs(path, alone_for_long, LONG)
