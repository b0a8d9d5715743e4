"""What stands between a layer's products, taken back: by autograd from `formulas.py`, or on a GPU by kernels.

A pull-back is a value and the function from its gradient to those of what it was made of. `layer.choose_rowwise`
is the one place that decides who computes them. Nothing here multiplies
matrices outside attention, and every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.model.backward.attention import Heads, attention_backward
from paceline.model.backward.products import Products
from paceline.model.formulas import logits_gradient, pull_back, rms_norm, split_heads, swiglu
from paceline.model.ops.base import Rotary

SwigluBack = Callable[[Tensor], Tensor]
HeadsBack = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]


class NormBack(Protocol):
    """From the gradient of a norm to that of x, with `residual` added, and that of the weight."""

    def __call__(self, gradient: Tensor, residual: Tensor | None = None, /) -> tuple[Tensor, Tensor]: ...


class RowwiseBackward(Protocol):
    """Values are fit to be operands of a product; gradients go where a product has a bias in full precision."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, NormBack]:
        """x / rms(x) * weight."""

    def swiglu(self, gate_up: Tensor, has_bias: bool) -> tuple[Tensor, SwigluBack]:
        """silu(gate) * up; `has_bias`: of the product that gate_up is."""

    def heads(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        sizes: tuple[int, int, int],
        rotary: Rotary,
        positions: Tensor,
        has_bias: bool,
    ) -> tuple[Heads, HeadsBack]:
        """Heads in the form that `attention` takes; the gradients go back to qkv and to both norms' weights."""

    def attention(self, heads: Heads, gradient: Tensor, row_starts: Sequence[int]) -> Heads:
        """The gradients of heads, for `heads` to take back, given that of attention's result."""

    def logits(self, logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
        """The gradient of logits, given that of log_softmax(logits * scale) at the targets; logits may be lost."""


class TorchRowwise:
    """See `RowwiseBackward`: float32 throughout, in plain torch. Heads are not scaled."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, NormBack]:
        h, norm_back = pull_back(lambda x, weight: rms_norm(x, weight, eps), x, weight)

        def back(gradient: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x_gradient, weight_gradient = norm_back(gradient)
            return x_gradient if residual is None else residual + x_gradient, weight_gradient

        return h, back

    def swiglu(self, gate_up: Tensor, has_bias: bool) -> tuple[Tensor, SwigluBack]:
        inner, back = pull_back(swiglu, gate_up)
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

        return pull_back(split, qkv, *(norms or (None, None)))

    def attention(self, heads: Heads, gradient: Tensor, row_starts: Sequence[int]) -> Heads:
        return attention_backward(heads, gradient, row_starts, self._products)

    def logits(self, logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
        return logits_gradient(logits, targets, gradient, scale)
