"""The first promise, as equality: whatever drafts, batches, chunks and preemptions do, tokens and the bits of their
log-probabilities are those of plain decoding, one sequence at a time.

Every comparison here goes through `assert_same`, and the negative controls at the end show that it can fail.
"""

from __future__ import annotations

import functools
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hostile import HOSTILE, Hostile, MakeDraft, Truth, deep_and_wide_tree, true_continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import FAMILIES, ROPES, ModelSpec, build
from torch import Tensor

from paceline.core.types import Drafter, Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.engine import Engine
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

EVERYTHING = BudgetSettings(always=True, max_draft_nodes=20)
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
)

specs = st.builds(
    ModelSpec,
    family=st.sampled_from(FAMILIES),
    vocab_size=st.sampled_from((61, 97, 320)),
    hidden_size=st.sampled_from((24, 48)),
    num_layers=st.integers(1, 2),
    num_kv_heads=st.sampled_from((1, 2)),
    group_size=st.sampled_from((1, 2, 3)),
    head_dim=st.sampled_from((8, 16, 20)),
    rope=st.sampled_from(sorted(ROPES)),
    is_tied=st.booleans(),
    has_bias=st.booleans(),
    eos_token_ids=st.sampled_from(((2,), (0, 5))),
    seed=st.integers(0, 3),
)


def parts_of(spec: ModelSpec) -> tuple[Any, dict[str, Tensor]]:
    """Configuration and weights of a spec, read from the folder transformers wrote."""
    with tempfile.TemporaryDirectory() as folder:
        build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: weight.clone() for name, weight in load_weights(Path(folder), config).items()}


@functools.cache
def decoder_of(spec: ModelSpec, exact: bool = True) -> Decoder:
    return Decoder(*parts_of(spec), exact=exact)


def prompts_of(rng: random.Random, count: int, vocab: int, longest: int = 40) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(
    decoder: Decoder, prompts: list[list[int]], sampling: Sampling, drafter: Any = None, **options: Any
) -> list[Rollout]:
    """Generate with an audit of the page books after every step."""
    shape = {key: options[key] for key in options if key != "budget"}
    engine = Engine(
        decoder, None, drafter, EngineSettings(**{"kv_tokens": 4096, **shape}), options.get("budget", EVERYTHING)
    )
    step = engine.step

    def audited_step() -> list[Rollout]:
        rollouts = step()
        engine.check_integrity()
        return rollouts

    engine.step = audited_step  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rollouts = engine.generate(prompts, sampling)
    run.last = engine  # type: ignore[attr-defined]
    return rollouts


def assert_same(expected: list[Rollout], found: list[Rollout]) -> None:
    """Token ids, log-probabilities (bit for bit) and reasons."""
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        where = f"prompt {a.prompt_index}, sample {a.sample_index}"
        assert a.token_ids == b.token_ids, where
        assert a.logprobs == b.logprobs, where
        assert a.truncated_logprobs == b.truncated_logprobs, where
        assert a.finish_reason == b.finish_reason, where


def truth_of(rollouts: list[Rollout]) -> Truth:
    return {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in rollouts}


def spoiled(truth: Truth, share: float, vocab: int) -> Truth:
    rng = random.Random(1)
    return {
        key: [rng.randrange(vocab) if rng.random() < share else token for token in tokens]
        for key, tokens in truth.items()
    }


any_drafter = given(
    spec=specs, sampling=st.sampled_from(SAMPLINGS), make_draft=st.sampled_from(HOSTILE), seed=st.integers(0, 99)
)


def check_drafter(spec: ModelSpec, sampling: dict[str, float], make_draft: MakeDraft, seed: int) -> None:
    decoder = decoder_of(spec)
    prompts = prompts_of(random.Random(seed), 5, spec.vocab_size)
    settings = Sampling(**sampling, max_new_tokens=33, n=2, seed=seed)  # type: ignore[arg-type]
    plain = run(decoder, prompts, settings)
    drafted = run(decoder, prompts, settings, Hostile(make_draft, truth_of(plain), spec.vocab_size, seed))
    assert_same(plain, drafted)


@settings(max_examples=30)
@any_drafter
def test_no_drafter_changes_a_token(
    spec: ModelSpec, sampling: dict[str, float], make_draft: MakeDraft, seed: int
) -> None:
    check_drafter(spec, sampling, make_draft, seed)


