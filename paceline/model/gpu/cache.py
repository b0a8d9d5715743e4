"""KV cache on a GPU: [layers, pages, kv heads, page, head dim], so that an attention split reads contiguous memory.

`kv_cache.PagePool` keeps track of the pages, as on a CPU; this is only the memory. One extra page takes the writes of
padding rows. The memory can be released while something else needs the GPU.
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
        """All pages in the pool, without the scratch page."""
        return self.num_pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Memory of one page over all layers."""
        two, layers, _, heads, page, dim = self._shape
        return two * layers * heads * page * dim * self._dtype.itemsize

    @property
    def memory(self) -> Tensor:
        """Keys and values; unavailable while released."""
        assert self._memory is not None, "the KV cache was released; call restore first"
        return self._memory

    @property
    def scratch_slot(self) -> int:
        """The slot that padding rows write to."""
        return self.num_pages * PAGE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, kv heads, page, head dim] of one layer."""
        return self.memory[0, index], self.memory[1, index]

    def copy_page(self, source: int, target: int) -> None:
        """Copy the contents of `source` to `target` in every layer."""
        self.memory[:, :, target] = self.memory[:, :, source]

    def release(self) -> None:
        """Free the GPU memory; cached tokens are lost."""
        self._memory = None
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again after `release`."""
        if self._memory is None:
            self._memory = self._allocate()


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache memory per token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
