"""Backward of the row-wise operations between matrix products: by autograd from `formulas.py`, or by GPU kernels.

Each operation returns its value and a function from the value's gradient to those of its inputs. `layer.choose_rowwise`
alone picks the implementation. Nothing here multiplies matrices outside attention, and every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.model.backward.attention import Heads, attention_backward
from paceline.model.backward.products import Products
from paceline.model.formulas import logits_gradient, rms_norm, split_heads, swiglu, value_and_backward
from paceline.model.ops.base import Rotary

SwigluBack = Callable[[Tensor], Tensor]
HeadsBack = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]


class NormBack(Protocol):
    """From a norm's gradient to that of x, plus `residual`, and that of the weight."""

    def __call__(self, gradient: Tensor, residual: Tensor | None = None, /) -> tuple[Tensor, Tensor]: ...


class RowwiseBackward(Protocol):
    """Values are ready as operands of a product; the gradient of a product with a bias keeps full precision."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, NormBack]:
        """x / rms(x) * weight."""

    def swiglu(self, gate_up: Tensor, has_bias: bool) -> tuple[Tensor, SwigluBack]:
        """silu(gate) * up; `has_bias`: whether the product gate_up has one."""

    def heads(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        sizes: tuple[int, int, int],
        rotary: Rotary,
        positions: Tensor,
        has_bias: bool,
    ) -> tuple[Heads, HeadsBack]:
        """Heads in the form that `attention` takes; the gradients are those of qkv and of both norm weights."""

    def attention(self, heads: Heads, gradient: Tensor, row_starts: Sequence[int]) -> Heads:
        """Gradients of the heads, given that of attention's output; the backward of `heads` takes them."""

    def logits(self, logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
        """Gradient of logits, given that of log_softmax(logits * scale) at the targets; may overwrite logits."""


class TorchRowwise:
    """See `RowwiseBackward`: plain torch, float32 throughout. Heads are not scaled."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, NormBack]:
        h, norm_back = value_and_backward(lambda x, weight: rms_norm(x, weight, eps), x, weight)

        def back(gradient: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x_gradient, weight_gradient = norm_back(gradient)
            return x_gradient if residual is None else residual + x_gradient, weight_gradient

        return h, back

    def swiglu(self, gate_up: Tensor, has_bias: bool) -> tuple[Tensor, SwigluBack]:
        inner, back = value_and_backward(swiglu, gate_up)
        return inner, lambda gradient: back(gradient)[0]

    def heads(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        sizes: tuple[int, int, int],
        rotary: Rotary,
        positions: Tensor,
        has_bias: bool,
    ) -> tuple[Heads, HeadsBack]:
        cos, sin = rotary.cos[positions, None], rotary.sin[positions, None]

        def split(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
            return split_heads(qkv, q_norm, k_norm, sizes, rotary.eps, cos, sin)

        return value_and_backward(split, qkv, *(norms or (None, None)))

    def attention(self, heads: Heads, gradient: Tensor, row_starts: Sequence[int]) -> Heads:
        return attention_backward(heads, gradient, row_starts, self._products)

    def logits(self, logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
        return logits_gradient(logits, targets, gradient, scale)
