"""Rewards that attack their grader, each with what may become of its item. Loaded in grader processes and by tests.

A reward is a function of the place it attacks (`Target`); its name is the text that asks for it. `HOSTILE` holds the
outcomes that are right: a score, or a kind of failure. `make_task` is the factory of the task that calls them.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import decimal
import gc
import glob
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.tasks.base import Item, Split
from paceline.tasks.settings import TaskSettings

HOUR = 3600
SCORE = 0.5
"""What a reward returns that does harm and then goes on as if nothing had happened."""

Outcome = float | str


@dataclass(frozen=True)
class Target:
    """What a reward may know of the run that it attacks."""

    run_pid: int
    port: int
    folder: str
    """Of the run; holds `victim`."""
    unix_socket: str


Reward = Callable[[Target], Any]
HOSTILE: dict[str, tuple[Reward, tuple[Outcome, ...]]] = {}


def hostile(*outcomes: Outcome) -> Callable[[Reward], Reward]:
    def add(reward: Reward) -> Reward:
        HOSTILE[reward.__name__] = (reward, outcomes)
        return reward

    return add


class HostileTask:
    """Scores a text by the reward that it names; any other text by its length."""

    name = "hostile"
    size = None

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        raise NotImplementedError

    def gold(self, item: Item) -> str:
        raise NotImplementedError

    def score(self, item: Item, text: str) -> float:
        if text not in HOSTILE:
            assert os.getcwd() == item.answer["folder"], "honest rewards run where the run runs"
            return len(text) / 1000
        value: float = HOSTILE[text][0](Target(**item.answer))
        return value


def make_task(settings: TaskSettings) -> HostileTask:
    return HostileTask()


# --- endings ---


@hostile("crash")
def exit_with_zero(_: Target) -> None:
    os._exit(0)


@hostile("error")
def sys_exit(_: Target) -> None:
    sys.exit()


@hostile("error")
def keyboard_interrupt(_: Target) -> None:
    raise KeyboardInterrupt


@hostile("error")
def generator_exit(_: Target) -> None:
    raise GeneratorExit


@hostile("error")
def stop_iteration(_: Target) -> None:
    raise StopIteration


@hostile("error")
def error_without_a_message(_: Target) -> None:
    class Evil(Exception):
        def __str__(self) -> str:
            raise SystemExit(0)

    raise Evil


@hostile("crash")
def kill_itself(_: Target) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@hostile("crash")
def segfault(_: Target) -> None:
    ctypes.string_at(0)


@hostile("crash")
def abort(_: Target) -> None:
    os.abort()


@hostile("crash")
def become_true(_: Target) -> None:
    os.execv("/bin/true", ["true"])


@hostile("crash")
def become_sleep(_: Target) -> None:
    os.execv("/bin/sleep", ["sleep", str(HOUR)])


@hostile("error")
def recursion(target: Target) -> Any:
    return recursion(target)


@hostile("crash", "memory", "error", "timeout")
def recursion_without_limit(_: Target) -> Any:
    sys.setrecursionlimit(10**9)
    nested: list[Any] = []
    for _step in range(10**6):
        nested = [nested]
    return repr(nested)


# --- time ---


@hostile("timeout")
def stop_itself(_: Target) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@hostile("timeout")
def sleep(_: Target) -> None:
    time.sleep(HOUR)


@hostile("timeout")
def burn(_: Target) -> None:
    while True:
        pass


@hostile("timeout")
def hang_in_a_regex(_: Target) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


@hostile("timeout")
def burn_with_the_signal_ignored(_: Target) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    while True:
        pass


@hostile("timeout")
def burn_with_all_signals_blocked(_: Target) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        pass


@hostile("timeout")
def burn_in_a_thread(_: Target) -> None:
    threading.Thread(target=pow, args=(7, 10**9)).start()
    time.sleep(HOUR)


@hostile("timeout")
def wait_for_a_child(_: Target) -> None:
    subprocess.run(["sleep", str(HOUR)], start_new_session=True)


@hostile(SCORE)
def lift_the_timer(_: Target) -> float:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    return SCORE


@hostile(SCORE)
def set_an_alarm_for_the_next(_: Target) -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    return SCORE


@hostile(SCORE)
def lower_its_priority(_: Target) -> float:
    os.nice(19)
    return SCORE


# --- memory ---


@hostile("memory")
def allocate_at_once(_: Target) -> int:
    return len(bytearray(10 << 30))


@hostile("memory")
def allocate_arrays(_: Target) -> None:
    pile = []
    while True:
        pile.append(np.empty(1 << 21))


@hostile("memory")
def claim_to_lack_memory(_: Target) -> None:
    raise MemoryError


@hostile(SCORE)
def leave_little_memory(_: Target) -> float:
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return SCORE


@hostile(SCORE)
def leave_no_descriptors(_: Target) -> float:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return SCORE


# --- what it returns ---


class EvilFloat:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __float__(self) -> float:
        value: float = self.act()
        return value

    def __repr__(self) -> str:
        raise KeyboardInterrupt


@hostile("not a number")
def return_nan(_: Target) -> float:
    return float("nan")


@hostile("not a number")
def return_infinity(_: Target) -> float:
    return float("-inf")


@hostile("not a number")
def return_text(_: Target) -> str:
    return "1.0"


@hostile("not a number")
def return_bytes(_: Target) -> bytes:
    return b"1.0"


@hostile("not a number")
def return_nothing(_: Target) -> None:
    return None


@hostile("not a number")
def return_complex(_: Target) -> complex:
    return 1 + 0j


@hostile("not a number")
def return_an_array(_: Target) -> Any:
    return np.ones(3)


@hostile("not a number")
def return_too_large_a_number(_: Target) -> int:
    return 10**400


@hostile("not a number", "memory")
def return_a_million_texts(_: Target) -> list[str]:
    return ["x" * 20] * 1_000_000


@hostile("not a number")
def return_a_generator(_: Target) -> Any:
    return (number for number in (1.0,))


@hostile(1.0)
def return_true(_: Target) -> bool:
    return True


@hostile(SCORE)
def return_a_decimal(_: Target) -> Any:
    return decimal.Decimal("0.5")


@hostile("error")
def return_a_float_that_exits(_: Target) -> Any:
    return EvilFloat(lambda: sys.exit(0))


@hostile("timeout")
def return_a_float_that_hangs(_: Target) -> Any:
    return EvilFloat(lambda: burn(_))


@hostile("error")
def return_what_cannot_be_shown(_: Target) -> Any:
    return EvilFloat(lambda: float("nan"))


# --- its pipes ---


def write_everywhere(data: bytes) -> None:
    for name in glob.glob("/proc/self/fd/*"):
        with suppress(OSError, ValueError):
            os.write(int(os.path.basename(name)), data)


def reply(**changed: Any) -> bytes:
    record: dict[str, Any] = {"ticket": "", "score": 1.0, "kind": "", "detail": ""}
    record |= {"has_threads": False, "is_spoiled": False, "wants_network": False}
    return json.dumps(record | changed).encode() + b"\n"


def own_ticket() -> str:
    """The ticket of its own item, from the frame of the server's loop."""
    frame: Any = sys._getframe()
    while frame is not None:
        ticket = frame.f_locals.get("ticket")
        if isinstance(ticket, bytes):
            return ticket.decode()
        frame = frame.f_back
    raise LookupError("no ticket in any frame")


