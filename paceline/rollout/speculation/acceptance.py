"""Calibrates drafters' scores: the probability that a node is accepted, given that its parent was.

`allocate` reads the probabilities; the engine reports outcomes after every step. Estimates affect time only; they never
decide a token.

A node's outcome is known as soon as the tokens of its position are emitted, whether or not it got a row: a child of the
root is right exactly when it equals the next emitted token, and further down the same holds as long as the emitted
tokens follow the draft. So nodes pruned by the budget are judged for free, calibration continues while speculation is
off, and no row is ever spent on exploration. `observe_drafts` does this: pass it the drafts *as proposed* and the
emitted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.types import Draft, IntArray
from paceline.rollout.speculation.forest import Forest

EDGES = np.array([0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.93, 0.98])
"""Bucket boundaries; finer near 1, where long chains tell 0.95 from 0.99."""
UNSCORED = len(EDGES) + 1
"""The bucket of nodes without a score."""
UNSCORED_CLAIM = 0.625
"""The score assumed for an unscored node; with TRUST its prior is 0.5."""
TRUST = 0.8
"""The share of its scores that a new source is trusted with: mildly pessimistic, so it is tried a little."""
PRIOR_WEIGHT = 4.0
"""How many observations the prior is worth."""
MOST_SOURCES = 64
"""How many names are told apart; a drafter that invents more shares the last one's estimates."""
MOST_WEIGHT = 300.0
"""The most observations a bucket can weigh, however many a step brings."""


class Acceptance:
    """Judged nodes, accepted nodes and summed scores per source and score bucket, all decaying.

    A bucket with few observations is estimated from its score times the source's overall honesty, so a source that
    overstates is trusted less at every score at once.
    """

    def __init__(self, memory_steps: int = 500) -> None:
        if memory_steps < 1:
            raise ValueError(f"Acceptance: memory_steps must be 1 or more; got {memory_steps}")
        self._keep = 1.0 - 1.0 / memory_steps
        self._ids: dict[str, int] = {}
        self._tried = np.zeros((0, UNSCORED + 1))
        self._accepted = np.zeros_like(self._tried)
        self._claimed = np.zeros_like(self._tried)

    def source_id(self, source: str) -> int:
        """The number of a source in `probabilities` and `observe_many`; a new name gets the next one."""
        number = self._ids.get(source)
        if number is None and len(self._ids) == MOST_SOURCES:
            return MOST_SOURCES - 1
        if number is None:
            number = self._ids[source] = len(self._ids)
            row = np.zeros((1, UNSCORED + 1))
            self._tried = np.concatenate([self._tried, row])
            self._accepted = np.concatenate([self._accepted, row])
            self._claimed = np.concatenate([self._claimed, row])
        return number

    def probability(self, source: str, scores: ArrayLike) -> NDArray[np.float64]:
        """Calibrated conditional acceptance of one source's nodes; NaN marks a node without a score."""
        scores = np.asarray(scores, dtype=np.float64)
        return self.probabilities(np.full(scores.shape, self.source_id(source)), scores)

    def probabilities(self, source_ids: IntArray, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for nodes of several sources at once."""
        buckets, claims = _bucketed(scores)
        trust = (self._accepted.sum(1) + PRIOR_WEIGHT * TRUST) / (self._claimed.sum(1) + PRIOR_WEIGHT)
        prior = np.minimum(claims * trust.take(source_ids), 1.0)
        cells = self._cells(source_ids, buckets)
        return (self._accepted.take(cells) + PRIOR_WEIGHT * prior) / (self._tried.take(cells) + PRIOR_WEIGHT)

    @property
    def tables(self) -> tuple[Any, ...]:
        """What `choice.probable` needs to compute the same."""
        return self._tried, self._accepted, self._claimed, EDGES, UNSCORED_CLAIM, TRUST, PRIOR_WEIGHT

    def observe(self, source: str, scores: ArrayLike, outcomes: ArrayLike) -> None:
        """Record outcomes of one source's nodes with accepted parents. Call it once per source and step; see module."""
        scores = np.asarray(scores, dtype=np.float64)
        row = slice(number := self.source_id(source), number + 1)
        self._fade(row)
        self._count(np.full(scores.shape, number), scores, np.asarray(outcomes, dtype=bool))

    def observe_many(self, source_ids: IntArray, scores: ArrayLike, outcomes: ArrayLike) -> None:
        """Record all judged nodes of a step in one call: source numbers, scores (NaN: none), whether each was right."""
        self._fade(slice(None))
        self._count(source_ids, np.asarray(scores, dtype=np.float64), np.asarray(outcomes, dtype=bool))

    def observe_drafts(
        self, drafts: Sequence[Draft] | Forest, sources: Sequence[str], emitted: Sequence[Sequence[int] | IntArray]
    ) -> None:
        """Judge a step's drafts as proposed, pruned nodes included, by the tokens each sequence then emitted."""
        forest = drafts if isinstance(drafts, Forest) else Forest.of(drafts)
        if forest.num_nodes == 0:
            return
        nodes, outcomes = judge(forest, emitted)
        source_ids = forest.spread([self.source_id(source) for source in sources])
        self.observe_many(source_ids[nodes], forest.scores[nodes], outcomes)

    def _cells(self, source_ids: IntArray, buckets: NDArray[np.intp]) -> NDArray[np.intp]:
        """The index of (source, bucket) in a flattened table."""
        return source_ids * (UNSCORED + 1) + buckets

    def _fade(self, rows: slice) -> None:
        for table in (self._tried, self._accepted, self._claimed):
            table[rows] *= self._keep

    def _count(self, source_ids: IntArray, scores: NDArray[np.float64], outcomes: NDArray[np.bool_]) -> None:
        buckets, claims = _bucketed(scores)
        cells = self._cells(source_ids, buckets)
        for table, weights in ((self._tried, None), (self._accepted, outcomes), (self._claimed, claims)):
            table += np.bincount(cells, weights, table.size).reshape(table.shape)
        # A long good past must not outvote the present: a bucket weighs no more than its last MOST_WEIGHT nodes.
        excess = np.maximum(self._tried / MOST_WEIGHT, 1.0)
        for table in (self._tried, self._accepted, self._claimed):
            table /= excess


def judge(forest: Forest, emitted: Sequence[Sequence[int] | IntArray]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The nodes whose outcome the emitted tokens settle (parent right, position emitted), and whether each is right."""
    assert len(emitted) == len(forest.drafts), "one list of emitted tokens per draft"
    lengths = np.array([len(tokens) for tokens in emitted], dtype=np.int64)
    depth = forest.fold(np.ones(forest.num_nodes, dtype=np.int64), np.add, 0)
    is_known = depth <= forest.spread(lengths)
    flat = np.fromiter(chain.from_iterable(emitted), np.int64, int(lengths.sum()))
    position = forest.spread(np.cumsum(lengths) - lengths) + depth - 1
    is_right = is_known.copy()
    is_right[is_known] = forest.tokens()[is_known] == flat[position[is_known]]
    is_walked = np.append(forest.fold(is_right, np.logical_and, True), True)
    nodes = np.flatnonzero(is_known & is_walked[forest.parents])
    return nodes, is_right[nodes]


def _bucketed(scores: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    is_unscored = np.isnan(scores)
    claims = np.where(is_unscored, UNSCORED_CLAIM, np.minimum(np.maximum(scores, 0.0), 1.0))
    return np.where(is_unscored, UNSCORED, np.searchsorted(EDGES, claims, side="right")), claims
