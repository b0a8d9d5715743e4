"""Grading in separate processes: a reward or parser may crash, hang or run out of memory, and the run continues.

`run/loop.py` and `paceline eval` pass (item, text) pairs to a `Grader` and get one `Grade` each, in the same order.
Items in other processes are untouched when a process fails (`grader_worker.py`), and a failure is never a silent 0:
the grade says what happened to which item. Scores depend on item and text alone, not on the number of processes or on
what they scored before.

**Second tries.** An item gets one where something other than its text may be to blame: its process crashed, ran out of
memory, or carried threads of earlier items. An item that uses up its CPU time in a clean process has failed: it would
again. One that waits instead of working starts in a second process too, after half of its time, and the first answer
counts. All tries of an item share its time, so no text costs more than one time-out.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, get_args

from paceline.core.plugins import names_file
from paceline.tasks.base import Item
from paceline.tasks.grader_process import encode_request
from paceline.tasks.grader_replies import FailureKind, GraderVerdict, GraderWelcome
from paceline.tasks.grader_worker import GraderFailure, GraderLimits, GraderWorker, Job
from paceline.tasks.sandbox.advice import NETWORK_ADVICE
from paceline.tasks.sandbox.limits import SandboxLimits
from paceline.tasks.settings import TaskSettings

NUM_TRIES = 2
MAX_KEY = 100


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


def _failed(job: Job, failure: GraderFailure) -> Grade:
    key = job.key if len(job.key) <= MAX_KEY else job.key[:MAX_KEY] + "..."
    return Grade(0.0, f"grading item {key!r}: {failure.detail}", failure.kind)


def sandbox_limits(settings: TaskSettings) -> SandboxLimits:
    """What rewards may do, from the settings; a ValueError if a folder is missing."""
    writable = tuple(os.path.abspath(os.path.expanduser(folder)) for folder in settings.grader_writable)
    for folder in writable:
        if not os.path.isdir(folder):
            raise ValueError(f"task.grader_writable: there is no folder {folder}; create it first")
    specs = (spec for spec in (settings.name, settings.reward) if spec and names_file(spec))
    files = tuple(os.path.abspath(spec.rpartition(":")[0]) for spec in specs)
    return SandboxLimits(settings.grader_sandbox, settings.grader_network, writable, files)


class Grader:
    """Grades pairs in `settings.grader_workers` processes. Close it, or use a `with` block; one thread at a time.

    `settings.grader_cpu_seconds` is the limit that counts: it does not depend on how busy the machine is. A process
    that waits instead of working is killed after `wall_seconds`, by default far longer. `factory` names the function
    that makes the task from the settings, anew in each process. `has_namespaces=False` does without them, as on a
    kernel that does not offer them.
    """

    def __init__(
        self,
        settings: TaskSettings,
        wall_seconds: float | None = None,
        factory: str = "paceline.tasks.registry:make_task",
        has_namespaces: bool = True,
    ) -> None:
        cpu_seconds = settings.grader_cpu_seconds
        wall_seconds = 30 + 10 * cpu_seconds if wall_seconds is None else wall_seconds
        self._task = {"factory": factory, "settings": settings.model_dump(mode="json")}
        self._limits = GraderLimits(
            cpu_seconds, wall_seconds, settings.grader_memory_mb, sandbox_limits(settings), has_namespaces
        )
        self._num_workers = settings.grader_workers
        self._workers: list[GraderWorker] = []
        self._selector = selectors.DefaultSelector()
        self._notes: dict[str, bool] = {}
        """What the user should know, and whether it has been said."""
        self.num_retries = 0
        """Second tries over the life of this grader; the count depends on the load of the machine."""
        self._start_first()

    def _start_first(self) -> None:
        """Find out now, not after the first rollouts, whether the task can be made."""
        try:
            self._hire()
            while not self._workers[0].is_ready:
                self._handle_news({})
        except BaseException:
            self.close()
            raise

    def score(self, pairs: Sequence[tuple[Item, str]]) -> list[Grade]:
        """One grade per (item, text), in the same order."""
        seconds = self._limits.wall_seconds
        waiting = deque(Job(i, item.key, encode_request(item, text), seconds) for i, (item, text) in enumerate(pairs))
        grades: dict[int, Grade] = {}
        try:
            while len(grades) < len(pairs):
                self._hand_out(waiting)
                self._handle_news(grades)
        except BaseException:  # replies to unfinished jobs would arrive in the next call
            self.close()
            raise
        return [grades[i] for i in range(len(pairs))]

    def take_notes(self) -> list[str]:
        """What the user should know about these graders and has not been told yet."""
        fresh = [note for note, is_said in self._notes.items() if not is_said]
        self._notes |= dict.fromkeys(fresh, True)
        return fresh

    def close(self) -> None:
        """Kill all processes. A later `score` starts new ones."""
        for worker in list(self._workers):
            self._dismiss(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hire(self, job: Job | None = None) -> None:
        """Start a process; it takes `job` first, once it is ready."""
        self._workers.append(GraderWorker(self._task, self._limits, self._selector, job))

    def _dismiss(self, worker: GraderWorker) -> None:
        """Kill a process and forget it."""
        self._workers.remove(worker)
        worker.leave()
        worker.kill()

    def _hand_out(self, waiting: deque[Job]) -> None:
        """Give jobs to idle processes; start more while jobs are left for them."""
        for worker in list(self._workers):
            if worker.is_idle and worker.process.poll() is not None:  # died without a job to blame
                self._dismiss(worker)
        for worker in self._workers:
            if waiting and worker.is_idle:
                job = waiting.popleft()
                job.num_tries = 1
                worker.take(job)
        num_unready = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(self._num_workers - len(self._workers), len(waiting) - num_unready)):
            self._hire()

    def _handle_news(self, grades: dict[int, Grade]) -> None:
        """Wait for a reply, a death or a deadline, and handle all that have come."""
        wake = min((self._deadline(worker) for worker in self._workers), default=math.inf)
        assert wake < math.inf, "nothing to wait for"
        for key, _ in self._selector.select(max(0.0, wake - time.monotonic())):
            worker: GraderWorker = key.data
            if worker in self._workers:  # not dismissed in this round
                self._handle_reply(worker, worker.handle(key.fd), grades)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker in self._workers and self._deadline(worker) <= now:
                self._handle_overdue(worker, grades)

    def _deadline(self, worker: GraderWorker) -> float:
        """When to look after a process that says nothing: at half of its job's time, and at the end."""
        if not worker.is_ready:
            return worker.start_deadline
        if worker.job is None or worker.turn_begin is None:
            return math.inf
        share = 0.5 if worker.job.num_tries < NUM_TRIES else 1.0
        return worker.turn_begin + share * worker.job.seconds_left

    def _handle_overdue(self, worker: GraderWorker, grades: dict[int, Grade]) -> None:
        job = worker.job
        if not worker.is_ready:
            raise RuntimeError("a grader process did not start in time")
        assert job is not None
        if job.num_tries < NUM_TRIES:
            self._try_again(job)
        else:
            self._settle(job, GraderFailure("timeout", f"no reply for {self._limits.wall_seconds:g} s"), grades)

    def _try_again(self, job: Job) -> None:
        job.num_tries += 1
        self.num_retries += 1
        self._hire(job)

    def _handle_reply(self, worker: GraderWorker, reply: object, grades: dict[int, Grade]) -> None:
        if reply == "over":
            self._workers.remove(worker)
            worker.leave()
            self._handle_failure(worker, worker.bury(), grades)
        elif isinstance(reply, GraderFailure):
            self._dismiss(worker)
            self._handle_failure(worker, reply, grades)
        elif isinstance(reply, GraderWelcome):
            self._welcome(worker, reply)
        elif isinstance(reply, GraderVerdict):
            self._handle_verdict(worker, reply, grades)

    def _welcome(self, worker: GraderWorker, welcome: GraderWelcome) -> None:
        """Handle a process's first reply: it has made its task, or says why it cannot."""
        if welcome.refusal:
            raise ValueError(welcome.refusal)
        if welcome.missing:
            self._notes.setdefault(f"this system cannot shut graders in: {welcome.missing}", False)
        worker.is_ready = True
        if worker.job is not None:
            worker.take(worker.job)

    def _handle_verdict(self, worker: GraderWorker, verdict: GraderVerdict, grades: dict[int, Grade]) -> None:
        job = worker.job
        assert job is not None
        if verdict.wants_network:
            self._notes.setdefault(f"a reward tried to reach the network: {NETWORK_ADVICE}", False)
        if verdict.kind == "memory":
            self._dismiss(worker)
            self._handle_failure(worker, GraderFailure("memory", verdict.detail, True), grades)
            return
        worker.finish()
        if verdict.is_spoiled:
            self._dismiss(worker)
        result = GraderFailure(verdict.kind, verdict.detail) if verdict.kind else verdict
        self._settle(job, result, grades)

    def _handle_failure(self, worker: GraderWorker, failure: GraderFailure, grades: dict[int, Grade]) -> None:
        """The process is gone; its job goes to a new one, or has failed for good."""
        if not worker.is_ready:
            raise RuntimeError(f"a grader process could not start: {failure.detail}")
        job, begin = worker.job, worker.turn_begin
        if job is None:
            return
        if begin is not None:
            job.seconds_left -= time.monotonic() - begin
        if failure.may_be_anothers_fault and any(other.job is job for other in self._workers):
            return  # its other try goes on
        if failure.may_be_anothers_fault and job.num_tries < NUM_TRIES:
            self._try_again(job)
        else:
            self._settle(job, failure, grades)

    def _settle(self, job: Job, result: GraderVerdict | GraderFailure, grades: dict[int, Grade]) -> None:
        """Note the grade of a job, and end what still works on it."""
        for worker in [worker for worker in self._workers if worker.job is job]:
            self._dismiss(worker)
        grades[job.index] = Grade(result.score) if isinstance(result, GraderVerdict) else _failed(job, result)
