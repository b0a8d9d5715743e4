"""The driver of a fleet: asks for rollouts and gradient sums, tells workers what the rules decide, keeps what counts.

`Fleet.generate` and `Fleet.learn` are what `Engine.generate` and `Learner.step` are for one device, and give the same.
A carrier brings commands to workers and their reports back, in order for each worker; it says who has come and gone.
The driver holds the texts of open sequences as far as it was told, so that whoever is lost takes nothing along but
time. It must never let timing reach a number: rollouts are sorted, sums added in the order of their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from paceline.budget.makespan import Lengths
from paceline.fleet.fleet_view import Command, Finish, Key, Learn, Ledger, OpenSequence, Publish, Rollout, Wait
from paceline.fleet.messages import Ended, Grew, Holds, Joined, Lost, Report, Summed
from paceline.fleet.rules import decide
from paceline.fleet.worker import joined
from paceline.noise import prompt_hash
from paceline.rl.learner import Batch, Learner, WorkerSum
from paceline.rl.packing import Sample
from paceline.types import Known, Request, Sampling
from paceline.types import Rollout as Response


class NoWorkersError(RuntimeError):
    """Nobody is left to work, and nobody will come."""


class Carrier(Protocol):
    """Brings commands and reports. It must keep the order of what one worker is told, and of what it says."""

    def send(self, command: Command, payload: Any) -> None:
        """To the worker that the command names; to one that is lost, nothing happens."""

    def collect(self) -> list[tuple[int, Report]]:
        """What workers have said since, and who; waits a little where nobody has said anything."""

    @property
    def may_come(self) -> bool:
        """Whether somebody may still join."""


class Fleet:
    """One policy, one learner, many workers."""

    def __init__(self, carrier: Carrier, learner: Learner, sampling: Sampling) -> None:
        self._carrier, self._learner, self._sampling = carrier, learner, sampling
        self._ledger, self._lengths = Ledger(), Lengths()
        self._requests: dict[Key, Request] = {}
        self._known: dict[Key, Known] = {}
        self._rollouts: list[Response] = []
        self._samples: Sequence[Sample] = ()
        self._sums: dict[int, WorkerSum] = {}

    # --- what a run asks for ------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], draws: Sequence[int]) -> list[Response]:
        """`sampling.n` rollouts per prompt, ordered by prompt, then sample."""
        self._requests, self._rollouts = {}, []
        self._known.clear()
        ids: list[int] = []
        for index, (prompt, draw) in enumerate(zip(prompts, draws, strict=True)):
            for sample in range(self._sampling.n):
                key = Key(draw, sample, self._sampling.stream)
                self._requests[key] = Request(prompt, draw, sample, prompt_index=index)
                ids.append(prompt_hash(np.asarray(prompt, np.int32)))
        left = self._lengths.mean_left(ids, [0] * len(ids)).tolist()
        self._ledger.begin_rollout(OpenSequence(key, own) for key, own in zip(self._requests, left, strict=True))
        self._until_all_is_in()
        return sorted(self._rollouts, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """As `Learner.step`."""
        self._samples = samples
        batch, first = self._learner.plan(samples), self._ledger.version
        metrics = self._learner.train(batch, lambda epoch: self._find_sums(batch, first + epoch))
        self._ledger.begin_version(first + batch.num_epochs)
        return metrics

    def _find_sums(self, batch: Batch, version: int) -> list[WorkerSum]:
        """One epoch, with the weights that the one before has left."""
        if version > self._ledger.version:
            self._ledger.begin_version(version)
        self._sums = {}
        self._ledger.begin_learn(sum(pack.num_rows for pack in packs) for packs in batch.workers)
        self._until_all_is_in()
        return [self._sums[part] for part in range(len(batch.workers))]

    # --- one round after the other ------------------------------------------------------------------------------------

    def _until_all_is_in(self) -> None:
        while True:
            for command in decide(self._ledger.view()):
                self._ledger.note(command)
                if isinstance(command, Finish):
                    return
                if isinstance(command, Wait):
                    if not self._carrier.may_come:
                        raise NoWorkersError(command.reason)
                else:
                    self._carrier.send(command, self._payload(command))
            for number, report in self._carrier.collect():
                self._hear(number, report)

    def _payload(self, command: Command) -> Any:
        match command:
            case Publish():
                return self._learner.weights
            case Rollout(_, _, keys):
                return [self._request(key) for key in keys]
            case Learn():
                return self._samples
        return None

    def _request(self, key: Key) -> Request:
        asked = self._requests[key]
        return Request(asked.prompt, asked.draw, asked.sample_index, self._known.get(key), asked.prompt_index)

    def _hear(self, number: int, report: Report) -> None:
        ledger = self._ledger
        match report:
            case Joined(speed):
                ledger.join(number, speed)
            case Lost():
                ledger.lose(number)
            case Holds(version):
                ledger.holds(number, version)
            case Grew(version, key, start, more):
                self._grow(number, version, key, start, more)
            case Ended(version, key, rollout):
                if ledger.finish(number, version, key):
                    self._rollouts.append(rollout)
                    self._known.pop(key, None)
                    has_ended = rollout.finish_reason == "stop"
                    self._lengths.observe(self._prompt_id(key), len(rollout.token_ids), has_ended)
            case Summed(version, part, found):
                if ledger.finish_part(number, version, part):
                    self._sums[part] = found

    def _grow(self, number: int, version: int, key: Key, start: int, more: Known) -> None:
        known = self._known.get(key)
        num_known = 0 if known is None else len(known.token_ids)
        num_tokens = start + len(more.token_ids)
        # A report that does not fit to what is there is one of a life before, or of a worker that has it no more.
        if start == num_known and key in self._requests:
            left = float(self._lengths.mean_left([self._prompt_id(key)], [num_tokens])[0])
            if self._ledger.advance(number, version, key, num_tokens, left):
                self._known[key] = joined(known, more)

    def _prompt_id(self, key: Key) -> int:
        return prompt_hash(np.asarray(self._requests[key].prompt, np.int32))