@pytest.mark.slow
@settings(max_examples=400)
@any_drafter
def test_no_drafter_changes_a_token_at_length(
    spec: ModelSpec, sampling: dict[str, float], make_draft: MakeDraft, seed: int
) -> None:
    check_drafter(spec, sampling, make_draft, seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLINGS[0],
        *(pytest.param(other, marks=pytest.mark.slow) for other in (SAMPLINGS[1], *SAMPLINGS[3:-1])),
        SAMPLINGS[2],
        SAMPLINGS[-1],
    ],
    ids=str,
)
def test_own_drafters_change_no_token(family: str, sampling: dict[str, float]) -> None:
    spec = ModelSpec(family=family, hidden_size=40, vocab_size=61)
    decoder = decoder_of(spec)
    prompts = prompts_of(random.Random(5), 4, spec.vocab_size)
    # The same prompt twice and eight samples each: siblings and repeats for the suffix drafter to find.
    prompts.append(prompts[0])
    settings = Sampling(**sampling, max_new_tokens=40, n=4, seed=3, ignore_eos=True)  # type: ignore[arg-type]
    plain = run(decoder, prompts, settings)
    truth = truth_of(plain)
    drafters: list[str | Drafter] = ["ngram", "suffix", "ngram,suffix"]
    drafters += [Replay(spoiled(truth, share, spec.vocab_size)) for share in (0.0, 0.2, 1.0)]
    for drafter in drafters:
        assert_same(plain, run(decoder, prompts, settings, drafter))
        assert_same(plain, run(decoder, prompts, settings, drafter, budget=BudgetSettings()))


def test_true_drafts_save_steps() -> None:
    """The equality above is not bought by drafting nothing."""
    spec = ModelSpec()
    decoder = decoder_of(spec)
    prompts = prompts_of(random.Random(0), 3, spec.vocab_size)
    sampling = Sampling(max_new_tokens=60, ignore_eos=True)
    plain = run(decoder, prompts, sampling)
    steps = run.last.stats.steps  # type: ignore[attr-defined]
    run(decoder, prompts, sampling, Hostile(true_continuation, truth_of(plain), spec.vocab_size))
    assert run.last.stats.steps < steps / 8  # type: ignore[attr-defined]
    assert run.last.stats.accept_length > 10  # type: ignore[attr-defined]


any_work = given(
    spec=specs,
    sampling=st.sampled_from(SAMPLINGS),
    make_draft=st.sampled_from(HOSTILE),
    shape=st.fixed_dictionaries(
        {
            "max_sequences": st.sampled_from((1, 2, 5, 64)),
            "max_rows": st.sampled_from((5, 17, 64, 512)),
            "prefill_chunk": st.sampled_from((1, 3, 16, 256)),
            "kv_tokens": st.sampled_from((96, 160, 4096)),
        }
    ),
)


def check_work(spec: ModelSpec, sampling: dict[str, float], make_draft: MakeDraft, shape: dict[str, int]) -> None:
    decoder = decoder_of(spec)
    prompts = prompts_of(random.Random(shape["max_rows"]), 4, spec.vocab_size)
    settings = Sampling(**sampling, max_new_tokens=48, n=3, seed=1, ignore_eos=True)  # type: ignore[arg-type]
    plain = run(decoder, prompts, settings)
    drafter = Hostile(make_draft, truth_of(plain), spec.vocab_size)
    assert_same(plain, run(decoder, prompts, settings, drafter, **shape))


@settings(max_examples=25)
@any_work
def test_no_shape_of_work_changes_a_token(
    spec: ModelSpec, sampling: dict[str, float], make_draft: MakeDraft, shape: dict[str, int]
) -> None:
    check_work(spec, sampling, make_draft, shape)


@pytest.mark.slow
@settings(max_examples=250)
@any_work
def test_no_shape_of_work_changes_a_token_at_length(
    spec: ModelSpec, sampling: dict[str, float], make_draft: MakeDraft, shape: dict[str, int]
) -> None:
    check_work(spec, sampling, make_draft, shape)


