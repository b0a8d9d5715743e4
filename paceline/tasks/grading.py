"""Grading in separate processes: a reward or parser may crash, hang or run out of memory, and the run continues.

`run/loop.py` and `paceline eval` pass (item, text) pairs to a `Grader` and get one `Grade` each, in the same order. A
grader process that crashes, hangs or runs out of memory is replaced, and its item retried once in the new one; items
in other processes are untouched. A failure is never a silent 0: the grade says what happened to which item. Scores
depend on item and text alone, not on the number of processes or on what they scored before.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

from paceline.tasks.base import Item
from paceline.tasks.grader_process import CPU_LIMIT_SIGNAL, encode_request
from paceline.tasks.settings import TaskSettings

FailureKind = Literal["timeout", "crash", "memory", "error", "not a number"]

RETRIED: tuple[FailureKind, ...] = ("timeout", "crash", "memory")
"""Failures that may be bad luck and are retried in a new process; the others would only repeat."""

NUM_TRIES = 2

START_SECONDS = 300.0
"""How long a process may take to import what it needs; a reward may load a model."""

MAX_LAST_WORDS = 300
MAX_KEY = 100

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Grade:
    """The result for one (item, text). If `kind` is set, `problem` names the item and the score is 0."""

    score: float
    problem: str | None = None
    kind: FailureKind | None = None


def count_problems(grades: Iterable[Grade]) -> dict[FailureKind, int]:
    """The number of failures by kind, with every kind present so that metrics always have the same names."""
    counts = Counter(grade.kind for grade in grades)
    return {kind: counts[kind] for kind in get_args(FailureKind)}


@dataclass(frozen=True)
class _Limits:
    cpu_seconds: float
    wall_seconds: float
    memory_mb: int


@dataclass(frozen=True)
class _Job:
    """One pair on its way through the processes."""

    index: int
    key: str
    request: bytes
    num_tries: int = 0


@dataclass(frozen=True)
class _Failure:
    kind: FailureKind
    detail: str

    def grade(self, job: _Job) -> Grade:
        key = job.key if len(job.key) <= MAX_KEY else job.key[:MAX_KEY] + "..."
        return Grade(0.0, f"grading item {key!r}: {self.detail}", self.kind)


class _Worker:
    """One grader process and its current job, which it receives once it is ready."""

    def __init__(self, task: Mapping[str, Any], limits: _Limits, job: _Job | None = None) -> None:
        self.job = job
        self.is_ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self._limits = limits
        self._unread = b""
        self._last_words = b""
        self.process = subprocess.Popen(
            # -P: a json.py in the user's working directory must not shadow Python's own.
            [sys.executable, "-P", "-m", "paceline.tasks.grader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # one group to kill, whatever a reward starts; and the run handles Ctrl-C
        )
        start = {
            **task,
            "parent": os.getpid(),
            "cpu_seconds": limits.cpu_seconds,
            "memory_mb": limits.memory_mb,
        }
        self._send(json.dumps(start).encode() + b"\n")

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None

    @property
    def outputs(self) -> tuple[int, int]:
        """The descriptors of its replies and its prints."""
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout.fileno(), self.process.stderr.fileno()

    def take(self, job: _Job) -> None:
        """Send a job to the idle process."""
        assert self.is_ready
        self.job = job
        self.deadline = time.monotonic() + self._limits.wall_seconds
        self._send(job.request)

    def _send(self, line: bytes) -> None:
        # Blocking is fine: the process gets one line at a time, and only while it waits for one. If it has died, the
        # end of its output will tell.
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def read(self) -> dict[str, Any] | Literal["over"] | None:
        """Its next reply, if complete; "over" at the end of its output."""
        data = os.read(self.outputs[0], 1 << 16)
        if not data:
            return "over"
        self._unread += data
        if b"\n" not in self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:  # not written by our worker code
            return {"kind": "crash", "detail": "the grader process garbled its replies"}
        return reply

    def listen(self) -> bool:
        """Keep the tail of what it prints, for the message if it dies; return whether more may come."""
        data = os.read(self.outputs[1], 1 << 16)
        self._last_words = (self._last_words + data)[-MAX_LAST_WORDS:]
        return bool(data)

    def bury(self, is_overdue: bool) -> _Failure:
        """Kill the process and everything it started; return how it died."""
        if not is_overdue:
            with suppress(subprocess.TimeoutExpired):  # a reward that closes every descriptor closes only the pipe
                self.process.wait(timeout=1)
        code = self.process.poll()
        os.set_blocking(self.outputs[1], False)  # a child process may hold the other end open
        with suppress(BlockingIOError):
            while self.listen():
                pass
        self.kill()
        return self._explain(code, is_overdue)

    def _explain(self, code: int | None, is_overdue: bool) -> _Failure:
        if is_overdue:
            return _Failure("timeout", f"no reply for {self._limits.wall_seconds:g} s")
        if code == -CPU_LIMIT_SIGNAL:
            return _Failure("timeout", f"used more than {self._limits.cpu_seconds:g} s of CPU time")
        words = self._last_words.decode(errors="replace").strip().rpartition("\n")[2]
        said = f", and last printed {words!r}" if words else ""
        if code is None:
            return _Failure("crash", f"the grader process closed its pipes{said}")
        if code < 0:
            name = f"signal {-code} ({signal.strsignal(-code)})"
            return _Failure("crash", f"the grader process was killed by {name}{said}")
        return _Failure("crash", f"the grader process ended with exit code {code}{said}")

    def kill(self) -> None:
        """Kill the process and everything it started, and free its pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of a request that was never read
                pipe.close()


