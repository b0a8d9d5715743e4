"""Allocates rows to draft nodes: those that raise expected tokens per millisecond.

The engine calls `node_limit` before drafting and `allocate` after it. There is no batch-size threshold: where rows are
cheap, nodes are bought; where live sequences already fill them, nothing pays and speculation turns itself off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Draft
from paceline.rollout.speculation.acceptance import Acceptance
from paceline.rollout.speculation.allocate_jit import best_nodes, probable
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.forest import Forest

CERTAIN = 0.9999
"""The highest conditional probability used. Below 1, a child is strictly less likely than its parent despite rounding,
so sorting by probability always puts parents first."""


def node_limit(
    curve: CostCurve,
    *,
    num_rows: int,
    num_live: int,
    kv_tokens: float,
    max_rows: int,
    max_nodes_per_sequence: int,
    min_gain: float = 1.03,
    weights: NDArray[np.float64] | None = None,
    others_worth: float = 0.0,
    idle_ms: float = 0.0,
) -> int:
    """How many nodes per sequence could pay if all were certain to be accepted; 0: do not even draft.

    This bounds what `allocate` can keep: less likely nodes never justify more rows than certain ones. The limit is not
    divided among sequences, because one (the one of most weight) may use all of it while others have nothing to offer.
    """
    cap = min(max_rows - num_rows, num_live * max_nodes_per_sequence)
    if cap <= 0:
        return 0
    most, certain = (
        (1.0, float(num_live)) if weights is None else (float(weights.max()), others_worth + float(weights.sum()))
    )
    one, all_ = np.zeros(1, np.int64), np.array([cap])
    more_ms = _more_ms(curve, num_rows, num_live, kv_tokens, idle_ms)
    chosen = best_nodes(
        np.ones(cap),
        one,
        all_,
        np.array([most]),
        0.0,
        certain,
        *curve.grid,
        num_rows,
        num_rows + cap,
        more_ms,
        min_gain,
    )
    return min(len(chosen), max_nodes_per_sequence)


def allocate(
    drafts: Sequence[Draft] | Forest,
    sources: Sequence[str],
    curve: CostCurve,
    acceptance: Acceptance,
    *,
    num_rows: int,
    num_live: int,
    kv_tokens: float,
    max_rows: int,
    min_gain: float = 1.03,
    min_probability: float = 0.01,
    weights: NDArray[np.float64] | None = None,
    others_worth: float = 0.0,
    idle_ms: float = 0.0,
) -> list[list[int]]:
    """Per draft, the node indices worth a row: ascending, closed under parents, empty where nothing pays.

    `num_rows` are the rows the step has anyway, of which `num_live` emit one token each. `weights` (one per draft, not
    negative) says how much a token of that sequence counts, for instance because it decides when the batch ends;
    `others_worth` how much one token of each sequence without a draft counts, together; `idle_ms` how long the GPU
    waits for the step, whatever is in it.
    """
    forest = drafts if isinstance(drafts, Forest) else Forest.of(drafts)
    spare = max_rows - num_rows
    if forest.num_nodes == 0 or spare <= 0:
        return [[] for _ in forest.drafts]
    certain = float(num_live) if weights is None else others_worth + float(weights.sum())
    chosen = best_nodes(
        path_probability(forest, sources, acceptance),
        forest.starts,
        forest.lengths,
        np.ones(len(forest.drafts)) if weights is None else weights,
        min_probability,
        certain,
        *curve.grid,
        num_rows,
        max_rows,
        _more_ms(curve, num_rows, num_live, kv_tokens, idle_ms),
        min_gain,
    )
    return forest.split(chosen) if len(chosen) else [[] for _ in forest.drafts]


@cache
def warm_up_choice() -> None:
    """Compile in advance what the first step would otherwise have to wait for."""
    curve, draft = CostCurve([1, 2], [1.0, 1.0]), Draft.chain([0, 1], [0.5, 0.5])
    allocate([draft], [""], curve, Acceptance(), num_rows=1, num_live=1, kv_tokens=0, max_rows=2)


def path_probability(forest: Forest, sources: Sequence[str], acceptance: Acceptance) -> NDArray[np.float64]:
    """The probability that a node and all its ancestors are accepted."""
    source_ids = np.array([acceptance.source_id(source) for source in sources], np.int64)
    path: NDArray[np.float64] = probable(
        forest.starts, forest.lengths, forest.parents, forest.scores, source_ids, *acceptance.tables, CERTAIN
    )
    return path


def _more_ms(curve: CostCurve, num_rows: int, num_live: int, kv_tokens: float, idle_ms: float) -> float:
    """The time of a decoding step beyond what the curve says for its rows.

    Prefill rows have to run some time anyway, so their own time is not charged. But they use up cheap rows, so the
    cost of further rows is read off the curve after them.
    """
    return curve.ms(max(num_live, 1)) - curve.ms(num_rows) + curve.kv_ms * kv_tokens + idle_ms
