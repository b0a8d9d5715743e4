"""The rollout engine: prompts in, rollouts out, with the same tokens for every drafter, batch and schedule.

    prompts -> scheduler.plan -> proposer.propose -> runner.launch -> verify -> scheduler.commit -> rollouts
                    ^-----------------------------------------------------------------'

`Engine.step` is one iteration of that loop. `generate` iterates until one list of prompts is done; `serve` opens the
engine for requests that come and go between steps (`serving.py`). The engine owns its parts, no part references its
owner, and only `verify.py` decides tokens. If the caller names its next requests (`ahead`), nearly free rows start
them early; the text they write comes back as a draft (`run_ahead/`).
"""

from __future__ import annotations

import gc
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.types import Drafter, Prompt, Request, Rollout, Sampling, Verdict
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.executors import make_executor
from paceline.model.policy import Policy
from paceline.model.self_test import require_exact
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.model_drafter import ModelDrafter
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.memory_plan import MemoryPlan
from paceline.rollout.progress import show_progress
from paceline.rollout.proposer import NO_PROPOSAL, NOTHING_EXPECTED, Proposal, Proposer
from paceline.rollout.requests import RequestBook
from paceline.rollout.run_ahead.admission import run_ahead_room
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.rollout.runner import Flight, Lane, Runner
from paceline.rollout.scheduler import Plan, Scheduler
from paceline.rollout.sequence import Sequence
from paceline.rollout.serving import Serving
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.speculation.step_line import StepLine
from paceline.rollout.stats import Stats, token_ms
from paceline.rollout.token_value import TokenValues
from paceline.rollout.verify import NonFiniteLogits, SampledRows, emit, verify

OnFinish = Callable[[Rollout], None]

FROM_SETTINGS: Any = object()
"""Stands for "as in the settings", since None already means "no drafter"."""
NEVER = 2**30
"""As the threshold for full garbage collections: effectively none."""
_GARBAGE_LOCK = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []
"""Python's garbage collection thresholds, saved once per running call."""
_PROBE_TOKENS = 1024
"""Context length used to measure the cost of reading cached tokens."""
AHEAD_REST = 16
HOST_BOUND = 1.3
"""A step that takes this many times what the GPU needs for it waits for the host."""
_MEMORY_SHARE, _GPU_SHARE = 0.25, 0.7
"""Share of free memory that the KV cache may fill when `kv_tokens` is not set: on the host, on a GPU."""


