"""A step of AdamW whose moments are stored in bfloat16 or in 8 bits: one kernel per parameter, nothing in between.

Weight, gradient and moments are read once and written once. The moments are unpacked, advanced and used in float32,
then rounded at random by a hash of (seed, place). `rl/small_adamw.py` calls it, and is its slow twin. Every element, or
block of elements with one scale, is computed alone: no order of sums matters.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.small_moments import BLOCK, FIRST_EXPONENTS, SECOND_EXPONENTS, AdamStep

_ROWS = 4
"""Blocks per program."""


@triton.jit
def _random_bits(place, seed):
    """32 random bits for a place in a tensor."""
    x = (place & 0xFFFFFFFF).to(tl.uint32) ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _adam(weight, at, mask, gradient, first, second, lr, beta1, beta2, eps, decay, correction2):
    """Move the weights; returns the new moments. `lr` is divided by the first correction."""
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    first = first * beta1 + g * (1 - beta1)
    second = second * beta2 + g * g * (1 - beta2)
    moved = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) * decay
    moved -= lr * (first / (tl.sqrt(second) / correction2 + eps))
    tl.store(weight + at, moved.to(weight.dtype.element_ty), mask=mask)
    return first, second


@triton.jit
def _round_to_bf16(value, noise):
    bits = (value.to(tl.int32, bitcast=True) + noise.to(tl.int32)) & -65536
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _unpack(code, scale, EXPONENTS: tl.constexpr):
    """The value of a code without its sign."""
    code = code.to(tl.int32)
    normal = ((code << 19) + ((126 - EXPONENTS) << 23)).to(tl.float32, bitcast=True)
    even = code.to(tl.float32) * (1.0 / (1 << (EXPONENTS + 4)))
    return tl.where(code >= 16, normal, even) * scale


@triton.jit
def _pack(value, noise, EXPONENTS: tl.constexpr):
    """Codes of values that are not negative, and the scale of every row."""
    scale = tl.max(value, axis=1)
    share = value / tl.where(scale > 0, scale, 1.0)[:, None]
    share = tl.minimum(share, 1.0)
    normal = share.to(tl.int32, bitcast=True) - ((126 - EXPONENTS) << 23)
    even = (tl.minimum(share, 1.0 / (1 << EXPONENTS)) * (1 << (EXPONENTS + 23))).to(tl.int32)
    fixed = tl.where(share >= 1.0 / (1 << EXPONENTS), normal, even)
    return (fixed + (noise.to(tl.int32) << 3)) >> 19, scale


@triton.jit(do_not_specialize=["size", "seed"])
def _bf16_kernel(
    weight, gradient, first, second, size, lr, beta1, beta2, eps, decay, correction2, seed, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    m = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
    m, v = _adam(weight, at, mask, gradient, m, v, lr, beta1, beta2, eps, decay, correction2)
    noise = _random_bits(at, seed)
    tl.store(first + at, _round_to_bf16(m, noise & 0xFFFF), mask=mask)
    tl.store(second + at, _round_to_bf16(v, noise >> 16), mask=mask)


@triton.jit(do_not_specialize=["size", "num_blocks", "seed"])
def _8bit_kernel(
    weight,
    gradient,
    first,
    first_scale,
    second,
    second_scale,
    size,
    num_blocks,
    lr,
    beta1,
    beta2,
    eps,
    decay,
    correction2,
    seed,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, is_block = at < size, row < num_blocks
    code = tl.load(first + at, mask=mask, other=0).to(tl.int32)
    m = _unpack(code & 127, tl.load(first_scale + row, mask=is_block, other=0.0)[:, None], FIRST)
    m = tl.where(code >= 128, -m, m)
    v = _unpack(
        tl.load(second + at, mask=mask, other=0), tl.load(second_scale + row, mask=is_block, other=0.0)[:, None], SECOND
    )
    m, v = _adam(weight, at, mask, gradient, m, v, lr, beta1, beta2, eps, decay, correction2)
    noise = _random_bits(at, seed)
    code, scale = _pack(tl.abs(m), noise & 0xFFFF, FIRST)
    tl.store(first + at, tl.where(m < 0, code | 128, code).to(tl.uint8), mask=mask)
    tl.store(first_scale + row, scale, mask=is_block)
    code, scale = _pack(v, noise >> 16, SECOND)
    tl.store(second + at, tl.where(v > 0, tl.maximum(code, 1), code).to(tl.uint8), mask=mask)
    tl.store(second_scale + row, scale, mask=is_block)


def step_bf16(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamStep) -> None:
    """Everything in place; `weight` is contiguous."""
    size, block = weight.numel(), _ROWS * BLOCK
    _bf16_kernel[(triton.cdiv(size, block),)](
        weight, gradient.contiguous(), first, second, size, *_scalars(step), BLOCK=block
    )


def step_8bit(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor,
    second_scale: Tensor,
    step: AdamStep,
) -> None:
    """Everything in place; `weight` is contiguous."""
    num_blocks = len(first_scale)
    _8bit_kernel[(triton.cdiv(num_blocks, _ROWS),)](
        weight,
        gradient.contiguous(),
        first,
        first_scale,
        second,
        second_scale,
        weight.numel(),
        num_blocks,
        *_scalars(step),
        ROWS=_ROWS,
        BLOCK=BLOCK,
        FIRST=FIRST_EXPONENTS,
        SECOND=SECOND_EXPONENTS,
    )


def _scalars(step: AdamStep) -> tuple[float, float, float, float, float, float, int]:
    return (
        step.lr / step.correction1,
        step.beta1,
        step.beta2,
        step.eps,
        step.decay,
        step.correction2,
        step.seed,
    )
