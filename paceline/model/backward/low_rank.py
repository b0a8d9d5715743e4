"""Gradients of an adapter's A and B: the forward runs on W' = round(W + scale * (B @ A)), and no dW' ever exists.

    y = h W'^T    dB = scale * dy^T (h A^T)    dA = scale * (dy B)^T h

Rounding counts as the identity, as it does for master weights that a decoder rounds. Called by `layer.py` with the rows
of a chunk, and by `plain.py`, whose autograd gets the same from `with_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.backward.products import Products
from paceline.model.lora.adapter import A, Adapter, B


class LowRank(NamedTuple):
    """The adapter of one linear layer."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank]."""
    scale: float

    def gradients(self, products: Products, h: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Those of A and B, given the layer's input and the gradient of its product."""
        through_a = products(h, self.a.mT)
        through_b = products(gradient, self.b)
        return self.scale * products(through_b.mT, h), self.scale * products(gradient.mT, through_a)

    def with_gradients(self, product: Tensor, h: Tensor) -> Tensor:
        """`product`, bit for bit, whose gradient also reaches A and B; that of `h` comes from W' alone."""
        update = self.scale * (h.detach() @ self.a.mT) @ self.b.mT
        return product + (update - update.detach())


LowRanks = Mapping[str, LowRank]
"""By module."""


def low_ranks(adapter: Adapter, tensors: Mapping[str, Tensor]) -> LowRanks:
    """The adapter's tensors by module, without a copy."""
    return {
        module: LowRank(tensors[f"{module}.{A}"], tensors[f"{module}.{B}"], adapter.scale) for module in adapter.modules
    }


def with_gradients(product: Tensor, h: Tensor, layers: LowRanks, modules: list[str], sizes: list[int]) -> Tensor:
    """`LowRank.with_gradients` for a product over the stacked weights of several modules."""
    parts = [
        layers[module].with_gradients(part, h) if module in layers else part
        for module, part in zip(modules, product.split(sizes, dim=1), strict=True)
    ]
    return torch.cat(parts, dim=1)
