"""The rollout engine: prompts in, rollouts out, the same tokens whatever the drafter, batch or order of work.

    prompts -> scheduler.plan -> drafting.propose -> runner.forward -> verify -> scheduler.commit -> rollouts
                    ^------------------------------------------------------------------'

`Engine.step` is one turn of that wheel. The engine owns its parts, the parts know nothing of each other's owner, and
nothing but `verify.py` decides a token.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.budget.cost import CostCurve
from paceline.budget.settings import BudgetSettings
from paceline.drafters import make_drafter
from paceline.engine.drafting import NO_PROPOSAL, Drafting, Proposal
from paceline.engine.ending import Ending
from paceline.engine.progress import show_progress
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Plan, Scheduler
from paceline.engine.sequence import Group, Sequence
from paceline.engine.settings import EngineSettings
from paceline.engine.stats import Stats
from paceline.engine.verify import NonFiniteLogits, verify
from paceline.model.checkpoint import load_config, load_weights, resolve
from paceline.model.decoder import Decoder
from paceline.model.kv_cache import KVCache, token_bytes
from paceline.model.ops import choose_ops
from paceline.model.ops.base import Drawn
from paceline.model.self_test import require_exact
from paceline.model.tokenizer import Tokenizer
from paceline.noise import prompt_hash
from paceline.types import Drafter, Rollout, Sampling, Verdict

Prompt = str | SequenceOf[int] | NDArray[np.integer[Any]]
OnFinish = Callable[[Rollout], None]

FROM_SETTINGS: Any = object()
"""Stands for "what the settings say" where None already means "no drafter"."""
_PROBE_TOKENS = 1024
"""Context used to price the reading of cached tokens."""
_MEMORY_SHARE = 0.25
"""Part of the free memory the KV cache may fill when `kv_tokens` is not set."""


class Engine:
    """Generates rollouts with one policy. Not to be used from two threads at once; `abort` may be."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        drafter: str | Drafter | None = FROM_SETTINGS,
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
        cache = KVCache.allocate(decoder.config, _num_pages(decoder, self.settings))
        self._scheduler = Scheduler(
            cache, self.settings.max_sequences, self.settings.max_rows, self.settings.prefill_chunk
        )
        self._runner = Runner(decoder, cache)
        made = make_drafter(self.settings.drafter if drafter is FROM_SETTINGS else drafter)
        self._drafting = self._make_drafting(made) if made and self._budget.max_draft_nodes else None
        self._sampling = Sampling()
        self._ending = Ending(self._sampling, (), tokenizer)
        self._next_id = 0
        self._lock = threading.Lock()
        self._aborts: list[tuple[int | None, int | None]] = []

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        drafter: str | Drafter | None = FROM_SETTINGS,
        exact: bool | None = None,
        settings: EngineSettings | None = None,
        budget: BudgetSettings | None = None,
    ) -> Engine:
        """Load a Hugging Face folder or hub id. `dtype` is that of the weights; activations are float32 on a CPU.

        What is not given comes from `settings`, whose defaults are float32, the suffix drafter and exact.
        """
        settings = settings or EngineSettings()
        dtype = settings.cpu_dtype if dtype is None else dtype
        exact = settings.exact if exact is None else exact
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {dtype!r} is not supported on a CPU; use 'float32' or 'bfloat16'")
        choose_ops(device, exact)
        folder = resolve(path)
        config = load_config(folder)
        weights = load_weights(folder, config)
        if dtype == "bfloat16":
            weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        decoder = Decoder(config, weights, exact=exact, device=device)
        return cls(decoder, Tokenizer.from_folder(folder), drafter, settings, budget)

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        sampling: Sampling | None = None,
        draws: SequenceOf[int] | None = None,
        on_finish: OnFinish | None = None,
        progress: bool = False,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per prompt, ordered by prompt, then sample.

        `draws` numbers this use of each prompt (default: its index in the call); with the seed and the sample index it
        fixes the randomness. `on_finish` sees every rollout as soon as it is done. Should the call fail, the engine is
        ready for the next one; NonFiniteLogits carries the rollouts finished before in `rollouts`.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this engine is generating already; wait for it, or make a second engine")
        finished: list[Rollout] = []
        self._aborts.clear()
        try:
            self._enqueue(prompts, sampling or Sampling(), draws)
            with show_progress(progress, sum(1 for _ in self._scheduler.live())) as report:
                while self._scheduler.has_work:
                    for rollout in self.step():
                        finished.append(rollout)
                        if on_finish is not None:
                            on_finish(rollout)
                    report(len(finished), self.stats)
        except NonFiniteLogits as error:
            error.rollouts = finished + error.rollouts
            raise
        finally:
            self._clear()
            self._lock.release()
        return sorted(finished, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))

    def step(self) -> list[Rollout]:
        """One turn: plan, draft, forward, verify, commit. Returns the rollouts that ended."""
        phase = self.stats.phase
        ended = self._take_aborts()
        with phase("plan"):
            plan = self._scheduler.plan()
        with phase("draft"):
            proposals = self._propose(plan)
        drawn = self._runner.forward(plan, proposals, self._sampling, self.stats)
        with phase("verify"):
            verdicts = self._verify(plan, proposals, drawn)
        with phase("commit"):
            ended += self._commit(plan, proposals, verdicts)
        with phase("draft"):
            self._observe(plan, proposals, verdicts, ended)
        return [self._rollout(sequence) for sequence in ended]

    def _propose(self, plan: Plan) -> list[Proposal]:
        if self._drafting is None:
            return [NO_PROPOSAL] * len(plan.decoding)
        return self._drafting.propose(plan, self._scheduler)

    def _verify(self, plan: Plan, proposals: list[Proposal], drawn: Drawn) -> list[Verdict]:
        verdicts = []
        failure: NonFiniteLogits | None = None
        row = 0
        for sequence, proposal in zip(plan.decoding, proposals, strict=True):
            try:
                verdicts.append(verify(sequence, proposal, drawn, row, self._ending.find))
            except NonFiniteLogits as error:
                failure = failure or error
            row += 1 + len(proposal.draft.tokens)
        if failure is not None:
            # What the same step has finished is not lost with it.
            failure.rollouts = [self._rollout(s) for s in plan.decoding if s.finish_reason is not None]
            raise failure
        return verdicts

    def _commit(self, plan: Plan, proposals: list[Proposal], verdicts: list[Verdict]) -> list[Sequence]:
        """Enter what was cached and emitted into the books; returns the sequences that ended."""
        for chunk in plan.chunks:
            chunk.owner.num_cached = chunk.stop
        ended = []
        for sequence, proposal, verdict in zip(plan.decoding, proposals, verdicts, strict=True):
            self._scheduler.commit(sequence, proposal.from_own(verdict.path))
            self.stats.visits += 1
            self.stats.tokens += len(verdict.token_ids)
            if sequence.finish_reason is not None:
                self._scheduler.finish(sequence)
                ended.append(sequence)
        self.stats.preemptions = self._scheduler.num_preemptions
        return ended

    def _observe(self, plan: Plan, proposals: list[Proposal], verdicts: list[Verdict], ended: list[Sequence]) -> None:
        if self._drafting is None:
            return
        self._drafting.observe(plan, proposals, verdicts, self.stats, self._runner.last_timing)
        for sequence in ended:
            self._drafting.finish(sequence)

    def abort(self, prompt_index: int | None = None, sample_index: int | None = None) -> None:
        """End running rollouts before the next step, all that match; they come back with reason "abort"."""
        self._aborts.append((prompt_index, sample_index))

    def _take_aborts(self) -> list[Sequence]:
        ended = []
        while self._aborts:
            prompt_index, sample_index = self._aborts.pop()
            for sequence in list(self._scheduler.live()):
                is_prompt = prompt_index in (None, sequence.group.prompt_index)
                if is_prompt and sample_index in (None, sequence.sample_index):
                    sequence.finish_reason = "abort"
                    self._scheduler.finish(sequence)
                    ended.append(sequence)
        return ended

    def check_integrity(self) -> None:
        """Audit the page books; raises AssertionError when a page is lost or owned twice."""
        self._scheduler.check_integrity()

    def _clear(self) -> None:
        """Leave nothing behind of a call, however it ended."""
        for sequence in list(self._scheduler.live()):
            self._scheduler.finish(sequence)
            if self._drafting is not None:
                self._drafting.finish(sequence)
        self._aborts.clear()

    def _rollout(self, sequence: Sequence) -> Rollout:
        assert sequence.finish_reason is not None
        return Rollout(
            prompt_index=sequence.group.prompt_index,
            sample_index=sequence.sample_index,
            draw=sequence.draw,
            token_ids=sequence.response_ids.tolist(),
            logprobs=sequence.logprobs,
            text=self._ending.text(sequence),
            finish_reason=sequence.finish_reason,
            truncated_logprobs=sequence.truncated_logprobs if self._sampling.is_truncated else None,
        )

    def _enqueue(self, prompts: SequenceOf[Prompt], sampling: Sampling, draws: SequenceOf[int] | None) -> None:
        """Check everything first, so that a bad prompt stops the call before any work is done."""
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list; for a single prompt pass [prompt]")
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model folder has none; use stop_token_ids")
        prompts = list(prompts)
        try:
            draws = list(range(len(prompts))) if draws is None else [operator.index(draw) for draw in draws]
        except TypeError as error:
            raise ValueError(f"draws must be integers: {error}") from None
        if len(draws) != len(prompts):
            raise ValueError(f"draws must have one integer per prompt: {len(draws)} for {len(prompts)} prompts")
        if any(not -(2**63) <= draw < 2**63 for draw in draws):
            raise ValueError("draws must fit into 64 bits")
        encoded = [self._encode(prompt, index) for index, prompt in enumerate(prompts)]
        lengths = [self._max_length(ids, index, sampling) for index, ids in enumerate(encoded)]

        self.stats = Stats()
        self._scheduler.num_preemptions = 0
        self._sampling = sampling
        self._ending = Ending(sampling, self.decoder.config.eos_token_ids, self.tokenizer)
        if self._drafting is not None:
            self._drafting.reset(sampling)
        for index, (ids, draw, length) in enumerate(zip(encoded, draws, lengths, strict=True)):
            group = Group(self._new_id(), index, prompt_hash(ids), draw, ids, num_open=sampling.n)
            for sample in range(sampling.n):
                self._scheduler.add(Sequence(self._new_id(), group, sample, sampling, length))

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _encode(self, prompt: Prompt, index: int) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model folder has no tokenizer; pass prompts as lists of token ids")
            prompt = self.tokenizer.encode(prompt)
        ids = _as_array(prompt)
        if ids.ndim == 1 and ids.size == 0:
            raise ValueError(f"prompt {index} is empty; every prompt needs at least one token")
        vocab = self.decoder.config.vocab_size
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"prompt {index} must be a string or a flat list of token ids; got {ids.ndim} levels of {ids.dtype}"
            )
        if ids.min() < 0 or ids.max() >= vocab:
            bad = int(ids[(ids < 0) | (ids >= vocab)][0])
            raise ValueError(f"prompt {index}: token id {bad} is outside the vocabulary of {vocab} ids")
        return ids.astype(np.int32)

    def _max_length(self, ids: NDArray[np.int32], index: int, sampling: Sampling) -> int:
        """Longest the sequence may get; the context may end it before `max_new_tokens` does."""
        context = self.decoder.config.max_context
        if len(ids) >= context:
            raise ValueError(f"prompt {index} has {len(ids)} tokens and leaves no room in the context of {context}")
        length = min(len(ids) + sampling.max_new_tokens, context)
        if length > self._scheduler.most_tokens:
            raise ValueError(
                f"prompt {index} may grow to {length} tokens, but the KV cache holds {self._scheduler.most_tokens} for "
                "one sequence; raise engine.kv_tokens or lower max_new_tokens"
            )
        return length

    def _make_drafting(self, drafter: Drafter) -> Drafting:
        max_rows, budget = self.settings.max_rows, self._budget
        if budget.calibrate and not budget.always:
            curve = CostCurve.measure(self._runner.time_rows, max_rows, kv_probe=(0, _PROBE_TOKENS))
        else:
            curve = CostCurve.linear(base_ms=1.0, row_ms=0.1)
        return Drafting(drafter, budget, curve, self.decoder.config.vocab_size, max_rows)


def _as_array(prompt: Any) -> NDArray[Any]:
    try:
        return np.asarray(prompt)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def _num_pages(decoder: Decoder, settings: EngineSettings) -> int:
    tokens = settings.kv_tokens
    if tokens is None:
        wanted = settings.max_sequences * decoder.config.max_context
        tokens = min(wanted, int(_available_bytes() * _MEMORY_SHARE) // token_bytes(decoder.config))
    # One page more than asked for: the scheduler sets one aside for a shared prompt's end.
    return max(-(-tokens // KVCache.page_size), 1) + 1


def _available_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
