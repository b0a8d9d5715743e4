"""The compiled core of `allocate`: from scores to the nodes that get a row, in one pass.

A GPU waits for it in every drafted step, and numpy would take ten times as long. Only `allocate.py` calls it, and
explains the choice. Numba caches by file, so every constant is an argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.kernels.cpu.jit import host_loop

_compiled: Any = host_loop


@_compiled
def probable(
    starts: Any,
    lengths: Any,
    parents: Any,
    scores: Any,
    source_ids: Any,
    tried: Any,
    accepted: Any,
    claimed: Any,
    edges: Any,
    unscored_claim: float,
    trust: float,
    prior_weight: float,
    highest: float,
) -> Any:
    """The probability that each node and all its ancestors are accepted; see `Acceptance.probabilities`."""
    num_nodes, unscored = len(scores), len(edges) + 1
    path = np.empty(num_nodes)
    for draft in range(len(starts)):
        source = source_ids[draft]
        honesty = (accepted[source].sum() + prior_weight * trust) / (claimed[source].sum() + prior_weight)
        for node in range(starts[draft], starts[draft] + lengths[draft]):
            if np.isnan(scores[node]):
                bucket, claim = unscored, unscored_claim
            else:
                bucket, claim = 0, min(max(scores[node], 0.0), 1.0)
                while bucket < len(edges) and edges[bucket] <= claim:
                    bucket += 1
            prior = min(claim * honesty, 1.0)
            own = (accepted[source, bucket] + prior_weight * prior) / (tried[source, bucket] + prior_weight)
            above = path[parents[node]] if parents[node] < num_nodes else 1.0
            path[node] = min(own, highest) * above
    return path


@_compiled
def best_nodes(
    path: Any,
    starts: Any,
    lengths: Any,
    weights: Any,
    min_probability: float,
    certain: float,
    grid_rows: Any,
    grid_ms: Any,
    num_rows: int,
    max_rows: int,
    more_ms: float,
    min_gain: float,
) -> Any:
    """The nodes, ascending, that maximise worth per millisecond; `more_ms` is a step's cost besides its rows."""
    value = np.empty(len(path))
    for draft in range(len(starts)):
        for node in range(starts[draft], starts[draft] + lengths[draft]):
            value[node] = path[node] * weights[draft]
    likely = np.flatnonzero(path >= min_probability)
    order = likely[np.argsort(-value[likely], kind="mergesort")][: max_rows - num_rows]
    step, best, total, last = 0, 0, certain, len(grid_rows) - 1
    first_rate = best_rate = 0.0
    for count in range(len(order) + 1):
        if count:
            total += value[order[count - 1]]
        rows = float(num_rows + count)
        while step < last - 1 and grid_rows[step + 1] < rows:
            step += 1
        ms = grid_ms[0]
        if last and rows > grid_rows[0]:
            slope = (grid_ms[step + 1] - grid_ms[step]) / (grid_rows[step + 1] - grid_rows[step])
            ms = grid_ms[step] + slope * (rows - grid_rows[step])
        rate = total / (ms + more_ms)
        if count == 0:
            first_rate = best_rate = rate
        elif rate > best_rate:
            best, best_rate = count, rate
    if best_rate < min_gain * first_rate:
        best = 0
    return np.sort(order[:best])
