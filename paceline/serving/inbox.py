"""A request that is being answered: its job is with the engine's thread, its events come back to its route.

Generating routes begin a job and read its events until the last answer. A client that goes away ends its job. Nothing
here may wait for the engine in the event loop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import Request

from paceline.core.documents import plain
from paceline.core.types import Rollout, Sampling
from paceline.serving.jobs import Answered, AnswerJob, Broken, Grown, JobEvent
from paceline.serving.state import Refusal, Server

LOOK_EVERY_S = 1.0
"""How often a client that waits is looked after: one that has gone away frees its rows."""


@dataclass
class Inbox:
    """A job's events, on their way from the engine's thread to its route."""

    job: AnswerJob
    response_id: str
    events: asyncio.Queue[list[JobEvent]]
    num_open: int
    """Answers that the route has not seen yet."""

    def close(self, server: Server) -> None:
        """Nobody reads any more: end what is still open."""
        if server.jobs.pop(self.response_id, None) is not None and self.num_open and server.model is not None:
            server.model.loop.abort([self.job])


@dataclass(frozen=True)
class AnswerRequest:
    """What a generating route asks of the engine."""

    prompts: Sequence[list[int]]
    sampling: Sampling
    has_seed: bool
    salt: str


async def begin(server: Server, asked: AnswerRequest, prefix: str, response_id: str | None = None) -> Inbox:
    """Start a job. A client may name it, but not like one that is open."""
    model, here = server.ready(), asyncio.get_running_loop()
    events: asyncio.Queue[list[JobEvent]] = asyncio.Queue()

    def deliver(found: list[JobEvent]) -> None:
        with suppress(RuntimeError):  # the event loop has closed: nobody waits any more
            here.call_soon_threadsafe(events.put_nowait, found)

    job = AnswerJob(asked.prompts, asked.sampling, deliver, asked.has_seed, asked.salt)
    name = response_id or f"{prefix}-{uuid.uuid4().hex}"
    if name in server.jobs:
        raise ValueError(f"the request_id {plain(name)} is in use; give every request its own")
    server.jobs[name] = job
    try:
        await asyncio.wrap_future(model.loop.submit(job))
    except BaseException as error:
        del server.jobs[name]
        if isinstance(error, asyncio.CancelledError):
            model.loop.abort([job])
        raise
    return Inbox(job, name, events, job.num_answers)


async def events_of(server: Server, request: Request, inbox: Inbox) -> AsyncIterator[Grown | Answered]:
    """The events of a job until its last answer; if the client goes away, the job ends."""
    looked_at = time.monotonic()
    try:
        while inbox.num_open:
            found: list[JobEvent] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    found = await inbox.events.get()
            if time.monotonic() - looked_at >= LOOK_EVERY_S:
                looked_at = time.monotonic()
                if await request.is_disconnected():
                    return
            for event in found:
                if isinstance(event, Broken):
                    raise Refusal(503, event.message)
                inbox.num_open -= isinstance(event, Answered)
                yield event
    finally:
        inbox.close(server)


async def rollouts_of(server: Server, request: Request, inbox: Inbox) -> list[Rollout]:
    """All answers of a job, in the order of their numbers."""
    found = {
        event.number: event.rollout async for event in events_of(server, request, inbox) if isinstance(event, Answered)
    }
    return [found[number] for number in sorted(found)]
