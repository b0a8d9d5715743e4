"""Merges a low-rank update into a weight on a GPU: out = round(base + scale * (b @ a)), in one pass over the weight.

Every element adds its products in the order of the rank, in float32 and without fused multiply-adds: the bits are those
of `kernels/cpu/merge.py`, the readable twin, which also numbers the ways of rounding. Called by `model/lora/merge.py`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core import noise
from paceline.kernels.cpu import merge as twin

ROWS, COLUMNS = 32, 128
"""A program's tile. Part of the metrics' last bits, never of the weights'."""

_EXACT, _DITHER = tl.constexpr(twin.EXACT), tl.constexpr(twin.DITHER)
_STRIDE = tl.constexpr(noise.STRIDE)
_FIRST, _SECOND = (tl.constexpr(m) for m in noise.MULTIPLIERS[:2])
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _threshold(index, seed):
    x = index * _STRIDE + seed
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x >> 16


@triton.jit
def _rounded(value, index, seed, ROUNDING: tl.constexpr):
    """float32 numbers rounded to bfloat16's, still in float32."""
    bits = value.to(tl.uint32, bitcast=True)
    added = _threshold(index, seed) if ROUNDING == _DITHER else ((bits >> 16) & 1) + 0x7FFF
    found = (bits + added) & 0xFFFF0000
    is_finite = (bits & _INFINITE) != _INFINITE
    return tl.where(is_finite, found, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["seed", "rank"])
def _merge_kernel(
    base,
    a,
    b,
    out,
    moved,
    sums,
    num_rows,
    width,
    rank,
    scale,
    seed,
    ROUNDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < num_rows, columns < width
    inside = has_row[:, None] & has_column[None, :]
    update = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(rank):
        factors = tl.load(b + rows * rank + k, mask=has_row, other=0.0)
        update += factors[:, None] * tl.load(a + k * width + columns, mask=has_column, other=0.0)[None, :]
    update *= scale
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    before = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    value = before + update
    if ROUNDING != _EXACT:
        index = rows.to(tl.uint32)[:, None] * width.to(tl.uint32) + columns.to(tl.uint32)[None, :]
        value = _rounded(value, index, seed.to(tl.uint32), ROUNDING)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    difference = tl.where(inside, value - before, 0.0)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(moved + program, tl.sum(tl.sum((difference != 0).to(tl.int32), 1), 0))
    tl.store(sums + 2 * program, tl.sum(tl.sum(difference * update, 1), 0))
    tl.store(sums + 2 * program + 1, tl.sum(tl.sum(update * update, 1), 0))


def merge(base: Tensor, a: Tensor, b: Tensor, scale: float, rounding: int, seed: int, out: Tensor) -> Tensor:
    """Fill `out`; return float64 [3] on the device: what the twin returns. `base` is bfloat16 or float32."""
    (num_rows, width), rank = base.shape, len(a)
    assert base.is_contiguous() and a.is_contiguous() and b.is_contiguous() and out.is_contiguous()
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(width, COLUMNS))
    moved = torch.empty(grid, dtype=torch.int32, device=base.device)
    sums = torch.empty(*grid, 2, dtype=torch.float32, device=base.device)
    # Negative if its highest bit is set: the kernel reads the same 32 bits.
    signed = seed - (1 << 32) if seed >= 1 << 31 else seed
    options = {"ROUNDING": rounding, "ROWS": ROWS, "COLUMNS": COLUMNS, "enable_fp_fusion": False}
    _merge_kernel[grid](base, a, b, out, moved, sums, num_rows, width, rank, scale, signed, **options)
    return torch.cat([moved.sum(dtype=torch.float64)[None], sums.flatten(0, 1).double().sum(0)])
