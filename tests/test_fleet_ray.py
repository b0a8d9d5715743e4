"""A fleet's processes under a real Ray: they start, hear, answer, break in every way there is, and are replaced.

All tests share one Ray on this machine and what it has started; each leaves two workers that are ready.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import SettingsError
from paceline.fleet.commands import Generate, Preempt, Publish, RunAhead, SequenceKey
from paceline.fleet.reports import Joined, Lost, Unplaced
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.mailbox import CrewEvent
from paceline.fleet.transport.ray_cluster import (
    AUTH_TOKEN,
    LOOPBACK_ONLY,
    Cluster,
    RayStore,
    open_cluster,
    own_token,
)
from paceline.fleet.transport.ray_watch import FleetError
from paceline.fleet.transport.ray_worker import Crew
from paceline.fleet.transport.weights import Package, Publisher, put_all
from paceline.fleet.transport.wire import Parcel, pack, unpack

HAS_RAY = importlib.util.find_spec("ray") is not None  # to import it here would be too early: see `ray_cluster.py`
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install -e '.[ray]'"),
]
SETTINGS = FleetSettings(workers=2, quiet_timeout_s=1.0, answer_timeout_s=1.0, start_timeout_s=60, max_lost=100)
LONG_S = 30.0


def ray_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


BEFORE = ray_variables()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster(SETTINGS) as opened:
        yield opened


def message_of(event: CrewEvent) -> dict[str, Any]:
    """What a toy says; nothing where its process says something."""
    return unpack(event, RayStore()) if isinstance(event, Parcel) else {}


class Team:
    """A crew and what was heard from it."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.joined: dict[int, int] = {}
        """Process ids."""
        self._unread: list[tuple[int, CrewEvent]] = []

    def wait(self, is_it: Callable[[int, CrewEvent], bool], seconds: float = LONG_S) -> tuple[int, Any]:
        """The first event of a kind, and whose; those before it are forgotten, those behind it are kept."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while self._unread:
                number, event = self._unread.pop(0)
                if isinstance(event, Joined):
                    self.joined[number] = event.process_id
                elif isinstance(event, Lost):
                    self.joined.pop(number, None)
                if is_it(number, event):
                    return number, event
            self._unread += self.crew.collect(0.5)
        raise AssertionError("it did not happen")

    def wait_ready(self) -> None:
        while len(self.joined) < 2:
            self.wait(lambda _, event: isinstance(event, Joined))

    def tell(self, number: int, message: Any) -> None:
        self.crew.send(number, Generate(number, 1, (SequenceKey(0, 0),)), pack(message, RayStore()))

    def hear_all(self, number: int, name: str) -> Any:
        """What a worker says that has this name in it."""
        return message_of(self.wait(lambda who, event: who == number and name in message_of(event))[1])

    def hear(self, number: int, name: str) -> Any:
        """What a worker says under a name."""
        return self.hear_all(number, name)[name]

    def loss(self, number: int) -> Lost:
        who, lost = self.wait(lambda _, event: isinstance(event, Lost))
        assert who == number and isinstance(lost, Lost)
        return lost

    @property
    def first(self) -> int:
        return min(self.joined)


@pytest.fixture(scope="module")
def shared(cluster: Cluster) -> Iterator[Team]:
    team = Team(Crew(cluster, "fleet_toys:make", {"load_s": 0.0}, SETTINGS))
    for _ in range(SETTINGS.workers):
        team.crew.start()
    yield team
    team.crew.close()


@pytest.fixture
def team(shared: Team) -> Team:
    shared.wait_ready()
    return shared


# --- the cluster ------------------------------------------------------------------------------------------------------


def listeners() -> list[str]:
    """Addresses on which this process and those below it listen: all of Ray's, whatever they are called."""
    found = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = {os.getpid(), *below(os.getpid())}
    return [line.split()[3] for line in found if ours & {int(number) for number in re.findall(r"pid=(\d+)", line)}]


