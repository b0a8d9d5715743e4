"""The rollout engine: prompts in, rollouts out, with the same tokens for every drafter, batch and schedule.

    scheduler.plan -> draft rows -> runner.launch -> (the next step) -> collect -> verify -> commit -> rollouts
          ^--------------------------------------------------------------------------------'

`Engine._step` is one iteration of that loop, and there is only one: the next step is launched before the tokens of
this one are known, whatever it drafts, unless a drafter on the host has to see them first (or the device cannot do two
things at once; then the same code runs without overlap). `generate` iterates until one list of prompts is done; `serve`
opens the engine for requests that come and go between steps (`serving.py`). The engine owns its parts, no part
references its owner, and only `verify.py` decides tokens. If the caller names its next requests (`ahead`), nearly free
rows start them early; the text they write comes back as a draft (`run_ahead/`).
"""

from __future__ import annotations

import gc
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.types import Drafter, Prompt, Request, Rollout, Sampling
from paceline.kernels.cpu.pool import set_num_threads
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.executor import TextInput
from paceline.model.executors import make_executor
from paceline.model.ops.base import Sampled
from paceline.model.policy import Policy
from paceline.model.self_test import require_exact
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.arms import Arms
from paceline.rollout.draft_rows import ANY_RANK, RUN_AHEAD_RANK, RowPlanner
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.model_drafter import ModelDrafter
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.feedback import Feedback, Settled, verdict_of
from paceline.rollout.governor import Governor
from paceline.rollout.memory_plan import MemoryPlan, free_host_bytes
from paceline.rollout.progress import show_progress
from paceline.rollout.proposer import Proposer
from paceline.rollout.requests import RequestBook
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.rollout.runner import Runner
from paceline.rollout.scheduler import Plan, Scheduler
from paceline.rollout.sequence import Sequence
from paceline.rollout.serving import Serving
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import OFF, Arm
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.stats import Stats, token_ms
from paceline.rollout.step import Step
from paceline.rollout.text_sources import TextSources, num_texts
from paceline.rollout.token_value import TokenValues
from paceline.rollout.verify import (
    GOES_ON,
    NOT_FINITE,
    REASONS,
    NonFiniteLogits,
    Walked,
    cut_at_stops,
    disagrees,
    walk,
    write,
)

OnFinish = Callable[[Rollout], None]

