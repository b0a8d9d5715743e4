"""Backward of the row-wise operations on a GPU: norms, SwiGLU, attention heads, and the softmax over logits.

Each formula is one launch over float32 rows that writes what the next product or kernel reads, in the precision it
reads. The slow twins are `model/formulas.py` and autograd. A norm weight's gradient is a sum over rows: blocks of rows
sum their own, first to last, and the block sums are added in one order, so never use atomics here. Called by
`model/backward/rowwise_gpu.py`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton.attention_backward import HeadTensors

SWIGLU_BLOCK = 1024
NORM_ROWS = 8
"""Rows per program in the sum for a norm weight's gradient."""
HEAD_ROWS = 16
"""The same for the query and key norms of one head."""
LOGITS_BLOCK = 4096
_LEAST = tl.constexpr(-3.0e38)
"""Below every logit but finite: the exponential of the difference of two such values is 1, not NaN."""


# --- SwiGLU -----------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_kernel(gate_up, inner_gradient, gradient, width, BLOCK: tl.constexpr):
    """One block of a row of [gate | up]: the gradient of both, given that of silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    given = tl.load(inner_gradient + row * width + at, mask=inside, other=0.0)
    sigmoid = 1 / (1 + tl.exp(-gate))
    of_gate = given * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_up = given * gate * sigmoid
    kind = gradient.dtype.element_ty
    tl.store(gradient + row * 2 * width + at, of_gate.to(kind), mask=inside)
    tl.store(gradient + row * 2 * width + width + at, of_up.to(kind), mask=inside)


def swiglu_backward(gate_up: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of rows [gate | up] in this dtype, given that of silu(gate) * up."""
    (num_rows, width), found = gradient.shape, torch.empty_like(gate_up, dtype=dtype)
    assert gate_up.is_contiguous() and gradient.is_contiguous()
    grid = (num_rows, triton.cdiv(width, SWIGLU_BLOCK))
    _swiglu_kernel[grid](gate_up, gradient, found, width, SWIGLU_BLOCK)
    return found


