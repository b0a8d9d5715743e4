"""The cost curve: a forward's time in ms(rows, KV tokens), piecewise linear in rows, linear in the KV tokens read.

The engine measures it once at start-up and calls `refine` with step times; `allocate` and `node_limit` read it. The
curve has no clock of its own, never falls as rows grow, and no single outlier bends it much.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

ANCHORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

LEARN = 0.15
"""The share of a sample's surprise that the neighbouring anchors adopt."""
FOLLOW = 0.02
"""The rate per step at which an unvisited anchor approaches the drift of visited ones."""
FORGET = 0.98
"""The decay of visits."""
FEW = 0.25
"""An anchor with more visits than this trusts them and hardly follows."""
UNVISITED = 0.05
"""The visits every anchor starts with; visited anchors overrule it where the curve would fall."""
CLIP = 0.25
"""The largest surprise (natural log) believed at once: a pause counts no more than a step that is 28 % late."""

FAR = 1000
"""The curve continues in a straight line up to this many times the last anchor."""

TimeRun = Callable[[int, int], float]


class CostCurve:
    """Anchor times and a price per KV token, each with a drift (log of now over start-up) that `refine` moves.

    Drift is kept apart from the start-up shape so that unvisited row counts follow the nearest visited ones: when the
    machine gets faster or slower, all anchors move, and speculation is not judged by outdated prices.
    """

    def __init__(self, anchors: Sequence[int], anchor_ms: Sequence[float], kv_ms: float = 0.0) -> None:
        if not anchors or list(anchors) != sorted(set(anchors)) or anchors[0] < 1 or len(anchors) != len(anchor_ms):
            raise ValueError(f"CostCurve: anchors must be ascending row counts with one time each; got {anchors}")
        if not all(0 < ms < math.inf for ms in anchor_ms) or not 0 <= kv_ms < math.inf:
            raise ValueError(f"CostCurve: times must be positive and finite; got {anchor_ms}, {kv_ms} per KV token")
        self.anchors = tuple(int(rows) for rows in anchors)
        self._base_ms = np.asarray(anchor_ms, dtype=np.float64)
        self._base_kv_ms = float(kv_ms)
        # One entry per anchor and, last, one for the price of a KV token.
        self._drift = np.zeros(len(anchors) + 1)
        self._visits = np.zeros(len(anchors) + 1)
        self._nearness = _nearness(len(anchors))
        self._grid_rows = np.array([*self.anchors, self.anchors[-1] * FAR], dtype=np.float64)
        self._dense: list[float] = []
        """Times by row count without KV, made when they are needed."""
        self._rebuild()

    @classmethod
    def linear(cls, base_ms: float, row_ms: float, max_rows: int = ANCHORS[-1]) -> CostCurve:
        """A guess for when nothing was measured: a fixed part and a price per row."""
        anchors = _anchors_up_to(max_rows)
        return cls(anchors, [base_ms + row_ms * rows for rows in anchors])

    @classmethod
    def measure(
        cls,
        run: TimeRun,
        max_rows: int,
        *,
        repeats: int = 3,
        budget_s: float = 0.3,
        kv_probe: tuple[int, int] = (0, 4096),
    ) -> CostCurve:
        """Time `run(rows, kv_tokens) -> seconds` at every anchor: one warm-up, then the minimum of `repeats`.

        Once an anchor takes longer than `budget_s`, the rest is extrapolated, so a slow machine starts in seconds.
        `kv_probe`: two amounts of KV tokens (over all rows together) whose difference in time prices one token.
        """
        low, high = kv_probe
        anchors = _anchors_up_to(max_rows)
        times: list[float] = []
        for rows in anchors:
            times.append(_least_ms(run, rows, low, repeats, budget_s))
            if times[-1] > budget_s * 1e3 and len(times) > 1:
                break
        probe = min(3, len(times) - 1)
        kv_ms = max(0.0, _least_ms(run, anchors[probe], high, repeats, budget_s) - times[probe]) / (high - low)
        measured = [max(ms - kv_ms * low, 0.1 * ms) for ms in _non_decreasing(times, [1.0] * len(times)).tolist()]
        return cls(anchors, _extended(anchors, measured), kv_ms)

    @property
    def kv_ms(self) -> float:
        """Milliseconds per KV token read."""
        return self._base_kv_ms * math.exp(self._drift[-1])

    @property
    def anchor_ms(self) -> NDArray[np.float64]:
        """Time at every anchor without KV."""
        return self._grid_ms[:-1].copy()

    @property
    def grid(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Row counts and their times without KV; the curve is linear in between."""
        return self._grid_rows, self._grid_ms

    def ms(self, rows: int, kv_tokens: float = 0) -> float:
        if not self._dense:
            self._dense = self.ms_many(np.arange(self.anchors[-1] + 1)).tolist()
        if rows < len(self._dense):  # asked several times per step
            return self._dense[rows] + self.kv_ms * kv_tokens
        return float(np.interp(rows, self._grid_rows, self._grid_ms)) + self.kv_ms * kv_tokens

    def ms_many(self, rows: NDArray[np.int64] | Sequence[int], kv_tokens: float = 0) -> NDArray[np.float64]:
        return np.interp(rows, self._grid_rows, self._grid_ms) + self.kv_ms * kv_tokens

    def refine(self, rows: int, kv_tokens: float, seconds: float) -> None:
        """Learn from one step. Each part adopts the surprise by its share of the predicted time."""
        ms = seconds * 1e3
        if not 0 < ms < math.inf:
            return
        row_part, kv_part = float(np.interp(rows, self._grid_rows, self._raw_ms)), self.kv_ms * kv_tokens
        share = self._shares(rows, kv_part / (row_part + kv_part))
        self._drift += LEARN * _clipped(math.log(ms / (row_part + kv_part))) * share
        self._visits = FORGET * self._visits + share**2
        seen = self._nearness @ (self._visits * self._drift) / (self._nearness @ self._visits)
        self._drift += FOLLOW / (1 + self._visits / FEW) ** 2 * (seen - self._drift)
        self._rebuild()

    def _shares(self, rows: int, kv_share: float) -> NDArray[np.float64]:
        """How much of a step's time depends on each anchor and on the KV price; sums to 1."""
        share = np.zeros(len(self.anchors) + 1)
        share[-1] = kv_share
        above = bisect_right(self.anchors, rows)
        low, high = max(above - 1, 0), min(above, len(self.anchors) - 1)
        span = self.anchors[high] - self.anchors[low]
        upper = (rows - self.anchors[low]) / span if span else 0.0
        share[low] += (1 - kv_share) * (1 - upper)
        share[high] += (1 - kv_share) * upper
        return share

    def _rebuild(self) -> None:
        # Surprise is relative to the raw anchors; only the curve that is read is made non-decreasing. If that were
        # written back, each upward wobble would lift the anchors above it for good.
        raw = self._base_ms * np.exp(self._drift[:-1])
        self._raw_ms = self._with_far_end(raw)
        weights = self._visits[:-1] + UNVISITED
        self._grid_ms = self._with_far_end(_non_decreasing(raw.tolist(), weights.tolist()))
        self._dense = []

    def _with_far_end(self, anchor_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Add a point far out on the last segment (with one anchor, proportional to rows): np.interp extrapolates."""
        last, last_ms = self.anchors[-1], float(anchor_ms[-1])
        before, before_ms = (self.anchors[-2], float(anchor_ms[-2])) if len(anchor_ms) > 1 else (0, 0.0)
        slope = max(0.0, last_ms - before_ms) / (last - before)
        return np.append(anchor_ms, last_ms + slope * (self._grid_rows[-1] - last))


def _anchors_up_to(max_rows: int) -> tuple[int, ...]:
    if max_rows < 1:
        raise ValueError(f"CostCurve: max_rows must be 1 or more; got {max_rows}")
    return (*(rows for rows in ANCHORS if rows < max_rows), max_rows)


def _least_ms(run: TimeRun, rows: int, kv_tokens: int, repeats: int, budget_s: float) -> float:
    warm_up = run(rows, kv_tokens)
    # A warm-up over budget is not repeated often: it may include one-off costs, so one more run decides.
    return 1e3 * min(run(rows, kv_tokens) for _ in range(1 if warm_up > budget_s else repeats))


def _extended(anchors: Sequence[int], measured: Sequence[float]) -> list[float]:
    """Extrapolate the measured times to all anchors along their last segment."""
    times = list(measured)
    if len(times) < len(anchors):
        last = len(times) - 1
        slope = (times[last] - times[last - 1]) / (anchors[last] - anchors[last - 1])
        times += [times[last] + slope * (rows - anchors[last]) for rows in anchors[last + 1 :]]
    return times


def _non_decreasing(values: Sequence[float], weights: Sequence[float]) -> NDArray[np.float64]:
    """The non-decreasing curve closest to the values in weighted least squares: falling neighbours are pooled."""
    pools: list[tuple[float, float, int]] = []
    for mean, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > mean:
            other, other_weight, other_count = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((mean, weight, count))
    return np.array([mean for mean, _, count in pools for _ in range(count)])


def _nearness(num_anchors: int) -> NDArray[np.float64]:
    """How much each anchor (and, last, the KV price) weighs the others: half as much per doubling of rows."""
    index = np.arange(num_anchors + 1)
    nearness = 0.5 ** np.abs(index[:, None] - index)
    nearness[-1], nearness[:-1, -1] = 1.0, 0.0
    return nearness


def _clipped(surprise: float) -> float:
    return min(max(surprise, -CLIP), CLIP)
