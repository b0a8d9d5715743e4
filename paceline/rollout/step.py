"""A step as data: what was planned, what stands in its draft rows, where its results will be.

The engine makes one per iteration of its loop; the runner fills in what the device needs and, once it is done, its
times. Decisions travel in here as values, and nobody asks anybody afterwards what was decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.model.executor import Guessed
from paceline.rollout.proposal import Proposal
from paceline.rollout.scheduler import Plan
from paceline.rollout.speculation.bandit import OFF, Arm
from paceline.rollout.speculation.forest import Forest

Timing = tuple[int, int, float]
"""Rows, cached tokens read and seconds of one forward."""


@dataclass
class DraftRows:
    """What stands in the draft rows of a step, one entry per decoding sequence.

    Either the host knows the tokens (`proposals`), or the device finds them when the step begins: in texts that it has
    (`ranks`), or among its own guesses after the step before (`depths` by `width`).
    """

    counts: NDArray[np.int64]
    """Rows."""
    proposals: list[Proposal] | None = None
    forest: Forest | None = None
    """The drafts as proposed, of the first sequences."""
    ranks: NDArray[np.int32] | None = None
    """The least rank of a match whose text is drafted; see `kernels/triton/text_search.py`."""
    branches: NDArray[np.int32] | None = None
    """The rows of each of `width` drafts from texts; 0: there is one. None: nobody has several."""
    depths: NDArray[np.int32] | None = None
    """How many of the device's guesses are drafted, where no text is."""
    width: int = 1
    """Tokens per guessed position, or drafts from texts."""
    known_ranks: NDArray[np.int32] | None = None
    """The ranks by which rows were shared, if they were."""

    @classmethod
    def none(cls, count: int) -> DraftRows:
        """No drafts."""
        return cls(np.zeros(count, np.int64))

    @property
    def is_from_text(self) -> NDArray[np.bool_]:
        """Per sequence, whether its rows are for what follows a match in a text."""
        if self.ranks is None:
            return np.zeros(len(self.counts), np.bool_)
        return (self.ranks > 0) if self.depths is None else (self.ranks > 0) & (self.depths == 0)


@dataclass
class Step:
    """A step in flight or done."""

    plan: Plan
    drafts: DraftRows
    ticket: Any
    num_rows: int
    num_kv_tokens: int
    starts: NDArray[np.int32]
    """The first row of each decoding sequence."""
    row_counts: NDArray[np.int64]
    parents: NDArray[np.int32]
    """Of each row of a decoding sequence, counted from the sequence's first row."""
    inputs: NDArray[np.int32]
    """Their tokens, as far as the host knew them."""
    owners: NDArray[np.int64]
    """The ids of the decoding sequences."""
    depths: NDArray[np.int32]
    """How many drafted tokens of each decoding sequence may be accepted."""
    arm: Arm = OFF
    """The way it was run."""
    guessed: Guessed | None = None
    """What the device guesses on its own after it, for every sequence that may be drafted for."""
    guessed_before: Guessed | None = None
    """The same after the step before, which this one may draft."""
    entries_before: NDArray[np.int32] | None = None
    """Where its sequences were in that step."""
    is_searched: bool = False
    """Whether the device looked for drafts after it."""
    is_branched: bool = False
    """Whether it looked for several for each sequence."""
    is_early: bool = False
    """Whether it was launched before the step before it was known."""
    gap: float = 0.0
    """Seconds that an asynchronous device had nothing to do but guess before it began."""
    wall: float = 0.0
    """Wall-clock seconds from the end of the step before to its own, the host's share included."""
    timing: Timing = field(default=(0, 0, 0.0))
    """Set when collected."""
