"""Formulas of the decoder in plain torch, for autograd to differentiate.

They are the readable twins of the engine's kernels, agree with them up to rounding, and serve as the forward itself
where exactness is not required. A backward evaluates them at the values its forward saw (`value_and_backward`), so no
derivative is written by hand. Called by `backward/rowwise.py`, `backward/plain.py` and the eagle network; nothing here
depends on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Backward = Callable[..., Any]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for rows [gate | up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [rows, heads, head dim], in the half-split layout; cos and sin [rows, 1, dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def split_heads(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sizes: tuple[int, int, int],
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of [q | k | v] as heads for attention: normed if the model has norms, rotated, not scaled.

    `sizes`: query heads, kv heads, head dim.
    """
    num_heads, num_kv_heads, head_dim = sizes
    q, k, v = qkv.view(len(qkv), -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def logits_gradient(logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
    """Gradient of logits [rows, vocabulary], which it overwrites, given that of the targets' log-probabilities.

    The gradient of log_softmax(z)[target] is (1 at the target) - softmax(z), with z = logits * scale.
    """
    weights = torch.softmax(logits.mul_(scale), dim=-1)
    per_row = (gradient * scale)[:, None]
    weights *= -per_row
    return weights.scatter_add_(1, targets[:, None], per_row)


def value_and_backward(formula: Callable[..., Any], *inputs: Tensor | None) -> tuple[Any, Backward]:
    """formula(*inputs), and a function from its gradient to those of the inputs (None for a None).

    A formula with several results takes their gradients in the same order.
    """
    with torch.enable_grad():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        result = formula(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    wanted = [leaf for leaf in leaves if leaf is not None]

    def back(*gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = iter(torch.autograd.grad(outputs, wanted, gradients))
        return tuple(None if leaf is None else next(found) for leaf in leaves)

    values = tuple(output.detach() for output in outputs)
    return (values if isinstance(result, tuple) else values[0]), back