def below(parent: int) -> list[int]:
    """Children, and theirs."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    children = [int(line) for line in found.stdout.split()]
    return [*children, *(process for child in children for process in below(child))]


@pytest.mark.skipif(not Path("/usr/bin/ss").exists() and not Path("/bin/ss").exists(), reason="there is no ss")
def test_ray_listens_on_loopback_only(cluster: Cluster) -> None:
    addresses = listeners()
    assert len(addresses) >= 3
    assert [address for address in addresses if "127.0.0.1" not in address and "[::1]" not in address] == []
    assert cluster.is_own and cluster.address.startswith("127.0.0.1:")


def test_this_process_is_left_as_it_was(cluster: Cluster) -> None:
    assert ray_variables() == BEFORE
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_ray_that_is_there_is_used_and_left(cluster: Cluster) -> None:
    with open_cluster(FleetSettings(workers=2)) as again:
        assert not again.is_own and again.address == cluster.address
    assert cluster.ray.is_initialized()
    with pytest.raises(SettingsError, match="already connected to a Ray"), open_cluster(FleetSettings(address="x:1")):
        pass


def in_new_process(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


def test_a_cluster_is_joined_by_its_address_and_survives(cluster: Cluster) -> None:
    """Another driver joins, works, says nothing that nobody asked for, and goes.

    Ray takes 127.0.0.1 for the machine's address in the network, where ours does not listen, unless it is told.
    """
    code = f"""
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_cluster import open_cluster
with open_cluster(FleetSettings(workers=2, address={cluster.address!r})) as joined:
    print(joined.address, joined.is_own, joined.ray.get(joined.ray.put(41)) + 1)
"""
    found = in_new_process(code, **{AUTH_TOKEN: own_token(), LOOPBACK_ONLY: "0"})
    assert found.split() == [cluster.address, "False", "42"], found
    assert cluster.ray.get(cluster.ray.put(1)) == 1


def test_a_cluster_refuses_who_has_not_its_token(cluster: Cluster) -> None:
    code = f"""
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_cluster import open_cluster
try:
    open_cluster(FleetSettings(workers=2, address={cluster.address!r})).__enter__()
except ValueError as error:
    print(error)
"""
    found = in_new_process(code, HOME="/nowhere", **{AUTH_TOKEN: "f" * 64, LOOPBACK_ONLY: "0"})
    (line,) = (line for line in found.splitlines() if "gcs_client.cc" not in line)  # Ray logs every attempt
    assert line.startswith(f"fleet.address: cannot join a Ray at {cluster.address}: ")
    assert "if it has a token (ray get-auth-token), set RAY_AUTH_TOKEN" in line and own_token() not in line


def test_a_session_is_private(cluster: Cluster) -> None:
    """Ray opens its own folder to everybody, so a closed one lies around it."""
    session = Path(cluster.ray.get_runtime_context().get_temp_dir())
    assert list(session.glob("session_*/sockets/*"))
    outer = session.parent.stat()
    assert outer.st_uid == os.geteuid() and outer.st_mode & 0o777 == 0o700
    assert not (session.parent.parent / "ray" / next(session.glob("session_2*")).name).exists()


def test_ray_that_was_imported_too_early_is_refused() -> None:
    code = """
import ray
from paceline.fleet.settings import FleetSettings
from paceline.fleet.transport.ray_cluster import open_cluster
try:
    open_cluster(FleetSettings(workers=2)).__enter__()
except RuntimeError as error:
    print(error)
