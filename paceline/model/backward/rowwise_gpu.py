"""The kernels' side of `backward/rowwise.py`: values in bfloat16 for the next product, gradients by one launch each.

Chosen by that file for packs on a GPU whose products are of bfloat16 numbers. Rows come as float32; what is only an
operand of products leaves in bfloat16, everything that is added up later in float32. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.triton import rowwise, rowwise_backward
from paceline.kernels.triton.attention_backward import HeadTensors, attention_backward
from paceline.kernels.triton.linear import Product
from paceline.kernels.triton.rowwise_backward import HeadLayout
from paceline.model.backward.rowwise import HeadsBack, NormBack, SwigluBack
from paceline.model.ops.base import Rotary


class KernelRowwise:
    """See `training.rowwise.RowwiseBackward`. Heads are in bfloat16, queries scaled."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, NormBack]:
        h = rowwise.add_norm(x, None, weight, eps, num_parts=1)[0]
        return h, partial(rowwise_backward.norm_backward, x, weight, eps)

    def swiglu(self, gate_up: Tensor, has_bias: bool) -> tuple[Tensor, SwigluBack]:
        inner = rowwise.swiglu(Product(gate_up[None], None), len(gate_up), num_parts=1)[0]

        def back(gradient: Tensor) -> Tensor:
            return rowwise_backward.swiglu_backward(gate_up, gradient, _gradient_dtype(has_bias))

        return inner, back

    def heads(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        sizes: tuple[int, int, int],
        rotary: Rotary,
        positions: Tensor,
        has_bias: bool,
    ) -> tuple[HeadTensors, HeadsBack]:
        layout = HeadLayout(sizes, norms, rotary.eps, rotary.cos, rotary.sin, positions)

        def back(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            return rowwise_backward.split_heads_backward(qkv, layout, (q, k, v), _gradient_dtype(has_bias))

        return rowwise_backward.split_heads(qkv, layout), back

    def attention(self, heads: HeadTensors, gradient: Tensor, row_starts: Sequence[int]) -> HeadTensors:
        return attention_backward(heads, gradient.view(heads[0].shape), row_starts)

    def logits(self, logits: Tensor, targets: Tensor, gradient: Tensor, scale: float) -> Tensor:
        return rowwise_backward.logits_backward(logits, targets, gradient, scale)


def _gradient_dtype(has_bias: bool) -> torch.dtype:
    """Of the gradient of a product: its sum over the rows is that of a bias."""
    return torch.float32 if has_bias else torch.bfloat16
