"""The backward between products on a GPU: every kernel is its slow twin, which is autograd through the formulas.

Then a whole layer and the head, kernels against torch with the same rounded products. Without a GPU the kernels run
in Triton's interpreter.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from model_factory import ModelSpec, build
from torch import Tensor

from paceline.kernels.triton import rowwise_backward as kernels
from paceline.model.backward import layer as layer_module
from paceline.model.backward.layer import Forward, choose_rowwise, layer_backward, run_layer
from paceline.model.backward.packed import PackedTexts, Text
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions, master_weights
from paceline.model.backward.products import Products
from paceline.model.backward.rowwise import RowwiseBackward, TorchRowwise
from paceline.model.backward.rowwise_gpu import KernelRowwise
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.formulas import logits_gradient
from paceline.model.ops.base import Rotary

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

ROUNDED = Products(torch.bfloat16)
TWIN, KERNELS = TorchRowwise(ROUNDED), KernelRowwise()
ONE_ROUNDING = 2**-8
"""What rounding to bfloat16 may move a number by, relative to it."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal up to the precision that `found` is in."""
    relative = ONE_ROUNDING if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), expected, rtol=relative, atol=relative * float(expected.abs().max()) / 16)


def assert_repeats(compute: Callable[[], Any]) -> None:
    first, again = compute(), compute()
    for one, other in zip(first, again, strict=True):
        assert one is other is None or torch.equal(one, other)


# --- one formula at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 13, 64, kernels.SWIGLU_BLOCK + 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_swiglu_is_its_twin(width: int, has_bias: bool) -> None:
    gate_up, gradient = 4 * random(5, 2 * width), random(5, width, seed=1)
    (inner, back), (expected, twin_back) = (p.swiglu(gate_up, has_bias) for p in (KERNELS, TWIN))
    assert inner.dtype == torch.bfloat16
    assert_close(inner, expected)
    found = back(gradient)
    assert found.dtype == (torch.float32 if has_bias else torch.bfloat16)
    assert_close(found, twin_back(gradient))


def test_swiglu_of_gates_whose_exponential_overflows() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -1.0, 3.0, 3.0, 3.0]], device=DEVICE)
    (_, back), (_, twin_back) = (p.swiglu(gate_up, True) for p in (KERNELS, TWIN))
    assert_close(back(torch.ones(1, 3, device=DEVICE)), twin_back(torch.ones(1, 3, device=DEVICE)))


