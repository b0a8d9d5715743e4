"""Whole runs of a fleet under a real Ray, quiet and with real faults: always the rows, texts and weights of one worker.

All tests but those of the command line share one Ray on this machine.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import compared_rows, make_model, make_settings, same_weights, train, weights, write_task

from paceline.fleet import fleet_opening
from paceline.fleet.checkpoints import Checkpoints
from paceline.fleet.fleet_settings import FleetSettings
from paceline.fleet.fleet_view import Command, Learn, Publish, Rollout
from paceline.fleet.messages import Joined, Report
from paceline.fleet.ray_carrier import RayCarrier
from paceline.fleet.ray_cluster import open_cluster

HAS_RAY = importlib.util.find_spec("ray") is not None  # to import it here would be too early: see `ray_cluster.py`
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'paceline[ray]'"),
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


def settings_of(home: Path, workers: int, **sections: dict[str, Any]) -> Any:
    fleet = {"workers": workers, "answer_timeout_s": 2.0, "quiet_timeout_s": 30.0}
    rl = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "lr": 1e-3, "pack_tokens": 128, "epochs": 2}
    return make_settings(home, sampling={"max_new_tokens": 40}, rl=rl, fleet=fleet, **sections)


@pytest.fixture(scope="module")
def alone(home: Path) -> Path:
    train(settings_of(home, 1), home / "alone")
    return home / "alone"


def assert_equal_runs(path: Path, other: Path, last: int = 3) -> None:
    assert compared_rows(path) == compared_rows(other)
    assert same_weights(weights(path, last), weights(other, last))
    for step in range(1, last + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (path / name).read_text() == (other / name).read_text()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_number_of_processes_makes_the_same_run(home: Path, alone: Path, tmp_path: Path, count: int) -> None:
    train(settings_of(home, count), tmp_path / "run")
    assert_equal_runs(tmp_path / "run", alone)


def test_a_run_goes_on_with_other_processes(home: Path, alone: Path, tmp_path: Path) -> None:
    settings = settings_of(home, 2)
    shorter = settings.model_copy(update={"rl": settings.rl.model_copy(update={"steps": 1})})
    train(shorter, tmp_path / "run")
    train(settings, tmp_path / "run", is_resumed=True)
    assert compared_rows(tmp_path / "run")[2:] == compared_rows(alone)[2:]
    assert same_weights(weights(tmp_path / "run", 3), weights(alone, 3))


# --- faults -----------------------------------------------------------------------------------------------------------


class Sabotage(RayCarrier):
    """Does something to a worker's process right after it was told something."""

    moment: type[Any] | None = None
    """After which command."""
    how = signal.SIGKILL
    num_times = 1
    done: list[int]
    """Who it was done to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._process_ids: dict[int, int] = {}
        Sabotage.latest = self

    latest: Sabotage

    def collect(self) -> list[tuple[int, Report]]:
        found = super().collect()
        for number, report in found:
            if isinstance(report, Joined):
                self._process_ids[number] = report.process_id
        return found

    def send(self, command: Command, payload: Any) -> None:
        super().send(command, payload)
        if self.moment is not None and isinstance(command, self.moment):
            self.strike(command.worker)

    def strike(self, number: int) -> None:
        if len(self.done) < self.num_times and number not in self.done:
            self.done.append(number)
            os.kill(self._process_ids[number], self.how)

    def strike_any(self) -> None:
        self.strike(max(self._process_ids))


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> type[Sabotage]:
    monkeypatch.setattr(fleet_opening, "RayCarrier", Sabotage)
    Sabotage.done = []
    for name, value in (("moment", None), ("how", signal.SIGKILL), ("num_times", 1)):
        monkeypatch.setattr(Sabotage, name, value)
    return Sabotage


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", [Publish, Rollout, Learn])
def test_a_fault_costs_time_only(
    home: Path, alone: Path, tmp_path: Path, sabotage: Any, moment: type[Any], how: signal.Signals
) -> None:
    """Killed, or standing still, while it fetches weights, generates or learns."""
    sabotage.moment, sabotage.how = moment, how
    train(settings_of(home, 2), tmp_path / "run")
    assert len(sabotage.done) == 1
    assert_equal_runs(tmp_path / "run", alone)


def test_many_faults_cost_time_only(home: Path, alone: Path, tmp_path: Path, sabotage: Any) -> None:
    """Every worker that is told to learn is killed, six times: once in the middle of everything."""
    sabotage.moment, sabotage.num_times = Learn, 6
    train(settings_of(home, 3), tmp_path / "run")
    assert len(sabotage.done) == 6
    assert_equal_runs(tmp_path / "run", alone)


def test_killed_while_a_checkpoint_is_written(
    home: Path, alone: Path, tmp_path: Path, sabotage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save: Callable[..., float] = Checkpoints.save

    def save_and_strike(*given: Any) -> float:
        found = save(*given)
        sabotage.latest.strike_any()
        return found

    monkeypatch.setattr(Checkpoints, "save", save_and_strike)
    train(settings_of(home, 2), tmp_path / "run")
    assert len(sabotage.done) == 1
    assert_equal_runs(tmp_path / "run", alone)
