"""Row-wise CPU kernels between the matrix products: RMS norm, SwiGLU, and rotary embedding with the cache write.

Each row is computed alone and in one fixed order, so results do not depend on the batch. Called by
`model/ops/native.py`.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from paceline.kernels.cpu.atomics import floats, int32s, int64s, number
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.pool import DONE, Shared, num_tasks, part_of, share_out, shared
from paceline.kernels.cpu.simd import LANES, exp, fma, load, splat, store, total

NORM_NS, SWIGLU_NS, ROTATE_NS = 0.15, 0.7, 1.5
"""What an element costs one core, to estimate work."""


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


def rms_norm(x: int, num_rows: int, width: int, weight: int, eps: float, y: int) -> None:
    """y = x / rms(x) * weight, row by row."""
    work_ns = num_rows * width * NORM_NS
    _rms_norm(shared(_norm_task, work_ns), work_ns, x, num_rows, width, weight, eps, y)


@kernel
def _rms_norm(to: Shared, work_ns: float, x: int, num_rows: int, width: int, weight: int, eps: float, y: int) -> None:
    count = num_tasks(num_rows, work_ns)
    block = np.empty(7, np.int64)
    block[0], block[1], block[2], block[3], block[4], block[5] = x, num_rows, width, weight, y, count
    block.view(np.float64)[6] = eps
    share_out(to, block, count)


def _norm_task(block: int, index: int) -> int:
    x, num_rows, width, weight, y, count, _ = carray(int64s(block), 7)
    eps = number(block, 6)
    first, last = part_of(index, count, num_rows)
    for r in range(first, last):
        _norm_row(x + r * width * 4, weight, width, eps, y + r * width * 4)
    return DONE


def swiglu(gate_up: int, num_rows: int, width: int, y: int) -> None:
    """y = silu(gate) * up for rows [gate | up] of 2 * width."""
    work_ns = num_rows * width * SWIGLU_NS
    _swiglu(shared(_swiglu_task, work_ns), work_ns, gate_up, num_rows, width, y)


@kernel
def _swiglu(to: Shared, work_ns: float, gate_up: int, num_rows: int, width: int, y: int) -> None:
    count = num_tasks(num_rows, work_ns)
    block = np.empty(5, np.int64)
    block[0], block[1], block[2], block[3], block[4] = gate_up, num_rows, width, y, count
    share_out(to, block, count)


def _swiglu_task(block: int, index: int) -> int:
    gate_up, num_rows, width, y, count = carray(int64s(block), 5)
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    first, last = part_of(index, count, num_rows)
    for r in range(first, last):
        gates = gate_up + r * width * 8
        for i in range(0, width, LANES):
            left = width - i
            gate = load(gates + 4 * i, left)
            up = load(gates + 4 * (width + i), left)
            store(y + 4 * (r * width + i), gate / (one + exp(zero - gate)) * up, left)
    return DONE


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
    _, num_kv_heads, head_dim, _ = keys.shape
    work_ns = len(positions) * (num_heads + 2 * num_kv_heads) * head_dim * ROTATE_NS
    to = shared(_rotate_task, work_ns)
    norms, turns = (q_norm, k_norm), (cos, sin)
    _rotate_rows(to, work_ns, qkv, norms, eps, turns, scale, positions, slots, num_heads, queries, keys, values)


@kernel
def _rotate_rows(
    to: Shared,
    work_ns: float,
    qkv: int,
    norms: tuple[int, int],
    eps: float,
    turns: tuple[int, int],
    scale: float,
    positions: NDArray[np.int32],
    slots: NDArray[np.int64],
    num_heads: int,
    queries: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    count = num_tasks(len(positions), work_ns)
    block = np.empty(_NUM_WORDS, np.int64)
    numbers = block.view(np.float64)
    numbers[18], numbers[19] = eps, scale
    block[0], block[1], block[2], block[3], block[4] = qkv, norms[0], norms[1], turns[0], turns[1]
    block[5], block[6], block[7] = count, positions.ctypes.data, slots.ctypes.data
    block[8], block[9], block[10], block[11] = len(positions), num_heads, queries, keys.ctypes.data
    block[12], block[13], block[14], block[15] = keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
    block[16], block[17] = values.ctypes.data, values.shape[3]
    share_out(to, block, count)


_NUM_WORDS = 20


def _rotate_task(block: int, index: int) -> int:
    """Some rows of `rotate_and_store`; every row has a slot of its own."""
    b = carray(int64s(block), _NUM_WORDS)
    qkv, q_norm, k_norm, cos, sin, num_rows, num_heads = b[0], b[1], b[2], b[3], b[4], b[8], b[9]
    eps, scale = number(block, 18), number(block, 19)
    positions, slots = carray(int32s(b[6]), num_rows), carray(int64s(b[7]), num_rows)
    keys = carray(floats(b[11]), (b[12], b[13], b[14], b[15]))
    values = carray(floats(b[16]), (b[12], b[13], b[15], b[17]))
    head_dim, half = b[14], b[14] // 2
    first, last = part_of(index, b[5], num_rows)
    for r in range(first, last):
        row = qkv + r * (num_heads + 2 * b[13]) * head_dim * 4
        c, s = cos + positions[r] * half * 4, sin + positions[r] * half * 4
        _rotate_row(row, q_norm, k_norm, eps, c, s, scale, slots[r], num_heads, b[10], r, num_rows, keys, values)
    return DONE


@kernel
def _rotate_row(
    row: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    cos: int,
    sin: int,
    scale: float,
    slot: int,
    num_heads: int,
    queries: int,
    r: int,
    num_rows: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    _, num_kv_heads, head_dim, page_size = keys.shape
    group = num_heads // num_kv_heads
    page, offset = slot // page_size, slot % page_size
    head = np.empty(head_dim, np.float32)
    for h in range(num_kv_heads):
        for g in range(group):
            source = row + (h * group + g) * head_dim * 4
            target = queries + (((h * num_rows + r) * group + g) * head_dim) * 4
            _prepare_head(source, q_norm, eps, head_dim, cos, sin, scale, target)
        source = row + (num_heads + h) * head_dim * 4
        _prepare_head(source, k_norm, eps, head_dim, cos, sin, 1.0, head.ctypes.data)
        _store_key(head, keys, page, h, offset)
        source = row + (num_heads + num_kv_heads + h) * head_dim * 4
        target = values[page, h, offset].ctypes.data
        for i in range(0, head_dim, LANES):
            store(target + 4 * i, load(source + 4 * i, head_dim - i), head_dim - i)
