"""An inflated model computes what the small one does: same logits, same text, no padded ids, after training too."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import ModelSpec, build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle, EagleConfig, tap_layers
from paceline.model.folder import load_config, resolve
from paceline.model.rope import rope_table
from paceline.model.tokenizer import Tokenizer
from paceline.rl.algorithms import assign_advantages
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.tasks.countdown import Countdown

Weights = dict[str, Tensor]

BENCH = Path(__file__).resolve().parent.parent / "bench"
SHIPPED = "shipped:countdown"
NAMES = ("0.6b", "1.7b", "7b")
LOUDEST, QUIETEST = 23.0, -3.0
"""Bounds of the noise that sampling adds to a logit."""

SPEC = ModelSpec(
    family="qwen3", vocab_size=61, hidden_size=40, intermediate_size=52, num_layers=6, head_dim=16, is_tied=True,
    rms_norm_eps=1e-2, initializer_range=0.1, eos_token_ids=(60,),
)  # fmt: skip
"""With an eps that matters: at 1e-6, leaving it out would hardly show."""
LLAMA = replace(SPEC, family="llama")
MIDDLE: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 320,
    "intermediate_size": 640,
    "num_hidden_layers": 11,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 128,
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The script as a module; the bench folder is no package."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("inflate")
    sys.path.remove(str(BENCH))


def sizes(is_tied: bool = True, **changes: Any) -> ModelConfig:
    """A model larger than `SPEC` in everything."""
    hf = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 150,
        "hidden_size": 72,
        "intermediate_size": 80,
        "num_hidden_layers": 9,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "tie_word_embeddings": is_tied,
    }
    return ModelConfig.from_hf(hf | changes)


def sizes_for(spec: ModelSpec, is_tied: bool = True, **changes: Any) -> ModelConfig:
    """A larger model of a spec's family: a Llama keeps its vocabulary and head width, and here its groups."""
    kept = {"vocab_size": spec.vocab_size, "head_dim": spec.head_dim, "num_attention_heads": 3 * spec.group_size}
    return sizes(is_tied, **((kept if spec.family == "llama" else {}) | changes))


@functools.cache
def parts_of(spec: ModelSpec = SPEC) -> tuple[ModelConfig, Weights, Any]:
    """Configuration, weights and the transformers model of a spec."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: w.clone() for name, w in load_weights(Path(folder), config).items()}, model


@functools.cache
def shipped() -> tuple[ModelConfig, Weights]:
    folder = resolve(SHIPPED)
    config = load_config(folder)
    return config, load_weights(folder, config)


def random_ids(vocab_size: int, count: int = 70) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def assert_equal_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# --- the same numbers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A small model and the sizes it is to have."""

    spec: ModelSpec
    sizes: ModelConfig


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(("qwen3", "llama")))
    num_kv_heads, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    spec = ModelSpec(
        family=family,
        vocab_size=draw(st.sampled_from((61, 97))),
        # transformers refuses a Llama whose hidden size its heads do not divide.
        hidden_size=36 * draw(st.integers(1, 2)) if family == "llama" else draw(st.sampled_from((24, 40))),
        intermediate_size=draw(st.sampled_from((20, 52))),
        num_layers=draw(st.integers(1, 7)),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=draw(st.sampled_from((8, 16))),
        rope=draw(st.sampled_from(("default", "theta", "linear", "llama3"))),
        is_tied=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from((1e-6, 1e-2, 0.3))),
        initializer_range=0.1,
        seed=draw(st.integers(0, 2**31 - 1)),
    )
    num_kv_heads += draw(st.integers(0, 2))
    is_llama = family == "llama"
    large = sizes(
        is_tied=spec.is_tied and draw(st.booleans()),
        vocab_size=spec.vocab_size + (0 if is_llama else draw(st.sampled_from((0, 1, 90)))),
        hidden_size=spec.hidden_size + draw(st.sampled_from((6, 40, 200))),
        intermediate_size=spec.intermediate_size + draw(st.sampled_from((0, 30))),
        num_hidden_layers=spec.num_layers + draw(st.integers(0, 4)),
        num_key_value_heads=num_kv_heads,
        num_attention_heads=num_kv_heads * (spec.group_size + draw(st.integers(0, 3))),
        head_dim=spec.head_dim * (1 if is_llama else draw(st.integers(1, 3))),
    )
    return Case(spec, large)


