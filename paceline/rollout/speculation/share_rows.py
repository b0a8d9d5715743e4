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

    @property
    def table(self) -> NDArray[np.float64]:
        """[rank, class of depth]"""
        found: NDArray[np.float64] = self._right / self._tried
        return found

    def observe(self, ranks: NDArray[np.int32], num_drafted: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Record drafts: how many tokens each had, and how many of them came true."""
        _judge(ranks, num_drafted, num_right, np.array(FIRST_DEPTHS), self._tried, self._right)
        excess = np.maximum(self._tried / MEMORY, 1.0)
        self._tried /= excess
        self._right /= excess

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
            self._tried, self._right = tried, right


@_compiled
def _class_of(depth: int, firsts: Any) -> int:
    found = 0
    for number in range(1, len(firsts)):
        if depth >= firsts[number]:
            found = number
    return found


@_compiled
def _judge(ranks: Any, num_drafted: Any, num_right: Any, firsts: Any, tried: Any, right: Any) -> None:
    for i in range(len(ranks)):
        for depth in range(min(num_drafted[i], num_right[i] + 1)):
            where = _class_of(depth, firsts)
            tried[ranks[i], where] += 1.0
            right[ranks[i], where] += 1.0 if depth < num_right[i] else 0.0


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
    counts, best = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
    path = np.empty(len(ranks), np.float64)
    most = 0.0
    for i in range(len(ranks)):
        path[i] = odds[ranks[i], 0] if caps[i] > 0 else 0.0
        most = max(most, weights[i])
    worth, plain = base, base / (bucket_ms[num_rows] + more_ms)
    best_rate = plain
    for total in range(num_rows + 1, len(bucket_ms)):
        chosen, gain = -1, least * most
        for i in range(len(ranks)):
            if weights[i] * path[i] > gain:
                chosen, gain = i, weights[i] * path[i]
        if chosen < 0:
            break
        worth += gain
        counts[chosen] += 1
        depth = counts[chosen]
        path[chosen] = path[chosen] * odds[ranks[chosen], _class_of(depth, firsts)] if depth < caps[chosen] else 0.0
        rate = worth / (bucket_ms[total] + more_ms)
        is_free = bucket_ms[total] <= bucket_ms[num_rows]
        if rate > best_rate and (is_free or rate >= min_gain * plain):
            best_rate = rate
            best[:] = counts
    return best


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

    `caps`: the most it may use; `weights`: what a token of it is worth, and `others_worth` what one token of each
    sequence without drafts is worth together; `bucket_ms[n]`: milliseconds of a step of n rows, a staircase; `num_rows`
    are there anyway, `more_ms` is the time of a step beyond its rows.
    """
    if num_rows >= len(bucket_ms) or not caps.any():
        return np.zeros(len(ranks), np.int64)
    base = max(others_worth + float(weights.sum()), 1e-12)
    firsts = np.array(FIRST_DEPTHS)
    found: NDArray[np.int64] = _share(
        ranks, caps, weights, base, odds.table, firsts, bucket_ms, num_rows, more_ms, min_gain, min_probability
    )
    return found
