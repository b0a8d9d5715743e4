"""The GPU path from a decoder to rollouts: the numbers of the plain decoder, weights that can be shared, steps launched
before the one before them is known, and what the settings refuse.

Without a GPU everything runs in Triton's interpreter, slowly: models are tiny, texts short, and the engine's
self-test, ten seconds there, is left to one test. What only a GPU can show is marked `gpu`.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choices import changing, keen, keen_when_alone
from gpu_device import HAS_CARD
from hostile import (
    Hostile,
    MakeDraft,
    Truth,
    always_wrong,
    deep_and_wide_tree,
    mostly_true,
    too_long,
)
from model_factory import ModelSpec, build
from torch import Tensor

from paceline.core.types import Draft, Request, RequestKey, Rollout, Sampling
from paceline.kernels.limits import MAX_TREE_DEPTH
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.executor import Overlap
from paceline.model.folder import load_config
from paceline.model.gpu.staging import _fill_paths
from paceline.model.graphs import buckets
from paceline.model.ops.choose import choose_ops
from paceline.model.random_model import make_random_model
from paceline.model.rows import Rows, SequenceRows
from paceline.model.self_test import run_self_test
from paceline.rollout import engine as engine_module
from paceline.rollout import proposer as proposer
from paceline.rollout import token_value as token_value_module
from paceline.rollout.compare import Mode, compare_engines
from paceline.rollout.draft_rows import RowPlanner
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.engine import RUN_AHEAD, Engine
from paceline.rollout.governor import Governor
from paceline.rollout.run_ahead.store import RunAheadText, prompt_id_of
from paceline.rollout.runner import Runner
from paceline.rollout.sampling_kinds import SamplingKinds
from paceline.rollout.scheduler import Plan
from paceline.rollout.serving import Serving
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Arm, Bandit
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.stats import device_share
from paceline.rollout.step import DraftRows, Step
from paceline.rollout.verify import NonFiniteLogits

# What was never written to the cache may be anything; the interpreter says so where a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

TINY = ModelSpec(
    hidden_size=64, intermediate_size=32, num_layers=1, num_kv_heads=1, vocab_size=61, max_positions=64,
    eos_token_ids=tuple(range(0, 61, 9)),
)  # fmt: skip
"""One token in nine ends a response, so that sequences end at different steps."""
SPECS = {
    "llama": replace(TINY, num_layers=2, num_kv_heads=2),
    "qwen2": replace(TINY, family="qwen2", hidden_size=72, head_dim=32, group_size=3),
    "qwen3": replace(TINY, family="qwen3", is_tied=True, head_dim=64),
}
TEXT = [3, 14, 15, 9, 2, 6, 5, 35]
PROMPTS = [[5, 6, 7], [8], [9, 10], [5, 6, 7]]
SAMPLING = Sampling(max_new_tokens=7, seed=11)
GREEDY = Sampling(temperature=0.0, max_new_tokens=20, ignore_eos=True)
"""The tiny model soon goes in circles, so that drafts from its own text come true."""
EVERYTHING = BudgetSettings(always=True, max_draft_nodes=4)
UNMEASURED = BudgetSettings(calibrate=False)

Weights = dict[str, Tensor]


@functools.cache
def parts_of(spec: ModelSpec) -> tuple[ModelConfig, Weights]:
    """Configuration and weights of a spec, read from the folder transformers wrote."""
    with tempfile.TemporaryDirectory() as folder:
        build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: weight.clone() for name, weight in load_weights(Path(folder), config).items()}


def gpu_decoder(spec: ModelSpec = TINY, precision: str = "auto", weights: Weights | None = None) -> Decoder:
    config, own = parts_of(spec)
    return Decoder(config, weights or own, device="cuda", precision=precision)


def changed(weights: Mapping[str, Tensor]) -> Weights:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(99)
    return {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


# --- the decoder ------------------------------------------------------------------------------------------------------


def oracle(spec: ModelSpec, precision: str) -> Tensor:
    """Plain float32 activations; matrices hold what the GPU's do, vectors are float32 there too."""
    config, weights = parts_of(spec)
    if precision != "float32":
        weights = {name: w.bfloat16().float() if w.ndim == 2 else w for name, w in weights.items()}
    return Decoder(config, weights, exact=False).score(TEXT)


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-4), ("mixed", 1e-4), ("split", 2e-3), ("bf16", 0.3)])
@pytest.mark.parametrize("family", SPECS)
def test_scores_are_those_of_the_plain_decoder(family: str, precision: str, tolerance: float) -> None:
    """Llama untied over two layers, Qwen2 with biases, Qwen3 with norms of queries and keys, tied."""
    expected = oracle(SPECS[family], precision)
    found = gpu_decoder(SPECS[family], precision).score(TEXT).cpu()
    assert found.dtype == torch.float32 and expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_more_precise_settings_are_closer() -> None:
    """The tolerances above are not all satisfied by the same arithmetic."""
    expected = oracle(TINY, "bf16")
    errors = [
        float((gpu_decoder(TINY, p).score(TEXT).cpu() - expected).abs().max()) for p in ("bf16", "split", "mixed")
    ]
    assert errors[0] > 10 * errors[1] > 30 * errors[2]


def test_auto_is_bf16(decoder: Decoder) -> None:
    ops: Any = decoder.ops
    assert ops.precision == "bf16" and ops.weight_dtype == ops.cache_dtype == torch.bfloat16


# --- shared weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("family", SPECS)
def test_shared_weights_are_all_weights_under_their_names(family: str, precision: str) -> None:
    config, weights = parts_of(SPECS[family])
    shared = gpu_decoder(SPECS[family], precision).shared_weights()
    assert {name: tuple(view.shape) for name, view in shared.items()} == dict(config.weight_shapes())
    for name, view in shared.items():
        assert torch.equal(view.cpu(), weights[name].to(view.dtype)), name
        assert view.dtype == (torch.bfloat16 if view.ndim == 2 and precision == "bf16" else torch.float32)


