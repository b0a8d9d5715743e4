"""Row-wise CPU kernels between the matrix products: RMS norm, SwiGLU, and rotary embedding with the cache write.

Each row is computed alone and in one fixed order, so results do not depend on the batch. Called by
`model/ops/native.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.simd import LANES, exp, fma, load, splat, store, total


@kernel
def _inverse_rms(x: int, width: int, eps: float) -> float:
    squares = splat(np.float32(0))
    for i in range(0, width, LANES):
        value = load(x + 4 * i, width - i)
        squares = fma(value, value, squares)
    mean = total(squares) / np.float32(width)
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


@kernel
def _norm_row(x: int, weight: int, width: int, eps: float, y: int) -> None:
    scale = splat(_inverse_rms(x, width, eps))
    for i in range(0, width, LANES):
        left = width - i
        store(y + 4 * i, load(x + 4 * i, left) * scale * load(weight + 4 * i, left), left)


@kernel
def rms_norm(x: int, num_rows: int, width: int, weight: int, eps: float, y: int) -> None:
    """y = x / rms(x) * weight, row by row."""
    for r in range(num_rows):
        _norm_row(x + r * width * 4, weight, width, eps, y + r * width * 4)


@kernel
def swiglu(gate_up: int, num_rows: int, width: int, y: int) -> None:
    """y = silu(gate) * up for rows [gate | up] of 2 * width."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    for r in range(num_rows):
        gates = gate_up + r * width * 8
        for i in range(0, width, LANES):
            left = width - i
            gate = load(gates + 4 * i, left)
            up = load(gates + 4 * (width + i), left)
            store(y + 4 * (r * width + i), gate / (one + exp(zero - gate)) * up, left)


@kernel
def _rotate(x: int, head_dim: int, cos: int, sin: int, scale: float, y: int) -> None:
    """Rotary embedding in the half-split layout; `y` may be `x`."""
    half = head_dim // 2
    factor = splat(np.float32(scale))
    for i in range(0, half, LANES):
        left = half - i
        c, s = load(cos + 4 * i, left), load(sin + 4 * i, left)
        a, b = load(x + 4 * i, left), load(x + 4 * (half + i), left)
        store(y + 4 * i, (a * c - b * s) * factor, left)
        store(y + 4 * (half + i), (b * c + a * s) * factor, left)


@kernel
def _prepare_head(x: int, norm: int, eps: float, head_dim: int, cos: int, sin: int, scale: float, y: int) -> None:
    """Apply the optional norm, then the rotation."""
    if norm != 0:
        _norm_row(x, norm, head_dim, eps, y)
        _rotate(y, head_dim, cos, sin, scale, y)
    else:
        _rotate(x, head_dim, cos, sin, scale, y)


@kernel
def _store_key(head: NDArray[np.float32], keys: NDArray[np.float32], page: int, h: int, offset: int) -> None:
    for d in range(head.shape[0]):
        keys[page, h, d, offset] = head[d]


@kernel
def rotate_and_store(
    qkv: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    cos: int,
    sin: int,
    scale: float,
    positions: NDArray[np.int32],
    slots: NDArray[np.int64],
    num_heads: int,
    queries: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    """Split rows of [q | k | v]: scaled queries to [kv head, row, head in group, dim], keys and values to slots."""
    num_rows = positions.shape[0]
    _, num_kv_heads, head_dim, page_size = keys.shape
    group = num_heads // num_kv_heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    head = np.empty(head_dim, np.float32)
    for r in range(num_rows):
        row = qkv + r * width * 4
        c = cos + positions[r] * (head_dim // 2) * 4
        s = sin + positions[r] * (head_dim // 2) * 4
        page, offset = slots[r] // page_size, slots[r] % page_size
        for h in range(num_kv_heads):
            for g in range(group):
                source = row + (h * group + g) * head_dim * 4
                target = queries + (((h * num_rows + r) * group + g) * head_dim) * 4
                _prepare_head(source, q_norm, eps, head_dim, c, s, scale, target)
            source = row + (num_heads + h) * head_dim * 4
            _prepare_head(source, k_norm, eps, head_dim, c, s, 1.0, head.ctypes.data)
            _store_key(head, keys, page, h, offset)
            source = row + (num_heads + num_kv_heads + h) * head_dim * 4
            target = values[page, h, offset].ctypes.data
            for i in range(0, head_dim, LANES):
                store(target + 4 * i, load(source + 4 * i, head_dim - i), head_dim - i)
