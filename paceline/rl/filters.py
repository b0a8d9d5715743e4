"""Filters: which groups a step trains on, what overlong responses lose, and which tokens count.

The run loop calls `select` while groups come in, and `shape_rewards` and `trained_mask` on the selected ones. Only draw
order decides, never which group finished first, how long it took, or what a run-ahead text looked like: a batch of
early finishers is a batch of short answers. Pure functions, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from paceline.core.types import BoolArray, FinishReason, Float64Array
from paceline.rl.algorithms import Filter

Truncated = Literal["score", "mask"]
T = TypeVar("T")


@dataclass(frozen=True)
class ScoredGroup(Generic[T]):
    """All finished responses to one draw of a prompt."""

    draw: int
    scores: tuple[float, ...]
    """The task's scores before any shaping: a length penalty must not make equal answers look different."""
    members: tuple[T, ...]
    """What the caller trains on, one per score."""

    @property
    def is_uniform(self) -> bool:
        """Whether all scores are equal, so that a group baseline leaves nothing to learn."""
        return max(self.scores) == min(self.scores)


@dataclass(frozen=True)
class Selection(Generic[T]):
    """The decision of `select`; final once `missing` is empty."""

    kept: tuple[ScoredGroup[T], ...]
    dropped: tuple[ScoredGroup[T], ...]
    """Considered in draw order and not trained on."""
    surplus: tuple[ScoredGroup[T], ...]
    """Not considered. Their draws open the next step, where these texts can be verified as run-ahead."""
    missing: tuple[int, ...]
    """Draws that this step needs to be decided, whatever the others turn out to be."""
    next_draw: int
    """The first draw that this step has not used."""
    is_short: bool
    """Whether the draw limit was reached before enough groups passed."""

    @property
    def num_uniform(self) -> int:
        """Number of considered groups whose scores are all equal."""
        return sum(group.is_uniform for group in (*self.kept, *self.dropped))


FILTERS: dict[Filter, Callable[[ScoredGroup[Any]], bool]] = {
    "none": lambda group: True,
    "spread": lambda group: not group.is_uniform,
}
"""Whether to train on a group. "spread" is the dynamic sampling of DAPO."""


def select(
    groups: Iterable[ScoredGroup[T]], *, first_draw: int, num_wanted: int, max_draws: int, filter: Filter
) -> Selection[T]:
    """The first `num_wanted` groups from `first_draw` on that pass, in draw order, out of at most `max_draws` draws.

    Call it again as groups arrive: a gap in the draws stops the walk, so `kept` can only grow.
    """
    assert 0 < num_wanted <= max_draws
    finished = {group.draw: group for group in groups}
    assert all(draw >= first_draw for draw in finished), "a draw of an earlier step"
    passes, end = FILTERS[filter], first_draw + max_draws
    kept: list[ScoredGroup[T]] = []
    dropped: list[ScoredGroup[T]] = []
    draw = first_draw
    while len(kept) < num_wanted and draw < end and draw in finished:
        (kept if passes(finished[draw]) else dropped).append(finished[draw])
        draw += 1
    return Selection(
        kept=tuple(kept),
        dropped=tuple(dropped),
        surplus=tuple(finished[late] for late in sorted(finished) if late >= draw),
        missing=_missing(finished, range(draw, end), num_wanted - len(kept), passes),
        next_draw=draw,
        is_short=len(kept) < num_wanted and draw == end,
    )


def _missing(
    finished: dict[int, ScoredGroup[T]], draws: range, num_open: int, passes: Callable[[ScoredGroup[T]], bool]
) -> tuple[int, ...]:
    """The unfinished draws that are needed even if every one of them passes."""
    hopeful = [draw for draw in draws if draw not in finished or passes(finished[draw])]
    return tuple(draw for draw in hopeful[:num_open] if draw not in finished)


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then falling linearly to -1 at the limit (DAPO, arXiv 2503.14476)."""
    if length <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - length) / buffer)


def shape_rewards(
    scores: Sequence[float], lengths: Sequence[int], *, limit: int, share: float, penalty: float
) -> Float64Array:
    """Rewards from scores: minus up to `penalty` in the last `share` of the length limit; `share` 0 changes nothing."""
    buffer = round(share * limit)
    shaping = [penalty * overlong_penalty(length, limit, buffer) if buffer else 0.0 for length in lengths]
    return np.asarray(scores, dtype=np.float64) + np.asarray(shaping, dtype=np.float64)


def trained_mask(num_tokens: int, finish_reason: FinishReason, truncated: Truncated) -> BoolArray:
    """Which tokens of a response enter the loss: all, or none if it was cut off and such responses are masked."""
    assert finish_reason != "abort", "an aborted response has no reward; generate it again"
    return np.full(num_tokens, finish_reason == "stop" or truncated == "score")