"""
    assert "import it later" in in_new_process(code)


# --- orders and reports -----------------------------------------------------------------------------------------------


def test_workers_have_one_thread_and_a_process_each(team: Team) -> None:
    for number, process_id in team.joined.items():
        team.tell(number, {"do": "echo", "value": 1})
        assert team.hear(number, "process") == {"id": process_id, "threads": 1, "OMP_NUM_THREADS": "1"}
    assert len({os.getpid(), *team.joined.values()}) == 3


def test_orders_are_carried_out_in_their_order(team: Team) -> None:
    number = team.first
    for value in range(200):
        team.tell(number, {"do": "echo", "value": value})
    seen: list[int] = []
    deadline = time.monotonic() + LONG_S
    while len(seen) < 200 and time.monotonic() < deadline:
        seen += [message_of(event)["echo"] for _, event in team.crew.collect(1.0)]
    assert seen == list(range(200))


def test_a_busy_worker_is_interrupted_at_once(team: Team) -> None:
    number = team.first
    team.crew.send(number, RunAhead(number, 5, (1,)))
    assert team.hear(number, "began") == 5
    start = time.monotonic()
    team.crew.send(number, Preempt(number))
    assert team.hear(number, "ended") == 5
    assert time.monotonic() - start < 2.0
    assert team.hear(number, "did") == "Preempt"


def test_an_interruption_may_come_before_what_it_ends(team: Team) -> None:
    number = team.first
    team.tell(number, {"do": "echo", "value": 1, "sleep_s": 0.3})
    team.crew.send(number, RunAhead(number, 6, (1,)))
    team.crew.send(number, Preempt(number))
    assert team.hear(number, "ended") == 6
    assert team.hear(number, "did") == "Preempt"


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_reach_every_worker_whole(team: Team) -> None:
    weights = {"a": torch.randn(300, 300), "b": torch.randn(100, 7).bfloat16(), "c": torch.ones(())}
    publisher = Publisher(RayStore())
    publisher.publish(1, weights)
    package = publisher.wait(10)
    expected = {name: float(weight.double().sum()) for name, weight in weights.items()}
    for number in team.joined:
        team.crew.send(number, Publish(number, 1), package)
        assert team.hear(number, "sums") == expected
    publisher.close()


def test_damaged_weights_are_refused_and_the_old_ones_kept(team: Team, cluster: Cluster) -> None:
    number = team.first
    store = RayStore()
    good = put_all(store, 7, {"w": torch.arange(1000.0)})
    team.crew.send(number, Publish(number, 7), good)
    assert team.hear(number, "version") == 7
    new = put_all(store, 8, {"w": torch.arange(1000.0) + 1})
    (array,) = cluster.ray.get(new.refs[0])
    damaged = array.copy()
    damaged[2000] ^= 1
    for wrong, reason in (([damaged], "w is damaged"), ([array[:-4]], "w has 3996 bytes, not 4000")):
        team.crew.send(number, Publish(number, 8), Package(new.manifest, (cluster.ray.put(wrong),)))
        heard = team.hear_all(number, "refused")
        assert reason in heard["refused"] and heard["version"] == 7
    team.crew.send(number, Publish(number, 8), new)
    assert team.hear(number, "version") == 8


def test_tensors_come_back_with_a_report(team: Team) -> None:
    number = team.first
    team.tell(number, {"do": "sum", "values": {"q": 1.5, "k": 2.5}})
    found = team.hear_all(number, "part")
    assert found["part"] == 1
    gradients = {name: tensor.tolist() for name, tensor in found["gradients"].items()}
    assert gradients == {"q": [1.5] * 3, "k": [2.5] * 3}


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason", "seconds"),
    [
        ("exit", "its process died", 3),
        ("kill", "its process died", 3),
        ("segfault", "its process died", 3),
        ("memory", "MemoryError", 5),
        ("raise", "KeyError: 'here' (fleet_toys.py:", 3),
        ("return", "SystemExit", 3),
        ("hang", "no sign of life for", 6),
        ("hold", "its process answered no call for", 8),
        ("stop", "its process answered no call for", 8),
    ],
)
def test_a_worker_that_breaks_is_lost_and_replaced(team: Team, fault: str, reason: str, seconds: float) -> None:
    broken, other = sorted(team.joined)
    known = set(team.crew.numbers)
    start = time.monotonic()
    team.tell(broken, {"do": fault, "value": "here"})
    lost = team.loss(broken)
    assert reason in lost.reason
    assert time.monotonic() - start < seconds
    team.tell(broken, {"do": "echo", "value": 0})  # nobody is there to hear it
    team.tell(other, {"do": "echo", "value": 9})
    assert team.hear(other, "echo") == 9
    team.wait_ready()
    (new,) = set(team.crew.numbers) - known
    assert new > max(known)
    team.tell(new, {"do": "echo", "value": fault})
    assert team.hear(new, "echo") == fault


def test_kill_from_outside_is_noticed_at_once(team: Team) -> None:
    number = team.first
    os.kill(team.joined[number], signal.SIGKILL)
    start = time.monotonic()
    assert "its process died" in team.loss(number).reason
    assert time.monotonic() - start < 3.0


def collect_for(crew: Crew, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        crew.collect(1.0)


def test_workers_that_cannot_start_end_the_fleet(cluster: Cluster, team: Team) -> None:
    """They are not started for ever, and the last reason is told. The CPUs are those that the team had."""
    settings = SETTINGS.model_copy(update={"max_lost": 1})
    team.crew.close()
    team.joined.clear()
    crew = Crew(cluster, "fleet_toys:make", {"fails": True}, settings)
    crew.start()
    with pytest.raises(FleetError, match=r"2 workers were lost, .*max_lost=1; .*ValueError: no such model"):
        collect_for(crew, LONG_S)
    crew.close()


def test_a_worker_that_is_not_ready_in_time_is_replaced(cluster: Cluster) -> None:
    settings = SETTINGS.model_copy(update={"start_timeout_s": 0.5, "max_lost": 0})
    crew = Crew(cluster, "fleet_toys:make", {"load_s": 60.0}, settings)
    crew.start()
    with pytest.raises(FleetError, match=r"not ready 0\.5 s after its start"):
        collect_for(crew, LONG_S)
    crew.close()


def unplaced(crew: Crew, seconds: float = LONG_S) -> tuple[list[int], list[tuple[int, str]]]:
    """Who joins and who has no room, when all have been heard of."""
    joined: list[int] = []
    waiting: list[tuple[int, str]] = []
    deadline = time.monotonic() + seconds
    while len(joined) + len(waiting) < len(crew.numbers) and time.monotonic() < deadline:
        for number, event in crew.collect(0.5):
            assert not isinstance(event, Lost), event
            if isinstance(event, Joined):
                joined.append(number)
            elif isinstance(event, Unplaced):
                waiting.append((number, event.reason))
    return joined, waiting


@pytest.fixture
def free(cluster: Cluster, shared: Team) -> Cluster:
    """The cluster without the team."""
    shared.crew.close()
    shared.joined.clear()
    return cluster


def test_a_worker_without_room_is_told_of_once_and_not_lost(free: Cluster) -> None:
    """Two CPUs, three workers: two work, the third comes when there is room. None counts as lost."""
    settings = SETTINGS.model_copy(update={"start_timeout_s": 40.0, "max_lost": 0, "answer_timeout_s": 60.0})
    crew = Crew(free, "fleet_toys:make", {"load_s": 0.0}, settings)
    for _ in range(3):
        crew.start()
    joined, ((number, reason),) = unplaced(crew, 60)
    assert len(joined) == 2 and number not in joined
    assert reason.startswith("it needs 1 CPU, and the cluster has 2 CPUs and 0 GPUs; the run goes on without it")
    for _ in range(int(settings.start_timeout_s) + 5):
        assert crew.collect(1.0) == []
    free.ray.kill(crew._members.pop(joined[0]).actor)  # as if it had ended, and with it its claim
    assert unplaced(crew, 60) == ([number], [])
    crew.close()


def test_a_fleet_without_room_for_anyone_ends_at_once(free: Cluster) -> None:
    crew = Crew(free, "fleet_toys:make", {"load_s": 0.0}, SETTINGS, num_gpus=1)
    crew.start()
    with pytest.raises(
        FleetError, match="no worker can be placed: each needs 1 CPU and 1 GPU, and the cluster has 2 CPUs and 0 GPUs"
    ):
        collect_for(crew, LONG_S)
    crew.close()


def test_room_that_others_use_is_waited_for(free: Cluster) -> None:
    """Another program holds all CPUs of the cluster for longer than a worker may take to start."""
    holder = Crew(free, "fleet_toys:make", {"load_s": 0.0}, SETTINGS.model_copy(update={"answer_timeout_s": 60.0}))
    for _ in range(2):
        holder.start()
    assert len(unplaced(holder, 60)[0]) == 2
    joined = Cluster(free.ray, free.address, False, free.watch)
    settings = SETTINGS.model_copy(update={"start_timeout_s": 5.0, "max_lost": 0})
    crew = Crew(joined, "fleet_toys:make", {"load_s": 0.0}, settings)
    crew.start()
    with pytest.raises(FleetError, match="no worker can be placed"):
        collect_for(crew, LONG_S)
    crew.close()
    holder.close()
