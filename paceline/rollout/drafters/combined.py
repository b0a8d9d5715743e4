"""Several drafters at once ("ngram,suffix"): each is asked, and per sequence the most promising draft is taken.

Promising is the expected number of accepted tokens: the sum over nodes of the product of scores down to it. Made by
`make_drafter` for a comma list. All drafters see all verdicts; it must never let one see another's drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, SequenceView, Verdict

UNKNOWN_SCORE = 0.5
"""What a node of a drafter that gives no scores counts for."""


def expected_tokens(draft: Draft) -> float:
    """How many nodes of a draft are accepted on average, if its scores are right."""
    scores = [UNKNOWN_SCORE] * len(draft) if draft.scores is None else np.asarray(draft.scores).tolist()
    paths: list[float] = []
    for parent, score in zip(np.asarray(draft.parents).tolist(), scores, strict=True):
        paths.append(score * (paths[parent] if parent >= 0 else 1.0))
    return sum(paths)


class Combined:
    """Drafters in order of preference: the first wins where two promise the same."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)
        self.names = [str(getattr(drafter, "name", type(drafter).__name__)) for drafter in drafters]
        self.name = ",".join(self.names)
        self.asked: frozenset[str] | None = None
        """Who may draft; None: all."""
        self.worth: Callable[[str, Draft], float] = lambda name, draft: expected_tokens(draft)
        """How many tokens of a drafter's draft will be accepted; the engine knows better than the drafter."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        nothing = [0] * len(budgets)
        offers = [
            drafter.propose(views, budgets if self.asked is None or name in self.asked else nothing)
            for name, drafter in zip(self.names, self.drafters, strict=True)
        ]
        return [self._best(drafts) for drafts in zip(*offers, strict=True)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for drafter in self.drafters:
            drafter.observe(verdicts)

    def finish(self, sequence_id: int) -> None:
        for drafter in self.drafters:
            drafter.finish(sequence_id)

    def check_integrity(self) -> None:
        """Audits each drafter that owns memory."""
        for check in self._methods("check_integrity").values():
            check()

    def release(self) -> None:
        """Frees what can be made again."""
        for release in self._methods("release").values():
            release()

    def state(self) -> dict[str, Any]:
        """The memories of those that have one, by name."""
        return {name: state() for name, state in self._methods("state").items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`; a memory that is not there stays as it is."""
        for name, restore in self._methods("restore").items():
            if name in state:
                restore(state[name])

    def _methods(self, name: str) -> dict[str, Callable[..., Any]]:
        """A method that not every drafter has, by drafter."""
        found = zip(self.names, (getattr(drafter, name, None) for drafter in self.drafters), strict=True)
        return {own: method for own, method in found if method is not None}

    def _best(self, drafts: Sequence[Draft]) -> Draft:
        offers = [(name, draft) for name, draft in zip(self.names, drafts, strict=True) if len(draft.tokens)]
        if not offers:
            return EMPTY_DRAFT
        name, best = offers[0] if len(offers) == 1 else max(offers, key=lambda offer: self.worth(*offer))
        return named(best, name)


class Fallback(Combined):
    """The first drafter leads: the others are asked only for sequences that it has nothing to say of."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        leader, *others = self.drafters
        drafts = leader.propose(views, budgets)
        has_spoken = [len(draft.tokens) > 0 for draft in drafts]
        open_budgets = [0 if is_led else budget for is_led, budget in zip(has_spoken, budgets, strict=True)]
        offers = [drafter.propose(views, open_budgets) for drafter in others]
        return [
            named(draft, self.names[0]) if is_led else self._best((EMPTY_DRAFT, *found))
            for draft, is_led, *found in zip(drafts, has_spoken, *offers, strict=True)
        ]


def named(draft: Draft, name: str) -> Draft:
    """The draft under the name of who made it."""
    if not len(draft.tokens) or draft.source is not None:
        return draft
    return Draft(draft.tokens, draft.parents, draft.scores, name)
