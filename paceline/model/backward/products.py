"""Matrix products of a backward: in float32, or of bfloat16 numbers accumulated in float32.

A product is reproducible for the same operands and shapes, which is all a backward needs: the packs decide which rows
go together, never a worker. Called by `layer.py`, `head.py` and `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Products:
    """The dtype that operands are rounded to; results are float32."""

    dtype: torch.dtype = torch.float32

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of matrices, or of batches of them."""
        a, b = self.round(a), self.round(b)
        if self.dtype == torch.float32:
            return a @ b
        if not a.is_cuda:  # float32 represents the product of two bfloat16 numbers exactly
            return a.float() @ b.float()
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)

    def round(self, operand: Tensor) -> Tensor:
        """Round an operand as products do; callers that use it in two products round it once."""
        return operand.to(self.dtype)
