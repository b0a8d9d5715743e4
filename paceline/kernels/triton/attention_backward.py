"""Backward of causal attention over packed texts on a GPU: all texts of a layer in two launches.

Formulas and roundings match its slow twin, `model/backward/attention.py`: products of bfloat16 numbers accumulated in
float32. Blocks start at each text's first row and every sum runs in row order, so a text's gradients are the same bits
whatever else is in the pack, in every run. Called by `model/backward/rowwise_gpu.py`; operands come from
`rowwise_backward.py` and are neither rounded nor scaled again.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Queries, or keys, per block."""
BLOCK_FIELDS = 3
_BLOCK_FIELDS = tl.constexpr(BLOCK_FIELDS)

HeadTensors = tuple[Tensor, Tensor, Tensor]


@triton.jit
def tile(base, rows, head, end, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load some rows of one head, zero past the text's end."""
    column = tl.arange(0, WIDTH)
    at = (rows[:, None].to(tl.int64) * HEADS + head) * D + column[None, :]
    return tl.load(base + at, mask=(rows < end)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def put(base, values, rows, head, end, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = (rows[:, None].to(tl.int64) * HEADS + head) * D + column[None, :]
    tl.store(base + at, values, mask=(rows < end)[:, None] & (column < D)[None, :])


@triton.jit
def _scores(q, k, rows, keys, end):
    """Scores of a block of queries against a block of keys; -inf where a key is not visible."""
    is_seen = (keys[None, :] <= rows[:, None]) & (keys < end)[None, :]
    return tl.where(is_seen, tl.dot(q, tl.trans(k)), float("-inf"))


@triton.jit(do_not_specialize=["num_rows"])
def _queries_kernel(
    q,
    k,
    v,
    g,
    blocks,
    q_gradient,
    log_sums,
    means,
    scale,
    num_rows,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of queries of one head: its softmax log-sums, the mean of its weights' gradients, its own gradient."""
    block, head = tl.program_id(0), tl.program_id(1)
    first, begin = tl.load(blocks + block * _BLOCK_FIELDS), tl.load(blocks + block * _BLOCK_FIELDS + 1)
    end = tl.load(blocks + block * _BLOCK_FIELDS + 2)
    kv_head = head // (H // KV)
    rows = first + tl.arange(0, ROWS)
    own_q, own_g = tile(q, rows, head, end, H, D, WIDTH), tile(g, rows, head, end, H, D, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total, weighted = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    stop = tl.minimum(first + ROWS, end)
    for start in range(begin, stop, ROWS):
        keys = start + tl.arange(0, ROWS)
        own_k, own_v = tile(k, keys, kv_head, end, KV, D, WIDTH), tile(v, keys, kv_head, end, KV, D, WIDTH)
        scores = _scores(own_q, own_k, rows, keys, end)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, fade = tl.exp(scores - new_top[:, None]), tl.exp(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        weighted = weighted * fade + tl.sum(weights * tl.dot(own_g, tl.trans(own_v)), 1)
        top = new_top
    log_sum, mean = top + tl.log(total), weighted / total
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, stop, ROWS):
        keys = start + tl.arange(0, ROWS)
        own_k, own_v = tile(k, keys, kv_head, end, KV, D, WIDTH), tile(v, keys, kv_head, end, KV, D, WIDTH)
        weights = tl.exp(_scores(own_q, own_k, rows, keys, end) - log_sum[:, None])
        slope = weights * (tl.dot(own_g, tl.trans(own_v)) - mean[:, None])
        found = tl.dot(slope.to(tl.bfloat16), own_k, found)
    put(q_gradient, found * scale, rows, head, end, H, D, WIDTH)
    tl.store(log_sums + head * num_rows + rows, log_sum, mask=rows < end)
    tl.store(means + head * num_rows + rows, mean, mask=rows < end)


@triton.jit(do_not_specialize=["num_rows"])
def _keys_kernel(
    q,
    k,
    v,
    g,
    blocks,
    k_gradient,
    v_gradient,
    log_sums,
    means,
    num_rows,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of keys and values of one head: gradients summed over the queries that see them, by head, then row."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(blocks + block * _BLOCK_FIELDS), tl.load(blocks + block * _BLOCK_FIELDS + 2)
    keys = first + tl.arange(0, ROWS)
    own_k, own_v = tile(k, keys, kv_head, end, KV, D, WIDTH), tile(v, keys, kv_head, end, KV, D, WIDTH)
    of_k, of_v = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for member in range(0, H // KV):
        head = kv_head * (H // KV) + member
        for start in range(first, end, ROWS):
            rows = start + tl.arange(0, ROWS)
            own_q, own_g = tile(q, rows, head, end, H, D, WIDTH), tile(g, rows, head, end, H, D, WIDTH)
            log_sum = tl.load(log_sums + head * num_rows + rows, mask=rows < end, other=0.0)
            mean = tl.load(means + head * num_rows + rows, mask=rows < end, other=0.0)
            weights = tl.exp(_scores(own_q, own_k, rows, keys, end) - log_sum[:, None])
            weights = tl.where((rows < end)[:, None], weights, 0.0)
            slope = weights * (tl.dot(own_g, tl.trans(own_v)) - mean[:, None])
            of_v = tl.dot(tl.trans(weights.to(tl.bfloat16)), own_g, of_v)
            of_k = tl.dot(tl.trans(slope.to(tl.bfloat16)), own_q, of_k)
    put(k_gradient, of_k, keys, kv_head, end, KV, D, WIDTH)
    put(v_gradient, of_v, keys, kv_head, end, KV, D, WIDTH)


def attention_backward(heads: HeadTensors, gradient: Tensor, row_starts: Sequence[int]) -> HeadTensors:
    """Gradients of queries [rows, heads, dim], keys and values [rows, kv heads, dim]; `gradient` is like the queries.

    Heads are bfloat16, and queries are already scaled by 1 / sqrt(dim); their gradient is that of the unscaled queries.
    """
    assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in heads)
    (num_rows, num_heads, dim), num_kv_heads = heads[0].shape, heads[1].shape[1]
    scale = 1 / math.sqrt(dim)
    (q, k, v), g = heads, gradient.to(torch.bfloat16).contiguous()
    found = tuple(torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
    log_sums, means = torch.empty(2, num_heads, num_rows, dtype=torch.float32, device=q.device)
    fields = [(first, start, stop) for start, stop in pairwise(row_starts) for first in range(start, stop, ROWS)]
    blocks = torch.tensor(fields, dtype=torch.int32).to(q.device, non_blocking=True)
    sizes = {"H": num_heads, "KV": num_kv_heads, "D": dim, "WIDTH": max(triton.next_power_of_2(dim), 16), "ROWS": ROWS}
    _queries_kernel[(len(fields), num_heads)](q, k, v, g, blocks, found[0], log_sums, means, scale, num_rows, **sizes)
    _keys_kernel[(len(fields), num_kv_heads)](
        q, k, v, g, blocks, found[1], found[2], log_sums, means, num_rows, **sizes
    )
    return found[0], found[1], found[2]
