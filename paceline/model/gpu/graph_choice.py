"""Which captured graph a step runs in: the one made for its rows, or for now a larger one that is there already.

Capturing a graph stops everything for as long as several steps take, and speculation asks for many sizes, some of
them only once. So a step may run in any graph with at least its rows and kinds of work; the rest is padding, and the
bits are the same. The graph made for it is captured as soon as the larger ones have cost as much time as capturing
takes: then no more than about twice the least possible time is lost, whatever sizes come. `graphs.py` asks before every
step and reports how long steps took. There is no clock here, and no GPU.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

FADE = 0.9
FIRST_CAPTURE_S = 0.05
"""How long a capture takes until one was measured."""
USES = 16
"""A graph of unknown worth is captured when it was wanted this often."""
FLAT = 0.6
"""The share of a step's time that is assumed not to depend on its rows, while no smaller step is known."""
LAUNCHES = 0.05
"""The share of a step's time that the launches for kinds of work take which it does not have."""


class GraphKey(NamedTuple):
    """Properties a step graph is captured for."""

    rows: int
    kinds: tuple[int, ...]
    """Kinds of attention work that may occur; each has its own kernel launch."""
    is_truncated: bool = False
    """Whether rows may be truncated: then the sampler has a third kernel."""
    is_kept: bool = False
    """Whether a drafter keeps the hidden states."""

    def can_replace(self, other: Key) -> bool:
        """Whether a step for which `other` is made can run in this graph."""
        if not isinstance(other, GraphKey) or (self.is_truncated, self.is_kept) != (other.is_truncated, other.is_kept):
            return False
        return self.rows >= other.rows and set(self.kinds) >= set(other.kinds)


class DraftGraphKey(NamedTuple):
    """Properties a draft graph is captured for."""

    entries: int
    depth: int

    def can_replace(self, other: Key) -> bool:
        """Whether guesses for which `other` is made can be made in this graph."""
        return isinstance(other, DraftGraphKey) and self.depth == other.depth and self.entries >= other.entries


Key = GraphKey | DraftGraphKey


class GraphChoice:
    """Keeps, for every graph, how long steps took in it and what going without it has cost so far."""

    def __init__(self) -> None:
        self._seconds: dict[Key, float] = {}
        self._wasted: dict[Key, float] = {}
        self._capture_s = FIRST_CAPTURE_S

    def choose(self, wanted: Key, captured: Collection[Key]) -> Key:
        """The graph for a step: one of the `captured`, or `wanted`, which is then to be captured."""
        if wanted in captured:
            return wanted
        found = [key for key in captured if key.can_replace(wanted)]
        if not found:
            return wanted
        chosen = min(found, key=lambda key: (key[0], len(key)))
        self._wasted[wanted] = self._wasted.get(wanted, 0.0) + self._waste(wanted, chosen, captured)
        return wanted if self._wasted[wanted] >= self._capture_s else chosen

    def observe(self, key: Key, seconds: float) -> None:
        """A step took this long in a graph."""
        before = self._seconds.get(key, seconds)
        self._seconds[key] = FADE * before + (1 - FADE) * seconds

    def captured(self, key: Key, seconds: float) -> None:
        """A graph was captured in this time."""
        self._wasted.pop(key, None)
        self._capture_s += (1 - FADE) * (seconds - self._capture_s)

    def forget(self) -> None:
        """Start afresh: graphs are gone."""
        self._seconds.clear()
        self._wasted.clear()

    def _waste(self, wanted: Key, chosen: Key, captured: Collection[Key]) -> float:
        """How much longer a step probably takes in `chosen` than in the one made for it, from what is known of others.

        Times lie on a line between the largest smaller graph and the chosen one; with fewer kinds of work, a step saves
        some launches.
        """
        if chosen not in self._seconds:
            return self._capture_s / USES
        most = self._seconds[chosen]
        smaller = [key for key in captured if wanted.can_replace(key) and key in self._seconds]
        below = max(smaller, key=lambda key: key[0], default=None)
        rows, least = (0, FLAT * most) if below is None else (below[0], min(self._seconds[below], most))
        share = (chosen[0] - wanted[0]) / max(chosen[0] - rows, 1)
        more_kinds = isinstance(chosen, GraphKey) and isinstance(wanted, GraphKey) and chosen.kinds != wanted.kinds
        return share * (most - least) + (LAUNCHES * most if more_kinds else 0.0)
