"""One worker of a fleet: an engine and a learner of its own that do as they are told, a piece at a time.

A carrier hands it the commands of `fleet_view.py`, in order, each with what it needs (`take`), and lets it work between
them (`turn`): one step of the engine, or the sum of one part. What it finds it reports at once. It holds one version of
the weights at a time; what it is asked for with another version it leaves alone. It must never decide what to do next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.engine.engine import Engine
from paceline.engine.serving import Serving
from paceline.fleet.fleet_view import Command, Drop, Key, Learn, Publish, Rollout
from paceline.fleet.messages import Ended, Grew, Holds, Report, Summed
from paceline.rl.learner import Batch, Learner
from paceline.rl.packing import Sample
from paceline.types import Known, Request, Sampling

TELL_EVERY = 16
"""Steps between reports of how far sequences are: what a worker that is lost has not told is made again."""


class FleetWorker:
    """See the module."""

    def __init__(self, engine: Engine, learner: Learner, sampling: Sampling, report: Callable[[Report], None]) -> None:
        self._engine, self._learner, self._sampling, self._report = engine, learner, sampling, report
        self._version: int | None = None
        self._serving: Serving | None = None
        self._told: dict[Key, int] = {}
        """Tokens of every live sequence that the driver has."""
        self._num_steps = 0
        self._batch: Batch | None = None
        self._parts: deque[int] = deque()

    def take(self, command: Command, payload: Any = None) -> None:
        """Do this, or begin with it. `payload`: weights, requests or samples."""
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
        if self._serving is not None and self._serving.has_work:
            self._step(self._serving)
        elif self._parts:
            part = self._parts.popleft()
            assert self._batch is not None and self._version is not None
            self._report(Summed(self._version, part, self._learner.worker_sum(self._batch, part)))
        else:
            return False
        return True

    def close(self) -> None:
        """Leave everything."""
        self._rest()

    def _hold(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """Weights that are None are in place already: the driver's own worker."""
        if version != self._version:
            self._rest()
            if weights is not None:
                self._learner.take_weights(weights)
            self._version = version
        self._report(Holds(version))

    def _rest(self) -> None:
        if self._serving is not None:
            self._serving.close()
        self._serving, self._batch = None, None
        self._told.clear()
        self._parts.clear()

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _roll_out(self, requests: Sequence[Request]) -> None:
        if self._serving is None:
            self._serving = self._engine.serve(self._sampling)
        live = self._serving.progress()
        new = [request for request in requests if (request.draw, request.sample_index) not in live]
        self._serving.add(new)
        for request in new:
            self._told[self._key(request)] = 0 if request.known is None else len(request.known.token_ids)

    def _step(self, serving: Serving) -> None:
        assert self._version is not None
        for rollout in serving.step():
            key = Key(rollout.draw, rollout.sample_index, self._sampling.stream)
            self._told.pop(key, None)
            self._report(Ended(self._version, key, rollout))
        self._num_steps += 1
        if self._num_steps % TELL_EVERY == 0:
            for request in serving.look():
                self._tell(request)

    def _tell(self, request: Request) -> None:
        key, known = self._key(request), request.known
        start = self._told.get(key, 0)
        if known is not None and len(known.token_ids) > start:
            assert self._version is not None
            self._told[key] = len(known.token_ids)
            self._report(Grew(self._version, key, start, tail(known, start)))

    def _drop(self, keys: Sequence[Key], parts: Sequence[int]) -> None:
        if self._serving is not None:
            live = self._serving.progress()
            self._serving.take((key.draw, key.sample) for key in keys if (key.draw, key.sample) in live)
        for key in keys:
            self._told.pop(key, None)
        self._parts = deque(part for part in self._parts if part not in parts)

    def _key(self, request: Request) -> Key:
        return Key(request.draw, request.sample_index, self._sampling.stream)

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, samples: Sequence[Sample], parts: Sequence[int]) -> None:
        if self._batch is None:
            self._batch = self._learner.plan(samples)
        self._parts.extend(part for part in parts if part not in self._parts)


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
