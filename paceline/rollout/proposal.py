"""A proposal: a draft as its drafter made it, and the part of it that gets rows in a step."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.types import EMPTY_DRAFT, Draft


@dataclass(slots=True, eq=False)
class Proposal:
    """Made by the proposer; `verify.py` walks down its `draft`."""

    whole: Draft
    kept: list[int]
    draft: Draft
    """The kept nodes, renumbered."""
    source: str

    def to_own(self, nodes: list[int]) -> list[int]:
        """Map nodes of `draft` to nodes of `whole`."""
        return nodes if self.draft is self.whole else [self.kept[node] for node in nodes]


NO_PROPOSAL = Proposal(EMPTY_DRAFT, [], EMPTY_DRAFT, "none")
