"""Row-wise GPU kernels of the forward pass: embedding, residual and norm, SwiGLU.

A product comes in as parts (see `linear.py`), which are added here, in order, where the sum is needed anyway. An
activation goes out as `parts` bfloat16 rows whose sum is the float32 value to the requested precision: one part is
plain bfloat16, two keep 16 bits, three all 24. With float32 weights it stays float32. Called by `model/ops/gpu.py`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.launch import pdl_options
from paceline.kernels.triton.linear import Product

_SWIGLU_BLOCK = 1024


@triton.jit
def store_parts(out, offset, stride, value, mask, PARTS: tl.constexpr):
    """Store a float32 value as PARTS bfloat16 numbers `stride` apart (unchanged if the output is float32)."""
    if out.dtype.element_ty == tl.float32:
        tl.store(out + offset, value, mask=mask)
    else:
        rest = value
        for p in tl.static_range(PARTS):
            piece = rest.to(tl.bfloat16)
            tl.store(out + offset + p * stride, piece, mask=mask)
            rest -= piece.to(tl.float32)


@triton.jit
def load_sum(parts, offset, stride, mask, NUM: tl.constexpr):
    """The sum of NUM parts, first to last."""
    total = tl.load(parts + offset, mask=mask, other=0.0)
    for p in tl.static_range(1, NUM):
        total += tl.load(parts + offset + p * stride, mask=mask, other=0.0)
    return total


@triton.jit
def _embed_kernel(table, token_ids, x, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(token_ids + row)
    at = tl.arange(0, BLOCK)
    value = tl.load(table + token.to(tl.int64) * width + at, mask=at < width, other=0.0)
    tl.store(x + row * width + at, value.to(tl.float32), mask=at < width)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    product,
    bias,
    weight,
    h,
    num_rows,
    width,
    eps,
    NUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x += product + bias, in place; h = x / rms(x) * weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    stride = num_rows.to(tl.int64) * width
    if NUM > 0:
        added = load_sum(product, row * width + at, stride, inside, NUM)
        if HAS_BIAS:
            added += tl.load(bias + at, mask=inside, other=0.0)
        value += added
        tl.store(x + row * width + at, value, mask=inside)
    normed = value * tl.rsqrt(tl.sum(value * value) / width + eps) * scale
    store_parts(h, row * width + at, stride, normed, inside, PARTS)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    product,
    bias,
    h,
    num_rows,
    width,
    NUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up; gate and up are the two halves of the product's features."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    stride = num_rows.to(tl.int64) * width
    gate = load_sum(product, row * 2 * width + at, 2 * stride, inside, NUM)
    up = load_sum(product, row * 2 * width + width + at, 2 * stride, inside, NUM)
    if HAS_BIAS:
        gate += tl.load(bias + at, mask=inside, other=0.0)
        up += tl.load(bias + width + at, mask=inside, other=0.0)
    value = gate / (1 + tl.exp(-gate)) * up
    store_parts(h, row * width + at, stride, value, inside, PARTS)


def activation(num_rows: int, width: int, num_parts: int, like: Tensor) -> Tensor:
    """Allocate an activation: [parts, rows, width] bfloat16, or with no parts [1, rows, width] float32."""
    dtype = torch.bfloat16 if num_parts else torch.float32
    return torch.empty(num_parts or 1, num_rows, width, dtype=dtype, device=like.device)


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """The initial residual stream: [rows, width] float32."""
    num_rows, width = len(token_ids), table.shape[1]
    x = torch.empty(num_rows, width, dtype=torch.float32, device=table.device)
    block = triton.next_power_of_2(width)
    _embed_kernel[(num_rows,)](table, token_ids, x, width, block, **pdl_options())
    return x


def add_norm(x: Tensor, product: Product | None, weight: Tensor, eps: float, num_parts: int) -> Tensor:
    """Add the product to the residual stream in place, and return its norm as an activation."""
    num_rows, width = x.shape
    h = activation(num_rows, width, num_parts, x)
    parts, bias = product or (None, None)
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        x,
        x if parts is None else parts,
        x if bias is None else bias,
        weight,
        h,
        num_rows,
        width,
        eps,
        0 if parts is None else _num_summed(parts, num_rows),
        bias is not None,
        num_parts,
        block,
        num_warps=min(max(block // 512, 1), 8),
        **pdl_options(),
    )
    return h


def swiglu(gate_up: Product, num_rows: int, num_parts: int) -> Tensor:
    """silu(gate) * up as an activation."""
    parts, bias = gate_up
    width = parts.shape[2] // 2
    h = activation(num_rows, width, num_parts, parts)
    _swiglu_kernel[(num_rows, triton.cdiv(width, _SWIGLU_BLOCK))](
        parts,
        parts if bias is None else bias,
        h,
        num_rows,
        width,
        _num_summed(parts, num_rows),
        bias is not None,
        num_parts,
        _SWIGLU_BLOCK,
        **pdl_options(),
    )
    return h


def _num_summed(parts: Tensor, num_rows: int) -> int:
    """Depth slices times activation parts: all are `num_rows` rows apart."""
    return parts.shape[0] * parts.shape[1] // num_rows
