"""What the drafters that keep text share: from verdicts to one flat batch, from one flat batch to drafts.

Both run once per step over the whole batch and are part of its cost: nothing here may copy tokens one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import EMPTY_DRAFT, Draft, IntArray, Verdict

UNKNOWN = -1
"""Instead of a number: this sequence is not kept."""


def emitted(live: Mapping[int, int], verdicts: Sequence[Verdict]) -> tuple[list[int], list[int], list[int]]:
    """Numbers of the sequences that grow, where each one's tokens end, and the tokens.

    One that is not in `live` was never proposed for; it brings its whole text along when it is.
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
    """Cuts a batch at its ends; without parents the drafts are chains."""
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
