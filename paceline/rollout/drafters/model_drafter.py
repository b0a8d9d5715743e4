"""The interface of a model drafter, a network on the policy's device; `eagle.py` is the only implementation.

The engine attaches it to its decoder and cache, `spot/` gives it new versions, and `Proposer` requests drafts of a
given shape in every step. It sees more than a text drafter, because its guesses start from the policy's cache, and it
declares everything it can do. Like any drafter, it must never change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from paceline.core.types import Draft, DrafterMemory, SequenceView, Verdict
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle
from paceline.model.executor import Guessed, Keeper


class GuessShape(NamedTuple):
    """How many positions to guess, and how many tokens for each."""

    depth: int
    width: int


class Hidden(NamedTuple):
    """Where the guesses after a sequence start: at its last cached token, the one before its last token."""

    states: Tensor | None
    """What `EagleLayer.keep` returned for the latest step, if drafts are made on the host."""
    guessed: Guessed | None
    """What the device guessed on its own after that step."""
    row: int
    """The token's row in `states`."""
    entry: int
    """The sequence's index in the step."""
    pages: Sequence[int]
    num_cached: int


class ModelDrafter(Keeper, DrafterMemory, Protocol):
    """Guesses with a network. Without a version of it, or asleep, it guesses nothing and costs nothing."""

    name: str
    shape: GuessShape
    """The default shape."""

    pass_ms: float
    """The least time of one guess on a GPU; 0 where that does not limit it."""

    def attach(self, decoder: Decoder, cache: Any) -> None:
        """Set the policy to draft for; its cache has one layer more than the policy."""

    def use(self, eagle: Eagle) -> None:
        """Draft with this version from now on."""

    @property
    def network(self) -> Eagle | None:
        """The version in use."""

    @property
    def version(self) -> int | None:
        """Its number."""

    @property
    def is_awake(self) -> bool: ...

    def wake(self) -> None:
        """Draft from now on."""

    def sleep(self) -> None:
        """Draft nothing and cost nothing; what is generated meanwhile is never seen."""

    def guess(
        self,
        views: Sequence[SequenceView],
        hidden: Sequence[Hidden | None],
        budgets: Sequence[int],
        shape: GuessShape,
    ) -> list[Draft]:
        """Return one draft per view, of at most `budgets[i]` nodes and this shape; empty if `hidden[i]` is None."""

    def recall(self, sequence_id: int, guessed: Guessed, entry: int, shape: GuessShape) -> Draft:
        """The draft that the device built on its own, from guesses that the host had not seen."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """As `Drafter.observe`."""

    def finish(self, sequence_id: int) -> None:
        """As `Drafter.finish`."""


@cache
def comb_parents(depth: int, width: int) -> tuple[int, ...]:
    """The parents of a chain of `depth` nodes, then of `width` - 1 nodes beside each of them."""
    beside = (node - 1 for node in range(depth) for _ in range(width - 1))
    return (*range(-1, depth - 1), *beside)
