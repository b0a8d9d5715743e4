"""The driver of a fleet: requests rollouts and gradient sums, sends the commands of the rules, collects results.

`FleetBackend.generate` and `FleetBackend.learn` return what `Engine.generate` and `Learner.step` return on one device.
A carrier delivers commands and reports in order for each worker, and reports which workers joined or were lost. The
driver keeps the tokens reported so far of open sequences, so that a lost worker costs only time. Timing must never
affect a number: rollouts are sorted, and sums are added in the order of their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.core.trace import Trace
from paceline.core.types import Prefix, Request, Rollout, Sampling
from paceline.fleet.commands import (
    Command,
    Equip,
    Finish,
    Generate,
    Learn,
    RunAhead,
    SequenceKey,
    SpotTrain,
    StepPhase,
    Wait,
)
from paceline.fleet.ledger import Ledger
from paceline.fleet.reports import (
    Ask,
    Ended,
    Grew,
    Growth,
    Holds,
    Joined,
    Lost,
    Rested,
    Spent,
    Summed,
    Trained,
    Unplaced,
    WorkerReport,
    Wrote,
)
from paceline.fleet.rules import decide
from paceline.fleet.run_ahead import RunAheadPlan
from paceline.fleet.throughput import PartClock
from paceline.fleet.timesheet import PUBLISH, Attendance
from paceline.fleet.view import OpenSequence
from paceline.fleet.worker import joined
from paceline.model.eagle.network import Eagle
from paceline.rl.learner import Learner, TrainBatch, WorkerSum
from paceline.rl.packing import Sample
from paceline.rollout.engine import OnFinish
from paceline.rollout.run_ahead.store import RunAheadStore, prompt_id_of
from paceline.rollout.speculation.makespan import Lengths
from paceline.rollout.stats import Stats
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.log import LOG, MicroLog
from paceline.spot.trainer import TrainerState

FRESH = 0.5
"""Weight of the newest measurement in the average time to publish weights."""

SPOT_VALUE = 2.0
"""Above the value of any run-ahead text, which is at most 1."""


class NoWorkersError(RuntimeError):
    """No worker is left, and none will join."""


class Carrier(Protocol):
    """Delivers commands and reports. It must keep the order of each worker's commands, and of its reports."""

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Start preparing new weights for `Publish`. They do not change while any worker is busy."""

    def send(self, command: Command, payload: Any) -> None:
        """Send to the worker that the command names; ignored if it is lost."""

    def collect(self) -> list[tuple[int, WorkerReport]]:
        """New reports with their workers' numbers; waits briefly if there are none."""

    @property
    def collect_s(self) -> float:
        """The driver's own time in the last `collect`, without waiting and without others' work."""

    @property
    def may_come(self) -> bool:
        """Whether a worker may still join."""

    def close(self) -> None:
        """Release all workers."""


