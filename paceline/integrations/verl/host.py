"""The engine of one server: opened by the first weights, changed by the next, closed to free memory.

Lives in the server's process; `server.py` calls it from verl's event loop, and `EngineLoop` steps the engine in its own
thread. It knows neither verl nor Ray. No request ever runs on weights that have not come whole.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.types import Rollout, Sampling
from paceline.integrations.verl.settings import ReplicaPlan
from paceline.rollout.engine import Engine
from paceline.serving.engine_loop import EngineLoop
from paceline.serving.jobs import Answered, AnswerJob, Broken, JobEvent


class _Open(NamedTuple):
    request_id: str
    answer: asyncio.Future[Rollout]


class EngineHost:
    """Answers requests while it has weights and its gate is open."""

    def __init__(self, plan: ReplicaPlan, most_open: int) -> None:
        self._plan, self._most_open = plan, most_open
        self._engine: Engine | None = None
        self._loop: EngineLoop | None = None
        self._open: dict[AnswerJob, _Open] = {}
        self._num_loads = 0
        self._rejects = False
        self._gate = asyncio.Event()
        self._gate.set()

    @property
    def engine(self) -> Engine | None:
        """None before the first weights, and while released."""
        return self._engine

    @property
    def version(self) -> int | None:
        """The number of the weights; None without any."""
        return None if self._loop is None else self._loop.version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, salt: str, has_seed: bool
    ) -> Rollout | None:
        """One response, or None if the gate is closed and rejects; otherwise a closed gate makes it wait.

        Without a seed the noise is keyed by the weights, the salt, the prompt, and how often that prompt has come.
        """
        while not self._gate.is_set():
            if self._rejects:
                return None
            await self._gate.wait()
        if self._loop is None:
            raise RuntimeError("the engine has no weights: none have come yet, or verl has put the replica to sleep")
        loop, home = self._loop, asyncio.get_running_loop()
        answer: asyncio.Future[Rollout] = home.create_future()

        def deliver(events: list[JobEvent]) -> None:
            home.call_soon_threadsafe(_settle, answer, events)

        # Loading the same version again must not repeat noise, so loads are counted.
        job = AnswerJob([prompt_ids], sampling, deliver, has_seed, salt=f"{salt}/{self._num_loads}")
        self._open[job] = _Open(request_id, answer)
        try:
            await asyncio.wrap_future(loop.submit(job))
            return await answer
        except asyncio.CancelledError:
            loop.abort([job])
            raise
        finally:
            del self._open[job]

    async def abort(self, request_id: str) -> bool:
        """End the requests of this id; they answer as far as they have got. False: there is none."""
        jobs = [job for job, open_ in self._open.items() if open_.request_id == request_id]
        if self._loop is not None and jobs:
            await asyncio.wrap_future(self._loop.abort(jobs))
        return bool(jobs)

    async def close_gate(self, rejects: bool) -> list[str]:
        """End all requests and let none in until `open_gate`; returns the ids of those that were open."""
        self._rejects = rejects
        self._gate.clear()
        ended = dict(self._open)
        if self._loop is not None:
            await asyncio.wrap_future(self._loop.pause("abort"))
            await asyncio.wrap_future(self._loop.resume())
        await _all_settled(open_.answer for open_ in ended.values())
        return [open_.request_id for open_ in ended.values()]

    def open_gate(self) -> None:
        """Let requests in again."""
        self._rejects = False
        self._gate.set()

    async def drain(self) -> None:
        """Wait until no request is open."""
        while self._open:
            await _all_settled([open_.answer for open_ in self._open.values()])
            await asyncio.sleep(0)

    async def load(self, weights: Mapping[str, Tensor], version: int | None) -> None:
        """Go on with these weights, all of them or none (ValueError). Open requests continue under them."""
        if self._loop is None:
            self._engine = await asyncio.to_thread(self._plan.build, weights)
            self._loop = EngineLoop(self._engine, seed=0, most_open=self._most_open)
            change = _nothing
        else:
            assert self._engine is not None, "a loop has an engine"
            change = partial(self._engine.decoder.load_weights, weights)
        self._num_loads += 1
        await asyncio.wrap_future(self._loop.change_weights(change, version))

    async def release(self) -> None:
        """Wait for the open requests, then free the weights and the KV cache; the drafters keep what they remember."""
        await self.drain()
        if self._loop is not None:
            await asyncio.to_thread(self._loop.close)
        self._loop = self._engine = None
        gc.collect()
        if self._plan.device != "cpu":
            torch.cuda.empty_cache()


def _nothing() -> None:
    """The engine was built with these weights."""


def _settle(answer: asyncio.Future[Rollout], events: Sequence[JobEvent]) -> None:
    for event in events:
        if answer.done():
            return
        if isinstance(event, Answered):
            answer.set_result(event.rollout)
        elif isinstance(event, Broken):
            answer.set_exception(RuntimeError(event.message))


async def _all_settled(answers: Iterable[asyncio.Future[Rollout]]) -> None:
    await asyncio.gather(*answers, return_exceptions=True)
