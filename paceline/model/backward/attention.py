"""Backward of causal attention over packed texts: text by text, one block of query rows at a time.

A block's scores are recomputed and discarded, so at most MOST_SCORES of them are ever in memory, however long a text or
large a pack. Called by `rowwise.py`. Blocks depend only on the text's length: whatever else is in the pack, a text's
gradients are the same bits. `kernels/triton/attention_backward.py` does the same on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.model.backward.products import Products

MOST_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores of a block over all heads. Small blocks stay in a CPU's cache, large ones keep a GPU busy."""
LEAST_BLOCK, MOST_BLOCK = 16, 256
"""Query rows of a block."""

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [rows, heads, head dim], keys and values [rows, kv heads, head dim]; or their gradients."""


def attention_backward(heads: Heads, gradient: Tensor, row_starts: Sequence[int], products: Products) -> Heads:
    """Gradients of queries, keys and values; `gradient` is that of the result, [rows, heads * head dim].

    `row_starts` has the first row of every text and then the number of rows.
    """
    gradient = gradient.view(heads[0].shape)
    gradients = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in heads)
    for start, stop in itertools.pairwise(row_starts):
        part = slice(start, stop)
        q, k, v = (tensor[part] for tensor in heads)
        found = _text_backward(q, k, v, gradient[part], products)
        for target, values in zip(gradients, found, strict=True):
            target[part] = values
    return gradients[0], gradients[1], gradients[2]


def block_rows(num_heads: int, length: int, device: str) -> int:
    """Query rows of a block for a text of this length."""
    return min(max(MOST_SCORES[device] // (num_heads * length), LEAST_BLOCK), MOST_BLOCK)


def _text_backward(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, products: Products) -> Heads:
    """One text: q and gradient [length, heads, dim], k and v [length, kv heads, dim]."""
    (length, num_heads, dim), num_kv_heads = q.shape, k.shape[1]
    group, scale = num_heads // num_kv_heads, 1 / math.sqrt(dim)
    # [kv head, row * head of the group, dim]: the heads of a group share keys, so they are rows of one product.
    q, gradient = (
        t.view(length, num_kv_heads, group, dim).transpose(0, 1).reshape(num_kv_heads, -1, dim) for t in (q, gradient)
    )
    q, k, v = q * scale, k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    q_gradient, k_gradient, v_gradient = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    step = block_rows(num_heads, length, q.device.type)
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
