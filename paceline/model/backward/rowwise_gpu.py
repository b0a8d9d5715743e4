"""GPU implementation of `backward/rowwise.py`: values in bfloat16 for the next product, one launch per gradient.

`layer.choose_rowwise` picks it for packs on a GPU whose products take bfloat16 numbers. Rows come in as float32. What
is only an operand of products goes out in bfloat16, everything that is summed later in float32. Nothing is computed
outside the kernels.
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
    """See `rowwise.RowwiseBackward`. Heads are bfloat16 and queries scaled."""

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
    """Dtype of a product's gradient: a bias needs float32, because its gradient is the sum over the rows."""
    return torch.float32 if has_bias else torch.bfloat16
