"""The drafts of one step concatenated into flat arrays, the form that allocation and calibration read.

The engine builds it once per step, or `allocate` and `Acceptance.observe_drafts` build their own. It expects
well-formed drafts (parents before children, equal lengths) and never looks inside a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.types import Draft


@dataclass(frozen=True, slots=True)
class Forest:
    """All nodes of all drafts, draft by draft. `num_nodes` means "no parent": the slot past the last node."""

    drafts: Sequence[Draft]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float64]
    """The drafter's scores, NaN where unknown."""

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> Forest:
        lengths = np.array([len(draft.tokens) for draft in drafts], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        num_nodes = int(lengths.sum())
        filled = [draft for draft in drafts if len(draft.tokens)]
        if all(draft.has_plain_parents for draft in filled):
            parents = np.arange(-1, num_nodes - 1)
            parents[starts[lengths > 0]] = num_nodes
        else:
            local = _join([draft.parents for draft in filled], np.int64, num_nodes)
            parents = np.where(local < 0, num_nodes, local + np.repeat(starts, lengths))
        return cls(drafts, lengths, starts, parents, _join_scores(filled, num_nodes))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    def tokens(self) -> NDArray[np.int64]:
        return _join([draft.tokens for draft in self.drafts if len(draft.tokens)], np.int64, self.num_nodes)

    def spread(self, per_draft: ArrayLike) -> NDArray[Any]:
        """One value per draft -> one per node."""
        return np.repeat(np.asarray(per_draft), self.lengths)

    def fold(self, values: NDArray[Any], combine: np.ufunc, neutral: float) -> NDArray[Any]:
        """Combine each node's value with those of all its ancestors.

        Every round doubles the span of ancestors that a node has absorbed, so chains and trees of depth d take log2(d)
        rounds over the whole step.
        """
        total = np.concatenate((values, np.array([neutral], dtype=values.dtype)))
        above = np.concatenate((self.parents, (self.num_nodes,)))
        for _ in range(self.num_nodes.bit_length()):
            if above.min() == self.num_nodes:
                break
            total = combine(total, total.take(above))
            above = above.take(above)
        return total[:-1]

    def split(self, nodes: NDArray[np.int64]) -> list[list[int]]:
        """Ascending flat node numbers -> per draft, its own node numbers."""
        ends = np.searchsorted(nodes, self.starts + self.lengths).tolist()
        owner = np.searchsorted(self.starts, nodes, side="right") - 1
        local = (nodes - self.starts[owner]).tolist()
        return [local[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def _join(parts: Sequence[Iterable[Any]], dtype: type, count: int) -> NDArray[Any]:
    # Concatenating arrays is fast, converting each short list to an array is not, so lists are read item by item.
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts).astype(dtype, copy=False)  # type: ignore[arg-type]
    return np.fromiter(chain.from_iterable(parts), dtype, count)


def _join_scores(drafts: Sequence[Draft], num_nodes: int) -> NDArray[np.float64]:
    parts = [draft.scores for draft in drafts]
    if all(part is None for part in parts):
        return np.full(num_nodes, np.nan)
    unknown = (np.nan,)
    filled = [unknown * len(draft.tokens) if draft.scores is None else draft.scores for draft in drafts]
    return _join(filled, np.float64, num_nodes)