# --- the norm ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    weight,
    gradient,
    residual,
    x_gradient,
    sums,
    num_rows,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows in order: residual + the gradient of x; and their share of the weight's gradient."""
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    factor = tl.load(weight + at, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(block * ROWS, tl.minimum(block * ROWS + ROWS, num_rows)):
        value = tl.load(x + row * width + at, mask=inside, other=0.0)
        given = tl.load(gradient + row * width + at, mask=inside, other=0.0)
        inverse = tl.rsqrt(tl.sum(value * value) / width + eps)
        total += given * value * inverse
        given *= factor
        along = tl.sum(given * value) / width * inverse * inverse
        found = (given - value * along) * inverse
        if residual is not None:
            found += tl.load(residual + row * width + at, mask=inside, other=0.0)
        tl.store(x_gradient + row * width + at, found, mask=inside)
    tl.store(sums + block * width + at, total, mask=inside)


def norm_backward(
    x: Tensor, weight: Tensor, eps: float, gradient: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of x, given that of x / rms(x) * weight, plus `residual` [rows, width]; and the weight's gradient."""
    num_rows, width = x.shape
    assert all(t is None or t.is_contiguous() for t in (x, gradient, residual))
    num_blocks, block = triton.cdiv(num_rows, NORM_ROWS), triton.next_power_of_2(width)
    x_gradient = torch.empty_like(x)
    sums = torch.empty(num_blocks, width, dtype=torch.float32, device=x.device)
    warps = min(max(block // 512, 1), 16)
    _norm_kernel[(num_blocks,)](
        x, weight, gradient, residual, x_gradient, sums, num_rows, width, eps, NORM_ROWS, block, num_warps=warps
    )
    return x_gradient, sums.sum(0)


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadLayout:
    """How rows of [q | k | v] become heads; shared by `split_heads` and its backward."""

    sizes: tuple[int, int, int]
    """Query heads, key/value heads, head dim."""
    norms: tuple[Tensor, Tensor] | None
    eps: float
    cos: Tensor
    sin: Tensor
    """Tables [positions, head dim / 2]."""
    positions: Tensor
    """Position of every row."""

    def tables(self) -> tuple[Tensor | None, ...]:
        """Inputs of both kernels besides the rows."""
        q_norm, k_norm = self.norms or (None, None)
        return q_norm, k_norm, self.cos, self.sin, self.positions

    def constants(self) -> dict[str, int]:
        """Compile-time constants of both kernels."""
        num_heads, num_kv_heads, dim = self.sizes
        half = triton.next_power_of_2(dim // 2)
        return {"H": num_heads, "KV": num_kv_heads, "D": dim, "HALF": half, "ROWS": HEAD_ROWS}

    def grid(self, num_rows: int) -> tuple[int, int]:
        """Row blocks, and heads of all three kinds."""
        num_heads, num_kv_heads, _ = self.sizes
        return triton.cdiv(num_rows, HEAD_ROWS), num_heads + 2 * num_kv_heads


@triton.jit
def _halves(base, rows, head, num_rows, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Addresses of the first half of a head for some rows, and their mask; the other half is D / 2 further."""
    column = tl.arange(0, HALF)
    at = (rows[:, None].to(tl.int64) * HEADS + head) * D + column[None, :]
    return base + at, (rows < num_rows)[:, None] & (column < D // 2)[None, :]


@triton.jit
def _load(base, rows, head, num_rows, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    at, inside = _halves(base, rows, head, num_rows, HEADS, D, HALF)
    return tl.load(at, mask=inside, other=0.0), tl.load(at + D // 2, mask=inside, other=0.0)


@triton.jit
def _store(base, a, b, rows, head, num_rows, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    at, inside = _halves(base, rows, head, num_rows, HEADS, D, HALF)
    tl.store(at, a.to(base.dtype.element_ty), mask=inside)
    tl.store(at + D // 2, b.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _turns(cos, sin, positions, rows, num_rows, D: tl.constexpr, HALF: tl.constexpr):
    """cos and sin of some rows, [rows, HALF]."""
    position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int64)
    column = tl.arange(0, HALF)
    at = position[:, None] * (D // 2) + column[None, :]
    inside = (rows < num_rows)[:, None] & (column < D // 2)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _norm_weight(q_norm, k_norm, head, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """The halves [1, HALF] of the norm weight for this head."""
    weight = q_norm if head < H else k_norm
    column = tl.arange(0, HALF)[None, :]
    inside = column < D // 2
    return tl.load(weight + column, mask=inside, other=0.0), tl.load(weight + column + D // 2, mask=inside, other=0.0)


@triton.jit
def _inverse_rms(a, b, eps, D: tl.constexpr):
    return tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _split_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    q,
    k,
    v,
    num_rows,
    eps,
    scale,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One head of a block of rows: normed if there are norms, rotated, and scaled if a query."""
    rows, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    a, b = _load(qkv, rows, head, num_rows, H + 2 * KV, D, HALF)
    if head >= H + KV:
        _store(v, a, b, rows, head - H - KV, num_rows, KV, D, HALF)
    else:
        if q_norm is not None:
            inverse = _inverse_rms(a, b, eps, D)
            of_a, of_b = _norm_weight(q_norm, k_norm, head, H, D, HALF)
            a, b = a * inverse * of_a, b * inverse * of_b
        c, s = _turns(cos, sin, positions, rows, num_rows, D, HALF)
        a, b = a * c - b * s, b * c + a * s
        if head < H:
            _store(q, a * scale, b * scale, rows, head, num_rows, H, D, HALF)
        else:
            _store(k, a, b, rows, head - H, num_rows, KV, D, HALF)


@triton.jit
def _norm_back(qkv, a, b, q_norm, k_norm, sums, rows, head, num_rows, eps, H: tl.constexpr, KV: tl.constexpr,
               D: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Gradient of a head before its norm, given the halves of the gradient after it; the weight's goes to `sums`."""
    x_a, x_b = _load(qkv, rows, head, num_rows, H + 2 * KV, D, HALF)
    of_a, of_b = _norm_weight(q_norm, k_norm, head, H, D, HALF)
    inverse = _inverse_rms(x_a, x_b, eps, D)
    column = tl.arange(0, HALF)
    to = sums + (tl.program_id(0).to(tl.int64) * (H + KV) + head) * D + column
    tl.store(to, tl.sum(a * x_a * inverse, 0), mask=column < D // 2)
    tl.store(to + D // 2, tl.sum(b * x_b * inverse, 0), mask=column < D // 2)
    a, b = a * of_a, b * of_b
    along = (tl.sum(a * x_a, 1) + tl.sum(b * x_b, 1))[:, None] / D * inverse * inverse
    return (a - x_a * along) * inverse, (b - x_b * along) * inverse


@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    q_gradient,
    k_gradient,
    v_gradient,
    gradient,
    sums,
    num_rows,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One head of a block of rows: rotate its gradient back, apply the norm's backward, write it to rows of qkv."""
    rows, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    if head >= H + KV:
        a, b = _load(v_gradient, rows, head - H - KV, num_rows, KV, D, HALF)
        _store(gradient, a, b, rows, head, num_rows, H + 2 * KV, D, HALF)
    else:
        if head < H:
            a, b = _load(q_gradient, rows, head, num_rows, H, D, HALF)
        else:
            a, b = _load(k_gradient, rows, head - H, num_rows, KV, D, HALF)
        c, s = _turns(cos, sin, positions, rows, num_rows, D, HALF)
        a, b = a * c + b * s, b * c - a * s
        if q_norm is not None:
            a, b = _norm_back(qkv, a, b, q_norm, k_norm, sums, rows, head, num_rows, eps, H, KV, D, HALF)
        _store(gradient, a, b, rows, head, num_rows, H + 2 * KV, D, HALF)


def split_heads(qkv: Tensor, layout: HeadLayout) -> HeadTensors:
    """Rows of [q | k | v] as bfloat16 heads for `attention_backward`: normed, rotated, queries / sqrt(head dim)."""
    assert qkv.is_contiguous()
    num_heads, num_kv_heads, dim = layout.sizes
    shapes = ((len(qkv), heads, dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=qkv.device) for shape in shapes)
    _split_kernel[layout.grid(len(qkv))](
        qkv, *layout.tables(), q, k, v, len(qkv), layout.eps, 1 / math.sqrt(dim), **layout.constants()
    )
    return q, k, v


def split_heads_backward(
    qkv: Tensor, layout: HeadLayout, gradients: HeadTensors, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of qkv in this dtype, given those of unscaled heads; and those of both norm weights."""
    assert qkv.is_contiguous() and all(gradient.is_contiguous() for gradient in gradients)
    num_heads, num_kv_heads, dim = layout.sizes
    found = torch.empty_like(qkv, dtype=dtype)
    grid, sums = layout.grid(len(qkv)), None
    if layout.norms is not None:
        sums = torch.empty(grid[0], num_heads + num_kv_heads, dim, dtype=torch.float32, device=qkv.device)
    _join_kernel[grid](qkv, *layout.tables(), *gradients, found, sums, len(qkv), layout.eps, **layout.constants())
    if sums is None:
        return found, None, None
    return found, sums[:, :num_heads].sum((0, 1)), sums[:, num_heads:].sum((0, 1))


# --- logits -----------------------------------------------------------------------------------------------------------


@triton.jit
def _logits_kernel(logits, targets, gradient, found, vocab, scale, BLOCK: tl.constexpr):
    """One row: its peak and its sum of exponentials, lane by lane; then its gradient."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top, total = tl.full([BLOCK], _LEAST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        z = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")) * scale
        new_top = tl.maximum(top, z)
        total = total * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    peak = tl.max(top, 0)
    mass = tl.sum(total * tl.exp(top - peak), 0)
    target, given = tl.load(targets + row), tl.load(gradient + row) * scale
    for start in range(0, vocab, BLOCK):
        at = start + lane
        z = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")) * scale
        value = tl.where(at == target, given, 0.0) - tl.exp(z - peak) / mass * given
        tl.store(found + row * vocab + at, value.to(found.dtype.element_ty), mask=at < vocab)


def logits_backward(logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
    """Gradient of logits in bfloat16, given that of log_softmax(logits * scale) at the targets."""
    assert logits.is_contiguous() and targets.is_contiguous()
    num_rows, vocab = logits.shape
    gradient = gradient.contiguous()  # the gradient of a plain sum is one expanded number
    found = torch.empty_like(logits, dtype=torch.bfloat16)
    _logits_kernel[(num_rows,)](logits, targets, gradient, found, vocab, scale, LOGITS_BLOCK, num_warps=8)
    return found