def test_who_writes_to_shared_weights_changes_the_policy() -> None:
    """One weight after the other: each has its effect at once, and all together are a decoder loaded with them."""
    spec = SPECS["qwen2"]
    decoder, update = gpu_decoder(spec), changed(parts_of(spec)[1])
    before = decoder.score(TEXT[:3])
    for name, view in decoder.shared_weights().items():
        view.copy_(update[name])
        after = decoder.score(TEXT[:3])
        # A constant added to all keys of a head moves all scores alike, but for the rotation: seen in last bits only.
        assert not torch.equal(before, after), name
        before = after
    assert torch.equal(before, gpu_decoder(spec, weights=update).score(TEXT[:3]))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loading_writes_in_place(family: str) -> None:
    """Tied or not: captured graphs and whoever shares the weights keep their addresses."""
    decoder, update = gpu_decoder(SPECS[family]), changed(parts_of(SPECS[family])[1])
    shared = decoder.shared_weights()
    addresses = {name: view.data_ptr() for name, view in shared.items()}
    decoder.load_weights(update)
    assert {name: view.data_ptr() for name, view in decoder.shared_weights().items()} == addresses
    assert torch.equal(shared["model.norm.weight"].cpu(), update["model.norm.weight"])
    assert torch.equal(decoder.score(TEXT[:3]), gpu_decoder(SPECS[family], weights=update).score(TEXT[:3]))


def test_loading_takes_all_weights_or_none() -> None:
    decoder, update = gpu_decoder(), changed(parts_of(TINY)[1])
    before = {name: view.clone() for name, view in decoder.shared_weights().items()}
    update["model.norm.weight"] = update["model.norm.weight"][:-1]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        decoder.load_weights(update)
    assert all(torch.equal(view, before[name]) for name, view in decoder.shared_weights().items())


def test_a_decoder_keeps_no_hold_of_the_weights_it_was_given() -> None:
    weights = {name: weight.clone() for name, weight in parts_of(TINY)[1].items()}
    decoder = gpu_decoder(TINY, "float32", weights)
    expected = decoder.score(TEXT[:3])
    for weight in weights.values():
        weight.zero_()
    assert torch.equal(decoder.score(TEXT[:3]), expected)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CARD:
        monkeypatch.setattr(engine_module, "require_exact", lambda decoder: None)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """For tests that leave its weights alone."""
    return gpu_decoder()


def make_engine(
    decoder: Decoder, drafter: Any = None, budget: BudgetSettings = EVERYTHING, can_overlap: bool = True, **options: Any
) -> Engine:
    settings = EngineSettings(**{"kv_tokens": 4096, "max_rows": 16, "max_sequences": 8, **options})
    engine = Engine(decoder, None, drafter, settings, budget)
    engine._executor.can_overlap = can_overlap
    return engine


@dataclass
class Run:
    """What came out, and how."""

    rollouts: list[Rollout]
    num_early: int
    """Steps launched before the one before them was collected."""
    num_steps: int
    num_hosted: int
    """Steps with drafts of the host."""
    num_found: int
    """Steps with rows for what the device finds in texts."""


def check_idle(engine: Engine) -> None:
    engine.check_integrity()
    assert engine._queued is None
    assert engine._scheduler._pool.num_free == engine._cache.num_pages


def run(
    engine: Engine,
    prompts: Sequence[list[int]] = PROMPTS,
    sampling: Sampling = SAMPLING,
    on_step: Callable[[int], None] | None = None,
    **options: Any,
) -> Run:
    """Generate with an audit of the page books after every step; `on_step` is told how many are done."""
    step, runner = engine.step, engine._runner
    launch = runner.launch
    result = Run([], 0, 0, 0, 0)

    def audited_step() -> list[Rollout]:
        rollouts = step()
        engine.check_integrity()
        result.num_steps += 1
        if on_step is not None:
            on_step(result.num_steps)
        return rollouts

    def counted(
        plan: Plan, drafts: DraftRows, kinds: SamplingKinds, depth: int, before: Step | None, *others: Any
    ) -> Step:
        result.num_early += before is not None
        result.num_hosted += drafts.proposals is not None and bool(drafts.counts.any())
        result.num_found += drafts.ranks is not None and bool(drafts.counts.any())
        return launch(plan, drafts, kinds, depth, before, *others)

    engine.step = audited_step  # type: ignore[method-assign]
    runner.launch = counted  # type: ignore[method-assign, assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            result.rollouts = engine.generate(prompts, sampling, **options)
    finally:
        engine.step = step  # type: ignore[method-assign]
        runner.launch = launch  # type: ignore[method-assign]
        check_idle(engine)
    return result


def contents(rollouts: Sequence[Rollout]) -> list[Any]:
    """Token ids, log-probabilities bit for bit, reasons."""
    return [(r.token_ids, r.logprobs, r.truncated_logprobs, r.finish_reason) for r in rollouts]


