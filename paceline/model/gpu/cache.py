"""Keys and values on a GPU: [layers, pages, kv heads, page, head dim], so that a split of
attention reads one stretch of memory.

The scheduler's page books are `kv_cache.PagePool`, as on a CPU; this is only the memory. One page more than asked for
takes the writes of rows that pad a step. The pool can be given back while something else needs the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.triton.attention import PAGE
from paceline.model.config import ModelConfig


class GpuCache:
    """See `ops.base.Cache`."""

    page_size = PAGE

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: str) -> None:
        self.num_pages = num_pages
        self._shape = (2, config.num_layers, num_pages + 1, config.num_kv_heads, PAGE, config.head_dim)
        self._dtype, self._device = dtype, device
        self._memory: Tensor | None = self._allocate()

    def _allocate(self) -> Tensor:
        try:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError:
            gib = self.num_bytes / 2**30
            raise ValueError(
                f"no memory on {self._device} for a KV cache of {gib:.1f} GiB; lower engine.kv_tokens"
            ) from None

    @property
    def num_bytes(self) -> int:
        """All pages the books know; the scratch page is not among them."""
        return self.num_pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """One page over all layers."""
        two, layers, _, heads, page, dim = self._shape
        return two * layers * heads * page * dim * self._dtype.itemsize

    @property
    def memory(self) -> Tensor:
        """Keys and values; only while the pool is not released."""
        assert self._memory is not None, "the KV pool was released; call restore first"
        return self._memory

    @property
    def scratch_slot(self) -> int:
        """Where padding rows write."""
        return self.num_pages * PAGE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, kv heads, page, head dim] of one layer."""
        return self.memory[0, index], self.memory[1, index]

    def copy_page(self, source: int, target: int) -> None:
        """Give `target` the contents of `source`, in every layer."""
        self.memory[:, :, target] = self.memory[:, :, source]

    def release(self) -> None:
        """Give the memory back to the GPU; what was cached is lost."""
        self._memory = None
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Take the memory again after `release`."""
        if self._memory is None:
            self._memory = self._allocate()


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache memory per token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
