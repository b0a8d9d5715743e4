"""Backward of causal attention over packed texts: text by text, one block of query rows at a time.

A block's scores are recomputed and discarded, so at most MOST_SCORES of them per thread are ever in memory, however
long a text or large a pack. Called by `rowwise.py`. Blocks depend only on the text's length: whatever else is in the
pack, a text's gradients are the same bits. `kernels/triton/attention_backward.py` does the same on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.backward.products import Products
from paceline.model.task_threads import each

MOST_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores of a block over all heads. Small blocks stay in a CPU's cache, large ones keep a GPU busy."""
LEAST_BLOCK, MOST_BLOCK = 16, 256
"""Query rows of a block."""
PIECE_PAIRS, MOST_PAIRS = 1 << 14, 1 << 16
"""Pairs of rows that keep a thread busy for some hundred microseconds: short texts go together until there are so many;
a text with more than MOST_PAIRS is divided by heads."""

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [rows, heads, head dim], keys and values [rows, kv heads, head dim]; or their gradients."""


def attention_backward(heads: Heads, gradient: Tensor, row_starts: Sequence[int], products: Products) -> Heads:
    """Gradients of queries, keys and values; `gradient` is that of the result, [rows, heads * head dim].

    `row_starts` has the first row of every text and then the number of rows.
    """
    gradient = gradient.view(heads[0].shape)
    gradients = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in heads)

    def write(piece: _Piece) -> None:
        """Compute some kv heads, with the query heads that share them, of some texts."""
        own = slice(piece.first_head, piece.last_head)
        group = heads[0].shape[1] // heads[1].shape[1]
        queries = slice(own.start * group, own.stop * group)
        for start, stop in piece.texts:
            part = slice(start, stop)
            step = block_rows(heads[0].shape[1], stop - start, gradient.device.type)
            inputs = heads[0][part, queries], heads[1][part, own], heads[2][part, own], gradient[part, queries]
            found = _text_backward(*inputs, products, step)
            for target, columns, values in zip(gradients, (queries, own, own), found, strict=True):
                target[part, columns] = values

    each(write, _pieces(row_starts, heads[1].shape[1], gradient.device.type))
    return gradients[0], gradients[1], gradients[2]


class _Piece(NamedTuple):
    """What one thread computes."""

    texts: list[tuple[int, int]]
    first_head: int
    last_head: int


def _pieces(row_starts: Sequence[int], num_kv_heads: int, device: str) -> list[_Piece]:
    """Texts in turn, several short ones together; on a CPU, a long one is divided by heads."""
    pieces: list[_Piece] = []
    waiting: list[tuple[int, int]] = []
    num_pairs = 0
    for start, stop in itertools.pairwise(row_starts):
        own = (stop - start) ** 2
        if device == "cpu" and own > MOST_PAIRS:
            pieces += [_Piece([(start, stop)], head, head + 1) for head in range(num_kv_heads)]
            continue
        waiting.append((start, stop))
        num_pairs += own
        if device == "cpu" and num_pairs >= PIECE_PAIRS:
            pieces.append(_Piece(waiting, 0, num_kv_heads))
            waiting, num_pairs = [], 0
    return [*pieces, _Piece(waiting, 0, num_kv_heads)] if waiting else pieces


def block_rows(num_heads: int, length: int, device: str) -> int:
    """Query rows of a block for a text of this length."""
    return min(max(MOST_SCORES[device] // (num_heads * length), LEAST_BLOCK), MOST_BLOCK)


def _text_backward(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, products: Products, step: int) -> Heads:
    """One text, `step` rows at a time: q and gradient [length, heads, dim], k and v [length, kv heads, dim]."""
    (length, num_heads, dim), num_kv_heads = q.shape, k.shape[1]
    group, scale = num_heads // num_kv_heads, 1 / math.sqrt(dim)
    # [kv head, row * head of the group, dim]: the heads of a group share keys, so they are rows of one product.
    q, gradient = (
        t.unflatten(1, (num_kv_heads, group)).transpose(0, 1).reshape(num_kv_heads, -1, dim) for t in (q, gradient)
    )
    q, k, v = q * scale, k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    q_gradient, k_gradient, v_gradient = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, length, step):
        stop = min(first + step, length)
        block = slice(first * group, stop * group)
        seen_k, seen_v, q_block, g_block = k[:, :stop], v[:, :stop], q[:, block], gradient[:, block]
        weights = _weights(products(q_block, seen_k.mT), first, group)
        v_gradient[:, :stop] += products(weights.mT, g_block)
        scores = products(g_block, seen_v.mT)
        scores -= (weights * scores).sum(-1, keepdim=True)
        scores *= weights
        q_gradient[:, block] = products(scores, seen_k)
        k_gradient[:, :stop] += products(scores.mT, q_block)
    q_gradient = (q_gradient * scale).view(num_kv_heads, length, group, dim).transpose(0, 1)
    return q_gradient.reshape(length, num_heads, dim), k_gradient.transpose(0, 1), v_gradient.transpose(0, 1)


def _weights(scores: Tensor, first: int, group: int) -> Tensor:
    """Softmax of a block of scores [kv heads, rows * group, keys] whose first row is row `first`."""
    own = scores[:, :, first:]
    row = torch.arange(scores.shape[1], device=scores.device) // group
    own.masked_fill_(torch.arange(own.shape[2], device=scores.device)[None] > row[:, None], -torch.inf)
    return torch.softmax(scores, dim=-1)
