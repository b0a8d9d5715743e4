"""Checks exactness on this GPU: the same sequences under other drafters and batch sizes, compared bit for bit.

The reference has no drafter and a batch of all sequences. `gpu.py` calls `equality` and keeps its lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, Rollout, Sampling, SequenceView, Verdict
from paceline.model.decoder import Decoder
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

Say = Callable[[str], None]
Texts = dict[tuple[int, int], list[int]]
FAULTY_ROWS = 200
"""More rows than plain decoding of all sequences, fewer than a step with drafts."""
CHANGED = (0, 20, 100)
"""Percentages of wrong draft tokens."""


@dataclass(frozen=True)
class Work:
    """What to generate: `samples` per prompt, `tokens` each."""

    prompts: list[list[int]]
    samples: int
    tokens: int
    kv_tokens: int
    max_rows: int = 512

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=1.0, n=self.samples, max_new_tokens=self.tokens, ignore_eos=True, seed=7)


class SteadyReplay:
    """Drafts a given text at every position, right or wrong before: unlike `replay`, it never stops."""

    name = "replay"

    def __init__(self, texts: Mapping[tuple[int, int], Sequence[int]]) -> None:
        self._texts = texts

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        done = len(view.token_ids) - view.prompt_length
        tokens = list(self._texts[view.draw, view.sample_index][done : done + max(budget, 0)])
        return Draft.chain(tokens, [0.9] * len(tokens)) if tokens else EMPTY_DRAFT

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to learn: the position says it all."""

    def finish(self, sequence_id: int) -> None:
        """Nothing to release."""


def changed(texts: Texts, percent: int, vocab_size: int, seed: int = 0) -> Texts:
    """The texts with this percentage of tokens replaced."""
    random = np.random.default_rng(seed)
    found = {}
    for key, text in texts.items():
        tokens = np.array(text)
        is_changed = random.random(len(tokens)) < percent / 100
        others = (tokens + random.integers(1, vocab_size, len(tokens))) % vocab_size
        found[key] = np.where(is_changed, others, tokens).tolist()
    return found


def num_equal(expected: Sequence[Rollout], found: Sequence[Rollout]) -> int:
    """Rollouts with the same ids and, bit for bit, the same log-probabilities."""
    by_key = {(r.draw, r.sample_index): r for r in expected}
    pairs = [(by_key[r.draw, r.sample_index], r) for r in found]
    return sum(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)


def make_engine(
    decoder: Decoder, work: Work, batch: int, drafter: str | Drafter | None, nodes: int, always: bool
) -> Engine:
    settings = EngineSettings(
        exact=decoder.ops.is_exact,
        precision="bf16",
        max_sequences=batch,
        max_rows=work.max_rows,
        # Different prefill chunks from the reference's.
        prefill_chunk=64 if batch == 1 else 256,
        kv_tokens=work.kv_tokens,
    )
    budget = BudgetSettings(max_draft_nodes=nodes, always=always, calibrate=not always)
    return Engine(decoder, drafter=drafter, settings=settings, budget=budget)


def equality(decoder: Decoder, work: Work, alone_s: float, say: Say) -> Iterator[dict[str, Any]]:
    """One line per way of generating; `alone_s` limits the time for sequences decoded alone."""
    everybody = work.num_sequences
    reference = make_engine(decoder, work, everybody, None, 0, True).generate(work.prompts, work.sampling)
    texts = {(r.draw, r.sample_index): r.token_ids for r in reference}
    # As many nodes as leave a row for every sequence; deeper drafts get a smaller batch.
    shallow, few = max(work.max_rows // everybody - 1, 1), max(everybody // 4, 1)
    deep = min(max(work.max_rows // few - 1, 1), 15)
    cases: list[tuple[str, int, str | Drafter | None, int, bool]] = []
    for percent in CHANGED:
        drafter = SteadyReplay(changed(texts, percent, decoder.config.vocab_size))
        cases.append((f"replay, {percent} % changed", everybody, drafter, shallow, True))
        if percent == 20:
            cases.append((f"replay, {percent} % changed", few, drafter, deep, True))
    cases.append(("suffix, every draft verified", everybody, "suffix", shallow, True))
    cases.append(("suffix, budgeted", everybody, "suffix", 16, False))
    for name, batch, drafter_or_name, nodes, always in cases:
        engine = make_engine(decoder, work, batch, drafter_or_name, nodes, always)
        start = time.perf_counter()
        found = engine.generate(work.prompts, work.sampling)
        line = _line(name, batch, num_equal(reference, found), len(found), start)
        line |= {"draft_nodes": nodes, "accept_length": round(engine.stats.accept_length, 3)}
        say(f"{name}, batch {batch}: {line['measured']}, accept length {line['accept_length']}")
        yield line
    yield _alone(decoder, work, reference, alone_s, say)


def _alone(decoder: Decoder, work: Work, reference: Sequence[Rollout], limit: float, say: Say) -> dict[str, Any]:
    """Sequences one at a time, prompt by prompt until the time is up."""
    engine = make_engine(decoder, work, 1, None, 0, True)
    start = time.perf_counter()
    found: list[Rollout] = []
    for index, prompt in enumerate(work.prompts):
        if time.perf_counter() - start > limit:
            break
        found += engine.generate([prompt], work.sampling, draws=[index])
    line = _line("none, alone", 1, num_equal(reference, found), len(found), start)
    if len(found) < len(reference):
        line["note"] = f"{len(found)} of {len(reference)} sequences tried in {limit:.0f} s"
    say(f"alone: {line['measured']} {line.get('note', '')}")
    return line


@contextmanager
def sums_by_row_count(decoder: Decoder) -> Iterator[None]:
    """Inject a fault: in steps of many rows, products are summed from last to first."""
    from paceline.kernels.triton import linear as linears
    from paceline.model.ops import gpu as ops_module

    ops: Any = decoder.ops
    gpu_ops: Any = ops_module

    def linear(x: Tensor, weight: Tensor, exact: bool = True) -> Tensor:
        if x.shape[0] > FAULTY_ROWS:
            return linears.own_linear(x.flip(1), weight.flip(1))
        return linears.linear(x, weight)

    sound, gpu_ops.linear, ops.is_exact = gpu_ops.linear, linear, False  # otherwise the self-test would refuse to start
    try:
        yield
    finally:
        gpu_ops.linear, ops.is_exact = sound, True


def control(decoder: Decoder, work: Work, say: Say, case: str) -> dict[str, Any]:
    """A decoder that is not exact, to show whether the comparison would notice."""
    everybody = work.num_sequences
    reference = make_engine(decoder, work, everybody, None, 0, True).generate(work.prompts, work.sampling)
    texts = {(r.draw, r.sample_index): r.token_ids for r in reference}
    drafter = SteadyReplay(changed(texts, 20, decoder.config.vocab_size))
    nodes = max(work.max_rows // everybody - 1, 1)
    start = time.perf_counter()
    found = make_engine(decoder, work, everybody, drafter, nodes, True).generate(work.prompts, work.sampling)
    line = _line(f"control: {case}, replay, 20 % changed", everybody, num_equal(reference, found), len(found), start)
    say(f"{line['case']}: {line['measured']}")
    return line | {"bar": None, "met": None}


def _line(case: str, batch: int, equal: int, num_found: int, start: float) -> dict[str, Any]:
    return {
        "case": case,
        "batch": batch,
        "bar": f"{num_found} of {num_found}",
        "measured": f"{equal} of {num_found}",
        "met": equal == num_found and num_found > 0,
        "seconds": round(time.perf_counter() - start, 2),
    }
