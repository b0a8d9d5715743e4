"""The watch over Ray's processes, with a Ray that does what it is told; `test_ray_faults.py` breaks a real one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.app import _advice
from paceline.fleet.transport.ray_watch import FleetError, RayWatch, end_in_time
from paceline.run.open_fleet import cautions
from paceline.run.settings import RootSettings


class FakeRay:
    """Answers unless it is stopped."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.is_alive = True

    def nodes(self) -> list[dict[str, Any]]:
        self.answers.wait(60)
        return [{"NodeID": "a", "Alive": self.is_alive}, {"NodeID": "b", "Alive": False}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "a")

    def shutdown(self, wait_for_processes: bool) -> None:
        assert wait_for_processes
        self.answers.wait(60)


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    made = FakeRay()
    yield made
    made.answers.set()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def trouble_of(watch: RayWatch, seconds: float = 30) -> str:
    deadline = time.monotonic() + seconds
    while watch.trouble is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(FleetError) as found:
        watch.check()
    return str(found.value)


def test_a_ray_that_answers_is_no_trouble(ray: FakeRay) -> None:
    watch = RayWatch(ray, 60, {})
    watch.confirm()
    assert watch.call(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        watch.call(lambda: 1 / 0)
    watch.close()


def test_silence_ends_what_waits_for_it(ray: FakeRay) -> None:
    watch = RayWatch(ray, 0.5, {})
    ray.answers.clear()
    begun = time.monotonic()
    with pytest.raises(FleetError, match=r"control server \(GCS\) has answered no call for .* with --resume"):
        watch.call(ray.answers.wait, 60)
    assert time.monotonic() - begun < 30
    assert watch.has_open_calls
    watch.close()


def test_a_dead_node_daemon_is_told_of(ray: FakeRay) -> None:
    watch = RayWatch(ray, 60, {})
    told: list[str] = []
    watch.tell = told.append
    ray.is_alive = False
    assert trouble_of(watch) == "the fleet has lost its Ray; continue the run with --resume"
    assert told == ["Ray's node daemon (raylet) on this machine answers no call, so the run cannot go on"]
    watch.close()


def test_a_killed_process_is_noticed_and_the_end_is_bounded(ray: FakeRay, sleeper: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    processes = {"gcs_server": sleeper, "raylet": other}
    watch = RayWatch(ray, 60, processes)
    sleeper.kill()
    assert trouble_of(watch).startswith("Ray's control server (GCS) was killed (SIGKILL); ")
    ray.answers.clear()
    assert not end_in_time(ray, watch, processes, 0.2)
    assert other.wait(30) == -9


def test_a_message_for_the_user_needs_no_traceback(ray: FakeRay) -> None:
    assert _advice(FleetError("Ray is gone")) == "Ray is gone"


def test_workers_beyond_the_shares_of_a_batch_are_told_of(tmp_path: Path) -> None:
    def said(workers: int, shares: int) -> list[str]:
        settings = RootSettings.model_validate(
            {"fleet": {"workers": workers, "in_process": True}, "rl": {"virtual_workers": shares}}
        )
        return list(cautions(settings))

    assert said(4, 4) == said(1, 1) == []
    (caution,) = said(6, 4)
    assert "2 of 6 workers will not learn" in caution and "rl.virtual_workers=6" in caution
