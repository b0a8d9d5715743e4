"""Shares the rows of a step among sequences whose drafts the device will find in texts, by what it found last.

The host learns one step late how good a match a sequence has (its rank), and decides from that how many rows it gets.
`TextOdds` knows how often a token after a match of that rank comes true, `share_rows` spends rows on the likeliest
tokens as long as that raises the expected tokens per millisecond. Rows that only fill up a graph's bucket are free.
Called by `rollout/draft_rows.py`; nothing here sees a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import host_loop
from paceline.kernels.text_ranks import LONGEST, NUM_RANKS

FIRST_DEPTHS = (0, 1, 2, 4, 8)
"""Where the classes of depth begin: the deeper a draft has come true, the likelier its next token."""
NUM_DEPTHS = len(FIRST_DEPTHS)
_FIRSTS = np.array(FIRST_DEPTHS)
MEMORY = 400.0
"""Outcomes that an estimate remembers."""
PRIOR = 6.0
"""Outcomes that the first guess is worth."""
_compiled: Any = host_loop


def first_odds() -> NDArray[np.float64]:
    """What is assumed until something is known: [rank, class of depth]."""
    rank = np.arange(NUM_RANKS, dtype=np.float64)
    run = rank - LONGEST
    text = np.where(rank > 1, 1 / (1 + 12 / (1 + rank) ** 1.5), 0.05)
    odds = np.where(run > 0, np.minimum(0.5 + 0.06 * run, 0.97), text)
    odds[0] = 0.01
    depth = np.array([0.0, 0.05, 0.1, 0.15, 0.2])
    return np.minimum(odds[:, None] + depth * (rank[:, None] > 0), 0.98)


class TextOdds:
    """How often the next token of a match comes true, by the rank known when rows were shared and by depth."""

    def __init__(self) -> None:
        prior = first_odds()
        self._tried = np.full((NUM_RANKS, NUM_DEPTHS), PRIOR)
        self._right = prior * PRIOR
        self._table: NDArray[np.float64] | None = None

    @property
    def table(self) -> NDArray[np.float64]:
        """[rank, class of depth]"""
        if self._table is None:
            self._table = self._right / self._tried
        return self._table

    def observe(self, ranks: NDArray[np.int32], num_drafted: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Record drafts: how many tokens each had, and how many of them came true."""
        _judge(ranks, num_drafted, num_right, _FIRSTS, self._tried, self._right, MEMORY)
        self._table = None

    def state(self) -> list[list[list[float]]]:
        """What was learned."""
        return [self._tried.tolist(), self._right.tolist()]

    def restore(self, state: Any) -> None:
        """Continue from a `state`; one that does not fit is ignored."""
        try:
            tried, right = (np.asarray(part, np.float64) for part in state)
        except (TypeError, ValueError, OverflowError):
            return
        fits = tried.shape == right.shape == self._tried.shape and np.isfinite(tried).all()
        if fits and (tried >= right).all() and (right >= 0).all() and (tried > 0).all():
            self._tried, self._right, self._table = tried, right, None


@_compiled
def _class_of(depth: int, firsts: Any) -> int:
    found = 0
    for number in range(1, len(firsts)):
        if depth >= firsts[number]:
            found = number
    return found


@_compiled
def _judge(ranks: Any, num_drafted: Any, num_right: Any, firsts: Any, tried: Any, right: Any, memory: float) -> None:
    for i in range(len(ranks)):
        for depth in range(min(num_drafted[i], num_right[i] + 1)):
            rank, where = ranks[i], _class_of(depth, firsts)
            tried[rank, where] += 1.0
            right[rank, where] += 1.0 if depth < num_right[i] else 0.0
            if tried[rank, where] > memory:
                right[rank, where] *= memory / tried[rank, where]
                tried[rank, where] = memory


@_compiled
def _comes_first(a: int, b: int, gains: Any) -> bool:
    return gains[a] > gains[b] or (gains[a] == gains[b] and a < b)


