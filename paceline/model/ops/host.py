"""Common base of the CPU implementations: rows stay numpy arrays, the cache is `KVCache`, small parameters are copied.

`native.py` and `plain.py` derive from it; it computes nothing but the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.cpu.attention import PAGE
from paceline.model.config import ModelConfig
from paceline.model.device import check_arithmetic
from paceline.model.kv_cache import KVCache, token_bytes
from paceline.model.rows import Rows


class HostOps:
    """See `base.Ops`."""

    device = "cpu"
    page_size = PAGE
    stretch = PAGE

    can_share = False

    def __init__(self, precision: str = "auto") -> None:
        check_arithmetic("cpu", precision)
        self.weight_dtype = torch.bfloat16 if precision == "mixed" else torch.float32

    def for_drafts(self) -> Any:
        return self

    def prepare(self, weights: Sequence[Tensor]) -> Any:
        raise NotImplementedError

    def restore(self, prepared: Any) -> Tensor:
        raise NotImplementedError

    def prepare_head(self, weight: Tensor, is_own: bool) -> Any:
        return self.prepare([weight])

    def prepare_vector(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).float().clone()

    def prepare_table(self, weight: Tensor) -> Tensor:
        # Our own copy: a learner that updates its tensors in place must not change half a policy.
        return self._rounded(weight).clone()

    def _rounded(self, weight: Tensor) -> Tensor:
        """A weight in the configured precision; one that is already less precise stays as it is."""
        return weight.to(torch.bfloat16) if self.weight_dtype == torch.bfloat16 else weight

    def token_bytes(self, config: ModelConfig) -> int:
        return token_bytes(config)

    def allocate_cache(self, config: ModelConfig, num_pages: int) -> KVCache:
        return KVCache.allocate(config, num_pages)

    def place(self, rows: Rows, config: ModelConfig) -> Rows:
        return rows

    def embed(self, table: Tensor, rows: Rows) -> Tensor:
        return table[torch.from_numpy(rows.token_ids).long()].float()

    def as_tensor(self, product: Tensor) -> Tensor:
        return product

    def as_rows(self, h: Tensor) -> Tensor:
        return h