@settings(max_examples=30)
@given(case=cases())
def test_logits_are_those_of_the_small_model(bench: Any, case: Case) -> None:
    config, weights, _ = parts_of.__wrapped__(case.spec)
    inflation = bench.Inflation(config, case.sizes)
    large_weights = inflation.inflate(weights)
    assert (len(inflation.constants) == 0) == (case.spec.family == "llama")
    assert {name: tuple(w.shape) for name, w in large_weights.items()} == inflation.large.weight_shapes()
    token_ids = random_ids(config.vocab_size)
    expected = Decoder(config, weights).score(token_ids)
    logits = Decoder(inflation.large, large_weights).score(token_ids)
    torch.testing.assert_close(logits[:, : config.vocab_size], expected, rtol=0, atol=3e-5)
    assert (logits[:, config.vocab_size :] < -1000).all()


@pytest.mark.parametrize("fault", ["eps", "constants", "scale", "pairs", "heads"])
def test_each_part_of_the_construction_is_seen(bench: Any, fault: str) -> None:
    """Without any one of them the logits differ by far more than the tolerance above."""
    config, weights, _ = parts_of()
    inflation = bench.Inflation(config, sizes())
    if fault == "eps":
        inflation.large = replace(inflation.large, rms_norm_eps=config.rms_norm_eps)
    elif fault == "constants":
        inflation.constants = inflation.constants * 1e-3
    elif fault == "scale":
        inflation._scale = 1.0
    elif fault == "pairs":
        inflation.places["head"] = torch.arange(16)
        for axis, heads in (("query", (0, 1, 3, 4)), ("key_value", (0, 1))):
            inflation.places[axis] = (torch.tensor(heads)[:, None] * 32 + torch.arange(16)).flatten()
    else:
        head = inflation.places["head"]
        inflation.places["query"] = (torch.arange(4)[:, None] * 32 + head).flatten()
    token_ids = random_ids(config.vocab_size)
    logits = Decoder(inflation.large, inflation.inflate(weights)).score(token_ids)
    expected = Decoder(config, weights).score(token_ids)
    assert (logits[:, : config.vocab_size] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_rotary_tables_have_the_same_bits(bench: Any, name: str) -> None:
    config, _ = shipped()
    inflation = bench.Inflation(config, bench.shape_config(name, config))
    large, pairs = inflation.large, inflation.places["head"][: config.head_dim // 2]
    assert large.max_context == config.max_context
    small_tables = rope_table(config.rope, config.head_dim, config.max_context)
    large_tables = rope_table(large.rope, large.head_dim, large.max_context)
    for small_table, large_table in zip(small_tables, large_tables, strict=True):
        assert torch.equal(large_table[:, pairs], small_table)
    assert torch.equal(inflation.places["head"][config.head_dim // 2 :], pairs + large.head_dim // 2)


def test_hidden_states_that_drafters_read_are_the_same(bench: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config, weights, small = parts_of()
    inflation = bench.Inflation(config, sizes())
    bench.save_checkpoint(tmp_path, inflation.large, inflation.inflate(weights))
    large = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids = torch.tensor([random_ids(config.vocab_size)])
    with torch.no_grad():
        small_states, large_states = (
            model(token_ids, output_hidden_states=True).hidden_states for model in (small, large)
        )
    taps = list(zip(tap_layers(6), tap_layers(9), strict=True))
    assert taps == [(2, 2), (3, 4), (3, 6)]
    for small_tap, large_tap in taps:
        state = large_states[large_tap][0]
        expected = torch.zeros_like(state)
        expected[:, inflation.places["hidden"]] = small_states[small_tap][0]
        expected[:, inflation.constant_columns] = inflation.constants.float()
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("num_drafted", [61, 20])
@pytest.mark.parametrize("spec", [SPEC, LLAMA], ids=lambda spec: spec.family)
def test_a_drafter_grows_with_its_policy(bench: Any, spec: ModelSpec, num_drafted: int) -> None:
    config, weights, _ = parts_of(spec)
    ids = torch.arange(config.vocab_size)[-num_drafted:]
    fresh = Eagle.fresh(EagleConfig.for_policy(config, num_drafted), weights, ids)
    generator = torch.Generator().manual_seed(2)
    moved = {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in fresh.weights.items()}
    small = replace(fresh, weights=moved, version=7)
    inflation = bench.Inflation(config, sizes_for(spec))
    large = bench.inflate_eagle(inflation, small)
    num_added = inflation.large.vocab_size - config.vocab_size
    assert large.version == 7 and large.config.vocab_size == config.vocab_size + num_added
    token_ids = torch.tensor(random_ids(config.vocab_size))
    # Taps as the policy leaves them: with an eps that matters, small ones show whether the norms have the right one.
    taps = 0.1 * torch.randn(len(token_ids) - 1, 3, config.hidden_size, generator=generator)
    large_taps = torch.zeros(len(taps), 3, large.config.hidden_size)
    large_taps[:, :, inflation.places["hidden"]] = taps
    large_taps[:, :, inflation.constant_columns] = inflation.constants.float()
    embeddings = weights["model.embed_tokens.weight"], inflation.inflate(weights)["model.embed_tokens.weight"]
    _, expected = small.forward_text(token_ids, taps.flatten(1), embeddings[0])
    _, found = large.forward_text(token_ids, large_taps.flatten(1), embeddings[1])
    torch.testing.assert_close(found[:, :num_drafted], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(large.draft_ids[:num_drafted], small.draft_ids) and found.shape[1] == num_drafted + num_added
    assert (found[:, num_drafted:] < expected.min() + QUIETEST - LOUDEST - 1000).all()


# --- the same text ----------------------------------------------------------------------------------------------------


def engine_of(config: ModelConfig, weights: Weights) -> Engine:
    settings = EngineSettings(kv_tokens=16_384, max_sequences=32)
    tokenizer = Tokenizer.from_folder(resolve(SHIPPED))
    return Engine(Decoder(config, weights), tokenizer, drafter=None, settings=settings)


@pytest.fixture(scope="module")
def engines(bench: Any) -> tuple[Engine, Engine]:
    """The shipped model, and itself inflated to a middling size."""
    config, weights = shipped()
    inflation = bench.Inflation(config, sizes(**MIDDLE))
    return engine_of(config, weights), engine_of(inflation.large, inflation.inflate(weights))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_the_shipped_model(engines: tuple[Engine, Engine], temperature: float) -> None:
    task = Countdown(0)
    prompts = [task.item(7, index, "train").prompt for index in range(16)]
    sampling = Sampling(temperature=temperature, max_new_tokens=64, n=2 if temperature else 1, seed=5)
    small, large = (engine.generate(prompts, sampling) for engine in engines)
    assert [r.token_ids for r in large] == [r.token_ids for r in small]
    assert [(r.text, r.finish_reason) for r in large] == [(r.text, r.finish_reason) for r in small]
    assert len({tuple(r.token_ids) for r in small}) > len(prompts) // 2
    differences = [np.abs(np.subtract(a.logprobs, b.logprobs)).max() for a, b in zip(small, large, strict=True)]
    assert max(differences) < 1e-4


def test_padded_ids_are_never_drawn(engines: tuple[Engine, Engine]) -> None:
    """Whatever the noise; with thousands of draws at a high temperature too."""
    small, large = (engine.decoder for engine in engines)
    num_ids = small.config.vocab_size
    logits = large.score(random_ids(num_ids))
    padded, best = logits[:, num_ids:].amax(1), logits[:, :num_ids].amax(1)
    assert (torch.log_softmax(logits, -1)[:, num_ids:] < -60).all() and torch.isfinite(logits).all()
    for temperature in (1.0, 20.0):
        assert (padded / temperature + LOUDEST < best / temperature + QUIETEST).all()
    keys, steps = np.arange(4000, dtype=np.uint64), np.arange(4000, dtype=np.int64)
    sampling = Sampling(temperature=20.0)
    small_logits = small.score(random_ids(num_ids))[-1].expand(4000, -1).contiguous()
    expected = small.ops.sample(small_logits, sampling, keys, steps).tokens
    rows = logits[-1].expand(4000, -1).contiguous()
    assert np.array_equal(large.ops.sample(rows, sampling, keys, steps).tokens, expected)
    assert len(set(expected.tolist())) > num_ids // 2
    unmasked = rows.clone()
    unmasked[:, num_ids:] = 0.0  # what zero rows of the head would give
    assert large.ops.sample(unmasked, sampling, keys, steps).tokens.max() >= num_ids


def test_the_mask_holds_for_hidden_states_of_any_length(bench: Any) -> None:
    config, weights, _ = parts_of()
    inflation = bench.Inflation(config, sizes())
    large = Decoder(inflation.large, inflation.inflate(weights))
    hidden = torch.zeros(5, inflation.large.hidden_size)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0.0, 1e-3, 1.0, 100.0, 3000.0])
    hidden[:, inflation.places["hidden"]] = torch.randn(5, config.hidden_size, generator=generator) * lengths[:, None]
    hidden[:, inflation.constant_columns] = inflation.constants.float()
    logits = large.logits(hidden)
    expected = Decoder(config, weights).logits(hidden[:, inflation.places["hidden"]])
    torch.testing.assert_close(logits[:, : config.vocab_size], expected, rtol=0, atol=1e-5)
    assert torch.isfinite(logits).all() and (logits[:, config.vocab_size :] < -1000).all()


# --- weights: precision, in place, training ---------------------------------------------------------------------------


def test_matrices_keep_every_bit_of_bfloat16(bench: Any) -> None:
    config, weights = shipped()
    inflation = bench.Inflation(config, sizes(**MIDDLE))
    made = inflation.inflate(weights)
    from_float32 = inflation.inflate({name: weight.float() for name, weight in weights.items()})
    assert {weight.dtype for weight in made.values() if weight.ndim == 2} == {torch.bfloat16}
    assert_equal_bits({name: weight.float() for name, weight in made.items()}, from_float32)
    again_config, again = inflation.deflate(made)
    assert again_config == config
    assert_equal_bits({name: weight.to(weights[name]) for name, weight in again.items()}, weights)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_constants_make_up_for_the_eps_of_hidden_norms(bench: Any, name: str, eps: float) -> None:
    config = replace(shipped()[0], rms_norm_eps=eps)
    inflation = bench.Inflation(config, bench.shape_config(name, config))
    constants, large = inflation.constants, inflation.large
    assert torch.equal(constants, constants.bfloat16().double()) and constants[0] == constants[1] > 0
    total = float(constants.square().sum()) + large.hidden_size * large.rms_norm_eps
    assert total == pytest.approx(config.hidden_size * eps, rel=1e-7)
    assert math.log2(inflation._scale).is_integer()


class LargestMade(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor with memory of its own, beside tensors known before."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self._known:
            num_elements = result.untyped_storage().nbytes() // result.element_size()
            self.num_elements = max(self.num_elements, num_elements)
        return result


@pytest.mark.parametrize("is_tied", [True, False])
def test_inflating_in_place_is_inflating_anew(bench: Any, is_tied: bool) -> None:
    config, weights, _ = parts_of()
    _, other, _ = parts_of(replace(SPEC, seed=9))
    inflation = bench.Inflation(config, sizes(is_tied, hidden_size=400, vocab_size=2000))
    made = inflation.inflate(weights)
    with LargestMade([*made.values(), *other.values()]) as largest:
        inflation.inflate_into(other, made)
    assert 0 < largest.num_elements <= max(weight.numel() for weight in weights.values())
    assert_equal_bits(made, inflation.inflate(other))
    # Views of weights kept in another precision, as a running decoder's are.
    kept = {name: w.bfloat16() if w.ndim == 2 else w for name, w in inflation.inflate(weights).items()}
    inflation.inflate_into(other, kept)
    assert_equal_bits(kept, {n: w.bfloat16() if w.ndim == 2 else w for n, w in made.items()})


def test_masked_gradients_are_those_of_the_small_model(bench: Any) -> None:
    config, weights, _ = parts_of()
    inflation = bench.Inflation(config, sizes(is_tied=False, hidden_size=400, vocab_size=2000))
    gradients = {name: torch.ones(shape) for name, shape in inflation.large.weight_shapes().items()}
    with LargestMade(gradients.values()) as largest:
        inflation.mask_gradients(gradients)
    assert largest.num_elements <= max(weight.numel() for weight in weights.values())
    num_kept = sum(int(gradient.sum()) for gradient in gradients.values())
    assert num_kept == config.num_parameters + weights[bench.EMBEDDING].numel(), "the head is held beside the embedding"
    other = inflation.inflate(parts_of(replace(SPEC, seed=9))[1])
    for name, before in inflation.inflate(weights).items():
        assert torch.equal(other[name] != before, gradients[name] != 0), "small weights differ, and nothing else"


def train(config: ModelConfig, weights: Weights, mask: Any) -> Weights:
    """Three GRPO steps that like even tokens; `mask` is applied to every gradient."""
    sampling = Sampling(n=6, max_new_tokens=8, stream="train", ignore_eos=True)
    decoder = Decoder(config, weights)
    engine = Engine(decoder, None, None, EngineSettings(kv_tokens=4096, max_sequences=16))
    settings = RlSettings(lr=6e-3, steps=3)
    learner = Learner(decoder, settings, sampling)
    for step in range(3):
        batch = learner.plan(as_samples(engine.generate([[3], [5, 9]], sampling, draws=[2 * step, 2 * step + 1])))
        sums = [learner.worker_sum(batch, worker) for worker in range(len(batch.workers))]
        for found in sums:
            mask(found.gradients or {})
        learner.apply(sums)
    return {name: weight.clone() for name, weight in learner.weights.items()}


def first_gradients(config: ModelConfig, weights: Weights) -> Weights:
    """Of the first virtual worker in the first step of `train`."""
    seen: list[Weights] = []
    train(config, weights, lambda gradients: seen.append({name: g.clone() for name, g in gradients.items()}))
    return seen[0]


def as_samples(rollouts: list[Rollout]) -> list[Sample]:
    rewards = np.array([np.mean(np.array(r.token_ids) % 2 == 0) for r in rollouts])
    draws = np.array([r.draw for r in rollouts])
    masks = [np.ones(len(r.token_ids), np.bool_) for r in rollouts]
    advantages = assign_advantages(RlSettings().build(), rewards, draws, masks)
    return [
        Sample.of(r.draw, r.sample_index, [[3], [5, 9]][r.prompt_index], r.token_ids, r.logprobs, advantage)
        for r, advantage in zip(rollouts, advantages, strict=True)
    ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_trained_inflated_model_is_an_inflation(bench: Any, is_tied: bool) -> None:
    config, weights, _ = parts_of()
    inflation = bench.Inflation(config, sizes(is_tied))
    start = inflation.inflate(weights)
    trained = train(inflation.large, start, inflation.mask_gradients)
    small_config, small = inflation.deflate(trained)
    assert small_config.tie_embeddings == is_tied
    again = bench.Inflation(small_config, sizes(is_tied)).inflate(small)
    for name, weight in trained.items():
        torch.testing.assert_close(again[name], weight, rtol=0 if weight.ndim == 2 else 1e-6, atol=0)
    token_ids = random_ids(config.vocab_size)
    logits = Decoder(inflation.large, trained).score(token_ids)[:, : config.vocab_size]
    torch.testing.assert_close(logits, Decoder(small_config, small).score(token_ids), rtol=0, atol=3e-5)
    assert (logits - Decoder(config, weights).score(token_ids)).abs().max() > 0.1, "it has learned something"
    unmasked = train(inflation.large, start, lambda gradients: None)
    assert any(bool((weight != start[name])[~is_small(inflation, name)].any()) for name, weight in unmasked.items())


def is_small(inflation: Any, name: str) -> Tensor:
    mask = torch.zeros(inflation.large.weight_shapes()[name], dtype=torch.bool)
    mask[inflation.small_part(name)] = True
    return mask


@pytest.mark.parametrize("has_added_members", [False, True])
def test_gradients_of_a_llamas_padding_are_zero(bench: Any, has_added_members: bool) -> None:
    """But for what reads query heads added to a small group: `mask_gradients` clears those."""
    config, weights, _ = parts_of(LLAMA)
    inflation = bench.Inflation(config, sizes_for(LLAMA, num_attention_heads=9 if has_added_members else 6))
    small_gradients = first_gradients(config, weights)
    large_gradients = first_gradients(inflation.large, inflation.inflate(weights))
    loud = {name for name, found in large_gradients.items() if found[~is_small(inflation, name)].any()}
    outputs = {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in inflation.layers}
    assert len(large_gradients) == len(inflation.large.weight_shapes()) and loud == (
        outputs if has_added_members else set()
    )
    for name, found in large_gradients.items():
        if (source := inflation._sources.get(name)) is not None:
            # Norm weights are smaller by a factor, so their gradients are larger by it.
            own = found[inflation.small_part(name)] * inflation._factor(name)
            torch.testing.assert_close(own, small_gradients[source], rtol=1e-3, atol=1e-6)
            assert own.any()
    inflation.mask_gradients(large_gradients)
    assert not any(found[~is_small(inflation, name)].any() for name, found in large_gradients.items())


def test_four_times_the_hidden_size_has_the_same_bits(bench: Any) -> None:
    """Its factors are powers of two, and zeros at the end change no sum; at other sizes norms round otherwise."""
    config, weights, _ = parts_of(LLAMA)
    expected = Decoder(config, weights).score(random_ids(config.vocab_size))
    for hidden_size, is_equal in ((160, True), (640, True), (200, False)):
        inflation = bench.Inflation(config, sizes_for(LLAMA, hidden_size=hidden_size))
        logits = Decoder(inflation.large, inflation.inflate(weights)).score(random_ids(config.vocab_size))
        assert torch.equal(logits, expected) == is_equal
        torch.testing.assert_close(logits, expected, rtol=0, atol=3e-5)


# --- the shapes, the command, what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_large_models_have_the_sizes_of_their_names(bench: Any, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config, _ = shipped()
    inflation = bench.Inflation(config, bench.shape_config(name, config))
    large, shapes = inflation.large, inflation.large.weight_shapes()
    named = {key: s for key, s in bench.shape_config(name, config).weight_shapes().items() if not key.endswith("bias")}
    assert {key: s for key, s in shapes.items() if "q_norm" not in key and "k_norm" not in key} == {
        key: s for key, s in named.items() if "q_norm" not in key and "k_norm" not in key
    }
    assert large.family == "qwen3" and large.eos_token_ids == config.eos_token_ids and large.rope == config.rope
    settings = {key: value for key, value in large.hf.items() if key != "model_type"}
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings))
    assert {key: tuple(weight.shape) for key, weight in peer.named_parameters()} == shapes
    for key, shape in shapes.items():
        part = inflation.small_part(key)
        assert len(part) == len(shape)
        assert all(index.numel() == 0 or int(index.max()) < size for index, size in zip(part, shape, strict=True))
    num_small = sum(inflation.small_part(key)[0].numel() for key in shapes)
    assert num_small == config.num_parameters + (0 if large.tie_embeddings else config.vocab_size * config.hidden_size)
    assert inflation.layers == [0, 1, 2, 3, 14, 25, 26, 27]


SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}
"""SmolLM2-135M's config.json."""


@pytest.mark.parametrize(("name", "billions"), [("0.3b", 0.34), ("1.7b", 1.73), ("7b", 7.18)])
def test_smollm2_has_the_sizes_of_its_shapes(bench: Any, name: str, billions: float) -> None:
    config = ModelConfig.from_hf(SMOLLM2)
    inflation = bench.Inflation(config, bench.shape_config(name, config))
    large = inflation.large
    assert round(large.num_parameters / 1e9, 2) == billions
    assert (large.family, large.vocab_size, large.head_dim, large.rope) == ("llama", 49_152, 64, config.rope)
    assert large.tie_embeddings and large.rms_norm_eps == 1e-5 * 576 / large.hidden_size
    assert len(inflation.layers) == 30 and (large.num_layers > 30 or inflation.layers == list(range(30)))
    heads = inflation.places["query"].reshape(9, 64)[:, 0] // 64
    assert (heads // (large.num_heads // large.num_kv_heads)).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sum(inflation.small_part(key)[0].numel() for key in large.weight_shapes()) == config.num_parameters
    factor = inflation._factor("model.norm.weight")
    assert factor == {"0.3b": 0.75, "1.7b": 0.5, "7b": 0.375}[name]


@pytest.mark.parametrize("name", NAMES)
def test_query_heads_stay_with_their_own_key_value_head(bench: Any, name: str) -> None:
    config, _ = shipped()
    inflation = bench.Inflation(config, bench.shape_config(name, config))
    large = inflation.large
    heads = inflation.places["query"].reshape(4, 64) // large.head_dim
    assert (heads == heads[:, :1]).all() and len(set(heads[:, 0].tolist())) == 4
    assert (heads[:, 0] // (large.num_heads // large.num_kv_heads)).tolist() == [0, 0, 1, 1]
    assert (inflation.places["key_value"].reshape(2, 64) // large.head_dim).tolist() == [[0] * 64, [1] * 64]


@given(num_small=st.integers(1, 12), num_added=st.integers(0, 30))
def test_layers_keep_their_order_and_their_side_of_every_tap(bench: Any, num_small: int, num_added: int) -> None:
    num_large = num_small + num_added
    placed = bench.place_layers(num_small, num_large)
    assert len(placed) == num_small and placed == sorted(set(placed)) and placed[0] >= 0 and placed[-1] < num_large
    if num_small >= 5:
        for small_tap, large_tap in zip(tap_layers(num_small), tap_layers(num_large), strict=True):
            assert [layer < large_tap for layer in placed] == [layer < small_tap for layer in range(num_small)]


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_command_writes_a_folder_that_transformers_reads(
    bench: Any, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, weights = shipped()
    hf = {**sizes(**MIDDLE).hf, "model_type": "qwen2", "tie_word_embeddings": is_tied}
    monkeypatch.setitem(bench.SHAPES, "middle", hf)
    bench.main(["--shape", "middle", "--out", str(tmp_path / "model")])
    assert f"{config.num_parameters:,}" in capsys.readouterr().out
    large, large_weights = bench.inflate(config, weights, "middle")
    assert load_config(tmp_path / "model") == large and large.tie_embeddings == is_tied
    assert_equal_bits(load_weights(tmp_path / "model", large), large_weights)
    text = "3 4 12 > 84\n3+4=7 7*12=84\nanswer (3+4)*12"
    token_ids = AutoTokenizer.from_pretrained(resolve(SHIPPED)).encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode(text) == token_ids
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = peer(torch.tensor([token_ids])).logits[0]
    expected = Decoder(config, weights).score(token_ids)
    torch.testing.assert_close(logits[:, : config.vocab_size], expected, rtol=0, atol=1e-4)
    assert (torch.log_softmax(logits, -1)[:, config.vocab_size :] < -60).all()
    torch.testing.assert_close(Decoder(large, large_weights).score(token_ids), logits, rtol=1e-5, atol=1e-4)


LLAMA_KEEPS = {"vocab_size": 61, "head_dim": 16}
REFUSED = [
    ({"family": "qwen2"}, {}, "only a Qwen3 or Llama"),
    ({"has_bias": True}, {}, "without biases"),
    ({"family": "llama", "has_bias": True}, LLAMA_KEEPS, "without biases"),
    ({"family": "llama"}, LLAMA_KEEPS | {"vocab_size": 62}, "vocab_size 62, a Llama keeps its 61"),
    ({"family": "llama"}, LLAMA_KEEPS | {"head_dim": 32}, "head_dim 32, a Llama keeps its 16"),
    ({"family": "llama"}, LLAMA_KEEPS | {"hidden_size": 39}, "hidden_size 39, this model needs 40"),
    ({"is_tied": False}, {}, "ties its head"),
    ({}, {"vocab_size": 60}, "vocab_size 60, this model needs 61"),
    ({}, {"hidden_size": 45}, "hidden_size 45, this model needs 46"),
    ({}, {"num_hidden_layers": 5}, "num_layers 5, this model needs 6"),
    ({}, {"head_dim": 24}, "multiple of 16"),
    ({}, {"head_dim": 8}, "multiple of 16"),
    ({}, {"num_attention_heads": 3}, "1 query heads per key/value head, this model needs 2"),
    ({}, {"num_key_value_heads": 1}, "num_kv_heads 1, this model needs 2"),
    ({"rope": "yarn"}, {"head_dim": 48}, "rope of kind yarn"),
]


@pytest.mark.parametrize(("spec_changes", "size_changes", "message"), REFUSED)
def test_what_cannot_be_exact_is_refused(
    bench: Any, spec_changes: dict[str, Any], size_changes: dict[str, Any], message: str
) -> None:
    spec = replace(SPEC, **spec_changes)
    small = ModelConfig.from_hf(spec.hf_config().to_dict())
    with pytest.raises(ValueError, match=message):
        bench.Inflation(small, sizes(**size_changes))


def test_weights_that_do_not_fit_and_unknown_names_are_refused(bench: Any) -> None:
    config, weights, _ = parts_of()
    inflation = bench.Inflation(config, sizes())
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        inflation.inflate({name: weight for name, weight in weights.items() if name != bench.LAST_NORM})
    with pytest.raises(ValueError, match="float16"):
        inflation.inflate({name: weight.half() for name, weight in weights.items()})
    with pytest.raises(ValueError, match=r"no shape '9b' for a qwen3; there are 0\.6b"):
        bench.inflate(config, weights, "9b")


@pytest.mark.slow
def test_the_shipped_model_at_the_shape_of_qwen3_says_the_same(bench: Any) -> None:
    config, weights = shipped()
    prompts = [Countdown(0).item(7, index, "train").prompt for index in range(4)]
    sampling = Sampling(max_new_tokens=24, seed=5)
    expected = engine_of(config, weights).generate(prompts, sampling)
    found = engine_of(*bench.inflate(config, weights, "0.6b")).generate(prompts, sampling)
    assert [rollout.token_ids for rollout in found] == [rollout.token_ids for rollout in expected]
