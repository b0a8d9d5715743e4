"""Merging an adapter into a weight: right against float64, unbiased where it rounds, the same bits on CPU and GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from torch import Tensor

from paceline.core import noise
from paceline.kernels.cpu import merge as host
from paceline.kernels.triton import merge as device
from paceline.model.lora.adapter import Rounding, threshold_seed
from paceline.model.lora.merge import Moved, merge, moved

MODULE = "model.layers.0.mlp.up_proj"
SHAPES = [(48, 32, 4), (33, 130, 1), (70, 257, 16)]


def tensors(num_rows: int, width: int, rank: int, size: float = 1e-3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in bfloat16, and A and B whose product has elements of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(num_rows, width, generator=generator) / width**0.5).bfloat16()
    a = torch.randn(rank, width, generator=generator)
    return base, a, size * torch.randn(num_rows, rank, generator=generator)


def merged(
    parts: tuple[Tensor, Tensor, Tensor], rounding: Rounding = "dither", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Moved]:
    found, counted = merge(MODULE, *parts, 0.5, rounding, dtype)
    return found, moved(parts[0].numel(), [counted])


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_adds_the_update_in_the_order_of_the_rank(shape: tuple[int, int, int]) -> None:
    base, a, b = tensors(*shape)
    update = torch.zeros(base.shape)
    for k in range(len(a)):
        update = update + b[:, k : k + 1] * a[k]
    found, counted = merged((base, a, b), dtype=torch.float32)
    assert torch.equal(found, base.float() + update * 0.5)
    exact = base.double() + 0.5 * b.double() @ a.double()
    assert (found - exact).abs().max() < 1e-6 and counted.kept == pytest.approx(counted.wanted, rel=1e-3)


def test_nearest_is_torchs_rounding() -> None:
    base, a, b = tensors(70, 257, 16, size=1e-2)
    whole, _ = merged((base, a, b), dtype=torch.float32)
    assert torch.equal(merged((base, a, b), "nearest")[0], whole.bfloat16())


def test_dither_has_the_readable_thresholds() -> None:
    base, a, b = tensors(33, 130, 1, size=1e-2)
    whole, _ = merged((base, a, b), dtype=torch.float32)
    index = np.arange(base.numel(), dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = index * np.uint32(noise.STRIDE) + np.uint32(threshold_seed(MODULE))
        x = (x ^ (x >> np.uint32(16))) * np.uint32(noise.MULTIPLIERS[0])
        x = (x ^ (x >> np.uint32(15))) * np.uint32(noise.MULTIPLIERS[1])
        bits = (whole.numpy().reshape(-1).view(np.uint32) + (x >> np.uint32(16))) & np.uint32(0xFFFF0000)
    assert torch.equal(merged((base, a, b))[0].float(), torch.from_numpy(bits.view(np.float32)).view(base.shape))


def test_dither_keeps_what_rounding_to_the_nearest_loses() -> None:
    """An update of a hundredth of a step: all but nothing comes through the one, on average all of it the other."""
    parts = tensors(256, 256, 16, size=2e-6)
    _, nearest = merged(parts, "nearest")
    found, dithered = merged(parts)
    assert nearest.metrics()["lora/kept_share"] < 0.3 < 0.9 < dithered.metrics()["lora/kept_share"] < 1.1
    assert nearest.num_moved < dithered.num_moved < 0.1 * dithered.num_elements
    change = (found.float() - parts[0].float()).double().sum()
    wanted = (0.5 * parts[2].double() @ parts[1].double()).sum()
    noise_of_sum = float((found.float() - parts[0].float()).double().square().sum().sqrt())
    assert abs(change - wanted) < 4 * noise_of_sum


def test_nothing_moves_without_an_update() -> None:
    base, a, b = tensors(48, 32, 4)
    found, counted = merged((base, a, torch.zeros_like(b)))
    assert torch.equal(found, base)
    assert counted.metrics() == {"lora/moved_share": 0.0, "lora/kept_share": 1.0}


def test_what_is_not_finite_stays_so() -> None:
    base, a, b = tensors(48, 32, 4)
    b[0, 0], b[1, 0] = torch.inf, torch.nan
    found, _ = merged((base, a, b))
    assert not found[:2].isfinite().any() and found[2:].isfinite().all()


@pytest.mark.parametrize("rounding", [host.EXACT, host.NEAREST, host.DITHER])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpus_kernel_has_the_same_bits(shape: tuple[int, int, int], rounding: int) -> None:
    base, a, b = tensors(*shape, size=1e-2)
    seed = threshold_seed(MODULE)
    expected = torch.empty(base.shape)
    counted = host.merge(base.float().numpy(), a.numpy(), b.numpy(), 0.3, rounding, seed, expected.numpy())
    for dtype in (torch.float32,) if rounding == host.EXACT else (torch.float32, torch.bfloat16):
        out = torch.empty(base.shape, dtype=dtype, device=DEVICE)
        found = device.merge(base.to(DEVICE), a.to(DEVICE), b.to(DEVICE), 0.3, rounding, seed, out)
        assert torch.equal(out.cpu().float(), expected)
        assert found.tolist() == pytest.approx(counted, rel=1e-4)


def test_thresholds_differ_between_modules() -> None:
    parts = tensors(48, 32, 4, size=1e-3)
    other, _ = merge("model.layers.1.mlp.up_proj", *parts, 0.5, "dither", torch.bfloat16)
    assert not torch.equal(other, merged(parts)[0])