@_compiled
def _rise(heap: Any, gains: Any, at: int) -> None:
    """Move the last entry of a heap, the best first, to its place."""
    while at > 0 and _comes_first(heap[at], heap[(at - 1) // 2], gains):
        up = (at - 1) // 2
        heap[at], heap[up] = heap[up], heap[at]
        at = up


@_compiled
def _sink(heap: Any, gains: Any, num: int) -> None:
    """Move the first entry to its place."""
    at = 0
    while 2 * at + 1 < num:
        down = 2 * at + 1
        if down + 1 < num and _comes_first(heap[down + 1], heap[down], gains):
            down += 1
        if not _comes_first(heap[down], heap[at], gains):
            break
        heap[at], heap[down] = heap[down], heap[at]
        at = down


@_compiled
def _share(
    ranks: Any,
    caps: Any,
    weights: Any,
    base: float,
    odds: Any,
    firsts: Any,
    bucket_ms: Any,
    num_rows: int,
    more_ms: float,
    min_gain: float,
    least: float,
) -> Any:
    """Rows per sequence. `bucket_ms[n]`: the time of a step of n rows; `base`: the worth of a step without drafts."""
    counts = np.zeros(len(ranks), np.int64)
    num, most = 0, 0.0
    heap, gains = np.empty(len(weights), np.int64), np.empty(len(weights), np.float64)
    for i in range(len(weights)):
        most = max(most, weights[i])
        gains[i] = weights[i] * odds[ranks[i], 0] if caps[i] > 0 else 0.0
    for i in range(len(weights)):
        if gains[i] > least * most:
            heap[num] = i
            num += 1
            _rise(heap, gains, num - 1)
    worth, plain = base, base / (bucket_ms[num_rows] + more_ms)
    best_rate, num_best = plain, 0
    order = np.empty(max(len(bucket_ms) - num_rows - 1, 0), np.int64)
    for nth in range(len(order)):
        if num == 0:
            break
        chosen, total = heap[0], num_rows + nth + 1
        order[nth] = chosen
        worth += gains[chosen]
        counts[chosen] += 1
        depth = counts[chosen]
        gains[chosen] = gains[chosen] * odds[ranks[chosen], _class_of(depth, firsts)] if depth < caps[chosen] else 0.0
        if not gains[chosen] > least * most:
            num -= 1
            heap[0] = heap[num]
        _sink(heap, gains, num)
        rate = worth / (bucket_ms[total] + more_ms)
        is_free = bucket_ms[total] <= bucket_ms[num_rows]
        if rate > best_rate and (is_free or rate >= min_gain * plain):
            best_rate, num_best = rate, nth + 1
    counts[:] = 0
    for nth in range(num_best):
        counts[order[nth]] += 1
    return counts


def share_rows(
    ranks: NDArray[np.int32],
    caps: NDArray[np.int64],
    weights: NDArray[np.float64],
    others_worth: float,
    odds: TextOdds,
    bucket_ms: NDArray[np.float64],
    *,
    num_rows: int,
    more_ms: float = 0.0,
    min_gain: float = 1.03,
    min_probability: float = 0.01,
) -> NDArray[np.int64]:
    """How many draft rows each sequence gets.

    `caps`: the most it may use; `weights`: what a token of the first sequences is worth, the only ones to get any, and
    `others_worth` what one token of each sequence without drafts is worth together; `bucket_ms[n]`: milliseconds of a
    step of n rows, a staircase; `num_rows` are there anyway, `more_ms` is the time of a step beyond its rows.
    """
    if num_rows >= len(bucket_ms) or not caps.any():
        return np.zeros(len(ranks), np.int64)
    base = max(others_worth + float(weights.sum()), 1e-12)
    found: NDArray[np.int64] = _share(
        ranks, caps, weights, base, odds.table, _FIRSTS, bucket_ms, num_rows, more_ms, min_gain, min_probability
    )
    return found
