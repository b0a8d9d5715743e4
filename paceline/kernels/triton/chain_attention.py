"""Attention of a drafter's guesses on a GPU: all pieces of all texts in one forward launch, with its backward.

A base sees the rows of its own piece up to its own, and the keys of its own chain (`model/eagle/unroll.py`). Pieces are
concatenated and differ in length; blocks start at each piece's first base and first row, so nothing is padded and no
scores are stored. In torch operations every piece size is its own batch of products, and a micro-step takes hundreds of
launches, more than the host can issue in time. Products take bfloat16 inputs and accumulate in float32; every sum has
one order, so a micro-step is reproducible. The CPU path of `Unroll._attend` is the twin.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.kernels.triton.attention_backward import put, tile

ROWS = 64
"""Bases, or keys, per block."""
BASE_FIELDS, KEY_FIELDS = 4, 5
_BASE_FIELDS, _KEY_FIELDS = tl.constexpr(BASE_FIELDS), tl.constexpr(KEY_FIELDS)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The work of each program."""

    bases: Tensor
    """[blocks, 4]: first base, end of the piece's bases, first row of the piece, offset from a base to its row."""
    keys: Tensor
    """[blocks, 5]: first row, end of the piece's rows, first base that sees one, end of the piece's bases, offset from
    a base to its row."""

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]], device: torch.device | str) -> Blocks:
        """`sizes`: bases and rows of every piece; its bases are its last rows."""
        bases: list[tuple[int, ...]] = []
        keys: list[tuple[int, ...]] = []
        base = row = 0
        for num_bases, num_rows in sizes:
            end, stop = base + num_bases, row + num_rows
            shift = stop - end
            bases += [(first, end, row, shift) for first in range(base, end, ROWS)]
            keys += [(first, stop, max(base, first - shift), end, shift) for first in range(row, stop, ROWS)]
            base, row = end, stop
        found = torch.tensor([value for fields in (*bases, *keys) for value in fields], dtype=torch.int32).to(device)
        split = len(bases) * BASE_FIELDS
        return cls(found[:split].view(-1, BASE_FIELDS), found[split:].view(-1, KEY_FIELDS))


@triton.jit
def _scores(q, k, rows, keys):
    """Scores of a block of bases, at these rows, against a block of keys; -inf where a key is not visible."""
    return tl.where(keys[None, :] <= rows[:, None], tl.dot(q, tl.trans(k)), float("-inf"))


