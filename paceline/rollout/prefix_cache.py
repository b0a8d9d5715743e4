"""Keys and values kept between requests: the full pages of finished texts, found again by the tokens they hold.

A conversation's next turn begins with its last prompt and answer, so their pages need no second prefill. A page is
named by a hash of its salt and of all tokens up to its end, and a cached row is bit-equal to a prefilled one, so a hit
changes no token. The scheduler owns the pages, asks `find` for each new prompt and `keep` for each finished text, and
evicts what was used longest ago whenever something else needs a page. It must be cleared when weights change.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class PrefixCache:
    """Pages by the text they end. The page before an entry's is always there too, and was used at least as recently."""

    def __init__(self, page_size: int, most_pages: int) -> None:
        self._page_size, self._most = page_size, most_pages
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, tokens: NDArray[np.int32], salt: str) -> list[int]:
        """The pages of the longest known beginning of these tokens."""
        known = []
        for name in self._names(tokens, salt):
            if name not in self._pages:
                break
            known.append(name)
        self._touch(known)
        return [self._pages[name] for name in known]

    def keep(self, tokens: NDArray[np.int32], salt: str, pages: list[int]) -> tuple[list[int], list[int]]:
        """Remember these tokens' pages; returns those that are new here, and those that made room for them."""
        names = list(self._names(tokens, salt))[: self._most]
        new = [(name, page) for name, page in zip(names, pages, strict=False) if name not in self._pages]
        self._pages.update(new)
        self._touch(names)
        evicted = [self.evict() for _ in range(len(self._pages) - self._most)]
        return [page for _, page in new], evicted

    def evict(self) -> int:
        """Forget the page that was used longest ago."""
        return self._pages.popitem(last=False)[1]

    def clear(self) -> list[int]:
        """Forget everything; returns the pages."""
        pages = list(self._pages.values())
        self._pages.clear()
        return pages

    def pages(self) -> list[int]:
        """All pages that it holds."""
        return list(self._pages.values())

    def _touch(self, names: list[bytes]) -> None:
        for name in reversed(names):  # the end of a text goes before its beginning
            self._pages.move_to_end(name)

    def _names(self, tokens: NDArray[np.int32], salt: str) -> Iterator[bytes]:
        size = self._page_size
        digest = hashlib.blake2b(hashlib.blake2b(salt.encode()).digest(), digest_size=16)
        for start in range(0, len(tokens) - size + 1, size):
            digest.update(np.ascontiguousarray(tokens[start : start + size], np.int32).tobytes())
            yield digest.copy().digest()
