"""One worker of a fleet: an engine and a learner of its own that do as they are told, a piece at a time.

A carrier hands it the commands of `fleet_view.py`, in order, each with what it needs (`take`), and lets it work between
them (`turn`): one step of the engine, or the sum of one part. What it finds it reports at once. It holds one version of
the weights at a time; what it is asked for with another version it leaves alone. It must never decide what to do next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.engine.engine import Engine
from paceline.engine.serving import Serving
from paceline.engine.stats import Stats
from paceline.fleet.fleet_view import Command, Drop, Key, Learn, Publish, Rollout, Speed
from paceline.fleet.messages import Ask, Ended, Grew, Holds, Load, Report, Spent, Summed
from paceline.fleet.timesheet import GENERATE, LEARN, PUBLISH, WAIT, Timesheet
from paceline.rl.learner import Batch, Learner
from paceline.rl.packing import Sample
from paceline.types import Known, Request, Sampling

TELL_EVERY = 16
"""Steps between reports of how far sequences are: what a worker that is lost has not told is made again."""
FIRST_SPEED = Speed(step_s=0.005, row_s=0.001, prefill_s=0.0002, learn_s=0.001, num_slots=1)
"""Before anything was measured; what counts is that it is the same for all."""
FRESH = 0.5
"""How much the latest measurement counts."""


class FleetWorker:
    """See the module."""

    def __init__(self, engine: Engine, learner: Learner, report: Callable[[Report], None]) -> None:
        self._engine, self._learner, self._report = engine, learner, report
        self.speed = replace(FIRST_SPEED, num_slots=engine.settings.max_sequences)
        self._sheet = Timesheet()
        self._version: int | None = None
        self._sampling: Sampling | None = None
        self._serving: Serving | None = None
        self._told: dict[Key, int] = {}
        """Tokens of every live sequence that the driver has."""
        self._num_steps = 0
        self._batch: Batch | None = None
        self._parts: deque[int] = deque()

    def take(self, command: Command, payload: Any = None) -> None:
        """Do this, or begin with it. `payload` is what `messages.py` says, or the samples to learn from."""
        match command:
            case Publish(_, version):
                self._hold(version, payload)
            case Rollout(_, version, _):
                if version == self._version:
                    self._roll_out(payload)
            case Learn(_, version, parts):
                if version == self._version:
                    self._learn(payload, parts)
            case Drop(_, keys, parts):
                self._drop(keys, parts)
            case _:
                raise ValueError(f"a worker cannot carry out {command!r}")

    def turn(self) -> bool:
        """One piece of work; whether there was any."""
        if self._serving is not None:
            self._step(self._serving)
        elif self._parts:
            self._sum(self._parts.popleft())
        else:
            self._sheet.turn_to(WAIT)
            return False
        return True

    def load(self, weights: Any) -> None:
        """Put weights in place; for a carrier that has them at hand."""
        self._learner.take_weights(weights)

    def close(self) -> None:
        """Leave everything."""
        if self._serving is not None:
            self._serving.close()
        self._serving, self._batch = None, None
        self._told.clear()
        self._parts.clear()

    def _hold(self, version: int, load: Load | None) -> None:
        """Without `load` the weights are in place already."""
        if version != self._version:
            self._sheet.turn_to(PUBLISH)
            self.close()
            self._version = None  # whoever fails half-way holds nothing
            if load is not None:
                load()
            self._version = version
            self._say_what_was_done()
        self._report(Holds(version))

    def _say_what_was_done(self, stats: Stats | None = None) -> None:
        """A piece of work is over; it waits unless there is another."""
        now_s, stretches = self._sheet.drain()
        self._sheet.turn_to(WAIT)
        seconds = {name: sum(s.seconds for s in stretches if s.name == name) for name in (GENERATE, LEARN)}
        amounts = {name: sum(s.amount for s in stretches if s.name == name) for name in (GENERATE, LEARN)}
        self.speed = measured(self.speed, stats, seconds[GENERATE], amounts[LEARN], seconds[LEARN])
        self._report(Spent(now_s, stretches, self.speed, stats))

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _roll_out(self, ask: Ask) -> None:
        self._sheet.turn_to(GENERATE)
        if self._serving is not None and ask.sampling != self._sampling:
            self._end_serving()
        if self._serving is None:
            self._sampling, self._serving = ask.sampling, self._engine.serve(ask.sampling)
        live = self._serving.progress()
        new = [request for request in ask.requests if (request.draw, request.sample_index) not in live]
        self._serving.add(new)
        for request in new:
            self._told[self._key(request)] = 0 if request.known is None else len(request.known.token_ids)

    def _step(self, serving: Serving) -> None:
        assert self._version is not None and self._sampling is not None
        ended = serving.step()
        self._sheet.turn_to(GENERATE, sum(len(rollout.token_ids) for rollout in ended))
        if not serving.has_work:
            self._end_serving()
        for rollout in ended:
            key = Key(rollout.draw, rollout.sample_index, self._sampling.stream)
            self._told.pop(key, None)
            self._report(Ended(self._version, key, rollout))
        self._num_steps += 1
        if self._num_steps % TELL_EVERY == 0 and self._serving is not None:
            for request in serving.look():
                self._tell(request)

    def _end_serving(self) -> None:
        """Say what it took before the last result is told: with that the driver may go on."""
        assert self._serving is not None
        self._serving.close()
        self._serving = None
        self._say_what_was_done(self._engine.stats)

    def _tell(self, request: Request) -> None:
        key, known = self._key(request), request.known
        start = self._told.get(key, 0)
        if known is not None and len(known.token_ids) > start:
            assert self._version is not None
            self._told[key] = len(known.token_ids)
            self._report(Grew(self._version, key, start, tail(known, start)))

    def _drop(self, keys: Sequence[Key], parts: Sequence[int]) -> None:
        if self._serving is not None and self._sampling is not None:
            live = self._serving.progress()
            own = [(key.draw, key.sample) for key in keys if key.stream == self._sampling.stream]
            self._serving.take(key for key in own if key in live)
            if not self._serving.has_work:
                self._end_serving()
        for key in keys:
            self._told.pop(key, None)
        self._parts = deque(part for part in self._parts if part not in parts)

    def _key(self, request: Request) -> Key:
        assert self._sampling is not None
        return Key(request.draw, request.sample_index, self._sampling.stream)

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, samples: Sequence[Sample], parts: Sequence[int]) -> None:
        if self._batch is None:
            self._sheet.turn_to(LEARN)
            self._engine.release_drafts()
            self._batch = self._learner.plan(samples)
        self._parts.extend(part for part in parts if part not in self._parts)

    def _sum(self, part: int) -> None:
        assert self._batch is not None and self._version is not None
        num_rows = sum(pack.num_rows for pack in self._batch.workers[part])
        self._sheet.turn_to(LEARN, num_rows)
        found = self._learner.worker_sum(self._batch, part)
        if not self._parts:
            self._say_what_was_done()
        self._report(Summed(self._version, part, found))


def measured(speed: Speed, stats: Stats | None, generate_s: float, num_rows: int, learn_s: float) -> Speed:
    """A speed after some more was seen. Of a step's two prices only their sum is seen, so both change alike."""
    if stats is not None and stats.steps and generate_s:
        # Guesses that come true make several tokens of a sequence in one step; the rules count by the token.
        expected = speed.step_s * stats.steps * stats.accept_length + speed.row_s * stats.tokens
        ratio = (1 - FRESH) + FRESH * generate_s / max(expected, 1e-9)
        speed = replace(
            speed, step_s=speed.step_s * ratio, row_s=speed.row_s * ratio, prefill_s=speed.prefill_s * ratio
        )
    if num_rows and learn_s:
        speed = replace(speed, learn_s=(1 - FRESH) * speed.learn_s + FRESH * learn_s / num_rows)
    return speed


def tail(known: Known, start: int) -> Known:
    """The tokens from `start` on."""
    truncated = known.truncated_logprobs
    return replace(
        known,
        token_ids=known.token_ids[start:],
        logprobs=known.logprobs[start:],
        truncated_logprobs=None if truncated is None else truncated[start:],
        spans=(),
    )


def joined(known: Known | None, more: Known) -> Known:
    """Both, one after the other."""
    if known is None:
        return more
    truncated = None
    if known.truncated_logprobs is not None and more.truncated_logprobs is not None:
        truncated = [*known.truncated_logprobs, *more.truncated_logprobs]
    return replace(
        known,
        token_ids=[*known.token_ids, *more.token_ids],
        logprobs=[*known.logprobs, *more.logprobs],
        truncated_logprobs=truncated,
    )
