"""Run-ahead admission: how many rows may go to run-ahead sequences, namely as many as cost less now than they save.

A run-ahead token costs the time that its row adds to a step now, and again as a row of a long draft when it is
verified. If it survives, it saves the next call the usual cost of a token. On a memory-bound device, the first cost is
nearly nothing; where every row costs, the answer is 0. The engine calls this before it starts run-ahead sequences.
"""

from __future__ import annotations

import numpy as np

from paceline.rollout.speculation.cost import CostCurve

MARGIN = 2.0
"""A run-ahead row must promise this many times its cost: the gain is an estimate, the cost is not."""


def run_ahead_room(
    curve: CostCurve, *, num_rows: int, kv_tokens: float, max_rows: int, token_ms: float, survival: float
) -> int:
    """How many rows beyond `num_rows` may be spent on run-ahead.

    `token_ms` is the current cost of a token in a call, the time of all steps divided by all tokens; `survival` is the
    share of run-ahead tokens that are accepted.
    """
    most = max_rows - num_rows
    if most <= 0:
        return 0
    ms = curve.ms_many(np.arange(num_rows, max_rows + 1), kv_tokens)
    verify_ms = (curve.ms(max_rows) - curve.ms(1)) / max(max_rows - 1, 1)
    worth = survival * (token_ms - verify_ms) / MARGIN
    # The most rows that together cost no more than they are worth; a jump in the curve may hide cheap ones behind it.
    pays = np.flatnonzero(ms[1:] - ms[0] <= worth * np.arange(1, most + 1))
    return int(pays[-1]) + 1 if len(pays) and worth > 0 else 0
