"""One grader process as the run sees it: a job at a time goes in, a verdict comes out, and nothing it does blocks.

`grading.Grader` owns these workers and its loop tells them when their pipes are ready. Every pipe is non-blocking and
every wait has an end: a process that is stopped, floods its pipes or closes them costs its own item at most.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.tasks.grader_process import CPU_LIMIT_SIGNAL
from paceline.tasks.grader_replies import (
    MAX_REPLY_BYTES,
    FailureKind,
    GraderVerdict,
    GraderWelcome,
    decode_verdict,
    decode_welcome,
    new_ticket,
)
from paceline.tasks.sandbox.limits import SandboxLimits

START_SECONDS = 300.0
"""How long a process may take to import what it needs; a reward may load a model."""

END_SECONDS = 20.0
"""How long the keeper of a sandbox has to end everything in it, before it is killed too."""

MAX_LAST_WORDS = 300

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class GraderLimits:
    """What one grader process may use."""

    cpu_seconds: float
    wall_seconds: float
    memory_mb: int
    sandbox: SandboxLimits
    has_namespaces: bool = True
    """False: as on a kernel that does not offer them."""


@dataclass
class Job:
    """One pair on its way through the processes."""

    index: int
    key: str
    request: bytes
    seconds_left: float
    """For all its tries together."""
    num_tries: int = 0


@dataclass(frozen=True)
class GraderFailure:
    """What became of a job or a process instead of a score."""

    kind: FailureKind
    detail: str
    may_be_anothers_fault: bool = False
    """Whether something other than the text is a likely reason, so that a new process may succeed."""


@dataclass
class _Turn:
    """The job that a process is at."""

    job: Job
    ticket: str = field(default_factory=new_ticket)
    begin: float = field(default_factory=time.monotonic)


class GraderWorker:
    """One grader process and its current job, which it receives once it is ready."""

    def __init__(
        self,
        task: Mapping[str, Any],
        limits: GraderLimits,
        selector: selectors.BaseSelector,
        job: Job | None = None,
    ) -> None:
        self.job = job
        self.is_ready = False
        self.start_deadline = time.monotonic() + START_SECONDS
        self._limits = limits
        self._selector = selector
        self._turn: _Turn | None = None
        self._start_ticket = new_ticket()
        self._unsent = b""
        self._unread = b""
        self._last_words = b""
        self._has_threads = False
        self.process = subprocess.Popen(
            # -P: a json.py in the user's working directory must not shadow Python's own.
            [sys.executable, "-P", "-m", "paceline.tasks.grader_start"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # one group to kill, whatever a reward starts; and the run handles Ctrl-C
        )
        for descriptor in (self._requests, self._replies, self._prints):
            os.set_blocking(descriptor, False)
        selector.register(self._replies, selectors.EVENT_READ, self)
        selector.register(self._prints, selectors.EVENT_READ, self)
        self._send(json.dumps(self._start_record(task)).encode() + b"\n")

    def _start_record(self, task: Mapping[str, Any]) -> dict[str, Any]:
        limits = self._limits
        return {
            **task,
            "ticket": self._start_ticket,
            "parent": os.getpid(),
            "cpu_seconds": limits.cpu_seconds,
            "memory_mb": limits.memory_mb,
            "sandbox": asdict(limits.sandbox),
            "has_namespaces": limits.has_namespaces,
        }

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None

    @property
    def turn_begin(self) -> float | None:
        """When it got its current job."""
        return self._turn.begin if self._turn else None

    @property
    def _requests(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    @property
    def _replies(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def _prints(self) -> int:
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    def take(self, job: Job) -> None:
        """Send a job to the idle process."""
        assert self.is_ready
        self.job = job
        self._turn = _Turn(job)
        self._send(self._turn.ticket.encode() + b" " + job.request)

    def finish(self) -> None:
        """Its job is done; whatever it writes before the next one is no reply."""
        self.job = self._turn = None

    def _send(self, line: bytes) -> None:
        self._unsent += line
        self._write()

    def _write(self) -> None:
        """Write as much as the pipe takes; the selector says when there is room for more."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
        except BlockingIOError:
            with suppress(KeyError):  # registered already
                self._selector.register(self._requests, selectors.EVENT_WRITE, self)
            return
        except BrokenPipeError:  # it has died, as the end of its output will tell
            self._unsent = b""
        with suppress(KeyError):
            self._selector.unregister(self._requests)

    def handle(self, descriptor: int) -> GraderWelcome | GraderVerdict | GraderFailure | Literal["over"] | None:
        """Handle news on one of its pipes; a reply, if it is complete, or "over" at the end of its output."""
        if descriptor == self._requests:
            self._write()
        elif descriptor == self._prints:
            if not self._listen():
                self._selector.unregister(descriptor)
        else:
            return self._read()
        return None

    def _read(self) -> GraderWelcome | GraderVerdict | GraderFailure | Literal["over"] | None:
        data = os.read(self._replies, MAX_REPLY_BYTES)
        if not data:
            return "over"
        self._unread += data
        if b"\n" not in self._unread and len(self._unread) <= MAX_REPLY_BYTES:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        reply = self._decode(line)
        if reply is None or self._unread:
            # An earlier item's code may have written this.
            return GraderFailure(
                "crash", "the grader process garbled its replies: its reward wrote into their pipe", True
            )
        if isinstance(reply, GraderVerdict):
            self._has_threads = reply.has_threads
        return reply

    def _decode(self, line: bytes) -> GraderWelcome | GraderVerdict | None:
        if not self.is_ready:
            return decode_welcome(line, self._start_ticket)
        return decode_verdict(line, self._turn.ticket) if self._turn else None

    def _listen(self) -> bool:
        """Keep the tail of what it prints, for the message if it dies; return whether more may come."""
        data = os.read(self._prints, 1 << 16)
        self._last_words = (self._last_words + data)[-MAX_LAST_WORDS:]
        return bool(data)

    def bury(self) -> GraderFailure:
        """Kill a process that has closed its pipe, with everything it started; return how it died."""
        with suppress(subprocess.TimeoutExpired):  # a reward that closes every descriptor closes only the pipe
            self.process.wait(timeout=1)
        code = self.process.poll()
        with suppress(BlockingIOError):  # a child process may hold the other end open
            for _ in range(64):
                if not self._listen():
                    break
        self.kill()
        return self._explain(code)

    def _explain(self, code: int | None) -> GraderFailure:
        if code == -CPU_LIMIT_SIGNAL:
            detail = f"used more than {self._limits.cpu_seconds:g} s of CPU time"
            return GraderFailure("timeout", detail, may_be_anothers_fault=self._has_threads)
        words = self._last_words.decode(errors="replace").strip().rpartition("\n")[2]
        said = f", and last printed {words!r}" if words else ""
        if code is None:
            how = "closed its pipes"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"ended with exit code {code}"
        return GraderFailure("crash", f"the grader process {how}{said}", may_be_anothers_fault=True)

    def leave(self) -> None:
        """Listen to its pipes no longer."""
        for descriptor in (self._requests, self._replies, self._prints):
            with suppress(KeyError):
                self._selector.unregister(descriptor)

    def kill(self) -> None:
        """Kill the process and everything it started, and free its pipes."""
        if sys.platform == "linux":  # elsewhere there is no keeper to tell
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
                self.process.send_signal(signal.SIGCONT)  # a stopped one would not hear
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def _environment() -> dict[str, str]:
    """The run's own environment, so that it sees the same modules, with hashing and summation order fixed."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