def truth_of(rollouts: Sequence[Rollout]) -> Truth:
    return {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in rollouts}


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> Iterator[list[Rollout]]:
    """Of PROMPTS, every step waited for before the next is planned."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_CARD:
            patch.setattr(engine_module, "require_exact", lambda decoder: None)
        found = run(make_engine(decoder, can_overlap=False))
    assert found.num_early == 0
    # The tests below need sequences that end at different steps and for both reasons.
    assert len({len(r.token_ids) for r in found.rollouts}) >= 3
    assert {r.finish_reason for r in found.rollouts} == {"stop", "length"}
    yield found.rollouts


@pytest.mark.parametrize("max_sequences", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 1))])
def test_steps_launched_ahead_change_nothing(decoder: Decoder, expected: list[Rollout], max_sequences: int) -> None:
    """All prompts at once, more prompts than places, one at a time; sequences end while the next step has their row."""
    found = run(make_engine(decoder, max_sequences=max_sequences))
    assert contents(found.rollouts) == contents(expected)
    assert found.num_early >= 4


AHEAD = [([5, 6, 7], 10), ([8], 11), ([9, 10], 12)]
LATER = [([5, 6], 20), ([9], 21)]
"""Prompts and draws that are asked for after those of `PROMPTS`, and after those."""


def run_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch, is_found: bool = True) -> list[Rollout]:
    """A call that begins the next ones, and those; `is_found`: the device looks for drafts in the text made ahead."""
    monkeypatch.setattr(Governor, "ahead_rows", lambda *_: 8)
    rollouts = run(engine, ahead=AHEAD + LATER).rollouts
    assert engine.stats.ahead_made > 0
    num_offered = num_accepted = 0
    for asked, ahead in ((AHEAD, LATER), (LATER, [])):
        draws = [draw for _, draw in asked]
        rollouts += run(engine, [prompt for prompt, _ in asked], draws=draws, ahead=ahead).rollouts
        assert engine.stats.ahead_offered == engine.stats.ahead_survived
        num_offered += engine.stats.ahead_offered
        num_accepted += engine.stats.drafters[RUN_AHEAD].accepted
    assert num_offered > 0 and (num_accepted > 0) == is_found
    return rollouts


def plain_of_three_calls(decoder: Decoder) -> list[Rollout]:
    """What `run_ahead` should return."""
    plain = make_engine(decoder, can_overlap=False)
    rollouts = plain.generate(PROMPTS, SAMPLING)
    for asked in (AHEAD, LATER):
        rollouts += plain.generate([prompt for prompt, _ in asked], SAMPLING, [draw for _, draw in asked])
    return rollouts


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        pytest.param("truth", {"max_rows": 6}, marks=pytest.mark.slow),
        pytest.param("truth", {}, marks=pytest.mark.slow),
        pytest.param("suffix", {"max_rows": 6}, marks=pytest.mark.slow),
        pytest.param("suffix", {}, marks=pytest.mark.slow),
        pytest.param(None, {"kv_tokens": 1024}, marks=pytest.mark.slow),
        pytest.param(None, {"prefill_chunk": 1}, marks=pytest.mark.slow),
        pytest.param("truth", {"kv_tokens": 1024}, marks=pytest.mark.slow),
        pytest.param(None, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_run_ahead_goes_on_while_the_host_looks_away(
    decoder: Decoder, drafter: str | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences made ahead go on from tokens that the host has not seen, beside others that are drafted for."""
    expected = plain_of_three_calls(decoder)
    budget = BudgetSettings(always=True, max_draft_nodes=1)
    is_hosted = drafter == "truth"
    own = Replay(truth_of(expected[: len(PROMPTS)])) if is_hosted else drafter
    engine = make_engine(decoder, own, budget, run_ahead=True, **options)
    assert contents(run_ahead(engine, monkeypatch, is_found=not is_hosted)) == contents(expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_hosted", [True, False])
def test_some_made_ahead_are_drafted_for_beside_others_that_go_on(
    decoder: Decoder, is_hosted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that lead get rows for a draft; which they are changes from step to step."""
    monkeypatch.setattr(token_value_module, "LEAST_STRAGGLER_SHARE", 0.34)
    monkeypatch.setattr(token_value_module, "LOOK_EVERY", 1)
    monkeypatch.setattr(Bandit, "choose", keen)
    monkeypatch.setattr(CostCurve, "refine", lambda *_: None)  # the interpreter's times say nothing
    expected = plain_of_three_calls(decoder)
    seen = count_leaders(monkeypatch)
    # Of those asked for first nothing is known, so that there is time for the others.
    own = Replay(truth_of(expected[len(PROMPTS) :])) if is_hosted else "suffix"
    engine = make_engine(decoder, own, UNMEASURED, run_ahead=True)
    assert contents(run_ahead(engine, monkeypatch, is_found=not is_hosted)) == contents(expected)
    assert seen["drafted"] > 0 and seen["others"] > 0


def count_leaders(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rows drafted for sequences made ahead, and how often some had none beside them."""
    seen: Counter[str] = Counter()
    rows = RowPlanner.rows

    def counted(self: RowPlanner, plan: Plan, arm: Arm | None, before: Step | None) -> DraftRows:
        found = rows(self, plan, arm, before)
        leaders = slice(plan.num_requested, plan.num_draftable)
        drafted = int(found.counts[leaders].sum())
        assert not found.counts[plan.num_draftable :].any()
        seen["drafted"] += drafted
        seen["others"] += bool(drafted) and len(plan.decoding) > plan.num_draftable
        return found

    monkeypatch.setattr(RowPlanner, "rows", counted)
    return seen


def crossed(self: Runner, plan: Plan, before: Step) -> Overlap:
    """Every sequence goes on from the token of another one."""
    found = _OVERLAP(self, plan, before)
    is_one = found.entries >= 0
    found.entries[is_one] = found.entries[is_one][::-1]
    return found


_OVERLAP = Runner._overlap


@pytest.mark.slow
def test_looking_away_can_be_told_apart(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: sequences made ahead that read each other's tokens are not what is asked for later."""
    engine = make_engine(decoder, run_ahead=True)
    monkeypatch.setattr(Runner, "_overlap", crossed)
    with pytest.raises(AssertionError):
        run_ahead(engine, monkeypatch)


def test_queueing_can_be_told_apart(decoder: Decoder, expected: list[Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a queued row that reads another sequence's token changes rollouts, and the comparison sees it."""
    engine = make_engine(decoder)
    monkeypatch.setattr(Runner, "_overlap", crossed)
    assert contents(engine.generate(PROMPTS, SAMPLING)) != contents(expected)


def test_steps_are_launched_early_until_the_host_has_to_draft(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch shrinks, and the drafter is asked as soon as it is for one sequence."""
    engine = make_engine(decoder, Replay({}), UNMEASURED)
    seen: list[tuple[int, bool]] = []
    rows = RowPlanner.rows

    def watched(self: RowPlanner, plan: Plan, arm: Arm | None, before: Step | None) -> DraftRows:
        found = rows(self, plan, arm, before)
        assert before is None or found.proposals is None, "the host's drafts need the tokens of the step before"
        seen.append((plan.num_requested, found.proposals is not None))
        return found

    monkeypatch.setattr(RowPlanner, "rows", watched)
    monkeypatch.setattr(Bandit, "choose", keen_when_alone)
    found = run(engine, sampling=replace(SAMPLING, max_new_tokens=24))
    assert (2, False) in seen and (1, True) in seen and found.num_early > 0


def test_sequences_that_reach_their_limit_at_different_steps(decoder: Decoder) -> None:
    """Prompts of different length, one row of a prompt at a time: responses begin and end one after the other."""
    sampling = replace(SAMPLING, ignore_eos=True, max_new_tokens=4)
    prompts = [[7], [8, 9, 7], [3, 4]]
    plain, queued = (
        run(make_engine(decoder, can_overlap=q, prefill_chunk=1), prompts, sampling) for q in (False, True)
    )
    assert [len(r.token_ids) for r in plain.rollouts] == [4, 4, 4]
    assert contents(queued.rollouts) == contents(plain.rollouts) and queued.num_early > 0


def test_the_context_ends_a_response(decoder: Decoder) -> None:
    [rollout] = run(make_engine(decoder, max_rows=64), [[7] * 62], replace(SAMPLING, ignore_eos=True)).rollouts
    assert len(rollout.token_ids) == 2 and rollout.finish_reason == "length"


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.8, top_k=9), pytest.param(Sampling(0.0), marks=pytest.mark.slow)],
    ids=["truncated", "greedy"],
)
def test_other_ways_to_draw(decoder: Decoder, sampling: Sampling) -> None:
    sampling = replace(sampling, max_new_tokens=3)
    plain, queued = (run(make_engine(decoder, can_overlap=q), [[8], [9]], sampling) for q in (False, True))
    assert contents(queued.rollouts) == contents(plain.rollouts) and queued.num_early > 0
    assert all((r.truncated_logprobs is not None) == (sampling.top_k > 0) for r in queued.rollouts)


def test_few_pages(decoder: Decoder, expected: list[Rollout]) -> None:
    """Three pages for four sequences: some are preempted, hardly any step can be planned ahead."""
    engine = make_engine(decoder, kv_tokens=512)
    assert engine._cache.num_pages == 3
    assert contents(run(engine).rollouts) == contents(expected)


@pytest.mark.parametrize("make_draft", [deep_and_wide_tree, too_long], ids=lambda f: f.__name__)
def test_a_hostile_drafter_changes_nothing(decoder: Decoder, expected: list[Rollout], make_draft: MakeDraft) -> None:
    engine = make_engine(decoder, Hostile(make_draft, truth_of(expected), TINY.vocab_size))
    found = run(engine)
    assert contents(found.rollouts) == contents(expected)
    assert engine.stats.drafters[make_draft.__name__].verified > 0
    assert found.num_early == 0, "the drafter has to see every token"


def give_text(engine: Engine, texts: Mapping[int, Sequence[int]], prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Have the engine find this run-ahead text for the first samples of some draws, as if it had made it."""
    assert engine.ahead is not None
    for draw, text in texts.items():
        tokens = np.array(text, np.int32)
        engine.ahead.put(SAMPLING, (draw, 0), RunAheadText(prompt_id_of(prompts[draw]), tokens, is_whole=True))


@pytest.mark.slow
def test_a_drafted_token_without_a_sound_embedding_harms_nobody() -> None:
    """Its value is NaN, and the row before it shares a tile with it."""
    config, weights = parts_of(TINY)
    prompts, sampling = [[5, 6, 7], [8]], Sampling(max_new_tokens=5, seed=3, ignore_eos=True)
    truth = run(make_engine(gpu_decoder(TINY)), prompts, sampling).rollouts
    emitted = {token for rollout in truth for token in rollout.token_ids} | {5, 6, 7, 8}
    [unused, *_] = sorted(set(range(config.vocab_size)) - emitted)
    broken = weights["model.embed_tokens.weight"].clone()
    broken[unused] = float("nan")
    decoder = gpu_decoder(TINY, weights={**weights, "model.embed_tokens.weight": broken})

    def nan_token(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
        return Draft.chain([unused] * min(budget, 3))

    engine = make_engine(decoder, Hostile(nan_token, truth_of(truth), config.vocab_size))
    assert contents(run(engine, prompts, sampling).rollouts) == contents(truth)
    engine = make_engine(decoder, run_ahead=True)
    assert engine.ahead is not None
    for rollout, prompt in zip(truth, prompts, strict=True):
        text = np.array([*rollout.token_ids[:2], *[unused] * 3], np.int32)
        engine.ahead.put(sampling, (rollout.draw, 0), RunAheadText(prompt_id_of(prompt), text, is_whole=True))
    found = run(engine, prompts, sampling)
    assert contents(found.rollouts) == contents(truth) and found.num_found > 0


def test_a_tree_deeper_than_the_gpu_can_follow_is_cut() -> None:
    """Two first nodes, and a long chain below the second."""
    draft = Draft(list(range(90)), [-1, -1, *range(1, 89)])
    kept = proposer._shallow(draft, list(range(90)))
    assert kept == list(range(MAX_TREE_DEPTH))
    rows = Rows.build([SequenceRows(range(1 + len(kept)), 5, [0], [-1, 0, 0, *range(2, len(kept))])], 128)
    paths = np.zeros((len(rows), MAX_TREE_DEPTH), np.int32)
    _fill_paths(paths, rows)
    assert paths[-1].tolist() == [0, *range(2, MAX_TREE_DEPTH + 1)]


def test_weights_that_require_gradients_are_taken() -> None:
    config, weights = parts_of(TINY)
    parameters: Weights = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    decoder = Decoder(config, parameters, device="cuda")
    decoder.load_weights(parameters)
    assert torch.equal(decoder.score(TEXT), gpu_decoder(TINY).score(TEXT))


def test_a_failing_machine_does_not_lock_the_engine(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(decoder)
    with monkeypatch.context() as patch:

        def fail(flight: Any, stats: Any) -> Any:
            raise RuntimeError("the GPU is gone")

        patch.setattr(engine._runner, "collect", fail)
        with pytest.raises(RuntimeError, match="gone"):
            engine.generate(PROMPTS, SAMPLING)
    assert len(engine.generate(PROMPTS[:1], SAMPLING)) == 1
    check_idle(engine)


def test_replayed_drafts_save_steps_and_change_nothing(decoder: Decoder, expected: list[Rollout]) -> None:
    found = run(make_engine(decoder, Replay(truth_of(expected))))
    assert contents(found.rollouts) == contents(expected)
    assert found.num_steps < 2 + max(len(r.token_ids) for r in expected)


@pytest.mark.parametrize("share_wrong", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_text_that_the_device_finds_changes_nothing(
    decoder: Decoder, expected: list[Rollout], share_wrong: float
) -> None:
    """Drafts for a step whose place in the text is not known yet: all right, some right."""
    rng = random.Random(1)
    texts = {
        rollout.draw: [rng.randrange(TINY.vocab_size) if rng.random() < share_wrong else t for t in rollout.token_ids]
        for rollout in expected
    }
    engine = make_engine(decoder, run_ahead=True)
    give_text(engine, texts)
    found = run(engine)
    assert contents(found.rollouts) == contents(expected)
    assert found.num_early > 0 and found.num_found > 0 and found.num_hosted == 0
    assert engine.stats.drafters[RUN_AHEAD].accepted > 0
    if not share_wrong:
        assert found.num_steps <= 6


@pytest.mark.parametrize(
    "kind",
    [pytest.param("random", marks=pytest.mark.slow), "too long", pytest.param("shifted", marks=pytest.mark.slow)],
)
def test_hostile_text_changes_nothing(decoder: Decoder, expected: list[Rollout], kind: str) -> None:
    """Nonsense, text that goes on far beyond the end of the response and of the context, text that is one token off."""
    rng = random.Random(2)
    more = [rng.randrange(TINY.vocab_size) for _ in range(300)]
    own = truth_of(expected)
    texts = {
        "random": lambda draw: more[draw : draw + 12],
        "too long": lambda draw: [*own[draw, 0], *more],
        "shifted": lambda draw: own[draw, 0][1:],
    }
    for drafter in (None, "suffix"):
        engine = make_engine(decoder, drafter, run_ahead=True)
        give_text(engine, {draw: texts[kind](draw) for draw in range(len(PROMPTS))})
        assert contents(run(engine).rollouts) == contents(expected)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [pytest.param("suffix", marks=pytest.mark.slow), "ngram"])
def test_drafts_found_on_the_device_save_steps_and_change_nothing(decoder: Decoder, drafter: str) -> None:
    """Text that repeats itself: the host gives rows to sequences whose next tokens it has not seen."""
    plain = run(make_engine(decoder, can_overlap=False), sampling=GREEDY)
    engine = make_engine(decoder, drafter)
    found = run(engine, sampling=GREEDY)
    assert contents(found.rollouts) == contents(plain.rollouts)
    assert found.num_early >= found.num_steps - 2 and found.num_hosted == 0
    assert engine.stats.drafters[drafter].accepted > 10 and found.num_steps < plain.num_steps


@pytest.mark.slow
def test_a_device_that_counts_differently_is_noticed(decoder: Decoder) -> None:
    """The control: what the device accepts places the next step's rows, so it must be what the host finds."""
    engine = make_engine(decoder, "suffix")
    collect = engine._executor.collect

    def miscounted(ticket: Any) -> Any:
        sampled, seconds = collect(ticket)
        assert sampled.num_accepted is not None
        return replace(sampled, num_accepted=np.maximum(sampled.num_accepted - 1, 0)), seconds

    engine._executor.collect = miscounted  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device and the host disagree"):
        engine.generate(PROMPTS, GREEDY)
    engine._executor.collect = collect  # type: ignore[method-assign]
    check_idle(engine)
    assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_the_suffix_drafter_changes_nothing(decoder: Decoder, expected: list[Rollout]) -> None:
    assert contents(run(make_engine(decoder, "suffix", UNMEASURED)).rollouts) == contents(expected)


@pytest.mark.slow
def test_a_comparison_measures_the_share_of_time_that_the_device_worked(decoder: Decoder) -> None:
    made: list[Engine] = []

    def make(mode: Mode) -> Engine:
        made.append(make_engine(decoder, None if mode == "off" else "suffix", EVERYTHING))
        return made[-1]

    found = compare_engines(make, PROMPTS, SAMPLING, repeats=1, has_gpu=True)
    assert found.difference is None and found.num_identical == len(PROMPTS)
    assert found.gpu_share_off == device_share(made[0].stats) and found.gpu_share_on == device_share(made[1].stats)
    assert 0 < found.gpu_share_off <= 1 and 0 < found.gpu_share_on <= 1


def test_a_resting_drafter_lets_steps_be_launched_ahead(
    decoder: Decoder, expected: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While drafting rests, steps are queued; then it is tried again."""
    monkeypatch.setattr(Bandit, "choose", changing())
    num_asked = 0

    def counted(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
        nonlocal num_asked
        num_asked += 1
        return always_wrong(rng, rest, budget, vocab)

    found = run(make_engine(decoder, Hostile(counted, truth_of(expected), TINY.vocab_size), UNMEASURED))
    assert contents(found.rollouts) == contents(expected)
    assert found.num_early > 0 and num_asked > len(PROMPTS)


@pytest.mark.parametrize(
    "at_step, drafter", [(4, None), (2, "hostile"), pytest.param(4, "suffix", marks=pytest.mark.slow)]
)
def test_an_abort_while_a_step_is_under_way(
    decoder: Decoder, expected: list[Rollout], at_step: int, drafter: str | None
) -> None:
    longest = max(range(len(PROMPTS)), key=lambda i: len(expected[i].token_ids))
    hostile = Hostile(always_wrong, truth_of(expected), TINY.vocab_size)
    engine = make_engine(decoder, hostile if drafter == "hostile" else drafter)
    found = run(engine, on_step=lambda step: engine.abort(longest) if step == at_step else None)
    aborted, whole = found.rollouts[longest], expected[longest]
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) < len(whole.token_ids)
    assert aborted.token_ids == whole.token_ids[: len(aborted.token_ids)]
    assert aborted.logprobs == whole.logprobs[: len(aborted.token_ids)]
    others = [i for i in range(len(PROMPTS)) if i != longest]
    assert contents([found.rollouts[i] for i in others]) == contents([expected[i] for i in others])


def test_an_abort_of_everything(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    found = run(engine, on_step=lambda step: engine.abort() if step == 3 else None)
    assert found.num_steps == 4 and {r.finish_reason for r in found.rollouts} <= {"abort", "stop"}


def move(given: Serving, taken: Serving, keys: Sequence[RequestKey]) -> None:
    taken.add(given.take(keys))


@pytest.mark.parametrize("drafter", [None, pytest.param("suffix", marks=pytest.mark.slow)])
def test_sequences_move_while_a_step_is_under_way(
    decoder: Decoder, expected: list[Rollout], drafter: str | None
) -> None:
    """The step under way holds rows of those that are taken, all of them in the end, and some come back at once."""
    engines = [make_engine(decoder, drafter, max_sequences=3) for _ in range(2)]
    rollouts: list[Rollout] = []
    with engines[0].serve(SAMPLING) as first, engines[1].serve(SAMPLING) as second:
        first.add([Request(prompt, draw) for draw, prompt in enumerate(PROMPTS)])
        for _ in range(3):
            rollouts += first.step()
        for serving, other, count in ((first, second, 2), (first, first, 4), (second, first, 4)):
            assert engines[serving is second]._queued is not None
            move(serving, other, list(serving.progress())[:count])
            for engine in engines:
                engine.check_integrity()
            rollouts += first.step()
            rollouts += second.step()
        while first.has_work or second.has_work:
            rollouts += first.step() + second.step()
    for engine in engines:
        check_idle(engine)
    assert contents(sorted(rollouts, key=lambda rollout: rollout.draw)) == contents(expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_moves_while_steps_are_under_way(
    decoder: Decoder, expected: list[Rollout], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With text made ahead, which is asked for in the middle of it."""
    monkeypatch.setattr(Governor, "ahead_rows", lambda *_: 8)
    rng = random.Random(seed)
    drafter = (None, Hostile(mostly_true, truth_of(expected), TINY.vocab_size), "suffix")[seed % 3]
    options: dict[str, Any] = {"run_ahead": True, "max_sequences": rng.randint(2, 6)}
    engines = [make_engine(decoder, drafter, rng.choice((EVERYTHING, UNMEASURED)), **options) for _ in range(2)]
    servings = [engine.serve(SAMPLING) for engine in engines]
    waiting = [Request(prompt, draw) for draw, prompt in enumerate(PROMPTS)]
    rollouts: list[Rollout] = []
    while waiting or any(serving.has_work for serving in servings):
        here, there = rng.sample(servings, 2)
        deed = rng.randrange(8)
        if deed == 0 and waiting:
            here.add([waiting.pop()])
        elif deed == 1 and waiting:
            here.name_ahead([(waiting[0].prompt, waiting[0].draw)])
        elif deed == 2 and here.progress():
            move(here, rng.choice((here, there)), [rng.choice(list(here.progress()))])
        else:
            rollouts += here.step()
        for engine in engines:
            engine.check_integrity()
    for engine, serving in zip(engines, servings, strict=True):
        serving.close()
        check_idle(engine)
    assert contents(sorted(rollouts, key=lambda rollout: rollout.draw)) == contents(expected)


MIXED = (
    SAMPLING,
    replace(SAMPLING, temperature=0.0),
    replace(SAMPLING, top_p=0.6, seed=3),
    replace(SAMPLING, temperature=0.7, ignore_eos=True),
    replace(SAMPLING, min_p=0.3, stop_token_ids=(4, 5, 6)),
)


def mixed_requests() -> list[Request]:
    return [
        Request(PROMPTS[n % len(PROMPTS)], n % 3, 0, None, n, sampling, f"request {n}")
        for n, sampling in enumerate(MIXED)
    ]


@pytest.mark.parametrize("drafter", [None, pytest.param("suffix", marks=pytest.mark.slow)])
def test_requests_with_settings_of_their_own(decoder: Decoder, drafter: str | None) -> None:
    """Also one that is not truncated in a step that truncates others; tokens in flight are not told yet."""
    engine, rollouts, told = make_engine(decoder, drafter, max_sequences=4), [], dict[Any, list[int]]()
    with engine.serve(SAMPLING) as serving:
        serving.add(mixed_requests())
        while serving.has_work:
            rollouts += serving.step()
            for key, start, tokens, *_ in serving.new_tokens():
                assert start == len(told.setdefault(key, []))
                told[key] += tokens
    check_idle(engine)
    plain = make_engine(decoder)
    for request, rollout in zip(
        mixed_requests(), sorted(rollouts, key=lambda rollout: rollout.prompt_index), strict=True
    ):
        [alone] = plain.generate([request.prompt], request.sampling, draws=[request.draw])
        assert contents([rollout]) == contents([replace(alone, prompt_index=rollout.prompt_index)])
        own = told.get(request.request_id, [])
        assert own == rollout.token_ids[: len(own)]


@pytest.mark.parametrize(("num_steps", "drafter"), [(3, None), pytest.param(5, "suffix", marks=pytest.mark.slow)])
def test_new_weights_while_a_step_is_under_way(num_steps: int, drafter: str | None) -> None:
    """It counts still; from then on everything is as on a fresh engine with the new weights."""
    own, other = gpu_decoder(), gpu_decoder(weights=changed(parts_of(TINY)[1]))
    engine, rollouts = make_engine(own, drafter), list[Rollout]()
    with engine.serve(SAMPLING) as serving:
        serving.add(mixed_requests())
        for _ in range(num_steps):
            rollouts += serving.step()
        assert engine._queued is not None
        before = serving.progress()
        serving.change_weights(lambda: own.load_weights(changed(parts_of(TINY)[1])))
        assert engine._queued is None
        known = {request.prompt_index: request for request in serving.look()}
        assert any(progress.num_tokens > before[key].num_tokens for key, progress in serving.progress().items())
        while serving.has_work:
            rollouts += serving.step()
            engine.check_integrity()
    check_idle(engine)
    assert len(rollouts) == len(mixed_requests()) and known
    with make_engine(other).serve(SAMPLING, version=1) as serving:
        serving.add(list(known.values()))
        twins: list[Rollout] = []
        while serving.has_work:
            twins += serving.step()
    found = [rollout for rollout in rollouts if rollout.prompt_index in known]
    by_index = functools.partial(sorted, key=lambda rollout: rollout.prompt_index)
    assert contents(by_index(found)) == contents(by_index(twins))
    assert [rollout.versions for rollout in by_index(found)] == [rollout.versions for rollout in by_index(twins)]


def test_infinite_logits_while_a_step_is_queued(expected: list[Rollout]) -> None:
    """The error names the sequence, brings what was finished, and leaves an engine that works."""
    decoder = gpu_decoder()
    engine = make_engine(decoder)
    norm = decoder.shared_weights()["model.norm.weight"]
    sound = norm.clone()
    queued = []

    def poison(step: int) -> None:
        queued.append(engine._queued is not None)
        if step == 4:
            norm.data.fill_(float("nan"))  # unnoticed: else the step would say that weights have changed

    with pytest.raises(NonFiniteLogits, match=r"prompt \d, sample 0") as caught:
        run(engine, on_step=poison)
    assert queued[-1], "the step after must have been under way"
    done = caught.value.rollouts
    assert done and contents(done) == contents([expected[r.prompt_index] for r in done])
    norm.copy_(sound)
    assert contents(run(engine).rollouts) == contents(expected)


def test_memory_comes_back_after_a_release(decoder: Decoder, expected: list[Rollout]) -> None:
    engine = make_engine(decoder)
    engine.release_memory()
    with pytest.raises(AssertionError, match="released"):
        _ = engine._cache.memory
    assert contents(run(engine).rollouts) == contents(expected)


def test_memory_is_not_released_under_a_running_call(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    with pytest.raises(RuntimeError, match="generating"):
        run(engine, PROMPTS[:1], on_step=lambda step: engine.release_memory())


def test_the_memory_plan_says_where_memory_goes(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    plan = engine.memory_plan()
    assert plan.weights == 2 * decoder.config.num_parameters
    assert plan.cache == engine._cache.num_bytes == engine._cache.num_pages * engine._cache.page_bytes
    assert plan.cache_tokens == engine._cache.num_pages * 256 >= 4096
    assert plan.graphs == engine._executor.num_bytes > 0
    assert plan.optimizer == 12 * decoder.config.num_parameters
    for word in ("weights", "KV cache", "graphs", "free", "optimizer", plan.device):
        assert word in str(plan)


def test_the_self_test_passes() -> None:
    probes = run_self_test(gpu_decoder(replace(TINY, max_positions=38)))
    assert len(probes) >= 5 and all(probe.ok for probe in probes), probes


def test_row_counts_are_rounded_up_to_few_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    for most in (16, 100, 256, 300, 512):
        found = buckets(most)
        assert found[-1] == most and found == sorted(set(found)) and len(found) <= 20


# --- settings ---------------------------------------------------------------------------------------------------------


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.precision 'fp8'.*bf16, split, mixed, float32"):
        gpu_decoder(TINY, "fp8")
    with pytest.raises(ValueError, match="precision"):
        EngineSettings(precision="fp8")


def test_a_precision_of_the_gpu_is_refused_on_a_cpu(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.precision split needs a GPU"):
        Engine.from_pretrained(tiny_model, settings=EngineSettings(precision="split"))


def test_an_unsupported_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head dim 80 .*16, 32, 64, 128.*device='cpu'"):
        Engine(gpu_decoder(replace(TINY, head_dim=80)), None, None)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *given: None if name == "triton" else find_spec(name, *given)
    )
    with pytest.raises(ValueError, match=rf"{device}.*pip install -e '\.\[gpu\]'.*device='cpu'"):
        choose_ops(device, exact=True)
    assert choose_ops("cpu", exact=True).name == "native"


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'tpu' is not supported; use 'cpu' or 'cuda'"):
        choose_ops("tpu", exact=True)


def test_a_missing_gpu_is_said() -> None:
    """In a process of its own, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    code = "from paceline.model.ops.choose import choose_ops; choose_ops('cuda', True)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError: device 'cuda' was requested, but torch sees no CUDA GPU; use device='cpu'" in done.stderr


# --- on a GPU --------------------------------------------------------------------------------------------------------

CARD: dict[str, Any] = {"kv_tokens": 128 * 512, "max_rows": 256, "max_sequences": 128}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five million random parameters."""
    return make_random_model(tmp_path_factory.mktemp("5m"), size="5m")


@pytest.fixture(scope="module")
def small_decoder(small_model: Path) -> Decoder:
    """For tests that leave its weights alone."""
    config = load_config(small_model)
    return Decoder(config, load_weights(small_model, config), device="cuda")


def gpu_prompts(count: int) -> list[list[int]]:
    """Some of them longer than a page, so that splits of attention and page borders are met."""
    rng = random.Random(7)
    return [[rng.randrange(200) for _ in range(rng.choice((1, 9, 40, 240, 300)))] for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "split", "mixed", "float32"])
def test_the_self_test_passes_on_the_gpu(small_model: Path, precision: str) -> None:
    config = load_config(small_model)
    decoder = Decoder(config, load_weights(small_model, config), device="cuda", precision=precision)
    probes = run_self_test(decoder)
    assert all(probe.ok for probe in probes), probes


@pytest.mark.gpu
def test_graphs_are_their_eager_twins(small_decoder: Decoder) -> None:
    prompts, sampling = gpu_prompts(24), Sampling(max_new_tokens=24)
    for way in (sampling, replace(sampling, temperature=0.7, top_k=20, top_p=0.9)):
        eager, replayed = (run(make_engine(small_decoder, graphs=g, **CARD), prompts, way) for g in (False, True))
        assert contents(eager.rollouts) == contents(replayed.rollouts)


@pytest.mark.gpu
def test_one_batch_another_batch_and_drafts_give_the_same_bits(small_decoder: Decoder) -> None:
    prompts, sampling = gpu_prompts(64), Sampling(max_new_tokens=64, ignore_eos=True)
    plain = run(make_engine(small_decoder, can_overlap=False, **CARD), prompts, sampling)
    together = run(make_engine(small_decoder, **CARD), prompts, sampling)
    assert contents(together.rollouts) == contents(plain.rollouts) and together.num_early > 50
    alone = run(make_engine(small_decoder, **{**CARD, "max_sequences": 1}), prompts, sampling)
    assert contents(alone.rollouts) == contents(plain.rollouts)
    truth, always = truth_of(plain.rollouts), BudgetSettings(always=True)
    drafters: list[tuple[Any, BudgetSettings]] = [
        ("suffix", UNMEASURED),
        ("suffix", always),
        ("ngram", always),
        (Replay(truth), always),
        (Hostile(mostly_true, truth, small_decoder.config.vocab_size), always),
        (Hostile(deep_and_wide_tree, truth, small_decoder.config.vocab_size), always),
    ]
    for drafter, budget in drafters:
        drafted = run(make_engine(small_decoder, drafter, budget, **CARD), prompts, sampling)
        assert contents(drafted.rollouts) == contents(plain.rollouts), drafter


@pytest.mark.gpu
def test_control_inexact_mode_is_reported(small_model: Path, record_property: Callable[[str, object], None]) -> None:
    """How many rollouts change with the batch when cuBLAS may choose: a report, as some shapes happen to agree."""
    config = load_config(small_model)
    decoder = Decoder(config, load_weights(small_model, config), exact=False, device="cuda")
    prompts, sampling = gpu_prompts(16), Sampling(max_new_tokens=64, ignore_eos=True)
    many, one = (run(make_engine(decoder, **{**CARD, "max_sequences": n}), prompts, sampling) for n in (128, 1))
    pairs = zip(contents(many.rollouts), contents(one.rollouts), strict=True)
    num_changed = sum(a != b for a, b in pairs)
    record_property("rollouts that change with the batch when exact=False", num_changed)
    print(f"exact=False: {num_changed} of {len(prompts)} rollouts change with the batch")


@pytest.mark.gpu
def test_weights_updated_in_place_need_no_new_graph(small_model: Path) -> None:
    config = load_config(small_model)
    weights = load_weights(small_model, config)
    decoder = Decoder(config, weights, device="cuda")
    engine = make_engine(decoder, **CARD)
    prompts, sampling = gpu_prompts(8), Sampling(max_new_tokens=16, ignore_eos=True)
    before = run(engine, prompts, sampling)
    executor: Any = engine._executor
    captured = dict(executor.captured)
    update = {name: w + 0.02 * torch.randn_like(w) for name, w in weights.items()}
    with torch.no_grad():
        for name, view in decoder.shared_weights().items():
            view.copy_(update[name])
    after = run(engine, prompts, sampling)
    assert contents(after.rollouts) != contents(before.rollouts)
    assert executor.captured == captured
    fresh = make_engine(Decoder(config, update, device="cuda"), **CARD)
    assert contents(run(fresh, prompts, sampling).rollouts) == contents(after.rollouts)
    decoder.load_weights(weights)
    assert contents(run(engine, prompts, sampling).rollouts) == contents(before.rollouts)


@pytest.mark.gpu
def test_a_released_pool_is_free_memory(small_decoder: Decoder) -> None:
    engine = make_engine(small_decoder, **{**CARD, "kv_tokens": 1 << 20})
    prompts, sampling = gpu_prompts(8), Sampling(max_new_tokens=16)
    before = run(engine, prompts, sampling)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    engine.release_memory()
    freed = torch.cuda.mem_get_info()[0] - free
    assert freed >= 0.95 * engine._cache.num_bytes > 1 << 30
    assert contents(run(engine, prompts, sampling).rollouts) == contents(before.rollouts)
    assert torch.cuda.mem_get_info()[0] <= free + freed // 4


@pytest.mark.gpu
def test_graphs_outlive_those_captured_before(small_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier engine is gone, and code that captures too has cleared cuBLAS' workspaces, as torch.compile does."""
    monkeypatch.setattr("paceline.kernels.triton.linear._prefers_library", lambda x, weight: True)
    earlier: Any = make_engine(small_decoder, **CARD)
    earlier._executor.prepare()
    engine: Any = make_engine(small_decoder, **CARD)
    engine._executor.prepare()
    prompts, sampling = gpu_prompts(32), Sampling(max_new_tokens=8, ignore_eos=True)
    before = run(engine, prompts, sampling)
    del earlier
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 26,), torch.nan, device="cuda") for _ in range(8)]
    assert contents(run(engine, prompts, sampling).rollouts) == contents(before.rollouts)
    assert all(other.isnan().all() for other in others)


@pytest.mark.gpu
def test_graphs_are_keyed_by_rows(small_decoder: Decoder) -> None:
    """Contexts, drafts, trees and temperatures share them; there is a second one for rows that only decode."""
    engine = make_engine(small_decoder, "suffix", BudgetSettings(always=True), **CARD)
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    for temperature in (1.0, 0.5, 0.0):
        run(engine, gpu_prompts(32), replace(sampling, temperature=temperature))
    executor: Any = engine._executor
    captured = executor.captured
    assert {key.rows for key in captured} <= set(buckets(CARD["max_rows"]))
    assert len(captured) <= 2 * len(buckets(CARD["max_rows"])) and not any(key.is_truncated for key in captured)
    assert all(graph.seconds > 0 for graph in captured.values())
    plan = engine.memory_plan()
    assert plan.device.startswith("cuda") and plan.graphs > 0 and plan.free > 0
