"""What a drafter that is a network on the policy's device must offer; `eagle.py` is the one there is.

The engine attaches it to its decoder and cache, `spot/` hands it new versions, and `Proposer` asks it in every step for
drafts of the shape it names. It sees more than a text drafter, since its guesses start in the policy's cache, and it
declares everything it can do. Like any drafter it must never change a token.
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
    """How far to guess, and how many tokens for each position."""

    depth: int
    width: int


class Hidden(NamedTuple):
    """Where the guesses behind a sequence start: at the last of its tokens but one, the last in the cache."""

    states: Tensor | None
    """Those that `EagleLayer.keep` returned for the latest step, where drafts are made on the host."""
    guessed: Guessed | None
    """What the device has guessed behind that step by itself."""
    row: int
    """That of the token, in `states`."""
    entry: int
    """The sequence's number in the step."""
    pages: Sequence[int]
    num_cached: int


class ModelDrafter(Keeper, DrafterMemory, Protocol):
    """Guesses with a network. Without a version of it, or asleep, it guesses nothing and costs nothing."""

    name: str
    shape: GuessShape
    """What it drafts where nobody chooses."""

    def attach(self, decoder: Decoder, cache: Any) -> None:
        """The policy that drafts are made for; its cache has one layer more than the policy."""

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
        """Draft nothing and cost nothing; what passes by in the meantime is never seen."""

    def guess(
        self,
        views: Sequence[SequenceView],
        hidden: Sequence[Hidden | None],
        budgets: Sequence[int],
        shape: GuessShape,
    ) -> list[Draft]:
        """One draft per view, of at most `budgets[i]` nodes and this shape; where `hidden[i]` is None, an empty one."""

    def recall(self, sequence_id: int, guessed: Guessed, entry: int, shape: GuessShape) -> Draft:
        """The draft that the device took by itself, of guesses that the host has not seen before."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """As `Drafter.observe`."""

    def finish(self, sequence_id: int) -> None:
        """As `Drafter.finish`."""


@cache
def comb_parents(depth: int, width: int) -> tuple[int, ...]:
    """Of a chain of `depth` nodes, and then of `width` - 1 nodes beside each of them."""
    beside = (node - 1 for node in range(depth) for _ in range(width - 1))
    return (*range(-1, depth - 1), *beside)