def test_preemption_happens_and_changes_nothing() -> None:
    spec = ModelSpec(family="qwen3")
    decoder = decoder_of(spec)
    prompts = prompts_of(random.Random(2), 6, spec.vocab_size)
    sampling = Sampling(max_new_tokens=70, n=2, ignore_eos=True)
    plain = run(decoder, prompts, sampling)
    assert run.last.stats.preemptions == 0  # type: ignore[attr-defined]
    for drafter in (None, "suffix", Hostile(HOSTILE[4], truth_of(plain), spec.vocab_size)):
        assert_same(plain, run(decoder, prompts, sampling, drafter, kv_tokens=160, prefill_chunk=7))
        assert run.last.stats.preemptions > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_of_one_and_of_64(family: str) -> None:
    spec = ModelSpec(family=family, num_kv_heads=2, group_size=3, hidden_size=48)
    decoder = decoder_of(spec)
    prompts = prompts_of(random.Random(8), 64, spec.vocab_size, longest=20)
    sampling = Sampling(max_new_tokens=24, seed=11)
    together = run(decoder, prompts, sampling, max_sequences=64)
    one_by_one = run(decoder, prompts, sampling, max_sequences=1)
    assert_same(one_by_one, together)
    # And alone in a call of its own, where only `draws` says which use of the prompt it is.
    engine = Engine(decoder, None, None, EngineSettings(kv_tokens=256))
    [alone] = engine.generate([prompts[37]], sampling, draws=[37])
    assert (alone.token_ids, alone.logprobs) == (together[37].token_ids, together[37].logprobs)


def test_two_torch_threads_change_nothing() -> None:
    import torch

    spec = ModelSpec(family="llama", hidden_size=48)
    prompts = prompts_of(random.Random(3), 8, spec.vocab_size)
    plain = run(decoder_of(spec), prompts, Sampling(max_new_tokens=20))
    torch.set_num_threads(2)
    try:
        assert_same(plain, run(decoder_of(spec), prompts, Sampling(max_new_tokens=20)))
    finally:
        torch.set_num_threads(1)


# Negative controls: the same comparison must see an engine without the guarantee.


def _control(decoder: Decoder, vocab_size: int) -> None:
    prompts = prompts_of(random.Random(4), 12, vocab_size)
    sampling = Sampling(max_new_tokens=32, ignore_eos=True)
    assert_same(run(decoder, prompts, sampling, max_sequences=1), run(decoder, prompts, sampling, max_sequences=64))


def test_control_inexact_mode_is_seen() -> None:
    spec = ModelSpec(family="llama", hidden_size=264, intermediate_size=520, vocab_size=320, num_layers=3)
    with pytest.raises(AssertionError):
        _control(decoder_of(spec, exact=False), spec.vocab_size)
    _control(decoder_of(spec, exact=True), spec.vocab_size)


def test_control_sum_order_that_depends_on_the_batch_is_seen() -> None:
    spec = ModelSpec(family="qwen2", seed=9)
    faulty = Decoder(*parts_of(spec))
    exact_linear = faulty.ops.linear

    def linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] <= 1:
            return exact_linear(x, weight, bias)
        # More rows, another order: the product in two halves of the depth.
        left, right = x.clone(), x.clone()
        left[:, x.shape[1] // 2 :] = 0
        right[:, : x.shape[1] // 2] = 0
        return exact_linear(right, weight) + exact_linear(left, weight, bias)

    faulty.ops.linear = linear  # type: ignore[method-assign, assignment]
    # The engine refuses to start with such a machine ...
    with pytest.raises(ValueError, match="exact mode does not hold"):
        Engine(faulty, None, None)
    # ... and were it to start, the comparison would see it.
    faulty.ops.is_exact = False
    with pytest.raises(AssertionError):
        _control(faulty, spec.vocab_size)


def test_an_interrupt_before_accepted_nodes_are_moved_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(ModelSpec(hidden_size=24, num_layers=1, vocab_size=61, eos_token_ids=(2,)))
    rng = random.Random(0)
    prompts = [[rng.randrange(61) for _ in range(30)] for _ in range(3)]
    sampling = Sampling(max_new_tokens=20, seed=4, ignore_eos=True)
    given, budget = EngineSettings(kv_tokens=256, max_rows=64), BudgetSettings(always=True, max_draft_nodes=8)
    plain = Engine(decoder, None, None, given, budget).generate(prompts, sampling)
    apply_moves = Scheduler.apply_moves
    for trial in range(6):
        engine = Engine(decoder, None, Hostile(deep_and_wide_tree, truth_of(plain), 61, trial), given, budget)
        num_moved = 0

        def interrupted(self: Scheduler, at: int = 1 + trial % 3) -> None:
            nonlocal num_moved
            num_moved += bool(self._moves)
            if num_moved == at:
                raise KeyboardInterrupt
            apply_moves(self)

        monkeypatch.setattr(Scheduler, "apply_moves", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, sampling)
        monkeypatch.setattr(Scheduler, "apply_moves", apply_moves)
        engine.check_integrity()
        found = engine.generate(prompts, sampling)
        assert [(r.token_ids, r.logprobs) for r in found] == [(r.token_ids, r.logprobs) for r in plain]
