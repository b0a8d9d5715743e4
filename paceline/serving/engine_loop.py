"""The engine's thread: takes jobs from the routes, steps the open engine, and hands back what has come.

    route -> submit(job) -> [orders] -> Serving.add / step / new_tokens -> job.deliver(events) -> route

Only this thread touches the engine. Orders are carried out between steps, so a change of weights or a pause falls
between two tokens. A step that fails ends the answers that were open, and the engine is opened afresh. It must never
wait for a client.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.core.noise import prompt_hash
from paceline.core.types import Request, Rollout, Sampling
from paceline.rollout.engine import Engine
from paceline.rollout.requests import NewTokens
from paceline.rollout.serving import Serving
from paceline.serving.arrivals import Arrivals, arrival_draw
from paceline.serving.jobs import Answered, AnswerJob, Broken, Busy, Grown, JobEvent, PauseMode

GARBAGE_EVERY_S = 30.0
"""An open engine puts full garbage collections off; an idle server catches up on them this often."""
Found = TypeVar("Found")


class EngineLoop:
    """One engine and its thread."""

    def __init__(
        self,
        engine: Engine,
        seed: int,
        most_open: int,
        version: int = 0,
        num_restarts: int = 0,
        prefix_share: float = 0.0,
    ) -> None:
        """`version` numbers the weights; `num_restarts` keeps noise apart from that of the server's earlier lives.

        `prefix_share` is as in `Engine.serve`.
        """
        self._prefix_share = prefix_share
        self._engine, self._seed, self._most_open, self._num_restarts = engine, seed, most_open, num_restarts
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[str, AnswerJob] = {}
        """By the names of their open answers."""
        self._held: list[AnswerJob] = []
        """Jobs that came while the engine finishes those before a pause."""
        self._mode: PauseMode | None = None
        self._waiters: list[Future[None]] = []
        self._arrivals = Arrivals()
        self._num_prompts = 0
        self._serving: Serving | None = None
        self._version = version
        self._is_asleep = False
        self._collected_at = time.monotonic()
        self.num_tokens = self.num_answers = self.num_aborted = self.num_prompt_tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, job: AnswerJob) -> Future[None]:
        """Ask for a job's answers. The result raises a ValueError if the engine refuses it, Busy if there are many."""
        return self._order(lambda: self._begin(job))

    def abort(self, jobs: Sequence[AnswerJob]) -> Future[None]:
        """End these jobs; their answers come as far as they have got."""
        return self._order(lambda: self._abort(jobs))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop stepping: after the open answers (wait), at once (keep), or ending all of them (abort)."""
        done = _promise()
        self._orders.put(lambda: self._pause(mode, done))
        return done

    def resume(self) -> Future[None]:
        """Go on after a pause."""
        return self._order(self._resume)

    def change_weights(self, change: Callable[[], object], version: int | None) -> Future[int]:
        """Change the weights between two steps; returns the new version."""
        return self._order(lambda: self._change_weights(change, version))

    def call(self, work: Callable[[], Found]) -> Future[Found]:
        """Have something done between two steps."""
        return self._order(work)

    def forget_prefixes(self) -> Future[None]:
        """Free the pages of finished texts."""
        return self._order(lambda: self._serving.forget_prefixes() if self._serving is not None else None)

    def sleep(self) -> Future[None]:
        """Close the engine and free its memory, after a pause has ended what was open; new jobs wait."""
        return self._order(self._sleep)

    def wake_up(self) -> Future[None]:
        """Go on after a sleep."""
        return self._order(self._resume)

    def close(self) -> None:
        """End the thread; open answers break."""
        self._orders.put(None)
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the thread lives; it does not end by itself unless something is broken."""
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether it is paused."""
        return self._mode is not None

    @property
    def is_asleep(self) -> bool:
        """Whether it sleeps."""
        return self._is_asleep

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of prompts that were found cached, since the engine was opened."""
        return self._engine.num_prefix_tokens

    @property
    def num_held(self) -> int:
        """Answers that wait for the end of a pause to begin."""
        return sum(job.num_answers for job in self._held)

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._version

    @property
    def num_open(self) -> int:
        """Answers still to come."""
        return len(self._jobs)

    def _order(self, work: Callable[[], Found]) -> Future[Found]:
        done = _promise()

        def carry_out() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._orders.put(carry_out)
        return done

    # --- in the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._carry_out_orders():
                if self._can_step:
                    self._step()
                if self._serving is not None and not self._serving.has_work:
                    self._rest()
        finally:
            self._break_off("the server is shutting down")

    @property
    def _can_step(self) -> bool:
        return self._mode in (None, "wait") and self._serving is not None and self._serving.has_work

    def _carry_out_orders(self) -> bool:
        """Carry out what has been ordered, waiting for an order if there is nothing else to do; False: to close."""
        while True:
            try:
                order = self._orders.get(block=not self._can_step)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _rest(self) -> None:
        """All answers are out: let those go on who wait for that, and collect garbage, which steps put off."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result(None)
        if time.monotonic() - self._collected_at > GARBAGE_EVERY_S:
            gc.collect()
            self._collected_at = time.monotonic()

    def _opened(self) -> Serving:
        if self._serving is None:
            self._serving = self._engine.serve(Sampling(), (), self._version, self._prefix_share)
        return self._serving

    def _begin(self, job: AnswerJob) -> None:
        num_open = len(self._jobs) + self.num_held
        if num_open + job.num_answers > self._most_open:
            raise Busy(f"the server has {num_open} open answers and takes {self._most_open}; try again later")
        if self._mode == "wait":
            self._held.append(job)
            return
        requests = [request for prompt in enumerate(job.prompts) for request in self._requests(job, *prompt)]
        self._opened().add(requests)
        self.num_prompt_tokens += sum(map(len, job.prompts))
        for number, request in enumerate(requests):
            assert request.request_id is not None
            job.open[request.request_id] = number
            self._jobs[request.request_id] = job

    def _requests(self, job: AnswerJob, number: int, prompt: Sequence[int]) -> list[Request]:
        """With a seed, the noise is that of `Engine.generate` with these prompts; else, that of this arrival."""
        sampling, draw = job.sampling, number
        if not job.has_seed:
            prompt_id = prompt_hash(prompt)
            arrival = self._arrivals.next(job.salt, prompt_id)
            draw = arrival_draw(self._version, job.salt, prompt_id, arrival, self._num_restarts)
        self._num_prompts += 1
        index = self._num_prompts
        return [
            Request(
                prompt,
                draw,
                sample,
                prompt_index=index,
                sampling=sampling,
                request_id=f"{index}-{sample}",
                salt=job.salt,
            )
            for sample in range(sampling.n)
        ]

    def _step(self) -> None:
        serving = self._opened()
        try:
            rollouts = serving.step()
        except Exception as error:
            self._serving = None
            self._break_off(f"the engine failed: {error}")
            return
        self._tell(serving.new_tokens(), rollouts)

    def _tell(self, grown: Sequence[NewTokens], rollouts: Sequence[Rollout]) -> None:
        events: dict[AnswerJob, list[JobEvent]] = {}
        for tokens in grown:
            job = self._jobs[str(tokens.key)]
            events.setdefault(job, []).append(Grown(job.open[str(tokens.key)], tokens))
        for rollout in rollouts:
            name = f"{rollout.prompt_index}-{rollout.sample_index}"
            job = self._jobs.pop(name)
            events.setdefault(job, []).append(Answered(job.open.pop(name), rollout))
            self.num_tokens += len(rollout.token_ids)
            self.num_answers += 1
            self.num_aborted += rollout.finish_reason == "abort"
        for job, found in events.items():
            job.deliver(found)

    def _break_off(self, message: str) -> None:
        """No open answer will be completed."""
        broken = dict.fromkeys([*self._jobs.values(), *self._held])
        self._jobs, self._held = {}, []
        if self._serving is not None:
            self._serving.close()
            self._serving = None
        for job in broken:
            job.open.clear()
            job.deliver([Broken(message)])
        for waiter in self._waiters:
            waiter.set_result(None)
        self._waiters = []

    def _abort(self, jobs: Sequence[AnswerJob]) -> None:
        if self._serving is not None:
            self._serving.abort([name for job in jobs for name in job.open])
        for job in [job for job in self._held if job in jobs]:
            self._held.remove(job)
            job.deliver([Broken("the request was aborted before it began")])

    def _pause(self, mode: PauseMode, done: Future[None]) -> None:
        if self._is_asleep:
            done.set_result(None)
            return
        self._mode = mode
        if mode == "abort":
            self._abort(list(dict.fromkeys(self._jobs.values())))
            if self._jobs:
                self._step()  # nothing is left to generate: it returns what was aborted
        if mode == "wait" and self._jobs:
            self._waiters.append(done)
        else:
            done.set_result(None)

    def _sleep(self) -> None:
        if self._jobs:
            raise ValueError("answers are open; sleep with mode=abort or mode=wait")
        self._mode, self._is_asleep = "wait", True
        if self._serving is not None:
            self._serving.close()
            self._serving = None
        self._engine.release_memory()

    def _resume(self) -> None:
        self._mode, self._is_asleep = None, False
        held, self._held = self._held, []
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result(None)
        for job in held:
            try:
                self._begin(job)
            except (ValueError, Busy) as error:
                job.deliver([Broken(str(error))])

    def _change_weights(self, change: Callable[[], Any], version: int | None) -> int:
        if self._is_asleep:
            change()
            self._version = self._version + 1 if version is None else version
        else:
            self._change_open(change, version)
        self._arrivals.forget()
        return self._version

    def _change_open(self, change: Callable[[], Any], version: int | None) -> None:
        serving = self._opened()
        try:
            serving.change_weights(change, version)
        except Exception as error:
            if not serving.is_open:
                self._serving = None
                self._break_off(f"the change of weights failed: {error}")
            raise
        self._version = serving.version


def _promise() -> Future[Any]:
    """A future that a client which goes away cannot cancel: the thread will keep it."""
    promise: Future[Any] = Future()
    promise.set_running_or_notify_cancel()
    return promise
