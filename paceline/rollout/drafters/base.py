"""Helpers of the drafters that keep text: from verdicts to one flat batch, and from one flat batch to drafts.

Both run once per step over the whole batch and add to its cost: nothing here may copy tokens one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import EMPTY_DRAFT, Draft, IntArray, Verdict

UNKNOWN = -1
"""Stands for the number of a sequence that is not kept."""


def emitted(live: Mapping[int, int], verdicts: Sequence[Verdict]) -> tuple[list[int], list[int], list[int]]:
    """The numbers of the growing sequences, where the tokens of each end, and the tokens.

    Sequences not in `live` are skipped: they have not been passed to `propose` yet, which will show their whole text.
    """
    numbers: list[int] = []
    ends: list[int] = []
    tokens: list[int] = []
    for verdict in verdicts:
        number = live.get(verdict.sequence_id, UNKNOWN)
        if number != UNKNOWN:
            tokens += verdict.token_ids
            numbers.append(number)
            ends.append(len(tokens))
    return numbers, ends, tokens


def drafts_of(
    tokens: IntArray, parents: IntArray | None, scores: NDArray[np.float32], ends: Sequence[int]
) -> list[Draft]:
    """Cut a batch at its ends; without parents the drafts are chains."""
    drafts = []
    start = 0
    for end in ends:
        if end == start:
            drafts.append(EMPTY_DRAFT)
            continue
        tree = range(-1, end - start - 1) if parents is None else parents[start:end]
        drafts.append(Draft(tokens[start:end], tree, scores[start:end]))
        start = end
    return drafts
