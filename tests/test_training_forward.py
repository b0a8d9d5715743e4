"""The learner's forward has the engine's bits, and its backward is the gradient of that forward.

Bits are compared with what the engine reported for its own rollouts; gradients with transformers in float32 and with
finite differences in float64. The negative controls show that the comparisons can fail.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import ModelSpec, build, reference_model, specs
from torch import Tensor

from paceline.core.types import Sampling
from paceline.model.backward import attention as attention_module
from paceline.model.backward import layer as layer_module
from paceline.model.backward.attention import attention_backward, block_rows
from paceline.model.backward.packed import Text
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions, master_weights
from paceline.model.backward.products import Products
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.formulas import rms_norm, split_heads
from paceline.model.ops.native import NativeOps
from paceline.model.rope import rope_table
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

SPECS = {
    "llama": ModelSpec(family="llama", has_bias=True, num_layers=3),
    "qwen2": ModelSpec(family="qwen2", hidden_size=50, group_size=3, head_dim=14, rope="yarn"),
    "qwen3": ModelSpec(family="qwen3", is_tied=True, head_dim=32),
    "mistral": ModelSpec(family="mistral", group_size=1, vocab_size=130, is_tied=True),
}
EXACT, PLAIN = TrainingOptions(), TrainingOptions(exact=False)
ENGINE = {"kv_tokens": 2048, "max_sequences": 8}

Weights = dict[str, Tensor]
Gradients = dict[str, Tensor]


@functools.cache
def parts_of(spec: ModelSpec) -> tuple[ModelConfig, Weights, Any]:
    """Configuration, weights and the transformers model of a spec."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: w.clone() for name, w in load_weights(Path(folder), config).items()}, model


def decoder_of(spec: ModelSpec, exact: bool = True, precision: str = "auto") -> Decoder:
    config, weights, _ = parts_of(spec)
    return Decoder(config, weights, exact=exact, precision=precision)


def texts_of(spec: ModelSpec, lengths: tuple[tuple[int, int], ...]) -> list[Text]:
    """Random texts of these (length, prompt length)."""
    rng = np.random.default_rng(5)
    return [Text(rng.integers(spec.vocab_size, size=n).astype(np.int32), prompt) for n, prompt in lengths]


MIXED_LENGTHS = ((5, 1), (40, 7), (2, 1), (100, 60))


def trainable(decoder: Decoder, options: TrainingOptions = EXACT) -> TrainablePolicy:
    return TrainablePolicy(decoder, master_weights(decoder), options)


def factors(count: int) -> Tensor:
    """What the log-probabilities are multiplied with to make a scalar: every one counts, none like another."""
    return torch.randn(count, generator=torch.Generator().manual_seed(7))


def gradients_of(policy: TrainablePolicy, texts: list[Text], temperature: float = 1.0) -> tuple[Tensor, Gradients]:
    """Log-probabilities, and the gradients of their weighted sum."""
    found = policy.log_probs(texts, temperature)
    names = list(policy.parameters)
    gradients = torch.autograd.grad((found * factors(len(found))).sum(), [policy.parameters[name] for name in names])
    return found.detach(), dict(zip(names, gradients, strict=True))


def reference_sum(model: Any, texts: list[Text], temperature: float) -> Tensor:
    """The same weighted sum by transformers, text by text."""
    parts = []
    for text in texts:
        ids = torch.from_numpy(text.token_ids).long()
        logits = model(ids[None]).logits[0, text.prompt_length - 1 : -1]
        parts.append((logits / temperature).log_softmax(-1).gather(1, ids[text.prompt_length :, None])[:, 0])
    found = torch.cat(parts)
    return (found * factors(len(found))).sum()


def reference_gradients(model: Any, texts: list[Text], temperature: float) -> Gradients:
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(reference_sum(model, texts, temperature), list(named.values()))
    return dict(zip(named, gradients, strict=True))


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The worst over all weights of |difference| / |expected|, as vectors."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def assert_equal_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# --- bits -------------------------------------------------------------------------------------------------------------


