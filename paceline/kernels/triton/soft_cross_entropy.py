"""Soft cross-entropy of a drafter's guesses on a GPU: everything between two matrix products in one kernel.

From a guess's logits over the draft vocabulary and the policy's logits at the row it is compared with, it computes the
loss, the policy's entropy, the shared probability, and the gradient, which overwrites the logits. As single operations
this takes some 25 passes over a chunk's logits, most of the time of a micro-step. Every row is one program that sums in
its own order, so a micro-step is reproducible. Called by `spot/loss.py`, whose CPU code is the twin.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _log_mass(logits, V: tl.constexpr, BLOCK: tl.constexpr):
    """Log-sum-exp of a row."""
    lane = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), _LOWEST, tl.float32)
    for start in range(0, V, BLOCK):
        peak = tl.maximum(peak, tl.load(logits + start + lane, mask=start + lane < V, other=_LOWEST))
    top = tl.max(peak, 0)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        mass += tl.exp(tl.load(logits + start + lane, mask=start + lane < V, other=_LOWEST) - top)
    return top + tl.log(tl.sum(mass, 0))


@triton.jit
def _log_mass_kernel(logits, found, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(found + row, _log_mass(logits + row * V, V, BLOCK))


@triton.jit
def _compare_kernel(logits, wanted, masses, rows, weights, found, V: tl.constexpr, BLOCK: tl.constexpr):
    """One guess: cross-entropy, entropy, shared probability; its logits become weight * (q - p)."""
    guess = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + guess)
    own, other = logits + guess * V, wanted + row * V
    own_mass, other_mass, weight = _log_mass(own, V, BLOCK), tl.load(masses + row), tl.load(weights + guess)
    lane = tl.arange(0, BLOCK)
    cross = tl.zeros((BLOCK,), tl.float32)
    entropy, shared = cross, cross
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        log_q = tl.load(own + start + lane, mask=inside, other=0.0) - own_mass
        log_p = tl.load(other + start + lane, mask=inside, other=0.0) - other_mass
        q, p = tl.where(inside, tl.exp(log_q), 0.0), tl.where(inside, tl.exp(log_p), 0.0)
        cross -= p * log_q
        entropy -= p * log_p
        shared += tl.minimum(p, q)
        tl.store(own + start + lane, weight * (q - p), mask=inside)
    tl.store(found + 3 * guess, weight * tl.sum(cross, 0))
    tl.store(found + 3 * guess + 1, weight * tl.sum(entropy, 0))
    tl.store(found + 3 * guess + 2, tl.sum(shared, 0))


def compare(logits: Tensor, wanted: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy and entropy of every guess, and shared probability; `logits` become their gradient.

    `rows`: the row of `wanted` that each row of `logits` is compared with.
    """
    (num_guesses, vocab_size), num_rows = logits.shape, len(wanted)
    assert logits.is_contiguous() and wanted.is_contiguous() and wanted.shape[1] == vocab_size
    masses = torch.empty(num_rows, device=logits.device)
    found = torch.empty(num_guesses, 3, device=logits.device)
    _log_mass_kernel[(num_rows,)](wanted, masses, vocab_size, BLOCK, num_warps=8)
    _compare_kernel[(num_guesses,)](logits, wanted, masses, rows, weights, found, vocab_size, BLOCK, num_warps=8)
    loss, entropy, shared = found.unbind(1)
    return loss, entropy, shared
