"""Signals that ask a process to end: they wait where they must, are never lost, and end it with the usual exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.fleet.transport.pipe import CHILD_MODULE
from paceline.run.ui.interrupts import STOPPING, Interrupted, Interrupts

LONG_S = 30.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A shell that runs the tests in the background, or `nohup`, ignores some of these signals."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOPPING}
    yield
    assert all(signal.getsignal(number) is signal.default_int_handler for number in STOPPING)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def wait_for(is_so: Callable[[], object], seconds: float = LONG_S) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(is_so())


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_raises_at_once(number: signal.Signals) -> None:
    with pytest.raises(Interrupted) as found, Interrupts():
        send(number)
    assert found.value.number == number


@pytest.mark.parametrize("number", STOPPING)
def test_a_burst_waits_for_the_end_of_the_step(number: signal.Signals) -> None:
    notes: list[str] = []
    is_done = False
    with pytest.raises(Interrupted) as found, Interrupts(notes.append, grace_s=LONG_S) as interrupts:
        interrupts.hold()
        for _ in range(50):
            send(number, *STOPPING)
        is_done = True
        interrupts.release()
    assert is_done and found.value.number == interrupts.came == number
    [note] = notes
    assert "finishing and saving this step first" in note


def test_a_key_that_is_held_down_is_one_press(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pytest.raises(Interrupted), Interrupts() as interrupts:
        interrupts.hold()
        for _ in range(1000):
            now += 0.5
            send(signal.SIGINT)
        interrupts.release()


def test_a_second_press_after_a_pause_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pytest.raises(Interrupted), Interrupts() as interrupts:
        interrupts.hold()
        send(signal.SIGINT)
        now += 2
        send(signal.SIGTERM)  # its sender does not see what is going on
        now += 2
        send(signal.SIGINT)
        pytest.fail("it waited")


def test_sigterm_waits_no_longer_than_its_grace() -> None:
    start = time.monotonic()
    with pytest.raises(Interrupted), Interrupts(grace_s=0.2) as interrupts:
        interrupts.hold()
        send(signal.SIGTERM)
        wait_for(lambda: False)
        pytest.fail("it waited")
    assert 0.2 <= time.monotonic() - start < LONG_S


def test_ctrl_c_has_no_grace() -> None:
    with pytest.raises(Interrupted), Interrupts(grace_s=0.0) as interrupts:
        interrupts.hold()
        send(signal.SIGINT)
        wait_for(lambda: False, 0.3)
        interrupts.release()


def test_what_follows_is_never_interrupted() -> None:
    is_saved = False
    with pytest.raises(Interrupted), Interrupts():
        try:
            send(signal.SIGTERM)
        finally:
            for _ in range(50):
                send(*STOPPING)
            is_saved = True
    assert is_saved
    with Interrupts() as interrupts:
        interrupts.finish()
        send(*STOPPING)


class Grave:
    def __del__(self) -> None:
        send(signal.SIGTERM)


@pytest.mark.parametrize("is_held", [False, True])
def test_one_that_python_swallows_is_raised_again(is_held: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """An exception in a destructor, or in a callback from C, is dropped."""
    with pytest.raises(Interrupted), Interrupts(grace_s=LONG_S) as interrupts:
        Grave()
        send(*STOPPING)  # while the first is being raised again
        if is_held:
            interrupts.hold()
        wait_for(lambda: False)
        pytest.fail("it was lost")
    assert not any(capfd.readouterr())


def test_one_that_is_swallowed_does_not_come_twice() -> None:
    """The step ends before it is raised again: then it must not interrupt what is saved."""
    is_saved = False
    with pytest.raises(Interrupted), Interrupts() as interrupts:
        interrupts.hold()
        try:
            interrupts._is_held = False
            Grave()
            interrupts.release()
        finally:
            time.sleep(0.3)
            is_saved = True
    assert is_saved


def test_the_command_learns_of_what_ended_its_run() -> None:
    with pytest.raises(Interrupted), Interrupts() as outer, Interrupts():
        send(signal.SIGHUP)
    assert outer.came == signal.SIGHUP
    with pytest.raises(Interrupted), Interrupts() as outer:
        try:
            with Interrupts():
                send(signal.SIGHUP)
        finally:
            send(*STOPPING)  # while the command cleans up


def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        send(signal.SIGHUP)
        assert interrupts.came is None
    assert signal.signal(signal.SIGHUP, signal.default_int_handler) is signal.SIG_IGN


# --- processes --------------------------------------------------------------------------------------------------------

SLOW_COMMAND = """
import signal, sys, time, types
stub = types.ModuleType("paceline.cli.app")
def main(argv):
    print("working", flush=True)
    time.sleep(60)
