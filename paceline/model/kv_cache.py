"""KV cache on a CPU: pages of keys and values, and the records of who owns each page.

`PagePool` is pure bookkeeping: it counts the owners of shared pages, and `check_integrity` audits every page. `KVCache`
is the memory. The engine's scheduler owns both; the ops read and write the arrays through page tables. A page shared by
two sequences is never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.attention import PAGE
from paceline.kernels.cpu.simd import LANES
from paceline.model.config import ModelConfig


class PagePool:
    """Reference counts of pages, and the list of free ones."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owners = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages with one owner each; the caller has checked `num_free`."""
        assert count <= len(self._free), "scheduler must make room before taking pages"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of these pages."""
        for page in pages:
            assert self._owners[page] > 0, "only owned pages can be shared"
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from each of these pages; a page without owners is free."""
        for page in pages:
            self._owners[page] -= 1
            assert self._owners[page] >= 0, "page released twice"
            if self._owners[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether another owner would see a write to this page."""
        return self._owners[page] > 1

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Check that every page is free, or owned exactly as often as the owners' lists say."""
        counts = Counter(page for pages in owned for page in pages)
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is listed as free twice")
        if (counts.keys() | free) - set(range(self.num_pages)):
            raise AssertionError("a page that does not exist is owned or free")
        for page in range(self.num_pages):
            if counts[page] != self._owners[page]:
                raise AssertionError(f"page {page}: {self._owners[page]} owners on the books, {counts[page]} found")
            if (page in free) != (counts[page] == 0):
                raise AssertionError(f"page {page} is both free and owned, or neither")


@dataclass(frozen=True)
class KVCache:
    """Keys [layers, pages, kv heads, head dim, PAGE] and values [layers, pages, kv heads, PAGE, padded head dim]."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    page_size = PAGE

    @classmethod
    def allocate(cls, config: ModelConfig, num_pages: int) -> KVCache:
        """Allocate `num_pages`; the operating system commits the memory only as pages are first written."""
        heads, dim = config.num_kv_heads, config.head_dim
        try:
            return cls(
                np.zeros((config.num_layers, num_pages, heads, dim, PAGE), np.float32),
                np.zeros((config.num_layers, num_pages, heads, PAGE, _padded(dim)), np.float32),
            )
        except MemoryError:
            size = num_pages * PAGE * token_bytes(config) / 2**30
            raise ValueError(f"no memory for a KV cache of {size:.1f} GiB; lower engine.kv_tokens") from None

    @property
    def num_pages(self) -> int:
        """Pages it can hold."""
        return int(self.keys.shape[1])

    @property
    def num_bytes(self) -> int:
        """Total memory, used or not."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def page_bytes(self) -> int:
        """Memory of one page over all layers."""
        return self.num_bytes // self.num_pages

    def copy_page(self, source: int, target: int) -> None:
        """Copy the contents of `source` to `target` in every layer."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Copy single tokens between physical slots, in order, in every layer."""
        for source, target in zip(source_slots, target_slots, strict=True):
            (from_page, at), (to_page, to) = divmod(source, PAGE), divmod(target, PAGE)
            self.keys[:, to_page, :, :, to] = self.keys[:, from_page, :, :, at]
            self.values[:, to_page, :, to] = self.values[:, from_page, :, at]


def token_bytes(config: ModelConfig) -> int:
    """Cache memory per token."""
    per_head = config.head_dim + _padded(config.head_dim)
    return config.num_layers * config.num_kv_heads * per_head * 4


def _padded(dim: int) -> int:
    return -(-dim // LANES) * LANES