@hostile("crash")
def write_junk(_: Target) -> float:
    write_everywhere(b"garbage\n")
    return SCORE


@hostile("crash")
def flood_its_pipes(_: Target) -> float:
    write_everywhere(b"x" * (100 << 20))
    return SCORE


@hostile("crash")
def write_a_bare_score(_: Target) -> float:
    write_everywhere(b'{"score": 1.0}\n')
    return SCORE


@hostile("crash")
def forge_a_reply(_: Target) -> float:
    write_everywhere(reply(ticket="0" * 32))
    return SCORE


@hostile("crash")
def forge_a_welcome(_: Target) -> float:
    write_everywhere(b'{"ticket": "", "refusal": "forged", "missing": ""}\n')
    return SCORE


@hostile("crash")
def write_nested_json(_: Target) -> float:
    write_everywhere(b"[" * 50_000 + b"\n")
    return SCORE


@hostile("crash")
def write_half_a_line(_: Target) -> float:
    write_everywhere(b'{"ticket": "')
    return SCORE


@hostile("crash")
def reply_with_its_ticket_and_junk(_: Target) -> float:
    write_everywhere(reply(ticket=own_ticket(), score="1.0"))
    return SCORE


@hostile(1.0, "crash")
def reply_with_its_own_ticket(_: Target) -> float:
    """It could have returned the score as well; the second reply must not reach the next item."""
    write_everywhere(reply(ticket=own_ticket()))
    return SCORE