stub.main = main
sys.modules["paceline.cli.app"] = stub
from paceline.cli import main
main([])
"""


@pytest.mark.parametrize("number", STOPPING)
def test_the_command_ends_quietly_with_the_usual_exit_code(number: signal.Signals) -> None:
    """In a burst, and with nobody left to read what it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "working\n"
    process.stdout.close()
    for _ in range(10):
        process.send_signal(number)
    assert process.wait(LONG_S) == 128 + number
    assert process.stderr.read() == ""
    process.stderr.close()


DONE_COMMAND = """
import atexit, sys, time, types
stub = types.ModuleType("paceline.cli.app")
stub.main = lambda argv: None
sys.modules["paceline.cli.app"] = stub
def linger():
    print("ending", flush=True)
    time.sleep(0.3)
atexit.register(linger)
from paceline.cli import main
main()
"""


@pytest.mark.parametrize("number", STOPPING)
def test_what_is_done_is_not_undone_while_python_ends(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", DONE_COMMAND], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.send_signal(number)
    assert process.wait(LONG_S) == 0
    process.stdout.close()


EVERY_MOMENT = """
import os, signal, sys, types
from itertools import count
from paceline.cli import main
from paceline.run.ui.interrupts import Interrupts
ARGUMENTS = eval(sys.argv[1])
stub = types.ModuleType("paceline.cli.app")
def run(argv):
    with Interrupts() as interrupts:
        interrupts.hold()
        interrupts.release()
stub.main = run
sys.modules["paceline.cli.app"] = stub
def strike(moment):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    moments = count()
    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(("cli/entry.py", "ui/interrupts.py")):
            return None
        frame.f_trace_opcodes = True
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGTERM)
        return trace
    code = 1
    try:
        sys.settrace(trace)
        main(ARGUMENTS)
        sys.settrace(None)
        code = 0 if next(moments) > moment else 99
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)
codes = [strike(0)]
while codes[-1] != 99:
    codes.append(strike(len(codes)))
print(*codes)
"""


@pytest.mark.parametrize("arguments", [None, []])
def test_there_is_no_wrong_moment_for_a_signal(arguments: list[str] | None) -> None:
    """At every instruction of the command's handling itself: it ends as one that was asked to, or is just done."""
    call = [sys.executable, "-c", EVERY_MOMENT, repr(arguments)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    codes = [int(code) for code in done.stdout.split()]
    stages = [code for at, code in enumerate(codes) if at == 0 or code != codes[at - 1]]
    last = 0 if arguments is None else -signal.SIGTERM  # the process ends with the command, or has a life of its own
    assert stages == [-signal.SIGTERM, 128 + signal.SIGTERM, last, 99], codes
    assert codes.count(128 + signal.SIGTERM) > 100, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.5, 2.5])
def test_loading_is_interrupted_quietly(tmp_path: Path, number: signal.Signals, seconds: float) -> None:
    """While torch is imported, say."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", "--model=random:tiny", f"--run.dir={tmp_path / 'run'}", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    time.sleep(seconds)
    for _ in range(5):
        process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in said and "ignored" not in said, said
    assert [entry.name for entry in tmp_path.iterdir()] in ([], ["run"])


SLOW_TORCH = """
import sys, time
print("importing torch", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "hi"], "paceline: stopped while loading random:tiny; nothing was written"),
        (["eval"], "paceline: stopped while evaluating random:tiny; nothing was written"),
        (["train", "--run.dir=run"], "note: stopped while loading; nothing was written"),
    ],
)
def test_a_command_that_is_interrupted_while_it_loads_says_so(tmp_path: Path, command: list[str], said: str) -> None:
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text(SLOW_TORCH)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *command, "--model=random:tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "stub")},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "importing torch" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signal.SIGINT and said in rest.splitlines() and "Traceback" not in rest
    assert not (tmp_path / "run").exists()


PARENT = """
import os, subprocess, sys, time
pipe = sys.argv[1]
child = subprocess.Popen([sys.executable, "-m", sys.argv[2], pipe, str(os.getpid())], pass_fds=[int(pipe)])
print(child.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of the pipe ends it, once it reads from it")
def test_a_child_dies_with_its_parent_even_while_it_imports() -> None:
    theirs, ours = os.pipe()  # it stays open: nothing but its parent's death can end the child
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(theirs), CHILD_MODULE], stdout=subprocess.PIPE, pass_fds=[theirs]
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.stdout.close()
    ignored = Path(f"/proc/{child}/status")
    assert wait_for(lambda: int(ignored.read_text().partition("SigIgn:")[2].split()[0], 16) & 1 << signal.SIGTERM - 1)
    for number in STOPPING:  # as if the whole group were to end: the parent decides
        os.kill(child, number)
    time.sleep(0.1)
    assert is_alive(child)
    parent.kill()
    parent.wait()
    try:
        assert wait_for(lambda: not is_alive(child), 3)
    finally:
        os.close(theirs)
        os.close(ours)
        if is_alive(child):
            os.kill(child, signal.SIGKILL)
