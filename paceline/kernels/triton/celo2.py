"""The two passes of a CELO2 step over a stack of matrices on a GPU; `rl/celo2.py` calls them and says what they do.

    advance       moves the moments on, and returns the mean square of every feature that differs by element
    directions    the network's answer for every element

As `kernels/cpu/celo2.py`, with tiles in place of rows: features live in registers and are computed twice rather than
stored. A tile's sums are added by torch, in an order that shapes alone decide. All tensors are contiguous float32.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_FEATURES, WIDTH = 18, 8
_ROWS, _COLUMNS, _WARPS = 16, 64, 8


@triton.jit
def _tile(height, width, num_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's matrix, rows and columns, the places of its elements, and which of them exist."""
    program = tl.program_id(0)
    matrix, tile = (program // num_tiles).to(tl.int64), program % num_tiles
    across = tl.cdiv(width, COLUMNS)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None].to(tl.int64) * width + columns[None, :]
    return matrix, rows, columns, at, (rows < height)[:, None] & (columns < width)[None, :]


@triton.jit
def _factor(row_factors, column_factors, matrix, number: tl.constexpr, rows, columns, height, width):
    by_row = tl.load(row_factors + (3 * matrix + number) * height + rows, mask=rows < height, other=0.0)
    by_column = tl.load(column_factors + (3 * matrix + number) * width + columns, mask=columns < width, other=0.0)
    return by_row[:, None] * by_column[None, :]


@triton.jit
def _put(sums, number: tl.constexpr, feature):
    tl.store(sums + number, tl.sum(feature * feature))