def rollout_texts(spec: ModelSpec, sampling: Sampling, precision: str) -> tuple[Decoder, list[Text], Tensor]:
    """What an engine with a drafter generates, and the log-probabilities it reported."""
    decoder = decoder_of(spec, precision=precision)
    engine = Engine(decoder, settings=EngineSettings(precision="auto", **ENGINE))
    prompts = [[3, 5, 7], [9], [11] * 40]
    rollouts = engine.generate(prompts, sampling)
    texts = [
        Text(np.array(prompts[r.prompt_index] + r.token_ids, np.int32), len(prompts[r.prompt_index])) for r in rollouts
    ]
    return decoder, texts, torch.tensor([value for r in rollouts for value in r.logprobs])


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "float32", {}),
    "cold": ("qwen3", "float32", {"temperature": 0.6}),
    "greedy": ("qwen2", "float32", {"temperature": 0.0}),
    "truncated": ("mistral", "float32", {"temperature": 1.3, "top_k": 20, "top_p": 0.9}),
    "mixed, biases": ("qwen2", "mixed", {}),
    "mixed, tied": ("qwen3", "mixed", {"temperature": 0.8}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_log_probs_have_the_bits_of_the_rollouts(case: tuple[str, str, dict[str, Any]]) -> None:
    family, precision, extra = case
    sampling = Sampling(n=3, max_new_tokens=45, seed=2, ignore_eos=True, **extra)
    decoder, texts, reported = rollout_texts(SPECS[family], sampling, precision)
    found = trainable(decoder, TrainingOptions(head_rows=19)).log_probs(texts, sampling.temperature)
    assert torch.equal(found, reported)
    # The control: other kernels give other last bits, and this comparison sees them.
    plain = trainable(decoder, PLAIN).log_probs(texts, sampling.temperature)
    assert not torch.equal(plain, reported)
    torch.testing.assert_close(plain, reported, rtol=0, atol=1e-4)


def test_a_text_has_the_same_bits_in_any_pack() -> None:
    policy = trainable(decoder_of(SPECS["qwen3"]))
    texts = texts_of(SPECS["qwen3"], MIXED_LENGTHS)
    together = policy.log_probs(texts).split([len(t.token_ids) - t.prompt_length for t in texts])
    for text, expected in zip(texts, together, strict=True):
        assert torch.equal(policy.log_probs([text]), expected)


@given(data=st.data())
@settings(max_examples=40)
def test_a_token_is_scored_by_the_samplers_formula(data: st.DataObject) -> None:
    """Whatever the sampler draws and reports, scoring that token gives the same bits."""
    rows, vocab = data.draw(st.integers(1, 5)), data.draw(st.sampled_from((1, 3, 16, 17, 63, 64, 501)))
    temperature = data.draw(st.sampled_from((0.0, 0.01, 0.7, 1.0, 3.0)))
    scale = data.draw(st.sampled_from((1e-3, 1.0, 30.0, 1e4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = torch.from_numpy((rng.standard_normal((rows, vocab)) * scale).astype(np.float32))
    ops = NativeOps()
    keys, steps = rng.integers(2**60, size=rows).astype(np.uint64), np.arange(rows)
    sampled = ops.sample(logits, Sampling(temperature=temperature), keys, steps)
    found = ops.log_probs(logits, torch.from_numpy(sampled.tokens).long(), temperature)
    assert found.numpy().tobytes() == sampled.logprobs.tobytes()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_log_prob(poison: float) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 38] = poison
    found = NativeOps().log_probs(logits, torch.tensor([0, 38, 39]), 1.0)
    assert found.isnan().tolist() == [False, True, False]


def test_an_engine_that_is_not_exact_has_no_bits_to_keep() -> None:
    assert not trainable(decoder_of(SPECS["llama"], exact=False)).is_exact
    assert trainable(decoder_of(SPECS["llama"])).is_exact


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("options", [EXACT, PLAIN], ids=["exact", "plain"])
@pytest.mark.parametrize("family", SPECS)
def test_gradients_are_those_of_transformers(family: str, options: TrainingOptions, temperature: float) -> None:
    """Biases, norms of queries and keys, grouped heads, tied and untied ones."""
    spec = SPECS[family]
    texts = texts_of(spec, MIXED_LENGTHS)
    expected = reference_gradients(parts_of(spec)[2], texts, temperature)
    _, found = gradients_of(trainable(decoder_of(spec), replace(options, head_rows=13)), texts, temperature)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("options", [EXACT, PLAIN], ids=["exact", "plain"])
def test_temperature_zero_means_one(options: TrainingOptions) -> None:
    """As in the engine, which reports the log-probabilities of greedy tokens at temperature 1."""
    policy, texts = trainable(decoder_of(SPECS["llama"]), options), texts_of(SPECS["llama"], MIXED_LENGTHS)
    assert_equal_bits(gradients_of(policy, texts, 0.0)[1], gradients_of(policy, texts, 1.0)[1])


@given(spec=specs(max_layers=2))
@settings(max_examples=12)
def test_gradients_are_those_of_transformers_for_any_shape(spec: ModelSpec) -> None:
    model = reference_model(spec)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = load_config(Path(folder))
        decoder = Decoder(config, load_weights(Path(folder), config))
    texts = texts_of(spec, ((17, 3), (34, 30)))
    expected = reference_gradients(model, texts, 1.0)
    _, found = gradients_of(trainable(decoder), texts)
    assert relative_error(found, expected) < 1e-4


def double_sum(config: ModelConfig, weights: Weights, texts: list[Text], temperature: float) -> float:
    """The weighted sum once more, in double precision throughout (transformers takes its norms in float32)."""
    table = [t.double() for t in rope_table(config.rope, config.head_dim, 64)]
    parts = []
    for text in texts:
        ids = torch.from_numpy(text.token_ids).long()
        x = weights["model.embed_tokens.weight"][ids]
        for layer in range(config.num_layers):
            x = double_layer(config, weights, f"model.layers.{layer}.", x, table)
        x = double_norm(x, weights["model.norm.weight"], config)
        found = (x @ weights["lm_head.weight"].T / temperature).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        parts.append(found[text.prompt_length - 1 :])
    found = torch.cat(parts)
    return float((found * factors(len(found)).double()).sum())


def double_norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def double_layer(config: ModelConfig, weights: Weights, prefix: str, x: Tensor, table: list[Tensor]) -> Tensor:
    def w(name: str) -> Tensor:
        return weights[f"{prefix}{name}.weight"]

    h, length, heads = double_norm(x, w("input_layernorm"), config), len(x), []
    cos, sin = (t[:length] for t in table)
    for name, norm in (("q", "q_norm"), ("k", "k_norm"), ("v", None)):
        part = (h @ w(f"self_attn.{name}_proj").T).view(length, -1, config.head_dim).transpose(0, 1)
        if norm is not None:
            a, b = double_norm(part, w(f"self_attn.{norm}"), config).chunk(2, -1)
            part = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        heads.append(part.repeat_interleave(config.num_heads // len(part), 0))
    scores = heads[0] @ heads[1].mT / config.head_dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ heads[2]).transpose(0, 1).flatten(1)
    x = x + attended @ w("self_attn.o_proj").T
    h = double_norm(x, w("post_attention_layernorm"), config)
    gate = h @ w("mlp.gate_proj").T
    return x + (gate * gate.sigmoid() * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T


def test_gradients_are_the_slopes_that_finite_differences_see() -> None:
    """Along a random direction in each weight, in double precision: no derivative on the other side."""
    spec = ModelSpec(family="qwen3", hidden_size=24, intermediate_size=20, head_dim=8, initializer_range=0.3)
    config, weights, _ = parts_of(spec)
    texts, epsilon = texts_of(spec, ((12, 4), (7, 1))), 1e-5
    _, gradients = gradients_of(trainable(decoder_of(spec)), texts, 0.9)
    doubles = {name: w.double() for name, w in weights.items()}
    generator = torch.Generator().manual_seed(3)
    for name, weight in doubles.items():
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        ahead, behind = (
            double_sum(config, doubles | {name: weight + move * direction}, texts, 0.9) for move in (epsilon, -epsilon)
        )
        found = float((gradients[name].double() * direction).sum())
        # Most of a long gradient is across the direction; its rounding is not small beside a slope near 0.
        allowed = 1e-5 * float(gradients[name].norm())
        assert found == pytest.approx((ahead - behind) / (2 * epsilon), rel=1e-5, abs=allowed), name


def test_rounded_weights_are_used_and_master_weights_get_the_gradient() -> None:
    """With bfloat16 matrices: the gradient is that of the rounded model, though the master weights are not rounded."""
    spec = SPECS["llama"]
    config, weights, _ = parts_of(spec)
    decoder = Decoder(config, weights, precision="mixed")
    rounded = reference_model(spec)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.bfloat16())
    texts = texts_of(spec, MIXED_LENGTHS)
    expected, other = (reference_gradients(model, texts, 1.0) for model in (rounded, parts_of(spec)[2]))
    for options in (EXACT, PLAIN):
        policy = TrainablePolicy(decoder, master_weights(decoder, weights), options)
        _, found = gradients_of(policy, texts)
        assert relative_error(found, expected) < (1e-5 if options.exact else 1e-2)
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert relative_error(other, expected) > 1e-3


# --- what must not change a bit, and what must stay small -------------------------------------------------------------


def test_checkpointing_changes_no_bit() -> None:
    for family in ("llama", "qwen3"):
        decoder, texts = decoder_of(SPECS[family]), texts_of(SPECS[family], MIXED_LENGTHS)
        kept = gradients_of(trainable(decoder), texts)
        again = gradients_of(trainable(decoder, TrainingOptions(checkpointing=True)), texts)
        assert torch.equal(kept[0], again[0])
        assert_equal_bits(again[1], kept[1])


def test_checkpointing_keeps_only_the_input_of_a_layer() -> None:
    texts = texts_of(SPECS["llama"], ((100, 50),))
    sizes = {}
    for checkpointing in (False, True):
        policy = trainable(decoder_of(SPECS["llama"]), TrainingOptions(checkpointing=checkpointing))
        node: Any = policy.log_probs(texts).grad_fn
        while "Layer" not in node.name():
            node = node.next_functions[0][0]
        sizes[checkpointing] = sum(tensor.numel() for tensor in node.saved_tensors)
    assert sizes[True] == 2 * 99 * SPECS["llama"].hidden_size < sizes[False]


def test_the_backward_is_the_same_bits_again() -> None:
    policy, texts = trainable(decoder_of(SPECS["qwen2"])), texts_of(SPECS["qwen2"], MIXED_LENGTHS)
    assert_equal_bits(gradients_of(policy, texts)[1], gradients_of(policy, texts)[1])


def test_logits_exist_for_one_chunk_of_scored_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: neither more rows than a chunk, nor one that nobody asked for."""
    decoder, texts = decoder_of(SPECS["qwen3"]), texts_of(SPECS["qwen3"], MIXED_LENGTHS)
    whole = gradients_of(trainable(decoder, TrainingOptions(head_rows=1000)), texts)
    counts: list[int] = []
    head = decoder.head

    def counting(hidden: Tensor) -> Any:
        counts.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(decoder, "head", counting)
    chunked = gradients_of(trainable(decoder, TrainingOptions(head_rows=32)), texts)
    num_scored = len(whole[0])
    assert counts == 2 * [32, 32, num_scored - 64] and num_scored == 4 + 33 + 1 + 40
    assert torch.equal(chunked[0], whole[0])
    assert relative_error(chunked[1], whole[1]) < 1e-5


def test_attention_scores_exist_for_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a text is cut into blocks of rows, and a backward into chunks, the gradients are the same function."""
    decoder, texts = decoder_of(SPECS["qwen2"]), texts_of(SPECS["qwen2"], ((150, 100), (30, 1)))
    _, expected = gradients_of(trainable(decoder), texts)
    shapes: list[tuple[int, ...]] = []
    weights = attention_module._weights

    def recording(scores: Tensor, first: int, group: int) -> Tensor:
        shapes.append(tuple(scores.shape))
        return weights(scores, first, group)

    monkeypatch.setattr(attention_module, "_weights", recording)
    monkeypatch.setattr(attention_module, "MOST_SCORES", {"cpu": 30_000})
    monkeypatch.setattr(layer_module, "CHUNK_ROWS", 37)
    _, found = gradients_of(trainable(decoder), texts)
    assert relative_error(found, expected) < 1e-5
    assert max(int(np.prod(shape)) for shape in shapes) <= 30_000 and len(shapes) > 2 * 3


@given(
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
@settings(max_examples=25)
def test_attention_backward_is_that_of_softmax(num_kv_heads: int, group: int, lengths: list[int]) -> None:
    generator, dim, starts = torch.Generator().manual_seed(1), 6, [0, *np.cumsum(lengths).tolist()]
    sizes = (num_kv_heads * group, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(starts[-1], size, dim, generator=generator) for size in sizes)
    gradient = torch.randn(starts[-1], sizes[0] * dim, generator=generator)
    found = attention_backward((q, k, v), gradient, starts, Products())
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    outs = []
    for start, stop in itertools.pairwise(starts):
        a, b, c = (t[start:stop].transpose(0, 1) for t in leaves)
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        is_hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        scores = (a @ b.mT / dim**0.5).masked_fill(is_hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ c).transpose(0, 1).flatten(1))
    expected = torch.autograd.grad(torch.cat(outs), leaves, gradient.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_a_block_is_never_empty_and_never_all() -> None:
    assert block_rows(num_heads=64, length=1 << 20, device="cpu") == attention_module.LEAST_BLOCK
    assert block_rows(num_heads=1, length=1, device="cuda") == attention_module.MOST_BLOCK


def test_products_of_bfloat16_numbers_are_added_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4000, generator=generator), torch.randn(4000, 2, generator=generator)
    found = Products(torch.bfloat16)(a, b)
    expected = a.bfloat16().double() @ b.bfloat16().double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
    assert not torch.allclose(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-3)


def test_a_rounded_backward_is_close_to_a_precise_one() -> None:
    decoder, texts = decoder_of(SPECS["llama"]), texts_of(SPECS["llama"], MIXED_LENGTHS)
    _, precise = gradients_of(trainable(decoder), texts)
    _, rounded = gradients_of(trainable(decoder, TrainingOptions(backward_dtype=torch.bfloat16)), texts)
    assert 1e-4 < relative_error(rounded, precise) < 0.03


# --- the seam to the decoder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", SPECS)
def test_a_decoder_tells_its_weights(family: str, exact: bool) -> None:
    config, weights, _ = parts_of(SPECS[family])
    found = decoder_of(SPECS[family], exact).weights()
    assert {name: tuple(w.shape) for name, w in found.items()} == dict(config.weight_shapes())
    assert_equal_bits(found, weights)


@pytest.mark.parametrize("exact", [True, False])
def test_mixed_precision_rounds_matrices_only(exact: bool) -> None:
    weights = parts_of(SPECS["qwen2"])[1]
    found = decoder_of(SPECS["qwen2"], exact, "mixed").weights()
    expected = {name: w.bfloat16().float() if w.ndim == 2 else w for name, w in weights.items()}
    assert_equal_bits({name: w.float() for name, w in found.items()}, expected)


def test_a_copy_stays_as_it_is() -> None:
    decoder = decoder_of(SPECS["qwen3"])
    twin, before = decoder.copy(), decoder.score([1, 2, 3])
    decoder.load_weights({name: w * 1.5 for name, w in parts_of(SPECS["qwen3"])[1].items()})
    assert torch.equal(twin.score([1, 2, 3]), before) and not torch.equal(decoder.score([1, 2, 3]), before)


def test_the_forward_writes_no_weight_and_keeps_no_graph_without_gradients() -> None:
    decoder, weights = decoder_of(SPECS["qwen2"]), parts_of(SPECS["qwen2"])[1]
    reference = TrainablePolicy(decoder, decoder.weights())
    assert not reference.log_probs(texts_of(SPECS["qwen2"], MIXED_LENGTHS)).requires_grad
    gradients_of(trainable(decoder), texts_of(SPECS["qwen2"], MIXED_LENGTHS))
    assert_equal_bits(decoder.weights(), weights)


@pytest.mark.parametrize("formula", ["norm", "heads"])
def test_formulas_are_the_twins_of_the_kernels(formula: str) -> None:
    """Up to rounding: what a backward differentiates is what the forward has computed."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((6, 48), (48,)))
    if formula == "norm":
        found, expected = rms_norm(x, weight, 1e-6), NativeOps().rms_norm(x, weight, 1e-6)
    else:
        decoder = decoder_of(SPECS["mistral"])
        cos, sin = (table[:6, None] for table in (decoder.rotary.cos, decoder.rotary.sin))
        q, _, v = split_heads(x, None, None, (1, 1, 16), 1e-6, cos, sin)
        turned = torch.view_as_complex(torch.stack(x[:, :16].chunk(2, -1), -1)) * torch.complex(cos[:, 0], sin[:, 0])
        found, expected = torch.cat([q[:, 0], v[:, 0]], -1), torch.cat([turned.real, turned.imag, x[:, 32:]], -1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
