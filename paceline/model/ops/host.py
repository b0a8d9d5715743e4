"""What all implementations on a CPU share: rows stay numpy arrays, the cache is `KVCache`, small parameters are copied.

A base for `native.py` and `plain.py`; it computes nothing but the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.kv_cache import KVCache, token_bytes
from paceline.model.ops.attention import PAGE
from paceline.model.rows import Rows


class HostOps:
    """See `base.Ops`."""

    device = "cpu"
    page_size = PAGE
    stretch = PAGE

    can_share = False

    def prepare(self, weights: Sequence[Tensor]) -> Any:
        raise NotImplementedError

    def prepare_head(self, weight: Tensor, is_own: bool) -> Any:
        return self.prepare([weight])

    def prepare_vector(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).float().clone()

    def prepare_table(self, weight: Tensor) -> Tensor:
        # A copy of our own: a learner that updates its tensors in place must not change half a policy.
        return weight.clone()

    def token_bytes(self, config: ModelConfig) -> int:
        return token_bytes(config)

    def allocate_cache(self, config: ModelConfig, num_pages: int) -> KVCache:
        return KVCache.allocate(config, num_pages)

    def place(self, rows: Rows, config: ModelConfig) -> Rows:
        return rows

    def embed(self, table: Tensor, rows: Rows) -> Tensor:
        return table[torch.from_numpy(rows.token_ids).long()].float()

    def as_logits(self, product: Tensor) -> Tensor:
        return product
