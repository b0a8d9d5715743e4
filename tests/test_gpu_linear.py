"""Linear layers and the row-wise kernels on a GPU: right against float64, and free of the number of rows.

Without a GPU the kernels run in Triton's interpreter, whose matrix product is numpy's. That one tile, or cuBLAS, gives
the bits of another is a property of matrix units: it is asked of a GPU only, and marked `gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_device import DEVICE
from torch import Tensor

from paceline.kernels.triton import linear as linears
from paceline.kernels.triton import rowwise
from paceline.kernels.triton.linear import Product, library_linear, linear, num_slices, own_linear

TOLERANCE = 2e-5
"""Of sums whose terms are of the order of 1 / sqrt(depth), in float32."""
SPLIT_ERROR = {1: 2.0**-8, 2: 2.0**-16, 3: 2.0**-23}
"""How far the sum of so many bfloat16 parts may be from the number they stand for, relative to it."""
CARD_SHAPES = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (4096, 1024), (1024, 3072), (1000, 776)]
"""Weights of Qwen2.5-7B, of Qwen3-0.6B, and one that no tile divides."""
EVERY_TILE = sorted({*linears.TILES.values(), *linears.SHALLOW_TILES.values(), linears.LARGE_TILE})
CARD_ROWS = (1, 2, 3, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 160, 192, 256, 320, 384, 448, 512)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers on the device, made there: some weights are large."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def layer(num_rows: int, num_out: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows and a weight that keeps their scale."""
    weight = randn(num_out, depth, seed=1) / depth**0.5
    return randn(num_rows, depth, dtype=dtype), weight.to(dtype)


# --- linear layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, slices",
    [
        ((4608, 3584), 4),
        ((3584, 3584), 4),
        ((37888, 3584), 1),
        ((3584, 18944), 4),
        ((152064, 3584), 1),
        ((4096, 1024), 2),
        ((1024, 2048), 4),
        ((6144, 1024), 2),
        ((1024, 3072), 4),
    ],
)
def test_slices_follow_from_the_shape_of_the_weight(shape: tuple[int, int], slices: int) -> None:
    """Numerics: whoever changes a number here changes the last bits of every model."""
    assert num_slices(*shape) == slices