@triton.jit
def _advance_kernel(
    weights,
    gradients,
    momenta,
    squares,
    row_factors,
    column_factors,
    sums,
    height,
    width,
    num_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    matrix, rows, columns, at, mask = _tile(height, width, num_tiles, ROWS, COLUMNS)
    size = height * width
    p = tl.load(weights + matrix * size + at, mask=mask, other=0.0)
    g = tl.load(gradients + matrix * size + at, mask=mask, other=0.0)
    place = momenta + 3 * matrix * size + at
    m0 = tl.load(place, mask=mask, other=0.0) * 0.9 + g * (1 - 0.9)
    m1 = tl.load(place + size, mask=mask, other=0.0) * 0.99 + g * (1 - 0.99)
    m2 = tl.load(place + 2 * size, mask=mask, other=0.0) * 0.999 + g * (1 - 0.999)
    v = tl.load(squares + matrix * size + at, mask=mask, other=0.0) * 0.95 + g * g * (1 - 0.95)
    tl.store(place, m0, mask=mask)
    tl.store(place + size, m1, mask=mask)
    tl.store(place + 2 * size, m2, mask=mask)
    tl.store(squares + matrix * size + at, v, mask=mask)
    inverse = tl.where(mask, 1.0 / tl.sqrt(v + 1e-8), 0.0)
    own = sums + tl.program_id(0).to(tl.int64) * 18
    _put(own, 0, g)
    _put(own, 1, tl.minimum(tl.maximum(g, -0.1), 0.1))
    _put(own, 2, p)
    _put(own, 3, m0)
    _put(own, 4, m1)
    _put(own, 5, m2)
    _put(own, 6, v)
    _put(own, 7, m0 * inverse)
    _put(own, 8, m1 * inverse)
    _put(own, 9, m2 * inverse)
    _put(own, 10, inverse)
    _put(own, 14, g * inverse)
    f = _factor(row_factors, column_factors, matrix, 0, rows, columns, height, width)
    _put(own, 11, g * f)
    _put(own, 15, m0 * f)
    f = _factor(row_factors, column_factors, matrix, 1, rows, columns, height, width)
    _put(own, 12, g * f)
    _put(own, 16, m1 * f)
    f = _factor(row_factors, column_factors, matrix, 2, rows, columns, height, width)
    _put(own, 13, g * f)
    _put(own, 17, m2 * f)


@triton.jit
def _first_unit(
    w, by_row, by_column, rows, columns, height, width,
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17,
):  # fmt: skip
    """A unit of the first layer: what the row and the column contribute, and the features by element."""
    x = tl.load(by_row + rows, mask=rows < height, other=0.0)[:, None]
    x = x + tl.load(by_column + columns, mask=columns < width, other=0.0)[None, :]
    x += tl.load(w) * a0 + tl.load(w + 1) * a1 + tl.load(w + 2) * a2 + tl.load(w + 3) * a3 + tl.load(w + 4) * a4
    x += tl.load(w + 5) * a5 + tl.load(w + 6) * a6 + tl.load(w + 7) * a7 + tl.load(w + 8) * a8 + tl.load(w + 9) * a9
    x += tl.load(w + 10) * a10 + tl.load(w + 11) * a11 + tl.load(w + 12) * a12 + tl.load(w + 13) * a13
    x += tl.load(w + 14) * a14 + tl.load(w + 15) * a15 + tl.load(w + 16) * a16 + tl.load(w + 17) * a17
    return tl.maximum(x, 0.0)


@triton.jit
def _second_unit(w, bias, output, a0, a1, a2, a3, a4, a5, a6, a7):
    """What a unit of the second layer adds to the answer."""
    x = tl.load(bias) + tl.load(w) * a0 + tl.load(w + 1) * a1 + tl.load(w + 2) * a2 + tl.load(w + 3) * a3
    x += tl.load(w + 4) * a4 + tl.load(w + 5) * a5 + tl.load(w + 6) * a6 + tl.load(w + 7) * a7
    return tl.maximum(x, 0.0) * tl.load(output)


@triton.jit
def _direction_kernel(
    weights,
    gradients,
    momenta,
    squares,
    row_factors,
    column_factors,
    first,
    by_row,
    by_column,
    hidden,
    hidden_bias,
    output,
    output_bias,
    out,
    height,
    width,
    num_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    matrix, rows, columns, at, mask = _tile(height, width, num_tiles, ROWS, COLUMNS)
    size = height * width
    p = tl.load(weights + matrix * size + at, mask=mask, other=0.0)
    g = tl.load(gradients + matrix * size + at, mask=mask, other=0.0)
    place = momenta + 3 * matrix * size + at
    m0 = tl.load(place, mask=mask, other=0.0)
    m1 = tl.load(place + size, mask=mask, other=0.0)
    m2 = tl.load(place + 2 * size, mask=mask, other=0.0)
    v = tl.load(squares + matrix * size + at, mask=mask, other=0.0)
    inverse = 1.0 / tl.sqrt(v + 1e-8)
    clipped = tl.minimum(tl.maximum(g, -0.1), 0.1)
    f0 = _factor(row_factors, column_factors, matrix, 0, rows, columns, height, width)
    f1 = _factor(row_factors, column_factors, matrix, 1, rows, columns, height, width)
    f2 = _factor(row_factors, column_factors, matrix, 2, rows, columns, height, width)
    w = first + matrix * 8 * 18
    r = by_row + matrix * 8 * height
    c = by_column + matrix * 8 * width
    a7, a8, a9, a11, a12, a13, a14 = m0 * inverse, m1 * inverse, m2 * inverse, g * f0, g * f1, g * f2, g * inverse
    a15, a16, a17 = m0 * f0, m1 * f1, m2 * f2
    h0 = _first_unit(w, r, c, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h1 = _first_unit(w + 18, r + height, c + width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h2 = _first_unit(w + 36, r + 2 * height, c + 2 * width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h3 = _first_unit(w + 54, r + 3 * height, c + 3 * width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h4 = _first_unit(w + 72, r + 4 * height, c + 4 * width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h5 = _first_unit(w + 90, r + 5 * height, c + 5 * width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h6 = _first_unit(w + 108, r + 6 * height, c + 6 * width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    h7 = _first_unit(w + 126, r + 7 * height, c + 7 * width, rows, columns, height, width,
        g, clipped, p, m0, m1, m2, v, a7, a8, a9, inverse, a11, a12, a13, a14, a15, a16, a17)  # fmt: skip
    answer = tl.load(output_bias) + _second_unit(hidden, hidden_bias, output, h0, h1, h2, h3, h4, h5, h6, h7)
    for unit in tl.static_range(1, 8):
        answer += _second_unit(hidden + 8 * unit, hidden_bias + unit, output + unit, h0, h1, h2, h3, h4, h5, h6, h7)
    tl.store(out + matrix * size + at, answer, mask=mask)


def advance(
    weights: Tensor, gradients: Tensor, momenta: Tensor, squares: Tensor, row_factors: Tensor, column_factors: Tensor
) -> Tensor:
    """Advance momenta and squares in place; [matrices, NUM_FEATURES] mean squares of the features, in float64."""
    count, height, width = weights.shape
    num_tiles = triton.cdiv(height, _ROWS) * triton.cdiv(width, _COLUMNS)
    sums = torch.empty(count, num_tiles, NUM_FEATURES, dtype=torch.float32, device=weights.device)
    _advance_kernel[(count * num_tiles,)](
        *(weights, gradients, momenta, squares, row_factors, column_factors, sums, height, width, num_tiles), **_shape()
    )
    return sums.double().sum(1) / (height * width)


def directions(
    weights: Tensor,
    gradients: Tensor,
    momenta: Tensor,
    squares: Tensor,
    row_factors: Tensor,
    column_factors: Tensor,
    first: Tensor,
    by_row: Tensor,
    by_column: Tensor,
    hidden: Tensor,
    hidden_bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
) -> Tensor:
    """[matrices, rows, columns] answers; `first`, `by_row` and `by_column` are the first layer of every matrix."""
    count, height, width = weights.shape
    num_tiles = triton.cdiv(height, _ROWS) * triton.cdiv(width, _COLUMNS)
    found = torch.empty_like(weights, memory_format=torch.contiguous_format)
    given = weights, gradients, momenta, squares, row_factors, column_factors, first, by_row, by_column
    learned = hidden, hidden_bias, output, output_bias
    _direction_kernel[(count * num_tiles,)](*given, *learned, found, height, width, num_tiles, **_shape())
    return found


def _shape() -> dict[str, Any]:
    return {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _WARPS}