@triton.jit(do_not_specialize=["num_bases", "num_guesses"])
def _forward_kernel(
    q, k, v, chain_k, chain_v, blocks, out, log_sums, num_bases, num_guesses,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of bases of one head: its attention output and the log-sum of its softmax."""
    fields, head = blocks + tl.program_id(0) * _BASE_FIELDS, tl.program_id(1)
    first, end, begin, shift = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    kv_head = head // (H // KV)
    bases = first + tl.arange(0, ROWS)
    own_q = tile(q, bases, head, end, H, D, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass, gathered = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    stop = tl.minimum(first + ROWS, end) + shift
    for start in range(begin, stop, ROWS):
        keys = start + tl.arange(0, ROWS)
        own_k, own_v = tile(k, keys, kv_head, stop, KV, D, WIDTH), tile(v, keys, kv_head, stop, KV, D, WIDTH)
        scores = _scores(own_q, own_k, bases + shift, keys)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, fade = tl.exp(scores - new_top[:, None]), tl.exp(top - new_top)
        mass = mass * fade + tl.sum(weights, 1)
        gathered = tl.dot(weights.to(tl.bfloat16), own_v, gathered * fade[:, None])
        top = new_top
    plane = num_bases * KV * D
    for guess in range(0, num_guesses):
        own_k = tile(chain_k + guess * plane, bases, kv_head, end, KV, D, WIDTH)
        own_v = tile(chain_v + guess * plane, bases, kv_head, end, KV, D, WIDTH)
        score = tl.sum(own_q.to(tl.float32) * own_k, 1)
        new_top = tl.maximum(top, score)
        weight, fade = tl.exp(score - new_top), tl.exp(top - new_top)
        mass = mass * fade + weight
        gathered = gathered * fade[:, None] + weight[:, None] * own_v
        top = new_top
    put(out, gathered / mass[:, None], bases, head, end, H, D, WIDTH)
    tl.store(log_sums + head * num_bases + bases, top + tl.log(mass), mask=bases < end)


@triton.jit(do_not_specialize=["num_bases", "num_guesses"])
def _bases_kernel(
    q, k, v, chain_k, chain_v, g, out, blocks, log_sums, means, q_gradient, num_bases, num_guesses,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of bases of one head: the mean of its weights' gradients, and the gradient of its queries."""
    fields, head = blocks + tl.program_id(0) * _BASE_FIELDS, tl.program_id(1)
    first, end, begin, shift = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    kv_head = head // (H // KV)
    bases = first + tl.arange(0, ROWS)
    own_q, own_g = tile(q, bases, head, end, H, D, WIDTH), tile(g, bases, head, end, H, D, WIDTH)
    mean = tl.sum(own_g.to(tl.float32) * tile(out, bases, head, end, H, D, WIDTH), 1)
    log_sum = tl.load(log_sums + head * num_bases + bases, mask=bases < end, other=0.0)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    stop = tl.minimum(first + ROWS, end) + shift
    for start in range(begin, stop, ROWS):
        keys = start + tl.arange(0, ROWS)
        own_k, own_v = tile(k, keys, kv_head, stop, KV, D, WIDTH), tile(v, keys, kv_head, stop, KV, D, WIDTH)
        weights = tl.exp(_scores(own_q, own_k, bases + shift, keys) - log_sum[:, None])
        slope = weights * (tl.dot(own_g, tl.trans(own_v)) - mean[:, None])
        found = tl.dot(slope.to(tl.bfloat16), own_k, found)
    plane = num_bases * KV * D
    for guess in range(0, num_guesses):
        own_k = tile(chain_k + guess * plane, bases, kv_head, end, KV, D, WIDTH)
        own_v = tile(chain_v + guess * plane, bases, kv_head, end, KV, D, WIDTH)
        weight = tl.exp(tl.sum(own_q.to(tl.float32) * own_k, 1) - log_sum)
        slope = weight * (tl.sum(own_g.to(tl.float32) * own_v, 1) - mean)
        found += slope[:, None] * own_k
    put(q_gradient, found, bases, head, end, H, D, WIDTH)
    tl.store(means + head * num_bases + bases, mean, mask=bases < end)


@triton.jit(do_not_specialize=["num_bases"])
def _chain_kernel(
    q, chain_k, chain_v, g, blocks, log_sums, means, k_gradient, v_gradient, num_bases,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of bases, one guess of their chains, one kv head: key and value gradients summed over its group."""
    fields, kv_head, guess = blocks + tl.program_id(0) * _BASE_FIELDS, tl.program_id(1), tl.program_id(2)
    first, end = tl.load(fields), tl.load(fields + 1)
    bases = first + tl.arange(0, ROWS)
    at = guess * num_bases * KV * D
    own_k = tile(chain_k + at, bases, kv_head, end, KV, D, WIDTH)
    own_v = tile(chain_v + at, bases, kv_head, end, KV, D, WIDTH)
    of_k, of_v = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for member in range(0, H // KV):
        head = kv_head * (H // KV) + member
        own_q = tile(q, bases, head, end, H, D, WIDTH).to(tl.float32)
        own_g = tile(g, bases, head, end, H, D, WIDTH).to(tl.float32)
        log_sum = tl.load(log_sums + head * num_bases + bases, mask=bases < end, other=0.0)
        mean = tl.load(means + head * num_bases + bases, mask=bases < end, other=0.0)
        weight = tl.exp(tl.sum(own_q * own_k, 1) - log_sum)
        of_v += weight[:, None] * own_g
        of_k += (weight * (tl.sum(own_g * own_v, 1) - mean))[:, None] * own_q
    put(k_gradient + at, of_k, bases, kv_head, end, KV, D, WIDTH)
    put(v_gradient + at, of_v, bases, kv_head, end, KV, D, WIDTH)


@triton.jit(do_not_specialize=["num_bases"])
def _keys_kernel(
    q, k, v, g, blocks, log_sums, means, k_gradient, v_gradient, num_bases,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of rows of one kv head: gradients summed over all bases that see them, head by head, base by base."""
    fields, kv_head = blocks + tl.program_id(0) * _KEY_FIELDS, tl.program_id(1)
    first, stop, begin = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    end, shift = tl.load(fields + 3), tl.load(fields + 4)
    keys = first + tl.arange(0, ROWS)
    own_k, own_v = tile(k, keys, kv_head, stop, KV, D, WIDTH), tile(v, keys, kv_head, stop, KV, D, WIDTH)
    of_k, of_v = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for member in range(0, H // KV):
        head = kv_head * (H // KV) + member
        for start in range(begin, end, ROWS):
            bases = start + tl.arange(0, ROWS)
            own_q, own_g = tile(q, bases, head, end, H, D, WIDTH), tile(g, bases, head, end, H, D, WIDTH)
            log_sum = tl.load(log_sums + head * num_bases + bases, mask=bases < end, other=float("inf"))
            mean = tl.load(means + head * num_bases + bases, mask=bases < end, other=0.0)
            weights = tl.exp(_scores(own_q, own_k, bases + shift, keys) - log_sum[:, None])
            slope = weights * (tl.dot(own_g, tl.trans(own_v)) - mean[:, None])
            of_v = tl.dot(tl.trans(weights.to(tl.bfloat16)), own_g, of_v)
            of_k = tl.dot(tl.trans(slope.to(tl.bfloat16)), own_q, of_k)
    put(k_gradient, of_k, keys, kv_head, stop, KV, D, WIDTH)
    put(v_gradient, of_v, keys, kv_head, stop, KV, D, WIDTH)


class ChainAttention(torch.autograd.Function):
    """attend(...) with its gradient."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
        q, k, v = (tensor.to(torch.bfloat16).contiguous() for tensor in (q, k, v))
        num_guesses, (num_bases, num_heads, dim) = len(chain) // 2, q.shape
        # Without earlier guesses the kernels never read these.
        chain_k, chain_v = torch.stack(chain).chunk(2) if chain else (q, q)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(num_heads, num_bases, device=q.device)
        sizes = _sizes(num_heads, k.shape[1], dim)
        grid = len(blocks.bases), num_heads
        _forward_kernel[grid](
            q, k, v, chain_k, chain_v, blocks.bases, out, log_sums, num_bases, num_guesses, **sizes
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, chain_k, chain_v, out, log_sums)
        ctx.blocks, ctx.num_guesses, ctx.sizes = blocks, num_guesses, sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, chain_k, chain_v, out, log_sums = ctx.saved_tensors
        blocks, count, sizes, num_bases = ctx.blocks, ctx.num_guesses, ctx.sizes, len(q)
        g, means = gradient.to(torch.bfloat16).contiguous(), torch.empty_like(log_sums)
        of_q, of_k, of_v = (torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
        _bases_kernel[len(blocks.bases), sizes["H"]](
            q, k, v, chain_k, chain_v, g, out, blocks.bases, log_sums, means, of_q, num_bases, count, **sizes
        )  # fmt: skip
        _keys_kernel[len(blocks.keys), sizes["KV"]](
            q, k, v, g, blocks.keys, log_sums, means, of_k, of_v, num_bases, **sizes
        )  # fmt: skip
        if not count:
            return None, of_q, of_k, of_v
        of_chain = torch.empty(2, *chain_k.shape, device=q.device)
        _chain_kernel[len(blocks.bases), sizes["KV"], count](
            q, chain_k, chain_v, g, blocks.bases, log_sums, means, of_chain[0], of_chain[1], num_bases, **sizes
        )  # fmt: skip
        return None, of_q, of_k, of_v, *of_chain.flatten(0, 1).unbind()


def _sizes(num_heads: int, num_kv_heads: int, dim: int) -> dict[str, int]:
    return {"H": num_heads, "KV": num_kv_heads, "D": dim, "WIDTH": max(triton.next_power_of_2(dim), 16), "ROWS": ROWS}


def attend(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, chain: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention output [bases, heads, dim] of every base.

    Queries [bases, heads, dim] are scaled; keys and values are [rows, kv heads, dim] for the rows and [bases, kv heads,
    dim] for each guess of the chain.
    """
    found: Tensor = ChainAttention.apply(blocks, q, k, v, *(k for k, _ in chain), *(v for _, v in chain))
    return found
