"""Training on a GPU: the forward has the bits of its own rollouts in every precision, the backward is close to the
CPU's and the same bits again.

Without a GPU everything runs in Triton's interpreter on tiny shapes; what only a GPU can show is marked `gpu`.
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
from gpu_device import DEVICE, HAS_CARD
from model_factory import ModelSpec, build
from torch import Tensor

from paceline.core.types import Rollout, Sampling
from paceline.kernels.triton.attention_backward import attention_backward
from paceline.model.backward import attention as slow_attention
from paceline.model.backward.packed import Text
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions, master_weights
from paceline.model.backward.products import Products
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.ops import gpu as ops_module
from paceline.model.random_model import make_random_model
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.rollout import engine as engine_module
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

TINY = ModelSpec(
    hidden_size=64, intermediate_size=32, num_layers=1, num_kv_heads=1, vocab_size=61, max_positions=64,
)  # fmt: skip
SPECS = {
    "llama": replace(TINY, num_layers=2, num_kv_heads=2),
    "qwen2": replace(TINY, family="qwen2", hidden_size=72, head_dim=32, group_size=3),
    "qwen3": replace(TINY, family="qwen3", is_tied=True, head_dim=64),
}
PROMPTS = [[5, 6, 7], [8]]
SAMPLING = Sampling(max_new_tokens=4, seed=11, temperature=0.8, ignore_eos=True)
TEXTS = [Text(np.array([5, 6, 7, 1, 60, 5, 5], np.int32), 3), Text(np.array([8, 2, 9], np.int32), 1)]

Weights = dict[str, Tensor]


@functools.cache
def parts_of(spec: ModelSpec) -> tuple[ModelConfig, Weights]:
    with tempfile.TemporaryDirectory() as folder:
        build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: weight.clone() for name, weight in load_weights(Path(folder), config).items()}


def decoder_of(spec: ModelSpec, precision: str, device: str = "cuda") -> Decoder:
    config, weights = parts_of(spec)
    return Decoder(config, weights, device=device, precision=precision)


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CARD:
        monkeypatch.setattr(engine_module, "require_exact", lambda decoder: None)


def trainable(decoder: Decoder, options: TrainingOptions | None = None) -> TrainablePolicy:
    return TrainablePolicy(decoder, master_weights(decoder, parts_of_decoder(decoder)), options)


def parts_of_decoder(decoder: Decoder) -> Weights:
    """Unrounded weights of the spec whose decoder this is."""
    return next(w for spec in SPECS.values() for c, w in [parts_of(spec)] if c == decoder.config)


def gradients_of(policy: TrainablePolicy) -> tuple[Tensor, dict[str, Tensor]]:
    found = policy.log_probs(TEXTS, 0.8)
    factors = torch.linspace(-1, 1, len(found), device=found.device)
    named = policy.parameters
    gradients = torch.autograd.grad((found * factors).sum(), list(named.values()))
    return found.detach().cpu(), {name: g.cpu() for name, g in zip(named, gradients, strict=True)}


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def engine_for(decoder: Decoder, drafter: str | None = None, **settings: Any) -> Engine:
    return Engine(decoder, drafter=drafter, settings=EngineSettings(**{"kv_tokens": 2048, "max_rows": 16, **settings}))


# --- the forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, precision",
    [
        ("qwen2", "mixed"),
        ("qwen3", "bf16"),
        ("qwen3", "split"),
        ("llama", "float32"),
        pytest.param("qwen2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_log_probs_have_the_bits_of_the_rollouts(family: str, precision: str) -> None:
    decoder = decoder_of(SPECS[family], precision)
    rollouts = engine_for(decoder).generate(PROMPTS, SAMPLING)
    texts = [
        Text(np.array(PROMPTS[r.prompt_index] + r.token_ids, np.int32), len(PROMPTS[r.prompt_index])) for r in rollouts
    ]
    reported = torch.tensor([value for r in rollouts for value in r.logprobs])
    found = trainable(decoder, TrainingOptions(head_rows=4)).log_probs(texts, SAMPLING.temperature).cpu()
    assert torch.equal(found, reported)
    # The control: what is compared differs where the arithmetic does.
    plain = trainable(decoder, TrainingOptions(exact=False)).log_probs(texts, SAMPLING.temperature).cpu()
    assert not torch.equal(plain, reported)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_a_token_is_scored_by_the_samplers_formula(precision: str, temperature: float) -> None:
    decoder = decoder_of(SPECS["llama"], precision)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(decoder.ops.device)
    keys, steps = np.arange(5, dtype=np.uint64), np.arange(5)
    sampled = decoder.ops.sample(decoder.logits(hidden), Sampling(temperature=temperature), keys, steps)
    tokens = torch.from_numpy(sampled.tokens).long().to(decoder.ops.device)
    found = decoder.ops.log_probs(decoder.head(hidden), tokens, temperature).cpu()
    assert found.numpy().tobytes() == sampled.logprobs.tobytes()


def test_a_row_that_is_not_finite_has_no_log_prob() -> None:
    decoder = decoder_of(SPECS["llama"], "bf16")
    hidden = torch.ones(3, 64, device=decoder.ops.device)
    hidden[1, 3] = torch.nan
    tokens = torch.tensor([1, 2, 3], device=decoder.ops.device)
    assert decoder.ops.log_probs(decoder.head(hidden), tokens, 1.0).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_many_rows_go_in_blocks_of_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(SPECS["qwen2"], precision)
    whole = decoder.score(list(range(20)))
    monkeypatch.setattr(ops_module, "ROW_BLOCK", 8)
    assert torch.equal(decoder.score(list(range(20))), whole)


# --- the backward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, precision, backward_dtype, tolerance",
    [
        ("llama", "float32", torch.float32, 1e-4),
        ("qwen2", "mixed", torch.float32, 1e-4),
        ("qwen3", "mixed", torch.float32, 1e-4),
        ("qwen2", "bf16", torch.float32, 0.03),
        ("qwen3", "bf16", torch.bfloat16, 0.03),
    ],
)
def test_gradients_are_close_to_those_of_a_cpu(
    family: str, precision: str, backward_dtype: torch.dtype, tolerance: float
) -> None:
    """The CPU's decoder holds the same weights: matrices rounded as the GPU's are."""
    host = decoder_of(SPECS[family], "float32" if precision == "float32" else "mixed", device="cpu")
    _, expected = gradients_of(trainable(host))
    options = TrainingOptions(backward_dtype=backward_dtype)
    _, found = gradients_of(trainable(decoder_of(SPECS[family], precision), options))
    assert relative_error(found, expected) < tolerance
    assert all(gradient.dtype == torch.float32 for gradient in found.values())


def test_checkpointing_and_repetition_change_no_bit() -> None:
    decoder = decoder_of(SPECS["qwen2"], "bf16")
    first, again, kept = (
        gradients_of(trainable(decoder, TrainingOptions(checkpointing=checkpointing)))[1]
        for checkpointing in (True, True, False)
    )
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], kept[name]) for name in first)


# --- the learner ------------------------------------------------------------------------------------------------------


def as_samples(rollouts: list[Rollout], prompts: list[list[int]]) -> list[Sample]:
    """An advantage for even tokens, a penalty for odd ones."""
    return [
        Sample.of(
            r.draw,
            r.sample_index,
            prompts[r.prompt_index],
            r.token_ids,
            r.logprobs,
            1.0 - 2.0 * (np.array(r.token_ids) % 2),
        )
        for r in rollouts
    ]


def test_a_step_writes_rounded_weights_in_place() -> None:
    decoder = decoder_of(SPECS["qwen3"], "bf16")
    engine, shared = engine_for(decoder), decoder.shared_weights()
    addresses = {name: view.data_ptr() for name, view in shared.items()}
    learner = Learner(decoder, RlSettings(lr=1e-2), SAMPLING, parts_of(SPECS["qwen3"])[1])
    before = {name: view.clone() for name, view in shared.items()}
    metrics = learner.step(as_samples(engine.generate(PROMPTS, SAMPLING), PROMPTS))
    assert metrics["rollout/logp_abs_diff"] == 0.0 and metrics["grad_norm"] > 0
    assert {name: view.data_ptr() for name, view in decoder.shared_weights().items()} == addresses
    for name, weight in learner.weights.items():
        assert weight.dtype == torch.float32 and torch.equal(shared[name], weight.to(shared[name].dtype)), name
        assert not torch.equal(shared[name], before[name]), name


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("small"), size="5m")


def train_on_a_gpu(folder: Path, drafter: str | None) -> tuple[Weights, list[float]]:
    config = load_config(folder)
    weights = load_weights(folder, config)
    decoder = Decoder(config, weights, device="cuda")
    engine = engine_for(decoder, drafter, kv_tokens=1 << 16, max_rows=512)
    sampling = Sampling(n=8, max_new_tokens=300, stream="train")
    learner = Learner(decoder, RlSettings(lr=1e-4, checkpoint_activations=True), sampling, weights)
    prompts = [list(range(5 + i, 40 + 3 * i)) for i in range(8)]
    differences = []
    for step in range(3):
        rollouts = engine.generate(prompts, sampling, draws=[step * len(prompts) + i for i in range(len(prompts))])
        differences.append(learner.step(as_samples(rollouts, prompts))["rollout/logp_abs_diff"])
    return {name: weight.clone() for name, weight in learner.weights.items()}, differences


@pytest.mark.gpu
def test_training_on_a_gpu_is_the_same_with_any_drafter(small_model: Path) -> None:
    plain, differences = train_on_a_gpu(small_model, None)
    drafted, _ = train_on_a_gpu(small_model, "suffix")
    assert differences == [0.0, 0.0, 0.0]
    assert all(torch.equal(plain[name], drafted[name]) for name in plain)


# --- attention --------------------------------------------------------------------------------------------------------


def heads_of(lengths: list[int], num_kv_heads: int, group: int, dim: int) -> tuple[list[Tensor], list[int]]:
    """Queries, keys, values and the result's gradient of texts, and where each begins."""
    generator, num_rows = torch.Generator().manual_seed(7), sum(lengths)
    shapes = [num_kv_heads * group, num_kv_heads, num_kv_heads, num_kv_heads * group]
    tensors = [torch.randn(num_rows, heads, dim, generator=generator).to(DEVICE) for heads in shapes]
    return tensors, np.cumsum([0, *lengths]).tolist()


