"""The drafter set of an engine: text drafters, at most one model drafter, and run-ahead text, which comes first.

While a sequence follows run-ahead text, no other drafter drafts for it. Otherwise the draft with the most expected
accepted tokens wins, per sequence. `make_drafters` builds the set from a setting; `Proposer` calls it once per step and
says which drafters may draft. Optional capabilities of a drafter are looked up only here. All drafters receive all
verdicts; none may ever see another's drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, DrafterMemory, NamedDrafter, SequenceView, Verdict
from paceline.rollout.drafters.guest import Guest, is_ours, receive
from paceline.rollout.drafters.replay import Replay

if TYPE_CHECKING:
    from paceline.rollout.drafters.model_drafter import GuessShape, Hidden, ModelDrafter

UNKNOWN_SCORE = 0.5
"""The score of a node if its drafter gives none."""

Worth = Callable[[str, Draft], float]
"""Maps a drafter's name and its draft to the expected number of accepted tokens."""


def expected_tokens(draft: Draft) -> float:
    """The expected number of accepted nodes if the scores are right: the sum of all nodes' path probabilities."""
    scores = [UNKNOWN_SCORE] * len(draft) if draft.scores is None else np.asarray(draft.scores).tolist()
    paths: list[float] = []
    for parent, score in zip(np.asarray(draft.parents).tolist(), scores, strict=True):
        paths.append(score * (paths[parent] if parent >= 0 else 1.0))
    return sum(paths)


def take_scores(name: str, draft: Draft) -> float:
    """A `Worth` that trusts every drafter's scores."""
    return expected_tokens(draft)


class Terms(NamedTuple):
    """How drafters compete in a step."""

    asked: Collection[str] | None = None
    """The drafters that may draft; None: all."""
    shape: GuessShape | None = None
    """The model drafter's shape; None: its default."""
    worth: Worth = take_scores

    def may_draft(self, name: str) -> bool:
        return self.asked is None or name in self.asked


ALL_MAY_DRAFT = Terms()


class DrafterSet:
    """Drafters in order of preference, the model drafter last: the first wins a tie."""

    def __init__(
        self,
        text: Collection[Drafter] = (),
        model: ModelDrafter | None = None,
        replay: Replay | None = None,
        guests: Collection[Guest] = (),
    ) -> None:
        """`replay` holds the run-ahead text; `guests` are those of `text` that `behind_doors` has made."""
        names = [*map(_name, text), *([] if model is None else [model.name])]
        if len(set(names)) < len(names):
            raise ValueError(f"two drafters of {','.join(names)!r} have the same name; give your class another `name`")
        self.text = dict(zip(names, text, strict=False))
        self.model, self.replay = model, replay
        self.names = tuple(names)
        self.name = ",".join(names if replay is None else [replay.name, *names])
        self._memories: dict[str, DrafterMemory] = {
            name: drafter for name, drafter in self.text.items() if isinstance(drafter, DrafterMemory)
        }
        if model is not None:
            self._memories[model.name] = model
        self._guests = guests

    def behind_doors(self, vocab_size: int, limit_s: float) -> DrafterSet:
        """The same drafters; a user's own ones are guests, whose calls may take `limit_s`."""
        guests = {
            name: receive(drafter, name, vocab_size, limit_s)
            for name, drafter in self.text.items()
            if not is_ours(drafter)
        }
        text = [guests.get(name, drafter) for name, drafter in self.text.items()]
        return DrafterSet(text, self.model, self.replay, guests.values())

    def begin(self) -> None:
        """A call of the engine begins."""
        for guest in self._guests:
            guest.begin()

    @property
    def is_left_out(self) -> bool:
        """Whether there is nobody left who may draft before the next call."""
        others = len(self._guests) < len(self.text) or self.model is not None or self.replay is not None
        return not others and all(guest.is_left_out for guest in self._guests)

    def led_by(self, replay: Replay) -> DrafterSet:
        """The same drafters, with run-ahead text first."""
        return DrafterSet(self.text.values(), self.model, replay, self._guests)

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        hidden: Sequence[Hidden | None] = (),
        terms: Terms = ALL_MAY_DRAFT,
    ) -> list[Draft]:
        """One draft per view; a model drafter starts from `hidden`."""
        if self.replay is None:
            return self._compete(views, budgets, hidden, terms)
        led = self.replay.propose(views, budgets)
        if not self.names:
            return led
        rest = [0 if len(draft.tokens) else budget for draft, budget in zip(led, budgets, strict=True)]
        others = self._compete(views, rest, hidden, terms)
        return [
            _named(draft, self.replay.name) if len(draft.tokens) else other
            for draft, other in zip(led, others, strict=True)
        ]

    def _compete(
        self, views: Sequence[SequenceView], budgets: Sequence[int], hidden: Sequence[Hidden | None], terms: Terms
    ) -> list[Draft]:
        # A drafter that may not draft gets a budget of 0: it has to see every sequence.
        given = {name: budgets if terms.may_draft(name) else [0] * len(budgets) for name in self.names}
        offers = [drafter.propose(views, given[name]) for name, drafter in self.text.items()]
        if self.model is not None:
            shape = terms.shape or self.model.shape
            offers.append(self.model.guess(views, hidden, given[self.model.name], shape))
        if len(offers) == 1 and self.replay is None:  # the source is clear
            return offers[0]
        return [self._best(drafts, terms.worth) for drafts in zip(*offers, strict=True)]

    def _best(self, drafts: Sequence[Draft], worth: Worth) -> Draft:
        offers = [(name, draft) for name, draft in zip(self.names, drafts, strict=True) if len(draft.tokens)]
        if not offers:
            return EMPTY_DRAFT
        name, best = offers[0] if len(offers) == 1 else max(offers, key=lambda offer: worth(*offer))
        return _named(best, name)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Pass the verdicts to all drafters."""
        for drafter in self._all():
            drafter.observe(verdicts)

    def finish(self, sequence_id: int) -> None:
        """Tell all drafters that a sequence is finished."""
        for drafter in self._all():
            drafter.finish(sequence_id)

    def _all(self) -> list[Drafter | ModelDrafter]:
        parts = (self.replay, *self.text.values(), self.model)
        return [part for part in parts if part is not None]

    def release(self) -> None:
        """Free what can be rebuilt."""
        for memory in self._memories.values():
            memory.release()

    def state(self) -> dict[str, Any] | None:
        """The drafters' states by name; a single drafter's own state. None if no drafter has state."""
        found = {name: memory.state() for name, memory in self._memories.items()}
        states = {name: state for name, state in found.items() if state is not None}
        own = states if len(self.names) > 1 else states.get(",".join(self.names))
        if self.replay is None or not self.names:
            return own
        return {} if own is None else {",".join(self.names): own}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; drafters that are not in it stay as they are."""
        if self.replay is not None:
            # The setting may have listed them in another order.
            own = [value for key, value in state.items() if sorted(key.split(",")) == sorted(self.names)]
            if not own:
                return
            state = own[0]
        states = state if len(self.names) > 1 else dict.fromkeys(self.names, state)
        for name, memory in self._memories.items():
            if name in states:
                memory.restore(states[name])


def _name(drafter: Drafter) -> str:
    return str(drafter.name) if isinstance(drafter, NamedDrafter) else type(drafter).__name__


def _named(draft: Draft, name: str) -> Draft:
    """The draft with its drafter's name as the source."""
    if not len(draft.tokens) or draft.source is not None:
        return draft
    return Draft(draft.tokens, draft.parents, draft.scores, name)