@pytest.mark.parametrize("num_rows, width", [(1, 16), (kernels.NORM_ROWS, 72), (2 * kernels.NORM_ROWS + 3, 37)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_is_its_twin(num_rows: int, width: int, has_residual: bool) -> None:
    x, weight, gradient = 3 * random(num_rows, width), random(width, seed=1), random(num_rows, width, seed=2)
    residual = random(num_rows, width, seed=3) if has_residual else None
    (h, back), (expected, twin_back) = (p.norm(x, weight, 1e-5) for p in (KERNELS, TWIN))
    assert h.dtype == torch.bfloat16
    assert_close(h, expected)
    for found, theirs in zip(back(gradient, residual), twin_back(gradient, residual), strict=True):
        assert found.dtype == torch.float32
        assert_close(found, theirs)
    assert_repeats(lambda: back(gradient, residual))


@pytest.mark.parametrize("num_rows", [1, kernels.HEAD_ROWS, 2 * kernels.HEAD_ROWS + 5])
@pytest.mark.parametrize("sizes", [(4, 2, 16), (3, 1, 6), pytest.param((2, 2, 24), marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_norms, has_bias", [(True, False), (True, True), (False, True), (False, False)])
def test_heads_are_their_twin(num_rows: int, sizes: tuple[int, int, int], has_norms: bool, has_bias: bool) -> None:
    num_heads, num_kv_heads, dim = sizes
    qkv = 2 * random(num_rows, (num_heads + 2 * num_kv_heads) * dim)
    norms = (random(dim, seed=1), random(dim, seed=2)) if has_norms else None
    rotary = Rotary(random(50, dim // 2, seed=3), random(50, dim // 2, seed=4), 1e-6)
    positions = torch.arange(num_rows, device=DEVICE) * 7 % 50
    (heads, back), (expected, twin_back) = (
        p.heads(qkv, norms, sizes, rotary, positions, has_bias) for p in (KERNELS, TWIN)
    )
    for found, theirs, scale in zip(heads, expected, (dim**-0.5, 1, 1), strict=True):
        assert found.dtype == torch.bfloat16
        assert_close(found, theirs * scale)
    gradients = [random(*values.shape, seed=5) for values in expected]
    qkv_gradient, *weights = back(*gradients)
    twin_gradient, *twin_weights = twin_back(*gradients)
    assert qkv_gradient.dtype == (torch.float32 if has_bias else torch.bfloat16)
    assert_close(qkv_gradient, twin_gradient)
    for ours, twin in zip(weights, twin_weights, strict=True):
        assert (ours is not None) == (twin is not None) == has_norms
        if ours is not None and twin is not None:
            assert_close(ours, twin)
    assert_repeats(lambda: back(*gradients))


@pytest.mark.parametrize("vocab", [3, 61, kernels.LOGITS_BLOCK, 2 * kernels.LOGITS_BLOCK + 7])
def test_logits_are_their_twin(vocab: int) -> None:
    logits, targets = 5 * random(4, vocab), torch.tensor([0, vocab - 1, 1, 2], device=DEVICE)
    for gradient in (random(4, seed=1), torch.ones((), device=DEVICE).expand(4)):
        found = KERNELS.logits(logits.clone(), targets, gradient, 1.25)
        assert found.dtype == torch.bfloat16
        assert_close(found, logits_gradient(logits.clone(), targets, gradient, 1.25))


def test_a_row_of_logits_that_is_not_finite_has_no_gradient() -> None:
    logits = random(3, 61)
    logits[1, 5] = torch.nan
    targets = torch.tensor([1, 2, 3], device=DEVICE)
    found = KERNELS.logits(logits, targets, torch.ones(3, device=DEVICE), 1.0)
    assert found.isnan().any(1).tolist() == [False, True, False]


# --- layers and the head ----------------------------------------------------------------------------------------------

TINY = ModelSpec(
    hidden_size=72, intermediate_size=52, num_layers=2, num_kv_heads=1, group_size=3, vocab_size=61, max_positions=64,
)  # fmt: skip
SPECS = {
    "llama": replace(TINY, num_kv_heads=2, group_size=2),
    "llama with biases": replace(TINY, has_bias=True),
    "qwen2": replace(TINY, family="qwen2", head_dim=32),
    "qwen3": replace(TINY, family="qwen3", is_tied=True),
}
TEXTS = [
    Text(np.array([5, 6, 7, 1, 60, 5, 5], np.int32), 3),
    Text(np.array([8, 2, 9], np.int32), 1),
    Text((np.arange(23, dtype=np.int32) * 5 + 3) % 61, 6),
]


@functools.cache
def decoder_of(family: str) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        build(SPECS[family], Path(folder))
        config = load_config(Path(folder))
        return Decoder(config, load_weights(Path(folder), config), device="cuda", precision="bf16")


def backward_of(
    decoder: Decoder, rowwise: RowwiseBackward, monkeypatch: pytest.MonkeyPatch, products: Products = ROUNDED
) -> dict[str, Tensor]:
    """The gradients of the last layer's weights, and of the residual stream before it."""
    monkeypatch.setattr(layer_module, "choose_rowwise", lambda products, device: rowwise)
    forward = Forward(decoder, PackedTexts.build(TEXTS, decoder), products, checkpointing=False)
    x = random(forward.packed.row_starts[-1], decoder.config.hidden_size)
    layer = decoder.policy.layers[1]
    h = decoder.ops.rms_norm(x, layer.attention_norm, decoder.config.rms_norm_eps)
    tape = run_layer(forward, 1, x, h, is_taped=True)[2]
    assert tape is not None
    before, found = layer_backward(forward, 1, tape, random(*x.shape, seed=1))
    return found | {"x": before}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


@pytest.mark.slow  # the whole policy below is one of them
@pytest.mark.parametrize("family", SPECS)
def test_a_layer_is_its_twin(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(family)
    twin, found, again = (backward_of(decoder, p, monkeypatch) for p in (TWIN, KERNELS, KERNELS))
    assert largest_error(found, twin) < 1e-3
    assert all(torch.equal(found[name], again[name]) for name in found)
    # The control: rounding alone makes a larger difference than that, so both round the same values.
    precise = backward_of(decoder, TorchRowwise(Products()), monkeypatch, Products())
    assert largest_error(precise, twin) > 2e-3


def gradients_of(decoder: Decoder, rowwise: RowwiseBackward, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    monkeypatch.setattr(layer_module, "choose_rowwise", lambda products, device: rowwise)
    options = TrainingOptions(head_rows=8, backward_dtype=torch.bfloat16)
    policy = TrainablePolicy(decoder, master_weights(decoder), options)
    found = policy.log_probs(TEXTS, 0.8)
    factors = torch.linspace(-1, 1, len(found), device=found.device)
    gradients = torch.autograd.grad((found * factors).sum(), list(policy.parameters.values()))
    return dict(zip(policy.parameters, gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama with biases", "qwen3"])
def test_a_whole_policy_is_its_twin(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(family)
    twin, found = (gradients_of(decoder, p, monkeypatch) for p in (TWIN, KERNELS))
    assert largest_error(found, twin) < 5e-3


def test_kernels_are_chosen_for_rounded_products_on_a_gpu() -> None:
    assert isinstance(choose_rowwise(ROUNDED, "cuda"), KernelRowwise)
    assert isinstance(choose_rowwise(ROUNDED, "cpu"), TorchRowwise)
    assert isinstance(choose_rowwise(Products(), "cuda"), TorchRowwise)
