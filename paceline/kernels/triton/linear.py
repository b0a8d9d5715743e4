"""Linear layers on a GPU: y = x W^T as partial sums, bit for bit the same for any number of rows.

Exact by construction: the depth is cut into `num_slices` slices, a number that depends only on the weight's shape. The
tensor cores sum each slice in depth order with the weight as left operand, so rows are only the width of an
instruction. Every tile shape gives the same bits, and so does cuBLAS where it works that way (`bench/gpu_tiles.py`
checks every shape; `_prefers_library` checks again for the shapes in use). So timing may choose the kernel, never the
numerics. Called by `model/ops/gpu.py`; the kernels that consume a product add its parts.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.launch import IS_INTERPRETED, pdl_options

MOST_TILES = 300
"""Up to this many tiles of 64 outputs, over all slices, more slices of the depth fill the GPU better."""
LEAST_DEPTH = 512
"""A shorter slice is not worth the extra part."""
OWN_ROWS = 32
"""Up to this many rows our kernel beat cuBLAS for every measured shape; above, timing decides."""
BUCKET_ROWS = 16
"""All larger row counts of captured steps are multiples of this."""
TIMED_RUNS, FLUSH_BYTES = 7, 128 << 20
TILE_DEPTH = 64


class Tile(NamedTuple):
    """A program's tile of outputs, rows and depth, its warps, and its pipeline stages."""

    out: int
    rows: int
    depth: int
    warps: int
    stages: int


TILES = {16: Tile(64, 16, 128, 4, 4), 32: Tile(64, 32, 128, 4, 4), 64: Tile(64, 64, 128, 4, 3)}
SHALLOW_TILES = {16: Tile(64, 16, 64, 4, 5), 32: Tile(64, 32, 64, 4, 5), 64: Tile(64, 64, 64, 4, 5)}
"""By rows, the best measured on an H200; the shallow ones are for depth slices that are not a multiple of 128."""
LARGE_TILE, FLOAT32_TILE = Tile(64, 128, 64, 4, 4), Tile(64, 16, 32, 4, 3)


class Product(NamedTuple):
    """A linear layer's result as parts [parts, rows, features] to add in order, and the bias to add last."""

    parts: Tensor
    bias: Tensor | None


def num_slices(out_features: int, in_features: int) -> int:
    """Number of slices a weight's depth is cut into. Part of the numerics: a change here changes the last bits."""
    slices = 1
    while (
        slices < 4
        and -(-out_features // 64) * slices * 2 <= MOST_TILES
        and in_features >= 2 * slices * LEAST_DEPTH
        and in_features % (2 * slices * TILE_DEPTH) == 0
    ):
        slices *= 2
    return slices


# Not specialized on the number of rows: one kernel variant serves all.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    w,
    y,
    num_rows,
    num_out,
    depth,
    slice_depth,
    TILE_OUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DEEP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[s, r, n]: the s-th slice of the sum over k of x[r, k] w[n, k]."""
    n = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    r = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    s = tl.program_id(2)
    start = s * slice_depth
    k = start + tl.arange(0, TILE_DEEP)
    weights = w + n[:, None].to(tl.int64) * depth + k[None, :]
    inputs = x + r[None, :].to(tl.int64) * depth + k[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((TILE_OUT, TILE_ROWS), tl.float32)
    for at in tl.range(0, slice_depth, TILE_DEEP):
        if IS_EVEN:
            left = tl.load(weights, mask=n[:, None] < num_out, other=0.0)
            right = tl.load(inputs, mask=r[None, :] < num_rows, other=0.0)
        else:  # the last tile extends past the depth; zeros add nothing
            inside = at + tl.arange(0, TILE_DEEP) < slice_depth
            left = tl.load(weights, mask=(n[:, None] < num_out) & inside[None, :], other=0.0)
            right = tl.load(inputs, mask=(r[None, :] < num_rows) & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        weights += TILE_DEEP
        inputs += TILE_DEEP
    out = y + s.to(tl.int64) * num_rows * num_out + r[None, :].to(tl.int64) * num_out + n[:, None]
    tl.store(out, total, mask=(n[:, None] < num_out) & (r[None, :] < num_rows))


def _tile(num_rows: int, slice_depth: int, is_float32: bool) -> Tile:
    """Pick a tile by speed; it does not affect numerics, except in float32, which therefore has one tile only."""
    if is_float32:
        return FLOAT32_TILE
    tiles = TILES if slice_depth % 128 == 0 else SHALLOW_TILES
    return next((tile for limit, tile in tiles.items() if num_rows <= limit), LARGE_TILE)


def own_linear(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """[slices, rows, out] by the kernel above, for any number of rows."""
    (num_rows, depth), num_out = x.shape, weight.shape[0]
    is_float32 = weight.dtype == torch.float32
    slices = num_slices(num_out, depth)
    slice_depth = depth // slices
    tile = tile or _tile(num_rows, slice_depth, is_float32)
    y = torch.empty(slices, num_rows, num_out, dtype=torch.float32, device=x.device)
    _linear_kernel[(triton.cdiv(num_out, tile.out), triton.cdiv(num_rows, tile.rows), slices)](
        x,
        weight,
        y,
        num_rows,
        num_out,
        depth,
        slice_depth,
        tile.out,
        tile.rows,
        tile.depth,
        slice_depth % tile.depth == 0,
        "ieee" if is_float32 else "tf32",  # tf32 has no effect on bfloat16 inputs
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(),
    )
    return y


def library_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The same through cuBLAS, one product per depth slice."""
    (num_rows, depth), num_out = x.shape, weight.shape[0]
    slices = num_slices(num_out, depth)
    if slices == 1:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
    rows = x.view(num_rows, slices, depth // slices).transpose(0, 1)
    columns = weight.view(num_out, slices, depth // slices).permute(1, 2, 0)
    return torch.bmm(rows, columns, out_dtype=torch.float32)


_is_library: dict[tuple[torch.device, int, int, int], bool] = {}


def _prefers_library(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS gives our bits for this shape, and faster. Tested once per shape, outside capture."""
    key = (x.device, x.shape[0], *weight.shape)
    if key not in _is_library:
        assert not torch.cuda.is_current_stream_capturing(), "run a shape once before capturing it"
        generator = torch.Generator(device=x.device).manual_seed(0)
        rows, other = (
            torch.randn(like.shape, dtype=x.dtype, device=x.device, generator=generator) for like in (x, weight)
        )
        # Compare all outputs on random inputs, since a zero weight would prove nothing: a different summation order
        # shows in most of them.
        is_proven = torch.equal(library_linear(rows, other), own_linear(rows, other))
        _is_library[key] = is_proven and _time(library_linear, rows, other) < _time(own_linear, rows, other)
    return _is_library[key]


def _time(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    """Median milliseconds with a cold GPU cache."""
    other = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=x.device)
    times = []
    for _ in range(TIMED_RUNS):
        other.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(x, weight)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def linear(x: Tensor, weight: Tensor, exact: bool = True) -> Tensor:
    """[slices, rows, out]: the parts of x W^T. With exact=False, one part summed in whatever order cuBLAS chooses."""
    if IS_INTERPRETED or weight.dtype == torch.float32:
        return own_linear(x, weight)
    if not exact:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
    # Other row counts occur once, when scoring texts, and are not worth timing.
    if x.shape[0] > OWN_ROWS and x.shape[0] % BUCKET_ROWS == 0 and _prefers_library(x, weight):
        return library_linear(x, weight)
    return own_linear(x, weight)
