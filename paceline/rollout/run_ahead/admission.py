"""Run-ahead admission: how many rows may go to run-ahead sequences, namely as many as cost less now than they save.

A run-ahead token costs the time that its sequence adds to a step now, on the GPU or on the host, and again as a row of
a long draft when it is verified. If it survives, it saves the next call the usual cost of a token. Where a GPU is bound
by memory and the host has time, the first cost is nearly nothing; where every row costs, the answer is 0. Before any
text has come back, survival is a guess: then run-ahead may cost only a small share of a step. The engine calls this
before it starts run-ahead sequences.
"""

from __future__ import annotations

import numpy as np

from paceline.rollout.speculation.cost import CostCurve

MARGIN = 2.0
"""A run-ahead row must promise this many times its cost: the gain is an estimate, the cost is not."""

TRIAL_SHARE = 0.05
"""The share of a step that run-ahead may cost while its survival is unknown."""


def run_ahead_room(
    curve: CostCurve,
    *,
    num_rows: int,
    kv_tokens: float,
    max_rows: int,
    token_ms: float,
    survival: float,
    sequence_ms: float = 0.0,
    num_ahead: int = 0,
    is_tested: bool = True,
) -> int:
    """How many rows beyond `num_rows` may be spent on run-ahead.

    `token_ms` is the current cost of a token in a call, the time of all steps divided by all tokens; `survival` is the
    share of run-ahead tokens that are accepted, and a mere guess unless `is_tested`; `sequence_ms` is what a sequence
    adds to the wall-clock time of a step; `num_ahead` of the rows belong to run-ahead sequences already.
    """
    most = max_rows - num_rows
    if most <= 0:
        return 0
    ms = curve.ms_many(np.arange(num_rows, max_rows + 1), kv_tokens)
    count = np.arange(1, most + 1)
    more_ms = np.maximum(ms[1:] - ms[0], sequence_ms * count)
    verify_ms = (curve.ms(max_rows) - curve.ms(1)) / max(max_rows - 1, 1)
    worth = survival * (token_ms - verify_ms) / MARGIN
    # The most rows that together cost no more than they are worth; a jump in the curve may hide cheap ones behind it.
    is_worth = more_ms <= worth * count
    if not is_tested:
        is_worth &= more_ms + sequence_ms * num_ahead <= TRIAL_SHARE * ms[0]
    pays = np.flatnonzero(is_worth)
    return int(pays[-1]) + 1 if len(pays) and worth > 0 else 0
