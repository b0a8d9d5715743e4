"""One step on a machine: rows in, drawn tokens out. What the engine's runner talks to; one per decoder and cache.

`launch` starts a step and `collect` waits for it. A machine that works on its own (a GPU) may be handed the next step
in between: `can_overlap` says so, and a sequence of that step may then follow one of the step before (`Overlap`).
`HostExecutor` computes at once; `graphs.py` has the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Sampling
from paceline.model.eagle.layer import EagleLayer
from paceline.model.ops.base import Sampled
from paceline.model.rows import Rows


@dataclass(frozen=True)
class Overlap:
    """What a step launched ahead knows of the step before: who goes on, and which text is expected.

    The rows of the step come as if that step accepted no drafted token; the machine moves them on by what it did
    accept. Their tokens are a placeholder: the last token drawn, then the expected text from behind it on.
    """

    entries: NDArray[np.int32]
    """Per sequence, its index in the step before."""
    slack: NDArray[np.int32]
    """Per sequence, drafted tokens of the step before that may have been accepted."""
    expected: Sequence[Sequence[int]]
    """Per sequence, from the first token on that the step before emits."""
    guessed: NDArray[np.int32] | None = None
    """Per sequence, how deep its draft is, where that is a comb of what the machine has guessed behind the step before;
    0: it is not. None: nobody's is."""


@dataclass(frozen=True)
class StepInput:
    """All rows of a step; the first `len(keys)` of them are drawn from."""

    rows: Rows
    keys: NDArray[np.uint64]
    steps: NDArray[np.int64]
    """Positions in the response."""
    sampling: Sampling
    num_decoding: int = 0
    """Sequences drawn from; they come first."""
    overlap: Overlap | None = None
    next_ids: NDArray[np.int32] | None = None
    """What follows each of the rows that are not drawn from; only where a drafter keeps hidden states."""
    num_draftable: int = 0
    """Of those drawn from, the first ones, which the next step may draft for."""
    guess_depth: int = 0
    """How many tokens to guess behind each of those, on a device that does that by itself."""


class Guess(NamedTuple):
    """What a learned drafter has for the positions behind a sequence."""

    sampled: NDArray[np.int32]
    """[depth, candidates]: what every candidate draws, where the tokens before are the first of `ranked`."""
    ranked: NDArray[np.int32]
    """[depth, MAX_GUESS_WIDTH]: the chosen candidate's best tokens."""
    scores: NDArray[np.float32]
    """[depth, MAX_GUESS_WIDTH]: theirs."""


class Guessed(Protocol):
    """Guesses that a machine has made by itself behind a step, for the sequences that come first in it."""

    num_entries: int
    chosen: int
    """The candidate that all guesses go on from."""

    def of(self, entry: int) -> Guess:
        """Those behind one sequence; waits for the machine."""


class Keeper(Protocol):
    """Who keeps hidden states of every step: a `ModelDrafter`, as far as executors know it."""

    @property
    def layer(self) -> EagleLayer | None:
        """None: there is nothing to keep."""

    def divisors(self, temperature: float) -> list[float]:
        """What logits are divided by before noise is added, one for each candidate; 0 for no noise."""

    @property
    def chosen(self) -> int:
        """The candidate to go on from."""


class Executor(Protocol):
    """Runs steps one after the other."""

    can_overlap: bool
    moves_nodes: bool
    """Whether a step itself moves accepted nodes of trees to where a chain would have them in the cache."""
    keeper: Keeper | None

    def launch(self, step: StepInput) -> Any:
        """Start a step; at most one other may be under way."""

    def num_guesses(self, ticket: Any) -> int:
        """How many tokens the machine guesses by itself behind this step, for each sequence that comes first in it."""

    def seconds_between(self, before: Any, ticket: Any) -> float:
        """From the end of one step to the start of the next, both over: what guesses took, and time without work."""

    def collect(self, ticket: Any) -> tuple[Sampled, float]:
        """Wait for a step: one entry per drawn row, and the seconds the machine took, its guesses not counted."""

    @property
    def num_bytes(self) -> int:
        """Memory beside weights and cache."""

    def release(self) -> None:
        """Give back the memory of the cache and all else that the next step can make anew; cached tokens are lost."""

    def for_timing(self, num_pages: int) -> tuple[Executor, Sequence[int]]:
        """An executor to time made-up steps with, and that many pages of its cache, which may be the same ones."""
