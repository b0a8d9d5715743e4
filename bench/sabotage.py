"""Real faults for a fleet: inflicted on its processes, nodes or disk at a chosen moment of a run.

    Sabotage.plan(Learn, kill)      kill the next worker that is told to learn
    with two_nodes() as nodes: ...  a cluster of two nodes on this machine, of which the second can be lost
    with small_disk(path, 2): ...   a disk of 2 MB, if mounting is allowed

`fleet_run.py` uses them to measure what faults cost, the tests to prove that they change nothing. Nothing here imports
Ray: that has to wait until a fleet opens it.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.fleet.commands import Command
from paceline.fleet.reports import Joined, Lost, WorkerReport
from paceline.fleet.transport.process_carrier import WAIT_S, ProcessCarrier
from paceline.fleet.transport.ray_cluster import LOOPBACK_ONLY
from paceline.run.store.checkpoints import Checkpoints

Strike = Callable[[int], None]
"""Inflicts a fault on a process."""


def kill(process_id: int) -> None:
    os.kill(process_id, signal.SIGKILL)


def stop(process_id: int) -> None:
    """Suspend it: it stays but answers nobody."""
    os.kill(process_id, signal.SIGSTOP)


def starve(process_id: int) -> None:
    """Let it keep its memory, but deny it more."""
    resource.prlimit(process_id, resource.RLIMIT_DATA, (1, 1))


class Sabotage(ProcessCarrier):
    """Strikes workers right after a command, each once, and records when they were missed and replaced."""

    moment: type[Any] | None = None
    """The command after which to strike."""
    strike: Strike = staticmethod(kill)
    num_times = 1
    num_spared = 0
    """Commands of that kind to let pass before the first strike."""
    latest: Sabotage

    @classmethod
    def plan(
        cls, moment: type[Any] | None = None, strike: Strike = kill, num_times: int = 1, num_spared: int = 0
    ) -> None:
        """Plan faults for the next fleet; without a moment, the caller strikes with `strike_any`."""
        cls.moment, cls.num_times, cls.num_spared = moment, num_times, num_spared
        cls.strike = staticmethod(strike)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._process_ids: dict[int, int] = {}
        self._num_seen = 0
        self.struck: dict[int, float] = {}
        """Worker and time of each strike."""
        self.noticed: list[tuple[float, str]] = []
        """When the driver learned of each loss, and its reason."""
        self.joined: list[float] = []
        """When replacements joined, after the first strike."""
        Sabotage.latest = self

    def collect(self, seconds: float = WAIT_S) -> list[tuple[int, WorkerReport]]:
        found = super().collect(seconds)
        for number, report in found:
            if isinstance(report, Joined):
                self._process_ids[number] = report.process_id
                self.joined += [time.perf_counter()] if self.struck else []
            elif isinstance(report, Lost):
                self.noticed.append((time.perf_counter(), report.reason))
        return found

    def send(self, command: Command, payload: Any) -> None:
        super().send(command, payload)
        if self.moment is not None and isinstance(command, self.moment):
            self._num_seen += 1
            if self._num_seen > self.num_spared:
                self._strike(command.worker)

    def strike_any(self) -> None:
        """Strike the worker that joined last."""
        self._strike(max(self._process_ids))

    def _strike(self, number: int) -> None:
        if len(self.struck) < self.num_times and number not in self.struck:
            self.struck[number] = time.perf_counter()
            self.strike(self._process_ids[number])

    def seconds(self) -> dict[str, float]:
        """From the first strike until the first loss was noticed, and until every lost worker was replaced."""
        begun, lost = min(self.struck.values()), len(self.noticed)
        assert lost >= 1 and len(self.joined) >= lost, f"{lost} lost, {len(self.joined)} joined: the run was too short"
        return {"noticed_s": self.noticed[0][0] - begun, "recovered_s": self.joined[lost - 1] - begun}


def save_and_strike(checkpoints: Checkpoints, *given: Any) -> float:
    """Replaces `Checkpoints.save`: strikes a worker while a checkpoint is written beside the run."""
    found = _save(checkpoints, *given)
    Sabotage.latest.strike_any()
    return found


_save = Checkpoints.save


# --- nodes ------------------------------------------------------------------------------------------------------------

OF_CLUSTER = {LOOPBACK_ONLY: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
"""For everyone in the cluster: it is on loopback only, and has its own token."""
NODES = """
from ray.cluster_utils import Cluster
given = {"num_cpus": 2, "object_store_memory": 200_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**given, "include_dashboard": False})
second = cluster.add_node(**given)
print(cluster.address, flush=True)
input()
cluster.remove_node(second, allow_graceful=False)
print("gone", flush=True)
input()
"""
"""Two nodes with room for two workers each; the second is killed when a line arrives."""


class Nodes:
    """A cluster in a separate process of the same Python."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self.address = self._from.readline().split()[-1]

    def lose(self, _: int = 0) -> None:
        """Start to kill the second node with everything on it."""
        self._to.write("\n")
        self._to.flush()

    def wait(self) -> None:
        """Wait until it is gone."""
        assert self._from.readline().split() == ["gone"]


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **OF_CLUSTER}
    with subprocess.Popen(
        [sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        nodes = Nodes(process)
        try:
            yield nodes
        finally:
            nodes.lose()  # a line ends whichever wait it is in
            assert process.stdin is not None
            process.stdin.close()


# --- disks ------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A real one; yields whether it could be mounted."""
    folder.mkdir(parents=True)
    size = f"size={megabytes}m"
    can_mount = not subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=False).returncode
    try:
        yield can_mount
    finally:
        if can_mount:
            subprocess.run(["umount", folder], check=True)


def enlarge(folder: Path, megabytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", folder], check=True)
