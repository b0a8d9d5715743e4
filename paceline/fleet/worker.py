"""One worker of a fleet: its own engine and learner, which carry out commands one piece of work at a time.

A carrier hands it the commands of `commands.py`, in order, with their payloads (`take`), and lets it work in between
(`turn`): one step of the engine, or the sum of one part. It reports results at once. It holds one version of the
weights at a time, and ignores requests for another version. In spare time it runs ahead until told otherwise. A worker
without a learner does nothing else. It must never decide what to do next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from paceline.core.types import IntArray, Prefix, Request, Sampling
from paceline.fleet.commands import (
    Command,
    Drop,
    Equip,
    Generate,
    Learn,
    Preempt,
    Publish,
    RunAhead,
    SequenceKey,
    Spare,
    SpotTrain,
)
from paceline.fleet.reports import (
    Ask,
    Ended,
    Grew,
    Growth,
    Holds,
    LoadWeights,
    Rested,
    Spent,
    Summed,
    WorkerReport,
    Wrote,
)
from paceline.fleet.spot_part import SpotPart
from paceline.fleet.throughput import Throughput
from paceline.fleet.timesheet import GENERATE, LEARN, PUBLISH, RUN_AHEAD, SPOT_TRAIN, WAIT, Timesheet
from paceline.fleet.view import Speed
from paceline.rl.learner import Learner, TrainBatch
from paceline.rl.packing import Sample
from paceline.rollout.engine import Engine
from paceline.rollout.run_ahead.store import RunAheadText, prompt_id_of
from paceline.rollout.serving import Serving
from paceline.rollout.stats import Stats

TELL_EVERY = 16
"""Steps between progress reports: what a lost worker has not reported is generated again."""


SPOT_S = 10.0
"""How long the drafter is trained at a time, before the worker publishes a version and shows a sign of life."""
SPOT_TRY_S = 0.05
"""The same for a worker that cannot be interrupted."""


class FleetWorker:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        learner: Learner | None,
        report: Callable[[WorkerReport], None],
        spot: SpotPart | None = None,
        is_called: Callable[[], bool] | None = None,
        load: Callable[[Mapping[str, Tensor]], object] | None = None,
    ) -> None:
        """`is_called`: whether more urgent work waits; without it, spare time allows one short try.

        `load` takes what the driver publishes; None: the learner does or, without one, the decoder.
        """
        self._engine, self._learner, self._report = engine, learner, report
        self._load = load or (engine.decoder.load_weights if learner is None else learner.take_weights)
        self._spot, self._is_called = spot, is_called
        self._made_with: int | None = None
        """The version of the latest rollouts: hidden states are kept only from learning with the same weights."""
        self._pace = Throughput(engine.settings.max_sequences)
        self._sheet = Timesheet()
        self._version: int | None = None
        self._sampling: Sampling | None = None
        self._serving: Serving | None = None
        self._told: dict[SequenceKey, int] = {}
        """Number of tokens that the driver has of every live sequence."""
        self._num_steps = 0
        self._batch: TrainBatch | None = None
        self._parts: deque[int] = deque()
        self._spare: Spare | None = None
        """Current spare-time work, which then owns the serving."""
        self._prompt_ids: dict[int, int] = {}
        """By draw that it runs ahead."""

    def take(self, command: Command, payload: Any = None) -> None:
        """Carry out a command, or start to. `payload` is what `reports.py` defines, or the samples to learn from."""
        match command:
            case Publish(_, version):
                self._hold(version, payload)
            case Generate(_, version, _):
                if version == self._version:
                    self._roll_out(payload)
            case Learn(_, version, parts):
                if version == self._version:
                    self._learn(payload, parts)
            case Drop(_, keys, parts):
                self._drop(keys, parts)
            case RunAhead():
                self._run_ahead(command, payload)
            case SpotTrain():
                self.close()
                self._spare = command
                if self._spot is not None and payload is not None:
                    self._spot.go_on(payload)
            case Equip():
                if self._spot is not None:
                    self._spot.use(payload)
            case Preempt():
                self._end_spare()
            case _:
                raise ValueError(f"a worker cannot carry out {command!r}")

    def turn(self) -> bool:
        """Do one piece of work; returns whether there was any."""
        if isinstance(self._spare, SpotTrain):
            self._train_drafter(self._spare)
        elif self._spare is not None and self._serving is not None:
            self._step_ahead(self._serving)
        elif self._serving is not None:
            self._step(self._serving)
        elif self._parts:
            self._sum(self._parts.popleft())
        else:
            self._sheet.turn_to(WAIT)
            return False
        return True

    @property
    def speed(self) -> Speed:
        """The latest measurement."""
        return self._pace.speed

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights."""
        self._load(weights)

    def close(self) -> None:
        """Drop all work."""
        if self._serving is not None:
            self._serving.close()
        self._serving, self._batch, self._spare = None, None, None
        self._told.clear()
        self._parts.clear()

    def _hold(self, version: int, load: LoadWeights | None) -> None:
        """Load a version; without `load` its weights are already loaded."""
        if version != self._version:
            self._end_spare()
            self._sheet.turn_to(PUBLISH)
            self.close()
            self._version = None  # a load that fails half-way leaves no usable version
            if load is not None:
                load()
            self._version = version
            self._pace.fade()
            self._say_what_was_done()
        self._report(Holds(version))

    def _say_what_was_done(self, stats: Stats | None = None) -> None:
        """Report a finished piece of work; the worker counts as waiting until the next one."""
        now_s, stretches = self._sheet.drain()
        self._sheet.turn_to(WAIT)
        if stats is not None:
            self._pace.generated(stats, sum(stretch.seconds for stretch in stretches if stretch.name == GENERATE))
        for stretch in stretches:
            if stretch.name == LEARN:
                self._pace.learned(stretch.amount, stretch.seconds)
        self._report(Spent(now_s, stretches, self.speed, stats))

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _roll_out(self, ask: Ask) -> None:
        self._end_spare()
        self._made_with = self._version
        self._sheet.turn_to(GENERATE)
        if self._serving is not None and ask.sampling != self._sampling:
            self._end_serving()
        serving = self._serving or self._open(ask.sampling)
        live = serving.progress()
        new = [request for request in ask.requests if (request.draw, request.sample_index) not in live]
        self._keep_drafts(ask, new)
        serving.add(new)
        for request in new:
            self._told[self._key(request)] = 0 if request.prefix is None else len(request.prefix.token_ids)

    def _open(self, sampling: Sampling) -> Serving:
        self._sampling, self._serving = sampling, self._engine.serve(sampling)
        return self._serving

    def _keep_drafts(self, ask: Ask, requests: Sequence[Request]) -> None:
        """Give the engine the run-ahead text of these requests, to draft from."""
        for request in requests:
            draft = ask.drafts.get(self._key(request))
            if draft is not None and self._engine.ahead is not None:
                self._engine.ahead.put(ask.sampling, (request.draw, request.sample_index), draft)

    def _step(self, serving: Serving) -> None:
        assert self._version is not None
        ended = serving.step()
        self._sheet.turn_to(GENERATE, sum(len(rollout.token_ids) for rollout in ended))
        if not serving.has_work:
            self._end_serving()
        for rollout in ended:
            key = SequenceKey(rollout.draw, rollout.sample_index, self._stream)
            self._told.pop(key, None)
            self._report(Ended(self._version, key, rollout))
        self._num_steps += 1
        if self._num_steps % TELL_EVERY == 0 and self._serving is not None:
            self._tell(serving.look())

    def _end_serving(self) -> None:
        """Report the time spent before the last result, after which the driver may move on."""
        assert self._serving is not None
        self._serving.close()
        self._serving = None
        self._say_what_was_done(self._engine.stats)
        changed = None if self._spot is None else self._spot.judge(self._engine.stats)
        if changed is not None:
            self._report(changed)

    def _tell(self, requests: Iterable[Request]) -> None:
        growths = []
        for request in requests:
            key, known = self._key(request), request.prefix
            start = self._told.get(key, 0)
            if known is not None and len(known.token_ids) > start:
                self._told[key] = len(known.token_ids)
                growths.append(Growth(key, start, tail(known, start)))
        if growths:
            assert self._version is not None
            self._report(Grew(self._version, growths))

    def _drop(self, keys: Sequence[SequenceKey], parts: Sequence[int]) -> None:
        if self._serving is not None and self._spare is None:
            live = self._serving.progress()
            own = [(key.draw, key.sample) for key in keys if key.stream == self._stream]
            self._serving.take(key for key in own if key in live)
            if not self._serving.has_work:
                self._end_serving()
        for key in keys:
            self._told.pop(key, None)
        self._parts = deque(part for part in self._parts if part not in parts)

    def _key(self, request: Request) -> SequenceKey:
        return SequenceKey(request.draw, request.sample_index, self._stream)

    # --- spare time ---------------------------------------------------------------------------------------------------

    def _run_ahead(self, command: RunAhead, ask: Ask) -> None:
        """Start on the draws of a later step."""
        self.close()
        self._sheet.turn_to(RUN_AHEAD)
        self._spare = command
        self._prompt_ids = {request.draw: prompt_id_of(request.prompt) for request in ask.requests}
        self._open(ask.sampling).add(ask.requests)

    def _step_ahead(self, serving: Serving) -> None:
        ended = serving.step() if serving.has_work else []
        self._wrote([(r.draw, r.sample_index, r.token_ids) for r in ended], is_whole=True)
        self._num_steps += 1
        if not serving.has_work:
            self._end_spare()
        elif self._num_steps % TELL_EVERY == 0:
            self._say_what_was_done()
            self._sheet.turn_to(RUN_AHEAD)

    def _end_spare(self) -> None:
        """End spare-time work, preempted or done, and report what was written."""
        spare, self._spare = self._spare, None
        if spare is None or self._serving is None:
            return
        begun = [(r.draw, r.sample_index, r.prefix.token_ids) for r in self._serving.look() if r.prefix is not None]
        self._serving.close()
        self._serving = None
        self._wrote(begun, is_whole=False)
        self._say_what_was_done()
        self._report(Rested(spare))

    def _wrote(self, found: Iterable[tuple[int, int, Sequence[int] | IntArray]], is_whole: bool) -> None:
        """Report run-ahead text, by draw and sample."""
        texts = {
            SequenceKey(draw, sample, self._stream): RunAheadText(
                self._prompt_ids[draw], np.array(token_ids, np.int32), is_whole
            )
            for draw, sample, token_ids in found
            if len(token_ids)
        }
        self._sheet.turn_to(RUN_AHEAD, sum(len(text.tokens) for text in texts.values()))
        if texts:
            self._report(Wrote(texts))

    def _train_drafter(self, spare: SpotTrain) -> None:
        """Run one stretch of micro-steps; an urgent order ends it within one of them."""
        self._sheet.turn_to(SPOT_TRAIN)
        if self._spot is not None and self._learner is not None and self._version is not None:
            seconds, should_stop = (SPOT_S, self._is_called) if self._is_called else (SPOT_TRY_S, lambda: False)
            trained = self._spot.train(self._learner.policy_weights, self._version, seconds, should_stop)
            if trained is not None:
                self._sheet.turn_to(SPOT_TRAIN, int(trained.metrics["drafter/micro_steps"]))
                self._report(trained)
        self._spare = None
        self._say_what_was_done()
        self._report(Rested(spare))

    @property
    def _stream(self) -> str:
        assert self._sampling is not None
        return self._sampling.stream

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, samples: Sequence[Sample], parts: Sequence[int]) -> None:
        self._end_spare()
        assert self._learner is not None, "a worker without a learner gets no sums"
        if self._batch is None:
            self._sheet.turn_to(LEARN)
            self._engine.release_drafts()
            self._batch = self._learner.plan(samples)
        self._parts.extend(part for part in parts if part not in self._parts)

    def _sum(self, part: int) -> None:
        assert self._batch is not None and self._version is not None and self._learner is not None
        num_rows = sum(pack.num_rows for pack in self._batch.workers[part])
        self._sheet.turn_to(LEARN, num_rows)
        is_first_epoch = self._made_with == self._version
        observer = self._spot.observe if self._spot is not None and is_first_epoch else None
        found = self._learner.worker_sum(self._batch, part, observer)
        if not self._parts:
            self._say_what_was_done()
        self._report(Summed(self._version, part, found))


def tail(known: Prefix, start: int) -> Prefix:
    """The tokens from `start` on."""
    truncated = known.truncated_logprobs
    assert known.logprobs is not None, "only verified tokens are reported"
    return replace(
        known,
        token_ids=known.token_ids[start:],
        logprobs=known.logprobs[start:],
        truncated_logprobs=None if truncated is None else truncated[start:],
        spans=(),
    )


def joined(known: Prefix | None, more: Prefix) -> Prefix:
    """Both concatenated."""
    if known is None:
        return more
    assert known.logprobs is not None and more.logprobs is not None, "only verified tokens are reported"
    truncated = None
    if known.truncated_logprobs is not None and more.truncated_logprobs is not None:
        truncated = [*known.truncated_logprobs, *more.truncated_logprobs]
    return replace(
        known,
        token_ids=[*known.token_ids, *more.token_ids],
        logprobs=[*known.logprobs, *more.logprobs],
        truncated_logprobs=truncated,
    )