class FleetBackend:
    """One policy, one learner, many workers: see `run.backend.Backend`."""

    def __init__(
        self,
        carrier: Carrier,
        learner: Learner,
        num_workers: int,
        note: Callable[[str], None] | None = None,
        ahead: RunAheadStore | None = None,
        trains_drafter: bool = False,
        drafter_folder: Path | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`note` takes a message for the user about each lost worker. Without `ahead` no worker runs ahead.

        `drafter_folder` holds the trained drafter and the log of its training; the workers' spans go to `trace`.
        """
        self._carrier, self._learner = carrier, learner
        self.trains_drafter = trains_drafter
        self.drafter: Eagle | None = None
        """The newest version, which all workers draft with."""
        self.stage: TrainerState | None = None
        """The state of its training, for the next trainer."""
        self.drafter_log = MicroLog(None if drafter_folder is None else drafter_folder / LOG)
        """Every training step, with the worker that did it."""
        self._drafters = None if drafter_folder is None else DrafterCheckpoints(drafter_folder)
        self._equipped: dict[int, Eagle] = {}
        """The version sent to each worker."""
        self._drafter_metrics: dict[str, float] = {}
        self.ahead = ahead
        """Run-ahead text of later steps, for checkpoints."""
        self._plan = None if ahead is None else RunAheadPlan(ahead)
        self._note = note or (lambda text: None)
        self.attendance = Attendance(num_workers)
        self.attendance.trace = trace
        self.ledger, self._lengths = Ledger(), Lengths()
        self._is_published = False
        self._sampling = Sampling()
        self._requests: dict[SequenceKey, Request] = {}
        self._prompt_ids: dict[SequenceKey, int] = {}
        self._known: dict[SequenceKey, Prefix] = {}
        self._rollouts: list[Rollout] = []
        self._on_finish: OnFinish | None = None
        self._samples: Sequence[Sample] = ()
        self._sums: dict[int, WorkerSum] = {}
        self._parts = PartClock()
        self._stats: list[Stats] = []

    # --- called by the run --------------------------------------------------------------------------------------------

    @property
    def runs_ahead(self) -> bool:
        return self.ahead is not None

    def begin_step(self) -> None:
        self.attendance.begin()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[int],
        on_finish: OnFinish | None = None,
        ahead: Sequence[tuple[Sequence[int], int]] | None = None,
    ) -> list[Rollout]:
        """As `Engine.generate`: `sampling.n` rollouts per prompt, ordered by prompt, then sample.

        Idle workers start the draws that `ahead` names; None keeps those named before.
        """
        if ahead is not None:
            self.plan_ahead(ahead, sampling)
        self._begin_version(self.ledger.version)
        self._requests, self._prompt_ids, self._rollouts = {}, {}, []
        self._sampling, self._on_finish = sampling, on_finish
        self._known.clear()
        for index, (prompt, draw) in enumerate(zip(prompts, draws, strict=True)):
            prompt_id = prompt_id_of(prompt)
            for sample in range(sampling.n):
                key = SequenceKey(draw, sample, sampling.stream)
                self._requests[key] = Request(prompt, draw, sample, prompt_index=index)
                self._prompt_ids[key] = prompt_id
        if self._plan is not None:
            self._plan.take(self._requests, sampling)
        self.ledger.begin_rollout(self._expect(list(self._prompt_ids.values())))
        self._until_all_is_in()
        if self._plan is not None:
            self._plan.judge(self._rollouts)
        return sorted(self._rollouts, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))

    def _expect(self, prompt_ids: Sequence[int]) -> list[OpenSequence]:
        """The expected length of each sequence: from complete run-ahead text, or from earlier rollouts."""
        self._lengths.begin()
        self._lengths.ask(set(prompt_ids))
        left = self._lengths.mean_left(prompt_ids, [0] * len(prompt_ids)).tolist()
        drafts = {} if self._plan is None else self._plan.drafts
        whole = {key: float(len(draft.tokens)) for key, draft in drafts.items() if draft.is_whole}
        return [OpenSequence(key, whole.get(key, own)) for key, own in zip(self._requests, left, strict=True)]

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """As `Learner.step`."""
        self._samples = samples
        batch, first = self._learner.plan(samples), self.ledger.version
        metrics = self._learner.train(batch, lambda epoch: self._find_sums(batch, first + epoch))
        self._samples = ()
        self._begin_version(first + batch.num_epochs)
        # Workers fetch the weights while the driver does other work.
        self._tell_all()
        return metrics

    def plan_ahead(self, prompts: Sequence[tuple[Sequence[int], int]], sampling: Sampling) -> None:
        """Name prompts and draws of later steps, with this sampling, for idle workers to start."""
        if self._plan is not None:
            self.ledger.values = replace(self.ledger.values, ahead=self._plan.texts.survival)
            missing = self._plan.name(prompts, sampling)
            self.ledger.plan_ahead(self._plan.plan(draw, self._lengths.expected(own)) for draw, own in missing)

    def take_stats(self) -> list[Stats]:
        """The engines' counters since the last call."""
        found, self._stats = self._stats, []
        return found

    def end_step(self, step: int, seconds: float) -> dict[str, float]:
        """Metrics of the drafter's training, and of how the workers spent their time since the step began."""
        found, self._drafter_metrics = self._drafter_metrics, {}
        return found | self.attendance.metrics(0.0 if self.ahead is None else self.ahead.survival)

    def compare(
        self,
        rounds: Sequence[Sequence[tuple[Sequence[int], int]]],
        sampling: Sampling,
        seconds: float,
        track: Callable[[int, str], OnFinish],
    ) -> None:
        self._note("run.compare is skipped: it times one engine, and this run has several workers")

    def drafter_state(self) -> dict[str, Any]:
        """Only run-ahead text: a worker's drafter keeps its memory to itself."""
        return {"ahead": None if self.ahead is None else self.ahead.state(), "drafter": None}

    def restore_drafter(self, state: Mapping[str, Any]) -> None:
        if state.get("ahead") is not None and self.ahead is not None:
            self.ahead.restore(state["ahead"])

    def save(self, step: int) -> None:
        """Save the drafter, once there is a version."""
        if self._drafters is not None and self.drafter is not None:
            stage = self.stage or TrainerState(self.drafter, {}, {})
            self.drafter_log.flush()
            counts = {**stage.counts, "num_entries": self.drafter_log.num_entries}
            self._drafters.save(step, self.drafter, stage.tensors, counts)

    def resume(self, step: int) -> None:
        """Resume with the drafter of this step; without one, restart its log."""
        if self._drafters is None:
            return
        self._drafters.cut_after(step)
        saved = self._drafters.load(step)
        self.drafter_log.cut_after(0 if saved is None else saved.counts.get("num_entries", 0))
        if saved is not None:
            self.drafter = saved.eagle
            self.stage = TrainerState(saved.eagle, saved.tensors, saved.counts) if saved.tensors else None

    def close(self) -> None:
        if self._drafters is not None:
            self._drafters.close()
        self._carrier.close()

    def _begin_version(self, version: int) -> None:
        """Publish new weights at once, so that they are already on their way when a worker needs them."""
        if version > self.ledger.version:
            self.ledger.begin_version(version)
            self._is_published = False
        if not self._is_published:
            self._carrier.publish(version, self._learner.weights)
            self._is_published = True

    def _find_sums(self, batch: TrainBatch, version: int) -> list[WorkerSum]:
        """The sums of one epoch, with the weights that the previous one produced."""
        self._begin_version(version)
        self._sums = {}
        self._parts.begin()
        if self.trains_drafter:
            # This batch is new to the drafter; one turn of training on it is worth more than run-ahead text.
            self.ledger.values = replace(self.ledger.values, spot=SPOT_VALUE)
        self.ledger.begin_learn(sum(pack.num_rows for pack in packs) for packs in batch.workers)
        self._until_all_is_in()
        return [self._sums.pop(part) for part in range(len(batch.workers))]

    # --- rounds of commands and reports -------------------------------------------------------------------------------

    def _until_all_is_in(self) -> None:
        while not self._tell_all():
            found = self._carrier.collect()
            self.attendance.dealing_s += self._carrier.collect_s
            with self.attendance.dealing():
                for number, report in found:
                    self._hear(number, report)

    def _tell_all(self) -> bool:
        """Send the commands of the rules; returns whether the phase is over."""
        is_over = False
        with self.attendance.dealing():
            self._equip()
            self._guess_progress()
            for command in decide(self.ledger.view()):
                self.ledger.note(command)
                if isinstance(command, Finish):
                    is_over = True
                elif isinstance(command, Wait):
                    if not self._carrier.may_come:
                        raise NoWorkersError(command.reason)
                else:
                    self._tell(command)
        return is_over

    def _tell(self, command: Command) -> None:
        if isinstance(command, Learn):
            self._parts.told(command.worker, command.parts)
        self._carrier.send(command, self._payload(command))
        if isinstance(command, SpotTrain):
            self.ledger.values = replace(self.ledger.values, trainer=command.worker)

    def _equip(self) -> None:
        """Send the newest version of the drafter to every worker."""
        if self.drafter is not None:
            for worker in self.ledger.view().workers:
                if self._equipped.get(worker.number) is not self.drafter:
                    self._equipped[worker.number] = self.drafter
                    self._carrier.send(Equip(worker.number, self.drafter.version), self.drafter)

    def _learn_of_drafter(self, number: int, trained: Trained) -> None:
        """Record a training report. What was not reported does not count: the next trainer continues from the log."""
        self._drafter_metrics |= trained.metrics
        self.stage = trained.stage
        if trained.has_version:
            self.drafter = trained.stage.eagle
        for entry in trained.entries:
            # Each worker numbers the texts of its own ring, and each resumed run its own workers.
            self.drafter_log.append({**entry, "ring": [self.drafter_log.begun_at, number]})

    def _guess_progress(self) -> None:
        """Estimate each worker's progress on its part: one that is nearly done needs no help."""
        if self.ledger.phase is StepPhase.LEARN:
            view = self.ledger.view()
            rows = {part.part: part.rows for part in view.parts}
            for worker in view.workers:
                found = self._parts.progress(worker.number, worker.speed)
                if found is not None and found[0] in rows:
                    part, num_done = found
                    left = max(rows[part] - num_done, 0.0)
                    self.ledger.advance_part(worker.number, view.version, part, left)

    def _payload(self, command: Command) -> Any:
        match command:
            case Generate(_, _, keys):
                drafts = {} if self._plan is None else self._plan.drafts
                own = {key: drafts[key] for key in keys if key in drafts}
                return Ask(self._sampling, [self._request(key) for key in keys], own)
            case RunAhead(_, _, draws):
                assert self._plan is not None, "workers run ahead only on named draws"
                return self._plan.ask(draws)
            case Learn():
                return self._samples
            case SpotTrain(number) if number != self.ledger.values.trainer:
                given = None if self.drafter is None else TrainerState(self.drafter, {}, {})
                return self.stage or given
        return None

    def _request(self, key: SequenceKey) -> Request:
        asked = self._requests[key]
        return Request(asked.prompt, asked.draw, asked.sample_index, self._known.get(key), asked.prompt_index)

    def _hear(self, number: int, report: WorkerReport) -> None:
        ledger = self.ledger
        match report:
            case Joined(speed):
                ledger.join(number, speed)
            case Lost(reason):
                ledger.lose(number)
                self.attendance.lose(number, reason)
                self._equipped.pop(number, None)
                if ledger.values.trainer == number:
                    ledger.values = replace(ledger.values, trainer=None)
                self._note(f"worker {number} was lost: {reason}; another takes over its work")
            case Unplaced(reason):
                self._note(f"worker {number} has not started: {reason}")
            case Holds(version):
                ledger.holds(number, version)
            case Grew(version, growths):
                self._grow(number, version, growths)
            case Ended(version, key, rollout):
                self._end(number, version, key, rollout)
            case Summed(version, part, found):
                self._parts.summed(number, part)
                if ledger.finish_part(number, version, part):
                    self._sums[part] = found
            case Spent():
                self._account(number, report)
            case Wrote(texts) if self._plan is not None:
                for key, text in texts.items():
                    self._plan.keep(key, text, key in self._requests)
            case Trained() if number == ledger.values.trainer:
                self._learn_of_drafter(number, report)
            case Rested(command):
                ledger.finish_spare(command)
                if isinstance(command, SpotTrain):
                    ledger.values = replace(ledger.values, spot=0.0)

    def _end(self, number: int, version: int, key: SequenceKey, rollout: Rollout) -> None:
        if self.ledger.finish(number, version, key):
            self._rollouts.append(rollout)
            self._known.pop(key, None)
            has_ended = rollout.finish_reason == "stop"
            self._lengths.observe(self._prompt_ids[key], len(rollout.token_ids), has_ended)
            if self._on_finish is not None:
                self._on_finish(rollout)

    def _grow(self, number: int, version: int, growths: Sequence[Growth]) -> None:
        # A report that does not continue our tokens is stale, or from a worker that no longer has the sequence.
        fitting = [growth for growth in growths if growth.start == self._num_known(growth.key)]
        num_tokens = [growth.start + len(growth.more.token_ids) for growth in fitting]
        all_left = self._lengths.mean_left([self._prompt_ids[growth.key] for growth in fitting], num_tokens).tolist()
        for (key, _, more), num_made, left in zip(fitting, num_tokens, all_left, strict=True):
            if self.ledger.advance(number, version, key, num_made, left):
                self._known[key] = joined(self._known.get(key), more)

    def _num_known(self, key: SequenceKey) -> int | None:
        """Number of tokens that the driver has of a sequence; None if it is not requested."""
        if key not in self._requests:
            return None
        known = self._known.get(key)
        return 0 if known is None else len(known.token_ids)

    def _account(self, number: int, spent: Spent) -> None:
        self.attendance.hear(number, spent)
        self.ledger.measure(number, spent.speed)
        if spent.stats is not None:
            self._stats.append(spent.stats)
        taken = [stretch.seconds for stretch in spent.stretches if stretch.name == PUBLISH]
        if taken:
            prices = self.ledger.prices
            self.ledger.prices = replace(prices, publish_s=(1 - FRESH) * prices.publish_s + FRESH * sum(taken))
