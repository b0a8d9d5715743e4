"""The executor interface: runs one step on a device, rows in, sampled tokens out. One per decoder and cache.

The engine's runner calls it: `launch` starts a step and `collect` waits for it. If the device runs asynchronously (a
GPU, `can_overlap`), the next step may be launched in between; its sequences then continue those of the step in flight
(`Overlap`). `HostExecutor` computes a step right at launch; the GPU's executor is in `graphs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.model.eagle.layer import EagleLayer
from paceline.model.mixed_sampling import RowSampling
from paceline.model.ops.base import Sampled
from paceline.model.rows import Rows


@dataclass(frozen=True)
class Overlap:
    """How a step continues the one in flight.

    The host lays out the rows as if that step accepted no drafted token; the device shifts them by the number it did
    accept, and fills in the token that it sampled last.
    """

    entries: NDArray[np.int32]
    """Per sequence, its index in the step in flight; -1: it has no row there."""
    slack: NDArray[np.int32]
    """Per sequence, how many drafted tokens that step may accept."""


@dataclass(frozen=True)
class TextInput:
    """Which of the texts on the device belong to the sequences of a step; see `kernels/triton/text_search.py`."""

    members: NDArray[np.int32]
    """[sequences, MEMBERS]: rows of texts: run-ahead text for this sequence, its own text, those of its siblings."""
    is_searched: bool
    """Whether to look for drafts after this step; the sequences' own texts grow in any case."""
    is_branched: bool = False
    """Whether to look for several drafts for each sequence."""


@dataclass(frozen=True)
class StepInput:
    """All rows of a step; tokens are sampled from the first `len(keys)` of them."""

    rows: Rows
    keys: NDArray[np.uint64]
    steps: NDArray[np.int64]
    """Positions in the response."""
    sampling: RowSampling
    num_decoding: int = 0
    """Decoding sequences; they come first."""
    overlap: Overlap | None = None
    next_ids: NDArray[np.int32] | None = None
    """The token after each row that is not sampled; only if a drafter keeps hidden states."""
    num_draftable: int = 0
    """How many of the decoding sequences, from the first, the next step may draft for."""
    guess_depth: int = 0
    """How many tokens to guess after each of those, on a device that guesses on its own."""
    texts: TextInput | None = None
    """The texts in which the device looks for drafts; None: nowhere."""
    ranks: NDArray[np.int32] | None = None
    """Per sequence, from which rank on a match in a text is drafted; None: never."""
    branches: NDArray[np.int32] | None = None
    """Per sequence, the rows of each of several drafts from texts; 0: there is one."""
    guessed: NDArray[np.int32] | None = None
    """Per sequence, the depth of its draft if that is a comb of the device's guesses after the step before, else 0."""
    is_timed: bool = False
    """Whether only its time matters: it must not take longer than other steps of its size."""


class Guess(NamedTuple):
    """A learned drafter's guesses for the positions after a sequence."""

    sampled: NDArray[np.int32]
    """[depth, candidates]: what each candidate samples if the tokens before are the first of `ranked`."""
    ranked: NDArray[np.int32]
    """[depth, MAX_GUESS_WIDTH]: the chosen candidate's best tokens."""
    scores: NDArray[np.float32]
    """[depth, MAX_GUESS_WIDTH]: their scores."""


class Guessed(Protocol):
    """Guesses that the device made on its own after a step, for the step's first sequences."""

    num_entries: int
    depth: int
    """Tokens per sequence."""
    chosen: int
    """The candidate that all guesses continue from."""

    def of(self, entry: int) -> Guess:
        """The guesses after one sequence; waits for the device."""


class Keeper(Protocol):
    """The part of a `ModelDrafter` that executors use to keep the hidden states of every step."""

    @property
    def layer(self) -> EagleLayer | None:
        """None if there is nothing to keep."""

    def divisors(self, temperature: float) -> list[float]:
        """What each candidate divides logits by before adding noise; 0 for no noise."""

    @property
    def chosen(self) -> int:
        """The candidate to continue from."""


class TextTable(Protocol):
    """Texts on the device, by row."""

    num_texts: int

    def write(self, rows: Sequence[int], texts: Sequence[NDArray[np.int32]]) -> None:
        """Replace the texts of some rows, for the steps launched from now on."""


class Executor(Protocol):
    """Runs steps one after the other."""

    @property
    def texts(self) -> TextTable | None:
        """The texts in which the device can look for drafts, if it can."""

    can_overlap: bool
    moves_nodes: bool
    """Whether a step itself moves accepted tree nodes to the cache slots where a chain would have them."""
    keeper: Keeper | None
    capture_seconds: float
    """Spent on preparing steps of new sizes so far, while the device may have had nothing to do."""

    def launch(self, step: StepInput) -> Any:
        """Start a step; at most one other may be in flight."""

    def guesses(self, ticket: Any) -> Guessed | None:
        """What the device guesses on its own after this step, for each of its draftable sequences."""

    def seconds_between(self, before: Any, ticket: Any) -> float:
        """Seconds from the end of one finished step to the start of the next: guessing and idle time."""

    def collect(self, ticket: Any) -> tuple[Sampled, float]:
        """Wait for a step; returns one entry per sampled row and the device's seconds, without its guesses."""

    def padded_rows(self, num_rows: int) -> int:
        """How many rows the device computes for a step of so many."""

    @property
    def num_bytes(self) -> int:
        """Memory beyond weights and cache."""

    def release(self) -> None:
        """Free the cache and everything else that the next step can rebuild; cached tokens are lost."""

    def for_timing(self, num_pages: int) -> tuple[Executor, Sequence[int]]:
        """An executor for timing dummy steps, and that many pages of its cache, which may be the engine's own."""