RUN_AHEAD = "ahead"
"""The name of run-ahead text as a source of drafts."""
FROM_SETTINGS: Any = object()
"""Stands for "as in the settings", since None already means "no drafter"."""
NEVER = 2**30
"""As the threshold for full garbage collections: effectively none."""
_GARBAGE_LOCK = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []
"""Python's garbage collection thresholds, saved once per running call."""
_PROBE_TOKENS = 1024
"""Context length used to measure the cost of reading cached tokens."""
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
        if self.settings.threads != "auto":
            set_num_threads(self.settings.threads)
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
        self.ahead = RunAheadStore(self.settings.ahead_tokens) if self.settings.run_ahead else None
        self._replay = Replay(name=RUN_AHEAD) if self.settings.run_ahead else None
        may_draft = self._budget.max_draft_nodes > 0
        searched = drafters.searched_by_device if drafters is not None else ()
        has_texts = may_draft and bool(searched or self._replay is not None)
        num_places = min(self.settings.max_sequences, self.settings.max_rows)
        self._executor = make_executor(
            decoder,
            cache,
            self.settings.max_rows,
            self.settings.graphs,
            self.eagle,
            num_texts(num_places, decoder.config.max_context) if has_texts else 0,
        )
        self._scheduler = Scheduler(
            cache,
            self.settings.max_sequences,
            self.settings.max_rows,
            self.settings.prefill_chunk,
            None if self._executor.moves_nodes else cache.move,
        )
        self._runner = Runner(decoder, self._executor, cache, self._scheduler.table)
        self._queued: Step | None = None
        self._collected_at = self._left_at = 0.0
        if self.eagle is not None:
            self.eagle.attach(decoder, cache)
        self._last_call = Stats()
        self._equip(drafters if may_draft else None, searched)
        self._lock = threading.Lock()
        self._aborts: list[tuple[int | None, int | None]] = []

    def _equip(self, drafters: DrafterSet | None, searched: SequenceOf[str]) -> None:
        """Make the parts that draft, and those that decide about it."""
        table, device, budget = self._scheduler.table, self._executor.texts, self._budget
        self._texts: TextSources | None = None
        if device is not None:
            self._texts = TextSources(device, table, self._replay, has_siblings="suffix" in searched)
        search_name = "+".join(searched) or RUN_AHEAD
        if self._texts is not None:
            drafters = None if drafters is None else drafters.without_searched()
        elif self._replay is not None and budget.max_draft_nodes:
            drafters = (drafters or DrafterSet()).led_by(self._replay)
        can_draft = drafters is not None or self._texts is not None
        curve = self._make_curve() if can_draft else CostCurve.linear(base_ms=1.0, row_ms=0.1)
        has_others = bool(searched or (drafters is not None and drafters.names))
        self._token_values = TokenValues(table, self.ahead, self._text_left, can_draft_run_ahead=has_others)
        guesses = self.eagle.shape if self.eagle is not None and self._executor.can_overlap else None
        vocab_size, max_rows = self.decoder.config.vocab_size, self.settings.max_rows
        self._proposer: Proposer | None = None
        if drafters is not None:
            self._proposer = Proposer(drafters, budget, curve, vocab_size, max_rows, self._token_values)
        is_hosted = drafters is not None and drafters.is_hosted(model_too=guesses is None)
        arms = None
        if can_draft and not budget.always:
            arms = Arms(
                tuple(drafters.hosted) if drafters else (),
                self.eagle,
                drafters.replay.name if drafters and drafters.replay else None,
                budget.seed,
                search=search_name if self._texts else None,
                is_model_hosted=guesses is None,
            )
        ahead = self.ahead if can_draft else None  # nobody could draft what it makes
        self._governor = Governor(arms, curve, self._token_values, ahead, max_rows, self.eagle)
        buckets = np.array([self._executor.padded_rows(count) for count in range(max_rows + 1)], np.int64)
        self._rows = RowPlanner(
            self._scheduler, self._proposer if is_hosted else None, self._texts, arms, curve, self._token_values,
            budget, max_rows, buckets, guesses, ANY_RANK if searched else RUN_AHEAD_RANK,
        )  # fmt: skip
        self._feedback = Feedback(
            table, self._governor, self._rows, self._proposer, self._texts, self._token_values, self.eagle, search_name,
            RUN_AHEAD,
        )  # fmt: skip
        self._requests = RequestBook(
            self.decoder.config, self.tokenizer, self._scheduler, self._token_values, self.ahead, self._replay,
            self._proposer, self._governor,
        )  # fmt: skip

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

        A prompt is a text, token ids, or the messages of a chat, which go through the model's chat template. `draws`
        numbers this use of each prompt (default: its index in the call); with the seed and the sample index it fixes
        the randomness. `on_finish` receives every rollout as soon as it finishes. If the call fails, the engine is
        ready for the next one; NonFiniteLogits carries the rollouts that had finished in `rollouts`.

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

    def serve(
        self,
        sampling: Sampling | None = None,
        ahead: SequenceOf[tuple[Prompt, int]] = (),
        version: int = 0,
        prefix_share: float = 0.0,
    ) -> Serving:
        """Open the engine: until it is closed, requests can be added, inspected and removed between steps.

        Requests without settings of their own use this sampling; its `n` matters only for `ahead`, which is as in
        `generate`. `version` numbers the weights. Only one `Serving` may be open at a time, and until it is closed,
        only its `change_weights` may change them. Up to `prefix_share` of the KV cache keeps finished texts, so that
        prompts which begin with one are not prefilled again.
        """
        serving = self._open(sampling, ahead, (), version)
        self._scheduler.keep_prefixes(prefix_share)
        return serving

    def _open(
        self,
        sampling: Sampling | None,
        ahead: SequenceOf[tuple[Prompt, int]],
        requests: SequenceOf[Request],
        version: int = 0,
    ) -> Serving:
        """Open with initial `requests`; if one of them is invalid, the engine is left unchanged.

        Unlike requests added later, they may repeat a key: the prompt's index in the call tells them apart.
        """
        with ExitStack() as opened:
            if not self._lock.acquire(blocking=False):
                raise RuntimeError("this engine is already generating; wait for it to finish or create a second engine")
            opened.callback(self._lock.release)
            opened.callback(self._clear)
            self._requests.prepare(sampling or Sampling(), version)
            sequences = self._requests.check(requests)
            self._aborts.clear()
            self._last_call, self.stats = self.stats, Stats()
            self._scheduler.num_preemptions = self._scheduler.num_prefix_tokens = 0
            opened.callback(self._end_call, self.stats, self._executor.capture_seconds)
            opened.enter_context(_only_young_garbage())
            self._requests.begin(ahead)
            self._governor.begin()
            if self._proposer is not None:
                self._proposer.begin(self._requests.sampling)
            if self._texts is not None:
                self._texts.begin()
            self._requests.enter(sequences)
            self._collected_at = self._left_at = time.perf_counter()
            close = opened.pop_all().close
            forget = self._scheduler.forget_prefixes
            return Serving(self._requests, self.decoder, self.step, self._drain, self._renew, forget, close)

    def _end_call(self, stats: Stats, captured_before: float) -> None:
        stats.capture_seconds = self._executor.capture_seconds - captured_before
        self._feedback.count(stats)
        self._requests.judge_ahead(stats)
        self._governor.end(stats)

    def step(self) -> list[Rollout]:
        """Run one step: plan, draft, forward, verify, commit. Returns the rollouts that finished."""
        # Time the caller spends between steps does not count as a host gap.
        self._collected_at += time.perf_counter() - self._left_at
        rollouts = self._step()
        self._left_at = time.perf_counter()
        return rollouts

    def _step(self) -> list[Rollout]:
        rollouts, ended = self._requests.take_ended(), self._take_aborts()
        if self._scheduler.has_work:
            step = self._queued or self._launch(None)
            assert step is not None, "a step that follows nothing can always be planned"
            self._queued = self._launch(step) if self._runner.can_overlap else None
            self._requests.begin_ahead()
            sampled = self._collect(step)
            settled, finished = self._settle(step, sampled)
            ended += finished
            if self._queued is None and self._runner.can_overlap and self._scheduler.has_work:
                self._queued = self._launch(None)  # while the device works, there is time to learn from this one
            self._learn(settled)
        return rollouts + self._requests.rollouts(ended)

    def _drain(self) -> None:
        """Settle the step in flight, if there is one; the next step returns what ended with it."""
        step, self._queued = self._queued, None
        if step is not None:
            self._collected_at += time.perf_counter() - self._left_at
            settled, finished = self._settle(step, self._collect(step))
            self._learn(settled)
            self._requests.note_ended(self._requests.rollouts(finished))
        self._scheduler.table.land()

    def _renew(self, version: int) -> None:
        """The weights have changed after `_drain`: drop everything that the old ones have computed."""
        self._requests.renew(version)
        # Nothing that the change took is the host's gap before a step.
        self._collected_at = self._left_at = time.perf_counter()

    def _launch(self, before: Step | None) -> Step | None:
        """Start the next step; if `before` is in flight, only if nobody has to see its tokens first."""
        if before is None:
            self._scheduler.table.land()
        elif self._rows.asks_host(self._governor.next):
            return None
        with self.stats.phase("plan"):
            stragglers = self._token_values.stragglers
            plan = self._scheduler.plan(self._ahead_rows(), stragglers, is_early=before is not None)
            self._requests.put_away_broken()
        if plan is None:
            return None
        with self.stats.phase("draft"):
            arm = self._governor.take(plan, self._has_text(plan))
            drafts = self._rows.rows(plan, arm, before)
            texts = self._text_input(plan, self._governor.next)
        with self.stats.phase("forward"):
            depth = self._rows.guess_depth(self._governor.next)
            step = self._runner.launch(plan, drafts, self._requests.kinds, depth, before, texts)
            self._scheduler.commit_chunks(plan)
        step.arm = arm if arm is not None else self._everything if drafts.counts.any() else OFF
        step.gap = time.perf_counter() - self._collected_at
        return step

    def _collect(self, step: Step) -> Sampled:
        with self.stats.phase("forward"):
            sampled = self._runner.collect(step, self.stats)
        before, self._collected_at = self._collected_at, time.perf_counter()
        step.wall = self._collected_at - before
        self.stats.wall_seconds += step.wall
        return sampled

    def _settle(self, step: Step, sampled: Sampled) -> tuple[Settled, list[Sequence]]:
        """Emit and commit a step's tokens; returns what became of it, and the sequences that finished."""
        table, slots = self._scheduler.table, step.plan.slots
        with self.stats.phase("verify"):
            # A sequence that has finished meanwhile has left its slot.
            is_live = table.owners[slots] == step.owners
            walked = self._walk(step, sampled, is_live)
            settled = Settled(step, sampled, walked, is_live, self._feedback.sources(step))
            self._move_nodes(step, walked)
            write(table, slots, step.starts, walked, settled.sources, sampled)
        with self.stats.phase("commit"):
            self._scheduler.apply_moves()
            self._count(settled)
            finished = self._finish(settled)
        with self.stats.phase("draft"):
            self._tell(settled)
            for sequence in finished:
                self._requests.put_away(sequence)
        return settled, finished

    def _walk(self, step: Step, sampled: Sampled, is_live: NDArray[np.bool_]) -> Walked:
        """The tokens that a step emits."""
        table, slots = self._scheduler.table, step.plan.slots
        rows = (step.starts, step.row_counts, step.parents, step.inputs, sampled.tokens, sampled.is_finite)
        kinds, num_left = self._requests.kinds, table.max_lengths[slots] - table.lengths[slots]
        walked = Walked(*walk(is_live, *rows, kinds.ends, table.kinds[slots], num_left))
        if kinds.has_stops:
            cut_at_stops(walked, step.plan.decoding, step.starts, sampled, kinds.after_stop)
        # The next step may be running on what the device accepted: a difference would corrupt the cache.
        found = sampled.num_accepted
        if found is not None and disagrees(is_live, walked.ends, walked.counts, found):
            raise RuntimeError("the device and the host disagree on accepted drafts; please report this")
        return walked

    def _move_nodes(self, step: Step, walked: Walked) -> None:
        """Have accepted nodes of trees moved, if the device does not do it by itself."""
        if step.drafts.proposals is None or self._executor.moves_nodes:
            return
        for i in np.flatnonzero(walked.counts > 1).tolist():
            path = walked.path_of(int(step.starts[i]), i)
            if path[-1] != len(path) - 1:
                self._scheduler.move(step.plan.decoding[i], path)

    def _count(self, settled: Settled) -> None:
        counts, num_requested = settled.walked.counts, settled.step.plan.num_requested
        asked = counts[:num_requested]
        if len(counts) > num_requested:
            self.stats.ahead_made += int(counts[num_requested:].sum())
        self.stats.visits += int(np.count_nonzero(asked))
        self.stats.tokens += int(asked.sum())
        self.stats.preemptions = self._scheduler.num_preemptions

    def _finish(self, settled: Settled) -> list[Sequence]:
        """Finish the sequences that end with a step."""
        step, ends = settled.step, settled.walked.ends
        finished, failure = [], None
        for i in np.flatnonzero(ends != GOES_ON).tolist():
            sequence = step.plan.decoding[i]
            if ends[i] == NOT_FINITE and not sequence.is_ahead:
                failure = failure or NonFiniteLogits.of(sequence)
                continue
            # Run-ahead without a next token ends here; the call that requests it will get the error.
            sequence.finish_reason = REASONS.get(int(ends[i]), "abort")
            # Rows of this step may have been moved differently from those of a sequence that goes on.
            self._scheduler.finish(sequence, sequence.num_cached - int(settled.walked.counts[i]))
            finished.append(sequence)
        if failure is not None:
            failure.rollouts = self._requests.rollouts(finished)
            raise failure
        return finished

    def _tell(self, settled: Settled) -> None:
        """Tell drafters on the host what became of their drafts, and keep what they start from next."""
        step, sampled = settled.step, settled.sampled
        if step.drafts.proposals is not None and self._proposer is not None:
            verdicts = [verdict_of(settled, i, p.source) for i, p in enumerate(step.drafts.proposals)]
            self._proposer.tell(step.plan.decoding, verdicts)
        if sampled.states is not None or (step.guessed is not None and self._proposer is not None):
            walked = settled.walked
            for i, sequence in enumerate(step.plan.decoding):
                count = int(walked.counts[i])
                if count:
                    row = int(step.starts[i] + walked.path[step.starts[i] + count - 1])
                    sequence.tapped = (sampled.states, step.guessed, row, i)

    def _learn(self, settled: Settled) -> None:
        with self.stats.phase("draft"):
            self._feedback.observe(settled, self.stats)

    def _has_text(self, plan: Plan) -> bool:
        """Whether a requested sequence follows run-ahead text that the host drafts."""
        if self._texts is not None or self._replay is None or not self._replay.texts or self._proposer is None:
            return False
        return any(map(self._proposer.follows, plan.requested()))

    def _text_left(self, sequence: Sequence) -> int:
        """How much run-ahead text a sequence has before it, while it follows that."""
        if self._texts is not None:
            return self._texts.follows(sequence)
        return 0 if self._proposer is None else self._proposer.follows(sequence)

    def _text_input(self, plan: Plan, next_arm: Arm | None) -> TextInput | None:
        if self._texts is None:
            return None
        return self._texts.input(plan, self._rows.searches(next_arm), self._rows.branches(next_arm) > 1)

    @property
    def _everything(self) -> Arm:
        """What a step is called in which everything drafts."""
        return Arm(self._proposer.name if self._proposer is not None else RUN_AHEAD, 0, 1, 0)

    # --- run-ahead ----------------------------------------------------------------------------------------------------

    def _ahead_rows(self) -> int:
        """How many rows the next step may spend on starting run-ahead sequences."""
        if self.ahead is None or not self._scheduler.has_ahead_waiting:
            return 0
        cost = token_ms(self._last_call, self.stats)
        return self._governor.ahead_rows(self._scheduler.load(), self._rows.typical_rows, cost)

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
            free=torch.cuda.mem_get_info(ops.device)[0] if is_gpu else free_host_bytes(),
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
        return self._governor.model_could_pay

    def release_drafts(self) -> None:
        """Let the drafter free what it can rebuild, while the engine is not generating."""
        if self._proposer is not None:
            self._proposer.release()

    def drafter_state(self) -> dict[str, Any] | None:
        """The drafter's state as numbers and arrays; None if it has none."""
        own = None if self._proposer is None else self._proposer.state()
        learned = self.learned()
        return {**(own or {}), **learned} if own is not None or learned else None

    def restore_drafter(self, state: Mapping[str, Any]) -> None:
        """Restore the drafter's state. No token depends on it."""
        self.restore_learned(state)
        if self._proposer is not None:
            self._proposer.restore(state)

    def learned(self) -> dict[str, Any]:
        """What the engine has learned about its own speed, as JSON. No text is in it."""
        return self._governor.state() | self._rows.state()

    def restore_learned(self, state: Mapping[str, Any]) -> None:
        """Continue with what was `learned`; what does not fit is ignored."""
        self._governor.restore(state)
        self._rows.restore(state)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of prompts that were found cached, since the engine was last opened."""
        return self._scheduler.num_prefix_tokens

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

    def _make_curve(self) -> CostCurve:
        if self._budget.calibrate and not self._budget.always:
            return CostCurve.measure(self._runner.time_rows, self.settings.max_rows, kv_probe=(0, _PROBE_TOKENS))
        return CostCurve.linear(base_ms=1.0, row_ms=0.1)


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
    return int(free_host_bytes() * _MEMORY_SHARE)