@hostile(SCORE, "crash")
def reply_again_later(_: Target) -> float:
    forged = reply(ticket=own_ticket())

    def write_later() -> None:
        for _step in range(20):
            time.sleep(0.02)
            write_everywhere(forged)

    threading.Thread(target=write_later, daemon=True).start()
    return SCORE


@hostile("timeout", "crash")
def read_every_pipe(_: Target) -> float:
    for name in glob.glob("/proc/self/fd/*"):
        with suppress(OSError, ValueError):
            os.read(int(os.path.basename(name)), 1 << 20)
    return SCORE


@hostile("crash")
def close_every_pipe(_: Target) -> float:
    os.closerange(0, 1000)
    return SCORE


@hostile(SCORE)
def close_its_prints(_: Target) -> float:
    sys.stdout.close()
    sys.stderr.close()
    os.closerange(0, 3)
    return SCORE


@hostile(SCORE)
def print_a_lot(_: Target) -> float:
    for _step in range(20):
        os.write(2, b"noise " * 100_000)
    return SCORE


@hostile("crash")
def last_words_with_control_characters(_: Target) -> None:
    os.write(2, b"\x1b[2J\x1b]0;owned\x07\xff\xfe\r")
    os._exit(1)


@hostile("error")
def raise_control_characters(_: Target) -> None:
    raise ValueError("\x1b[2J\r\n\x07\ud800")


@hostile("crash")
def break_the_writer(_: Target) -> float:
    def fail(*_args: Any, **_named: Any) -> str:
        raise SystemExit(0)

    json.dumps = fail
    return SCORE


# --- processes and threads that stay ---


@hostile(SCORE)
def leave_a_daemon(_: Target) -> float:
    subprocess.Popen(["sleep", str(HOUR)], start_new_session=True)
    return SCORE


@hostile(SCORE)
def leave_a_double_fork(_: Target) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(HOUR)
    os.wait()
    return SCORE


@hostile(SCORE)
def leave_a_python_process(_: Target) -> float:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(HOUR,)).start()
    return SCORE


@hostile("crash")
def leave_a_daemon_and_exit(_: Target) -> None:
    subprocess.Popen(["sleep", str(HOUR)], start_new_session=True)
    os._exit(0)


@hostile(SCORE)
def come_back_twice(_: Target) -> float:
    os.fork()
    return SCORE


@hostile(SCORE)
def come_back_many_times(_: Target) -> float:
    for _step in range(6):
        os.fork()
    return SCORE


@hostile(SCORE)
def leave_a_burning_thread(_: Target) -> float:
    threading.Thread(target=burn, args=(_,), daemon=True).start()
    return SCORE


@hostile(SCORE)
def leave_a_thread_and_a_handler(_: Target) -> float:
    threading.Thread(target=time.sleep, args=(HOUR,)).start()
    atexit.register(time.sleep, HOUR)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return SCORE


@hostile(SCORE)
def leave_its_session(_: Target) -> float:
    with suppress(OSError):
        os.setsid()
    return SCORE


@hostile(SCORE)
def run_an_event_loop(_: Target) -> float:
    asyncio.run(asyncio.sleep(0))
    gc.disable()
    os.environ.clear()
    os.umask(0o777)
    return SCORE