@pytest.mark.parametrize("num_out", [1, 64, 1000, 9600, 9601, 200_000])
def test_slices_are_whole_tiles(num_out: int) -> None:
    for depth in (8, 64, 1000, 1024, 1088, 2048, 2049, 18944):
        slices = num_slices(num_out, depth)
        assert slices in (1, 2, 4)
        assert slices == 1 or (depth % (slices * linears.TILE_DEPTH) == 0 and depth // slices >= linears.LEAST_DEPTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "num_rows, num_out, depth",
    [(1, 100, 72), (1, 1, 1), (2, 64, 64), (5, 33, 200), (16, 130, 128), (17, 65, 40), (33, 100, 136), (70, 70, 72)],
)
def test_products_of_odd_shapes(num_rows: int, num_out: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = layer(num_rows, num_out, depth, dtype)
    parts = own_linear(x, weight)
    assert parts.shape == (1, num_rows, num_out) and parts.dtype == torch.float32
    torch.testing.assert_close(parts[0].double(), x.double() @ weight.double().t(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("num_out, depth", [(70, 1024), (40, 2048), (30, 2176)])
def test_every_part_is_its_slice_of_the_depth(num_rows: int, num_out: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = layer(num_rows, num_out, depth, dtype)
    parts, slices = own_linear(x, weight), num_slices(num_out, depth)
    assert len(parts) == slices > 1
    for part, left, right in zip(parts, x.chunk(slices, 1), weight.chunk(slices, 1), strict=True):
        torch.testing.assert_close(part.double(), left.double() @ right.double().t(), atol=TOLERANCE, rtol=0)


def test_a_row_alone_is_the_row_among_others_of_its_tile() -> None:
    x, weight = layer(16, 70, 1024)
    together = own_linear(x, weight)
    for row in (0, 7, 15):
        assert torch.equal(own_linear(x[row : row + 1], weight)[:, 0], together[:, row])


def test_nan_stays_in_its_row() -> None:
    x, weight = layer(5, 70, 72)
    expected = own_linear(x, weight)
    x[2, 3] = float("nan")
    found = own_linear(x, weight)
    assert found[:, 2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[:, others], expected[:, others])


@pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
def test_every_tile_computes_the_product(tile: linears.Tile) -> None:
    """On a depth that none divides, and for more rows than it is meant for."""
    x, weight = layer(40, 150, 200)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(own_linear(x, weight, tile)[0].double(), expected, atol=TOLERANCE, rtol=0)


def test_weights_with_nan_do_not_stop_the_choice_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken model is reported by the sequence that meets it: the proof does not look at its numbers."""
    monkeypatch.setattr(linears, "_is_library", {})
    monkeypatch.setattr(linears, "library_linear", own_linear)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(linears, "_time", lambda run, x, weight: 1.0)
    x, weight = layer(2, 70, 72)
    weight[3, 3] = float("nan")
    assert not linears._prefers_library(x, weight)


def test_weights_of_zeros_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that sums in another order gives the same zeros; it must not be trusted for that."""
    monkeypatch.setattr(linears, "_is_library", {})
    monkeypatch.setattr(linears, "library_linear", lambda x, weight: own_linear(x.flip(1), weight.flip(1)))
    monkeypatch.setattr(linears, "_time", lambda run, x, weight: 1.0 if run is own_linear else 0.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, weight = layer(48, 70, 200)
    assert not linears._prefers_library(x, torch.zeros_like(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARD_SHAPES, ids=str)
def test_no_tile_changes_a_bit(shape: tuple[int, int]) -> None:
    """Every tile there is, for row counts it is not meant for too."""
    x, weight = layer(130, *shape)
    for num_rows in (1, 16, 40, 130):
        expected = own_linear(x[:num_rows], weight)
        for tile in EVERY_TILE:
            assert torch.equal(own_linear(x[:num_rows], weight, tile), expected), (num_rows, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARD_SHAPES, ids=str)
def test_no_number_of_rows_changes_a_bit(shape: tuple[int, int]) -> None:
    """Whatever `linear` takes, its own kernel or cuBLAS: each row is the row alone."""
    x, weight = layer(max(CARD_ROWS), *shape)
    whole = own_linear(x, weight)
    for row in (0, 1, 31, 100, 511):
        assert torch.equal(own_linear(x[row : row + 1], weight)[:, 0], whole[:, row])
    for num_rows in CARD_ROWS:
        assert torch.equal(own_linear(x[:num_rows], weight), whole[:, :num_rows]), num_rows
        assert torch.equal(linear(x[:num_rows], weight), whole[:, :num_rows]), num_rows
        assert torch.equal(linear(x[-num_rows:], weight), whole[:, -num_rows:]), num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARD_SHAPES[:6], ids=str)
def test_cublas_gives_our_bits(shape: tuple[int, int]) -> None:
    """For the models' shapes, from where on it may be used; elsewhere `linear` looks before it trusts it."""
    x, weight = layer(max(CARD_ROWS), *shape)
    whole = own_linear(x, weight)
    for num_rows in CARD_ROWS:
        if num_rows > linears.OWN_ROWS:
            assert torch.equal(library_linear(x[:num_rows], weight), whole[:, :num_rows]), num_rows


@pytest.mark.gpu
def test_control_another_number_of_slices_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality of bits is not what any two orders of summation give."""
    x, weight = layer(64, 3584, 3584)
    ours = own_linear(x, weight).sum(0)
    monkeypatch.setattr(linears, "num_slices", lambda *_: 1)
    for other in (own_linear(x, weight), library_linear(x, weight)):
        assert len(other) == 1
        assert (other[0] != ours).float().mean() > 0.5
        torch.testing.assert_close(other[0], ours, atol=TOLERANCE, rtol=0)


# --- row by row -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 72])
def test_embedding(dtype: torch.dtype, width: int) -> None:
    table = randn(50, width, dtype=dtype)
    token_ids = torch.tensor([5, 7, 0, 49, 49], dtype=torch.int32, device=DEVICE)
    x = rowwise.embed(table, token_ids)
    assert x.dtype == torch.float32
    assert torch.equal(x, table[token_ids.long()].float())


def check_parts(h: Tensor, expected: Tensor, num_parts: int) -> None:
    """An activation in its parts against the float64 number it stands for."""
    assert len(h) == max(num_parts, 1) and h.dtype == (torch.bfloat16 if num_parts else torch.float32)
    error = (h.double().sum(0) - expected).abs()
    assert bool((error <= (SPLIT_ERROR.get(num_parts, 0.0) + 2e-6) * expected.abs() + 1e-6).all())


@pytest.mark.parametrize("num_parts", [0, 1, 2, 3])
@pytest.mark.parametrize("num_summed, has_bias", [(0, False), (1, False), (1, True), (4, False), (4, True)])
def test_residual_and_norm(num_summed: int, has_bias: bool, num_parts: int) -> None:
    num_rows, width, eps = 5, 72, 1e-5
    before, weight = randn(num_rows, width), randn(width, seed=1)
    bias = randn(width, seed=2) if has_bias else None
    parts = randn(num_summed, num_rows, width, seed=3)
    x, expected = before.clone(), before.double()
    if num_summed:
        expected = expected + parts.double().sum(0) + (0.0 if bias is None else bias.double())
    address = x.data_ptr()
    h = rowwise.add_norm(x, Product(parts, bias) if num_summed else None, weight, eps, num_parts)
    assert x.data_ptr() == address and h.shape[1:] == x.shape
    if num_summed:
        torch.testing.assert_close(x.double(), expected, atol=2e-6, rtol=0)
    else:
        assert torch.equal(x, before)
    normed = expected * (expected.pow(2).mean(1, keepdim=True) + eps).rsqrt() * weight.double()
    check_parts(h, normed, num_parts)


def test_parts_are_added_in_order() -> None:
    """Numbers whose sum depends on it: (1e8 + 1 - 1e8) is 0 in float32, not 1."""
    parts = torch.tensor([1e8, 1.0, -1e8], device=DEVICE).view(3, 1, 1).expand(3, 2, 64).contiguous()
    x = torch.zeros(2, 64, device=DEVICE)
    rowwise.add_norm(x, Product(parts, None), torch.ones(64, device=DEVICE), 1e-5, 1)
    assert not x.any()
    rowwise.add_norm(x, Product(parts[[0, 2, 1]].contiguous(), None), torch.ones(64, device=DEVICE), 1e-5, 1)
    assert bool((x == 1).all())


@pytest.mark.parametrize("num_parts", [0, 1, 2, 3])
@pytest.mark.parametrize("num_summed, has_bias", [(1, False), (2, True)])
@pytest.mark.parametrize("width", [40, 1030])
def test_swiglu(width: int, num_summed: int, has_bias: bool, num_parts: int) -> None:
    num_rows = 3
    parts = 2 * randn(num_summed, num_rows, 2 * width)
    bias = randn(2 * width, seed=1) if has_bias else None
    h = rowwise.swiglu(Product(parts, bias), num_rows, num_parts)
    total = parts.double().sum(0) + (0.0 if bias is None else bias.double())
    gate, up = total.chunk(2, 1)
    check_parts(h, torch.nn.functional.silu(gate) * up, num_parts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about what this test is for
def test_swiglu_of_large_numbers_is_finite() -> None:
    parts = torch.tensor([-300.0, -100.0, 100.0, 300.0, 2.0, 2.0, 2.0, 2.0], device=DEVICE).view(1, 1, 8)
    h = rowwise.swiglu(Product(parts, None), 1, 0)
    assert torch.allclose(h.flatten().cpu(), torch.tensor([0.0, 0.0, 200.0, 600.0]))


@pytest.mark.parametrize("num_parts, tolerance", SPLIT_ERROR.items())
def test_parts_carry_the_float32_value(num_parts: int, tolerance: float) -> None:
    """The first part is the rounded value, each other one the rest's; a product of parts is the product of the sum."""
    x, weight = randn(3, 64), torch.ones(64, device=DEVICE)
    whole = rowwise.add_norm(x, None, weight, 1e-5, 0)[0]
    parts = rowwise.add_norm(x, None, weight, 1e-5, num_parts)
    assert torch.equal(parts[0], whole.bfloat16())
    error = (parts.double().sum(0) - whole.double()).abs()
    assert bool((error <= tolerance * whole.double().abs()).all())
    matrix = layer(1, 70, 64)[1]
    product = own_linear(parts.view(-1, 64), matrix).view(num_parts, 3, 70).double().sum(0)
    expected = whole.double() @ matrix.double().t()
    torch.testing.assert_close(product, expected, atol=10 * tolerance + TOLERANCE / 10, rtol=0)


def test_a_product_of_parts_is_summed_by_the_norm() -> None:
    """Slices of the depth times parts of the activation arrive as one stack."""
    num_rows, width, num_parts = 3, 1024, 2
    h: Any = rowwise.add_norm(randn(num_rows, width), None, torch.ones(width, device=DEVICE), 1e-5, num_parts)
    weight = layer(1, 40, width)[1]
    product = linear(h.view(-1, width), weight)
    assert product.shape == (2, num_parts * num_rows, 40)
    x = torch.zeros(num_rows, 40, device=DEVICE)
    rowwise.add_norm(x, Product(product, None), torch.ones(40, device=DEVICE), 1e-5, 0)
    torch.testing.assert_close(x.double(), h.double().sum(0) @ weight.double().t(), atol=TOLERANCE, rtol=0)