class Engine:
    """Generates rollouts with one policy. Not thread-safe, except for `abort`."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        drafter: str | Drafter | DrafterSet | None = FROM_SETTINGS,
        settings: EngineSettings | None = None,
        budget: BudgetSettings | None = None,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.settings = settings or EngineSettings()
        self.stats = Stats()
        self._budget = budget or BudgetSettings()
        if decoder.ops.is_exact:
            require_exact(decoder)
        drafters = make_drafters(self.settings.drafter if drafter is FROM_SETTINGS else drafter)
        if drafters is not None:
            drafters = drafters.behind_doors(decoder.config.vocab_size, self.settings.drafter_timeout_s)
        self.eagle: ModelDrafter | None = None if drafters is None else drafters.model
        """The model drafter, if any; `spot/` gives it new versions."""
        num_layers = decoder.config.num_layers + (self.eagle is not None)
        cached = replace(decoder.config, num_layers=num_layers)
        self._cache = cache = decoder.ops.allocate_cache(cached, _num_pages(decoder, self.settings, cached))
        self._executor = make_executor(decoder, cache, self.settings.max_rows, self.settings.graphs, self.eagle)
        self._scheduler = Scheduler(
            cache,
            self.settings.max_sequences,
            self.settings.max_rows,
            self.settings.prefill_chunk,
            None if self._executor.moves_nodes else cache.move,
        )
        self._runner = Runner(decoder, self._executor, cache)
        self._queued: Flight | None = None
        self._collected_at = self._left_at = 0.0
        self._ahead_rest = 0
        """For how many steps run-ahead will not be started, because it did not pay lately."""
        self._walls = StepLine()
        """The wall-clock time of steps without drafts."""
        if self.eagle is not None:
            self.eagle.attach(decoder, cache)
        self.ahead = RunAheadStore(self.settings.ahead_tokens) if self.settings.run_ahead else None
        self._replay = Replay(name="ahead") if self.settings.run_ahead else None
        self._token_values = TokenValues(self._replay, self.ahead, can_draft_run_ahead=drafters is not None)
        if self._replay is not None:
            drafters = (drafters or DrafterSet()).led_by(self._replay)
        self._proposer = (
            self._make_proposer(drafters) if drafters is not None and self._budget.max_draft_nodes else None
        )
        self._last_call = Stats()
        self._requests = RequestBook(
            decoder.config, tokenizer, self._scheduler, self._token_values, self.ahead, self._replay, self._proposer
        )
        self._lock = threading.Lock()
        self._aborts: list[tuple[int | None, int | None]] = []

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        drafter: str | Drafter | DrafterSet | None = FROM_SETTINGS,
        exact: bool | None = None,
        settings: EngineSettings | None = None,
        budget: BudgetSettings | None = None,
    ) -> Engine:
        """Load a Hugging Face folder or hub id. `dtype` rounds the weights; `settings.precision` is the arithmetic.

        Arguments left out come from `settings`, which defaults to the suffix drafter and exact float32 on a CPU.
        """
        settings = settings or EngineSettings()
        policy = Policy.load(path, device, settings.exact if exact is None else exact, settings.precision, dtype)
        return cls(policy.decoder, policy.tokenizer, drafter, settings, budget)

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        sampling: Sampling | None = None,
        draws: SequenceOf[int] | None = None,
        on_finish: OnFinish | None = None,
        progress: bool = False,
        ahead: SequenceOf[tuple[Prompt, int]] = (),
    ) -> list[Rollout]:
        """Return `sampling.n` rollouts per prompt, ordered by prompt, then sample.

        `draws` numbers this use of each prompt (default: its index in the call); with the seed and the sample index it
        fixes the randomness. `on_finish` receives every rollout as soon as it finishes. If the call fails, the engine
        is ready for the next one; NonFiniteLogits carries the rollouts that had finished in `rollouts`.

        `ahead` lists prompts and draws that a later call will request with the same sampling. With
        `settings.run_ahead`, the engine starts them in nearly free rows to make later calls faster: prompts with the
        longest responses so far first, the others in the order given.
        """
        requests = _requests(prompts, sampling or Sampling(), draws)
        finished: list[Rollout] = []
        try:
            with self._open(sampling, ahead, requests) as serving, show_progress(progress, len(requests)) as report:
                while serving.has_work:
                    for rollout in serving.step():
                        finished.append(rollout)
                        if on_finish is not None:
                            on_finish(rollout)
                    report(len(finished), self.stats)
        except NonFiniteLogits as error:
            error.rollouts = finished + error.rollouts
            raise
        return sorted(finished, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))

    def serve(self, sampling: Sampling | None = None, ahead: SequenceOf[tuple[Prompt, int]] = ()) -> Serving:
        """Open the engine: until it is closed, requests can be added, inspected and removed between steps.

        All requests use this sampling; its `n` matters only for `ahead`, which is as in `generate`. Only one `Serving`
        may be open at a time, and the weights must not change until it is closed.
        """
        return self._open(sampling, ahead, ())

    def _open(
        self, sampling: Sampling | None, ahead: SequenceOf[tuple[Prompt, int]], requests: SequenceOf[Request]
    ) -> Serving:
        """Open with initial `requests`; if one of them is invalid, the engine is left unchanged.

        Unlike requests added later, they may repeat a key: the prompt's index in the call tells them apart.
        """
        with ExitStack() as opened:
            if not self._lock.acquire(blocking=False):
                raise RuntimeError("this engine is already generating; wait for it to finish or create a second engine")
            opened.callback(self._lock.release)
            opened.callback(self._clear)
            self._requests.prepare(sampling or Sampling())
            sequences = self._requests.check(requests)
            self._aborts.clear()
            self._last_call, self.stats = self.stats, Stats()
            self._scheduler.num_preemptions = 0
            opened.callback(self._requests.judge_ahead, self.stats)
            opened.callback(self._note_curve, self.stats)
            opened.enter_context(_only_young_garbage())
            self._requests.begin(ahead)
            self._requests.enter(sequences)
            self._collected_at = self._left_at = time.perf_counter()
            return Serving(self._requests, self.decoder, self.step, opened.pop_all().close)

    def step(self) -> list[Rollout]:
        """Run one step: plan, draft, forward, verify, commit. Returns the rollouts that finished.

        If the device runs asynchronously and the next step does not depend on this one's tokens, the next step is
        launched before this one is collected, so the device never waits for the host. Otherwise the device waits only
        until the sequences that may be drafted for are verified; the host does the rest while the device works.
        """
        # Time the caller spends between steps does not count as a host gap.
        self._collected_at += time.perf_counter() - self._left_at
        rollouts = self._step()
        self._left_at = time.perf_counter()
        return rollouts

    def _step(self) -> list[Rollout]:
        ended = [*self._requests.take_complete(), *self._take_aborts()]
        if not self._scheduler.has_work:
            return [self._requests.rollout(sequence) for sequence in ended]
        flight = self._queued or self._launch()
        self._queued = self._launch_overlapped(flight)
        self._requests.begin_ahead()
        with self.stats.phase("forward"):
            sampled = self._runner.collect(flight, self.stats)
        before, self._collected_at = self._collected_at, time.perf_counter()
        flight.wall = self._collected_at - before
        self.stats.wall_seconds += flight.wall
        if not flight.names and not flight.plan.chunks:
            self._walls.observe(len(flight.plan.decoding), 1e3 * flight.wall)
        self._scheduler.commit_chunks(flight.plan)
        rows = SampledRows.of(sampled)
        verdicts: list[Verdict | None] = [None] * len(flight.plan.decoding)
        if self._is_undrafted(flight, rows):
            ended += self._settle(flight, rows)
            if self._queued is None and self._runner.can_overlap and self._scheduler.has_work:
                self._queued = self._launch(flight)
        elif self._queued is None and self._runner.can_overlap:
            first, others = self._parted(flight.plan)
            ended += self._decide(flight, rows, verdicts, first)
            if self._scheduler.has_work:
                self._scheduler.mark_overlapped([flight.plan.decoding[i] for i in others])
                self._queued = self._launch(flight)
            ended += self._decide(flight, rows, verdicts, others)
        else:
            ended += self._decide(flight, rows, verdicts, range(len(verdicts)))
            if self._queued is not None:
                self._queued.resolve(verdicts, flight)
                if self._proposer is not None and self._queued.takes_guesses:
                    self._proposer.recall(self._queued, flight)
        with self.stats.phase("draft"):
            self._observe(flight, verdicts)
        return [self._requests.rollout(sequence) for sequence in ended if not sequence.is_ahead]

    def _is_undrafted(self, flight: Flight, rows: SampledRows) -> bool:
        """Whether nobody drafts in this step or depends on its verdicts, so that each sequence emits its one token."""
        follows_text = self._queued is not None and self._queued.lane is None and self._queued.guesses is not None
        is_simple = flight.lane is not None and not follows_text and not self._requests.sampling.stop
        return is_simple and (self._proposer is None or flight.names == ()) and all(rows.is_finite)

    def _settle(self, flight: Flight, rows: SampledRows) -> list[Sequence]:
        """Emit and commit the tokens of a step without drafts; returns the sequences that finished."""
        decoding, stats = flight.plan.decoding, self.stats
        with stats.phase("verify"):
            live = [(i, s) for i, s in enumerate(decoding) if s.finish_reason is None]
            ended = emit(decoding, rows, self._requests.ending.end_tokens)
        with stats.phase("commit"):
            num_ahead = 0
            is_tapped = flight.states is not None or flight.guessed is not None
            for i, sequence in live:
                if sequence.length - sequence.num_cached > 1:  # otherwise it was overlapped, and is recorded already
                    sequence.num_cached += 1
                sequence.tapped = flight.tapped(flight.row_starts[i], i) if is_tapped else None
                num_ahead += sequence.is_ahead
            stats.ahead_made += num_ahead
            stats.visits += len(live) - num_ahead
            stats.tokens += len(live) - num_ahead
            for sequence in ended:
                self._scheduler.finish(sequence)
            stats.preemptions = self._scheduler.num_preemptions
        with stats.phase("draft"):
            for sequence in ended:
                self._requests.put_away(sequence)
        return ended

    def _parted(self, plan: Plan) -> tuple[SequenceOf[int], SequenceOf[int]]:
        """Split a step's sequences into those the next step may draft for, and those that continue without drafts."""
        first, others = list(range(plan.num_requested + plan.num_stragglers)), list[int]()
        for i in range(len(first), len(plan.decoding)):
            (first if plan.decoding[i].sequence_id in self._token_values.stragglers else others).append(i)
        return first, others

    def _decide(
        self, flight: Flight, rows: SampledRows, verdicts: list[Verdict | None], chosen: SequenceOf[int]
    ) -> list[Sequence]:
        """Verify and commit the tokens of the chosen sequences of a step; returns those that finished."""
        with self.stats.phase("verify"):
            self._verify(flight, rows, verdicts, chosen)
        with self.stats.phase("commit"):
            ended = self._commit(flight, verdicts, chosen)
        with self.stats.phase("draft"):
            if self._proposer is not None:
                told = [flight.plan.decoding[i] for i in chosen], [verdicts[i] for i in chosen]
                self._proposer.tell(*told, flight.names)
            for sequence in ended:
                self._requests.put_away(sequence)
        return ended

    def _launch(self, before: Flight | None = None) -> Flight:
        """Start a step; run-ahead sequences of `before` may continue in it although their tokens are still unknown."""
        with self.stats.phase("plan"):
            plan = self._scheduler.plan(self._ahead_rows(), self._token_values.stragglers)
            self._requests.put_away_broken()
        with self.stats.phase("draft"):
            proposals = self._propose(plan)
        with self.stats.phase("forward"):
            flight = self._runner.launch(plan, proposals, self._requests.sampling, self._guess_depth, before)
        flight.gap = time.perf_counter() - self._collected_at
        if self._proposer is not None:
            flight.forest, flight.arm, flight.names = self._proposer.forest, self._proposer.arm, self._proposer.names
        return flight

    def _launch_overlapped(self, flight: Flight) -> Flight | None:
        """Start the step after `flight` before the tokens of `flight` are known, if it hardly depends on them."""
        proposer = self._proposer
        is_guessing = proposer is not None and flight.num_guesses > 0 and proposer.is_guessing
        if proposer is not None and not (proposer.is_resting or proposer.is_late or is_guessing):
            return None
        if not self._runner.can_overlap or not flight.can_be_followed or self._ahead_rows():
            return None  # overlapped steps start no sequences
        with self.stats.phase("plan"):
            plan = self._scheduler.plan_overlapped(flight.plan)
        if plan is None:
            return None
        if plan is flight.plan and flight.lane is not None and (proposer is None or proposer.is_resting):
            return self._launch_again(flight, flight.lane)
        most = {s.sequence_id: depth + 1 for s, depth in zip(flight.plan.decoding, flight.depths, strict=True)}
        max_emitted = [most[sequence.sequence_id] for sequence in plan.decoding]
        if not self._scheduler.fit_overlapped(plan, [ahead + 1 for ahead in max_emitted]):
            return None
        nothing = [NOTHING_EXPECTED] * len(max_emitted)
        guesses = nothing
        with self.stats.phase("draft"):
            if proposer is not None and is_guessing:
                guesses = proposer.follow(plan, max_emitted, flight.num_guesses)
            elif proposer is not None and proposer.is_resting:
                proposer.skip(plan)
            elif proposer is not None:
                guesses = proposer.propose_overlapped(plan, max_emitted)
        with self.stats.phase("plan"):
            needed = [ahead + 1 + guess.num_drafted for ahead, guess in zip(max_emitted, guesses, strict=True)]
            if not self._scheduler.fit_overlapped(plan, needed):
                guesses = nothing
        with self.stats.phase("forward"):
            sampling = self._requests.sampling
            following = self._runner.launch_overlapped(plan, flight, guesses, sampling, self._guess_depth)
        if proposer is not None:
            following.arm, following.names = proposer.arm, proposer.names
        return following

    def _launch_again(self, flight: Flight, lane: Lane) -> Flight | None:
        """Start the step after `flight` if that decodes only and this one does the same."""
        with self.stats.phase("plan"):
            grown = self._scheduler.grow(flight.plan, lane.full())
            if grown is None:
                return None
            if self._proposer is not None:
                self._proposer.skip(flight.plan)
        with self.stats.phase("forward"):
            following = self._runner.launch_again(flight, grown, self._requests.sampling, self._guess_depth)
        if self._proposer is not None:
            following.arm, following.names = self._proposer.arm, self._proposer.names
        return following

    @property
    def _guess_depth(self) -> int:
        """How many tokens the device guesses on its own after the step being launched."""
        return 0 if self._proposer is None else self._proposer.guess_depth

    def _propose(self, plan: Plan) -> list[Proposal]:
        if self._proposer is None:
            return [NO_PROPOSAL] * len(plan.decoding)
        return self._proposer.propose(plan, self._scheduler)

    def _verify(
        self, flight: Flight, rows: SampledRows, verdicts: list[Verdict | None], chosen: SequenceOf[int]
    ) -> None:
        """Fill in a verdict per chosen sequence; none if it had already finished when the overlapped step began."""
        failure: NonFiniteLogits | None = None
        for i in chosen:
            sequence, proposal = flight.plan.decoding[i], flight.proposals[i]
            if sequence.finish_reason is None:
                num_known = sequence.length
                try:
                    verdicts[i] = verify(sequence, proposal, rows, flight.row_starts[i], self._requests.ending.find)
                except NonFiniteLogits as error:
                    if sequence.is_ahead:  # it ends here; the call that requests it will get the error
                        sequence.finish_reason = "abort"
                        emitted = sequence.token_ids[num_known:].tolist()
                        verdicts[i] = Verdict(sequence.sequence_id, proposal.source, 0, (), tuple(emitted))
                    else:
                        failure = failure or error
        if failure is not None:
            # Rollouts that finished in the same step are not lost.
            live = set(self._scheduler.live())
            failure.rollouts = [
                self._requests.rollout(s)
                for s in flight.plan.decoding
                if s.finish_reason is not None and s in live and not s.is_ahead
            ]
            raise failure

    def _commit(self, flight: Flight, verdicts: list[Verdict | None], chosen: SequenceOf[int]) -> list[Sequence]:
        """Record cached rows and emitted tokens; returns the sequences that finished."""
        ended = []
        for i in chosen:
            sequence, proposal, verdict = flight.plan.decoding[i], flight.proposals[i], verdicts[i]
            if verdict is None:
                continue
            path = proposal.from_own(verdict.path)
            if sequence.num_pending > 1:  # otherwise it was overlapped, and its row is recorded already
                self._scheduler.commit(sequence, path)
            row = flight.row_starts[i] + (path[-1] + 1 if path else 0)
            sequence.tapped = flight.tapped(row, i)
            self._count(sequence, verdict)
            if sequence.finish_reason is not None:
                self._scheduler.finish(sequence)
                ended.append(sequence)
        self._scheduler.apply_moves()
        self.stats.preemptions = self._scheduler.num_preemptions
        return ended

    def _count(self, sequence: Sequence, verdict: Verdict) -> None:
        if sequence.is_ahead:
            self.stats.ahead_made += len(verdict.token_ids)
            return
        self.stats.visits += 1
        self.stats.tokens += len(verdict.token_ids)
        if verdict.path:
            sequence.mark_accepted(len(verdict.path), len(verdict.token_ids), verdict.source)

    def _observe(self, flight: Flight, verdicts: list[Verdict | None]) -> None:
        if self._proposer is not None:
            self._proposer.observe(flight.plan, flight.proposals, verdicts, self.stats, flight)

    def _note_curve(self, stats: Stats) -> None:
        if self._proposer is not None:
            curve = self._proposer.curve
            stats.curve = tuple(zip(curve.anchors, curve.anchor_ms.tolist(), strict=True))

    # --- run-ahead ----------------------------------------------------------------------------------------------------

    def _ahead_rows(self) -> int:
        """How many rows the next step may spend on starting run-ahead sequences."""
        if self.ahead is None or self._proposer is None or not self._scheduler.has_ahead_waiting:
            return 0
        if self._ahead_rest:  # looking at it in every step would cost more than some steps take
            self._ahead_rest -= 1
            return 0
        room = self._ahead_room()
        self._ahead_rest = 0 if room else AHEAD_REST
        return room

    def _ahead_room(self) -> int:
        assert self.ahead is not None and self._proposer is not None
        load = self._scheduler.load()
        if self.ahead.num_tokens + load.num_made >= self.ahead.max_tokens:
            return 0
        return run_ahead_room(
            self._proposer.curve,
            num_rows=load.num_rows + round(self._proposer.typical_rows),
            kv_tokens=load.kv_tokens,
            max_rows=self.settings.max_rows,
            token_ms=token_ms(self._last_call, self.stats),
            survival=self.ahead.survival,
            sequence_ms=self._sequence_ms(load.num_rows),
            num_ahead=load.num_ahead,
            is_tested=self.ahead.is_tested,
        )

    def _sequence_ms(self, num_sequences: int) -> float:
        """What one more sequence adds to the wall-clock time of a step: nothing the GPU's curve does not know while the
        GPU is the slower one; else its share of the host's time, which is nearly all spent on sequences."""
        assert self._proposer is not None
        wall_ms, gpu_ms = self._walls.ms(num_sequences), self._proposer.curve.ms(num_sequences)
        return wall_ms / num_sequences if num_sequences and wall_ms > HOST_BOUND * gpu_ms else self._walls.sequence_ms

    # --- around a call ------------------------------------------------------------------------------------------------

    def abort(self, prompt_index: int | None = None, sample_index: int | None = None) -> None:
        """End all matching rollouts before the next step; they are returned with finish reason "abort"."""
        self._aborts.append((prompt_index, sample_index))

    def _take_aborts(self) -> list[Sequence]:
        ended = []
        while self._aborts:
            prompt_index, sample_index = self._aborts.pop()
            for sequence in list(self._scheduler.live()):
                is_prompt = prompt_index in (None, sequence.group.prompt_index)
                if is_prompt and sample_index in (None, sequence.sample_index) and not sequence.is_ahead:
                    self._requests.end(sequence)
                    ended.append(sequence)
        return ended

    def memory_plan(self) -> MemoryPlan:
        """Where the memory goes: weights, KV cache, graphs, free."""
        ops, config = self.decoder.ops, self.decoder.config
        is_gpu = ops.device.startswith("cuda")
        return MemoryPlan(
            device=ops.device,
            weights=self.decoder.num_bytes,
            cache=self._cache.num_bytes,
            cache_tokens=self._cache.num_pages * self._cache.page_size,
            graphs=self._executor.num_bytes,
            free=torch.cuda.mem_get_info(ops.device)[0] if is_gpu else _available_bytes(),
            num_parameters=config.num_parameters,
        )

    def release_memory(self) -> None:
        """Free the KV cache's memory while something else needs the GPU; `generate` allocates it again."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this engine is generating; its KV cache is in use")
        try:
            self._executor.release()
            self.release_drafts()
        finally:
            self._lock.release()

    @property
    def model_could_pay(self) -> bool:
        """Whether a well-trained model drafter could save time at this policy's speed on this device."""
        return self._proposer is None or self._proposer.model_could_pay

    def release_drafts(self) -> None:
        """Let the drafter free what it can rebuild, while the engine is not generating."""
        if self._proposer is not None:
            self._proposer.release()

    def drafter_state(self) -> dict[str, Any] | None:
        """The drafter's state as numbers and arrays; None if it has none."""
        return None if self._proposer is None else self._proposer.state()

    def restore_drafter(self, state: Mapping[str, Any]) -> None:
        """Restore the drafter's state. No token depends on it."""
        if self._proposer is not None:
            self._proposer.restore(state)

    def check_integrity(self) -> None:
        """Audit page ownership; raises AssertionError if a page is lost or owned twice."""
        self._scheduler.check_integrity()

    def _clear(self) -> None:
        """Clean up after a call, however it ended."""
        queued, self._queued = self._queued, None
        try:
            if queued is not None:
                self._runner.collect(queued, Stats())
        finally:
            self._aborts.clear()
            self._requests.forget()

    def _make_proposer(self, drafters: DrafterSet) -> Proposer:
        max_rows, budget = self.settings.max_rows, self._budget
        if budget.calibrate and not budget.always:
            curve = CostCurve.measure(self._runner.time_rows, max_rows, kv_probe=(0, _PROBE_TOKENS))
        else:
            curve = CostCurve.linear(base_ms=1.0, row_ms=0.1)
        return Proposer(drafters, budget, curve, self.decoder.config.vocab_size, max_rows, self._token_values)