# --- the disk ---


@hostile(SCORE)
def change_the_folder(_: Target) -> float:
    os.chdir("/")
    return SCORE


@hostile("error")
def overwrite_the_run(target: Target) -> None:
    with open(f"{target.folder}/victim", "w") as file:
        file.write("owned")


@hostile("error")
def unlink_in_the_run(target: Target) -> None:
    os.unlink(f"{target.folder}/victim")


@hostile(SCORE)
def remove_the_run(target: Target) -> float:
    shutil.rmtree(target.folder, ignore_errors=True)
    return SCORE


@hostile("error")
def rename_the_run(target: Target) -> None:
    os.rename(target.folder, f"{target.folder}-gone")


@hostile("error")
def link_into_the_run(target: Target) -> None:
    os.symlink("/etc/passwd", f"{target.folder}/link")


@hostile("error")
def write_to_home(_: Target) -> None:
    with open(os.path.expanduser("~/.paceline-was-here"), "w") as file:
        file.write("owned")


@hostile("error")
def write_to_tmp(_: Target) -> None:
    with open("/tmp/paceline-was-here", "w") as file:
        file.write("owned")


@hostile("error")
def open_the_disk(_: Target) -> float:
    disks = [path for path in glob.glob("/dev/*") if stat.S_ISBLK(os.stat(path).st_mode)]
    for path in disks:
        os.close(os.open(path, os.O_WRONLY))
    raise PermissionError("there is none")


@hostile(SCORE)
def use_its_temporary_folder(_: Target) -> float:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * 1000)
    open(os.path.join(tempfile.gettempdir(), "paceline-stays"), "w").close()
    return SCORE


# --- the network ---


@hostile("error")
def connect(target: Target) -> float:
    socket.create_connection(("127.0.0.1", target.port), timeout=5).close()
    return SCORE


@hostile(SCORE)
def connect_and_hide_it(target: Target) -> float:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", target.port), timeout=5).close()
    return SCORE


@hostile("error")
def send_a_packet(target: Target) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"owned", ("127.0.0.1", target.port))


@hostile("error")
def connect_to_a_unix_socket(target: Target) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(target.unix_socket)


@hostile("error")
def look_up_a_name(_: Target) -> None:
    socket.getaddrinfo("example.com", 80)


@hostile("crash", "error")
def connect_from_a_child(target: Target) -> None:
    code = f"import socket; socket.create_connection(('127.0.0.1', {target.port}), timeout=5)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the run ---


@hostile("error")
def read_the_environment_of_the_run(target: Target) -> None:
    with open(f"/proc/{target.run_pid}/environ", "rb") as file:
        file.read()


@hostile("error")
def kill_the_run(target: Target) -> None:
    os.kill(target.run_pid, signal.SIGKILL)


@hostile("error")
def kill_its_keeper(_: Target) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


@hostile("error", "not a number")
def kill_everything(_: Target) -> None:
    os.kill(-1, signal.SIGKILL)


def call_kernel(number: int, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


@hostile("error")
def trace_the_run(target: Target) -> None:
    attach = 16
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(attach, target.run_pid, None, None) < 0:
        raise PermissionError("refused")


@hostile("error")
def limit_the_run(target: Target) -> None:
    resource.prlimit(target.run_pid, resource.RLIMIT_CPU, (0, 0))


@hostile("error")
def make_the_disk_writable(_: Target) -> None:
    remount_bind = 0x1020
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, b"/", None, ctypes.c_ulong(remount_bind), None) < 0:
        raise PermissionError("refused")


@hostile("error")
def gain_new_namespaces(_: Target) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) < 0:
        raise PermissionError("refused")


@hostile("error", "crash")
def fork_into_new_namespaces(_: Target) -> None:
    call_kernel({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)


@hostile("error")
def raise_a_long_error_from_a_long_chain(_: Target) -> None:
    error: Exception | None = None
    for _step in range(1000):
        link = KeyError("x" * 10_000)
        link.__cause__ = error
        error = link
    assert error is not None
    raise error
