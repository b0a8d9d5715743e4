"""Rewards that attack their grader: each costs its own item at most, is named, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml
from hostile_rewards import HOSTILE, Target
from leftovers import MARK, tagged, wait_until_gone
from small_run import assert_equal_runs, make_model, make_settings, write_task

from paceline.cli import main
from paceline.run.store.folder import read_metrics
from paceline.tasks.base import Item
from paceline.tasks.grader_replies import GraderVerdict, decode_verdict, encode_reply
from paceline.tasks.grading import Grade, Grader
from paceline.tasks.sandbox.advice import DISK_ADVICE, GPU_ADVICE, NETWORK_ADVICE, advise
from paceline.tasks.sandbox.limits import Sandbox, SandboxLimits
from paceline.tasks.settings import TaskSettings

TASK = "hostile_rewards:make_task"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux's parts")


@dataclass
class Outcomes:
    """What became of every hostile reward, and of the honest texts between them."""

    grades: dict[str, Grade]
    honest: list[tuple[str, Grade]]
    notes: list[str]
    connections: int
    victim: str
    left_in_folder: list[str]
    left_in_temporary: list[str]


def settings(**changed: object) -> TaskSettings:
    limits = {"grader_cpu_seconds": 0.5, "grader_memory_mb": 400}
    return TaskSettings.model_validate(limits | changed)


COSTLY = {"crash", "memory", "timeout"}
QUICK = [name for name, (_, outcomes) in HOSTILE.items() if not COSTLY & set(outcomes)]
QUICK += ["exit_with_zero", "forge_a_reply", "leave_a_daemon_and_exit", "reply_with_its_own_ticket"]
"""Few of those that end a process or wait: these take most of the time."""


def attack(folder: Path, names: Sequence[str], has_namespaces: bool = True, **changed: object) -> Outcomes:
    """Score these hostile text, each between honest ones, in one grader, and look at what it did to the machine."""
    folder.mkdir()
    (folder / "victim").write_text("alive")
    listener, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "socket"))
    unix.listen()
    before = set(os.listdir("/tmp")) | set(os.listdir("/dev/shm"))
    with closing(listener), closing(unix), pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        target = Target(os.getpid(), listener.getsockname()[1], str(folder), str(folder / "socket"))
        texts = [text for i, name in enumerate(names) for text in (name, f"honest {i}")]
        pairs = [(Item("", asdict(target), text), text) for text in texts]
        with Grader(settings(**changed), wall_seconds=4, factory=TASK, has_namespaces=has_namespaces) as grader:
            found = dict(zip(texts, grader.score(pairs), strict=True))
            notes = grader.take_notes()
        connections = count_connections(listener) + count_connections(unix)
    after = set(os.listdir("/tmp")) | set(os.listdir("/dev/shm"))
    honest = [(text, grade) for text, grade in found.items() if text not in HOSTILE]
    victim = (folder / "victim").read_text()
    ours = [name for name in after - before if name.startswith(("paceline-grader", "paceline-was", "paceline-stays"))]
    return Outcomes(found, honest, notes, connections, victim, sorted(os.listdir(folder)), ours)


def count_connections(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def attack_once(tmp: pytest.TempPathFactory, names: Sequence[str], has_namespaces: bool = True) -> Iterator[Outcomes]:
    tag = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(MARK, tag)
        yield attack(tmp.mktemp("runs") / "run", names, has_namespaces)
        wait_until_gone(tag)


@pytest.fixture(scope="module")
def shut_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield from attack_once(tmp_path_factory, QUICK)


@pytest.fixture(scope="module")
def all_shut_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield from attack_once(tmp_path_factory, list(HOSTILE))


@pytest.fixture(scope="module")
def without_namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield from attack_once(tmp_path_factory, list(HOSTILE), has_namespaces=False)


def check(outcomes: Outcomes, name: str) -> None:
    grade = outcomes.grades[name]
    allowed = HOSTILE[name][1]
    assert (grade.kind or grade.score) in allowed, grade
    if grade.kind:
        assert grade.score == 0.0 and grade.problem is not None
        assert grade.problem.isprintable() and len(grade.problem) < 1000
        assert f"grading item '{name}'" in grade.problem


def check_the_rest(outcomes: Outcomes) -> None:
    assert all(grade == Grade(len(text) / 1000) for text, grade in outcomes.honest), outcomes.honest
    assert outcomes.connections == 0
    assert outcomes.victim == "alive" and outcomes.left_in_folder == ["socket", "victim"]
    assert not outcomes.left_in_temporary
    assert not (Path.home() / ".paceline-was-here").exists()


def test_there_are_sixty() -> None:
    assert len(HOSTILE) >= 60 and len(QUICK) >= 40


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_reward_fails_by_name_or_scores_what_it_returned(shut_in: Outcomes, name: str) -> None:
    check(shut_in, name)


def test_hostile_rewards_touch_no_other_item_and_nothing_outside(shut_in: Outcomes) -> None:
    check_the_rest(shut_in)
    assert shut_in.notes == [f"a reward tried to reach the network: {NETWORK_ADVICE}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_reward_fails_by_name_or_scores(all_shut_in: Outcomes, name: str) -> None:
    check(all_shut_in, name)


@pytest.mark.slow
def test_every_hostile_reward_touches_nothing_else(all_shut_in: Outcomes) -> None:
    check_the_rest(all_shut_in)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_the_same_without_namespaces(without_namespaces: Outcomes, name: str) -> None:
    check(without_namespaces, name)


@pytest.mark.slow
def test_the_rest_without_namespaces(without_namespaces: Outcomes) -> None:
    check_the_rest(without_namespaces)


def test_what_the_sandbox_refuses_comes_with_advice(shut_in: Outcomes) -> None:
    for name in ("connect", "send_a_packet", "look_up_a_name"):
        assert NETWORK_ADVICE in str(shut_in.grades[name].problem)
    for name in ("overwrite_the_run", "write_to_home"):
        assert DISK_ADVICE in str(shut_in.grades[name].problem)
    assert NETWORK_ADVICE not in str(shut_in.grades["kill_its_keeper"].problem)


def test_the_harness_sees_a_sandbox_that_is_off(tmp_path: Path) -> None:
    """Negative control: without the sandbox the same attacks succeed, and these tests would notice."""
    names = ("connect", "connect_to_a_unix_socket", "overwrite_the_run")
    outcomes = attack(tmp_path / "run", names, grader_sandbox=False)
    assert outcomes.connections == 2
    assert outcomes.victim == "owned"
    assert outcomes.grades["connect"] == Grade(0.5)
    with pytest.raises(AssertionError):
        check_the_rest(outcomes)


def test_settings_open_the_network_and_folders(tmp_path: Path) -> None:
    names = ("connect", "overwrite_the_run", "write_to_home")
    outcomes = attack(tmp_path / "run", names, grader_network=True, grader_writable=(str(tmp_path),))
    assert (outcomes.connections, outcomes.victim) == (1, "owned")
    assert outcomes.grades["write_to_home"].kind == "error"


def test_a_folder_that_is_not_there_cannot_be_writable() -> None:
    with pytest.raises(ValueError, match=r"task\.grader_writable: there is no folder /no/such; create it first"):
        Grader(settings(grader_writable=("/no/such",)))


def test_a_sandbox_that_is_off_still_ends_its_daemons(tag: str) -> None:
    with Grader(settings(grader_sandbox=False), factory=TASK) as grader:
        assert grader.score([(Item("", asdict(Target(0, 0, "", "")), ""), "leave_a_double_fork")]) == [Grade(0.5)]
        assert tagged(tag), "the search sees processes that are there"
    wait_until_gone(tag)


UNPRIVILEGED = """
set -e
mkdir {folder}/python
mount --bind {base} {folder}/python
mount -t tmpfs -o mode=755 tmpfs {hidden}
mkdir -p {base}
mount --bind {folder}/python {base}
exec setpriv --reuid=65534 --regid=65534 --clear-groups {python} -P -m paceline.tasks.sandbox.probe
"""


def test_a_user_without_privileges_is_shut_in_too(tmp_path: Path) -> None:
    """Python's own folder may lie in one that only root reads, so root shows it to the other user first."""
    command = [sys.executable, "-P", "-m", "paceline.tasks.sandbox.probe"]
    if os.geteuid() == 0:
        base = os.path.realpath(sys.base_prefix)
        script = UNPRIVILEGED.format(folder=tmp_path, base=base, hidden=f"/{base.split('/')[1]}", python=sys.executable)
        command = ["unshare", "--mount", "sh", "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.startswith("no network (namespace and seccomp); disk read-only (mounts"), done.stderr


TRAINED = """
import os, random, subprocess, sys, threading, time

def attack(): pass
{attack}

def reward(prompts, completions, **columns):
    attack()
    return [min(1.0, sum(letter in "aeiou" for letter in text) / 6) for text in completions]
"""

HARMLESS = """
def attack():
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    threading.Thread(target=time.sleep, args=(3600,)).start()
    print('{"score": 1.0}', flush=True)
    os.chdir("/")
"""

FATAL = """
def attack():
    KIND
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_model(folder)
    return folder


def train_with(home: Path, attack: str, run: Path) -> int:
    """The exit code of `paceline train` with a reward."""
    write_task(home, TRAINED.format(attack=attack))
    recipe = home / "small.yaml"
    tree = make_settings(home, rl={"steps": 2}).model_dump(mode="json")
    recipe.write_text(yaml.safe_dump(tree))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), f"--run.dir={run}", "--quiet"])
    return int(ended.value.code or 0)


def test_a_hostile_reward_changes_no_token_of_a_run(home: Path, tmp_path: Path, tag: str) -> None:
    assert train_with(home, "", tmp_path / "honest") == 0
    assert train_with(home, HARMLESS, tmp_path / "hostile") == 0
    wait_until_gone(tag)
    assert_equal_runs(tmp_path / "honest", tmp_path / "hostile", last=2)


@pytest.mark.parametrize("attack", ["sys.exit(0)", "raise KeyboardInterrupt", "raise SystemExit(0)"])
def test_a_reward_cannot_end_a_run_as_if_all_were_well(
    home: Path, tmp_path: Path, tag: str, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_with(home, FATAL.replace("KIND", attack), tmp_path / "run") == 2
    assert "the reward failed while grading item" in capsys.readouterr().err
    wait_until_gone(tag)


@pytest.mark.slow
def test_a_reward_that_ends_its_process_costs_scores_and_not_the_run(home: Path, tmp_path: Path, tag: str) -> None:
    assert train_with(home, FATAL.replace("KIND", "if random.random() < 0.2: os._exit(0)"), tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows][-1] == 2
    assert sum(row.get("grader/crash", 0) for row in rows) > 0
    wait_until_gone(tag)


def test_a_reward_on_a_gpu_is_told_what_to_set() -> None:
    shut_in = Sandbox(SandboxLimits(), disk="mounts")
    error = RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 304: OS call failed")
    assert advise(error, shut_in) == GPU_ADVICE
    assert advise(error, Sandbox(SandboxLimits(is_enforced=False))) == ""
    assert advise(RuntimeError("no such thing"), shut_in) == ""


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"junk",
        b"[" * 60_000,
        b"null",
        b'{"ticket": "t"}',
        b'{"ticket": "t", "score": 1, "kind": "", "detail": "", "has_threads": false, "is_spoiled": false, '
        b'"wants_network": false}',
    ],
)
def test_only_an_exact_line_is_a_reply(line: bytes) -> None:
    assert decode_verdict(line, "t") is None
    assert decode_verdict(encode_reply("other", GraderVerdict(0.5)), "t") is None
    assert decode_verdict(encode_reply("t", GraderVerdict(float("nan"))), "t") is None
    assert decode_verdict(encode_reply("t", GraderVerdict(0.5)), "t") == GraderVerdict(0.5)