def _requests(prompts: SequenceOf[Prompt], sampling: Sampling, draws: SequenceOf[int] | None) -> list[Request]:
    """Requests for all samples of all prompts of a call."""
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list; for a single prompt pass [prompt]")
    prompts = list(prompts)
    try:
        draws = list(range(len(prompts))) if draws is None else [operator.index(draw) for draw in draws]
    except TypeError as error:
        raise ValueError(f"draws must be integers: {error}") from None
    if len(draws) != len(prompts):
        raise ValueError(f"draws must have one integer per prompt: {len(draws)} for {len(prompts)} prompts")
    return [
        Request(prompt, draw, sample, prompt_index=index)
        for index, (prompt, draw) in enumerate(zip(prompts, draws, strict=True))
        for sample in range(sampling.n)
    ]


@contextmanager
def _only_young_garbage() -> Iterator[None]:
    """Restrict garbage collection to young objects: a full collection stalls a step for half a second."""
    with _GARBAGE_LOCK:
        _thresholds.append(gc.get_threshold())
        gc.set_threshold(*_thresholds[0][:2], NEVER)
    try:
        yield
    finally:
        with _GARBAGE_LOCK:
            # With calls in several threads, the last one restores what the first one found.
            first = _thresholds[0]
            _thresholds.pop()
            if not _thresholds:
                gc.set_threshold(*first)


def _num_pages(decoder: Decoder, settings: EngineSettings, cached: ModelConfig) -> int:
    tokens = settings.kv_tokens
    if tokens is None:
        wanted = settings.max_sequences * decoder.config.max_context
        tokens = min(wanted, _cache_bytes(decoder.ops.device) // decoder.ops.token_bytes(cached))
    # One page more than requested: the scheduler sets one aside for a shared prompt's end.
    return max(-(-tokens // decoder.ops.page_size), 1) + 1


def _cache_bytes(device: str) -> int:
    """Bytes the KV cache may fill when `kv_tokens` is not set."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(_available_bytes() * _MEMORY_SHARE)


def _available_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
