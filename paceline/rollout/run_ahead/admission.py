"""How many rows may go to rollouts that are not asked for yet: as many as cost less now than they save later.

A token made ahead costs the time that its row adds to a step now, and again as a row of a long draft when it is
verified. If it survives, the next call is spared what a token costs it otherwise. Where a machine waits for its memory,
the first is nearly nothing; where every row costs, this says 0. The engine asks before it begins a rollout ahead.
"""

from __future__ import annotations

import numpy as np

from paceline.rollout.speculation.cost import CostCurve

MARGIN = 2.0
"""A row ahead must promise so many times its price: the promise is a guess and the price is not."""


def run_ahead_room(
    curve: CostCurve, *, num_rows: int, kv_tokens: float, max_rows: int, token_ms: float, survival: float
) -> int:
    """How many rows more than `num_rows` may be spent on run-ahead.

    `token_ms` is what a token costs in a call as they are now, all its steps divided by all its tokens; `survival` the
    share of run-ahead tokens that come true.
    """
    most = max_rows - num_rows
    if most <= 0:
        return 0
    ms = curve.ms_many(np.arange(num_rows, max_rows + 1), kv_tokens)
    verify_ms = (curve.ms(max_rows) - curve.ms(1)) / max(max_rows - 1, 1)
    worth = survival * (token_ms - verify_ms) / MARGIN
    # Rows up to which all together have cost no more than they are worth; a step in the curve may hide cheap ones.
    pays = np.flatnonzero(ms[1:] - ms[0] <= worth * np.arange(1, most + 1))
    return int(pays[-1]) + 1 if len(pays) and worth > 0 else 0