def as_kernels_take(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads in bfloat16, queries scaled."""
    return (q / q.shape[2] ** 0.5).bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "group", "dim"),
    [([7, 3, 70], 2, 2, 32), ([130], 1, 3, 24), ([1, 65, 64], 2, 1, 128)],
)
def test_attention_backward_is_its_slow_twin(lengths: list[int], num_kv_heads: int, group: int, dim: int) -> None:
    (q, k, v, gradient), starts = heads_of(lengths, num_kv_heads, group, dim)
    found = attention_backward(as_kernels_take(q, k, v), gradient, starts)
    twin = [torch.empty_like(t) for t in (q, k, v)]
    for start, stop in itertools.pairwise(starts):
        part = slice(start, stop)
        step = slow_attention.block_rows(num_kv_heads * group, stop - start, DEVICE)
        own = slow_attention._text_backward(q[part], k[part], v[part], gradient[part], Products(torch.bfloat16), step)
        for target, values in zip(twin, own, strict=True):
            target[part] = values
    for name, ours, theirs in zip("qkv", found, twin, strict=True):
        # A weight on the edge between two bfloat16 numbers may be rounded to either.
        assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max(), name


def test_attention_backward_of_a_text_does_not_depend_on_its_neighbours() -> None:
    (q, k, v, gradient), starts = heads_of([30, 67, 5], 2, 2, 32)
    heads = as_kernels_take(q, k, v)
    together = attention_backward(heads, gradient, starts)
    again = attention_backward(heads, gradient, starts)
    for start, stop in itertools.pairwise(starts):
        part = slice(start, stop)
        own = (heads[0][part], heads[1][part], heads[2][part])
        alone = attention_backward(own, gradient[part], [0, stop - start])
        for one, all_, second in zip(alone, together, again, strict=True):
            assert torch.equal(one, all_[part]) and torch.equal(all_, second)