def _environment() -> dict[str, str]:
    """The run's own environment, so that it sees the same modules, with hashing and summation order fixed."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


class Grader:
    """Grades pairs in `settings.grader_workers` processes. Close it, or use a `with` block; one thread at a time.

    `settings.grader_cpu_seconds` is the limit that counts: it does not depend on how busy the machine is. A process
    that waits instead of working is killed after `wall_seconds`, by default far longer. `factory` names the function
    that makes the task from the settings, anew in each process.
    """

    def __init__(
        self,
        settings: TaskSettings,
        wall_seconds: float | None = None,
        factory: str = "paceline.tasks.registry:make_task",
    ) -> None:
        cpu_seconds = settings.grader_cpu_seconds
        wall_seconds = 30 + 10 * cpu_seconds if wall_seconds is None else wall_seconds
        self._task = {"factory": factory, "settings": settings.model_dump(mode="json")}
        self._limits = _Limits(cpu_seconds, wall_seconds, settings.grader_memory_mb)
        self._num_workers = settings.grader_workers
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self.num_retries = 0
        """Retries over the life of this grader; the count depends on the load of the machine."""
        self._start_first()

    def _start_first(self) -> None:
        """Find out now, not after the first rollouts, whether the task can be made."""
        try:
            self._hire()
            while not self._workers[0].is_ready:
                self._handle_news(deque(), {})
        except BaseException:
            self.close()
            raise

    def score(self, pairs: Sequence[tuple[Item, str]]) -> list[Grade]:
        """One grade per (item, text), in the same order."""
        waiting = deque(_Job(i, item.key, encode_request(item, text)) for i, (item, text) in enumerate(pairs))
        grades: dict[int, Grade] = {}
        try:
            while len(grades) < len(pairs):
                self._hand_out(waiting)
                self._handle_news(waiting, grades)
        except BaseException:  # replies to unfinished jobs would arrive in the next call
            self.close()
            raise
        return [grades[i] for i in range(len(pairs))]

    def close(self) -> None:
        """Kill all processes. A later `score` starts new ones."""
        for worker in list(self._workers):
            self._dismiss(worker)
            worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hire(self, job: _Job | None = None) -> None:
        """Start a process; it takes `job` first, once it is ready."""
        worker = _Worker(self._task, self._limits, job)
        self._workers.append(worker)
        replies, prints = worker.outputs
        self._selector.register(replies, selectors.EVENT_READ, worker)
        self._selector.register(prints, selectors.EVENT_READ, worker)

    def _dismiss(self, worker: _Worker) -> None:
        """Forget a process; the caller kills it."""
        self._workers.remove(worker)
        for descriptor in worker.outputs:
            with suppress(KeyError):  # its stderr has already ended
                self._selector.unregister(descriptor)

    def _hand_out(self, waiting: deque[_Job]) -> None:
        """Give jobs to idle processes; start more while jobs are left for them."""
        for worker in list(self._workers):
            if worker.is_idle and worker.process.poll() is not None:  # died without a job to blame
                self._dismiss(worker)
                worker.kill()
        for worker in self._workers:
            if waiting and worker.is_idle:
                worker.take(waiting.popleft())
        num_unready = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(self._num_workers - len(self._workers), len(waiting) - num_unready)):
            self._hire()

    def _handle_news(self, waiting: deque[_Job], grades: dict[int, Grade]) -> None:
        """Wait for a reply, a death or a deadline, and handle all that have come."""
        deadline = min((worker.deadline for worker in self._workers if not worker.is_idle), default=math.inf)
        assert deadline < math.inf, "nothing to wait for"
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            worker: _Worker = key.data
            if worker not in self._workers:
                continue
            if key.fd == worker.outputs[1]:
                if not worker.listen():
                    self._selector.unregister(key.fd)
            else:
                self._handle_reply(worker, grades)
        now = time.monotonic()
        for worker in list(self._workers):
            if not worker.is_idle and worker.deadline < now:
                self._replace(worker, grades, is_overdue=True)

    def _handle_reply(self, worker: _Worker, grades: dict[int, Grade]) -> None:
        reply = worker.read()
        if reply is None:
            return
        if reply == "over":
            self._replace(worker, grades)
        elif reply.get("kind") in RETRIED:
            self._replace(worker, grades, _Failure(reply["kind"], reply["detail"]))
        elif not worker.is_ready:
            self._welcome(worker, reply)
        else:
            assert worker.job is not None
            job, worker.job = worker.job, None
            failure = _Failure(reply["kind"], reply["detail"]) if "kind" in reply else None
            grades[job.index] = failure.grade(job) if failure else Grade(reply["score"])

    def _welcome(self, worker: _Worker, reply: dict[str, Any]) -> None:
        """Handle a process's first reply: it has made its task, or says why it cannot."""
        if "refused" in reply:
            raise ValueError(reply["refused"])
        worker.is_ready = True
        if worker.job is not None:
            worker.take(worker.job)

    def _replace(
        self, worker: _Worker, grades: dict[int, Grade], failure: _Failure | None = None, is_overdue: bool = False
    ) -> None:
        """Drop a process; its job goes to a new one, or has failed for good."""
        self._dismiss(worker)
        if failure is None:
            failure = worker.bury(is_overdue)
        else:
            worker.kill()
        if not worker.is_ready:
            raise RuntimeError(f"a grader process could not start: {failure.detail}")
        if worker.job is None:
            return
        job = replace(worker.job, num_tries=worker.job.num_tries + 1)
        if job.num_tries < NUM_TRIES:
            self.num_retries += 1
            self._hire(job)
        else:
            grades[job.index] = failure.grade(job)
