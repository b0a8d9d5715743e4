"""The drafter set of an engine: text drafters, at most one model drafter, and run-ahead text, which comes first.

While a sequence follows run-ahead text, no other drafter drafts for it. Otherwise the draft with the most expected
accepted tokens wins, per sequence. `make_drafters` builds the set from a setting; `Proposer` calls it once per step and
says which drafters may draft. Optional capabilities of a drafter are looked up only here. A drafter that rests costs
nothing: it sees what it missed when it is next asked, or when a sequence ends. None may ever see another's drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.core.types import EMPTY_DRAFT, Draft, Drafter, DrafterMemory, NamedDrafter, SequenceView, Verdict
from paceline.rollout.drafters.guest import Guest, is_ours, receive
from paceline.rollout.drafters.replay import Replay

if TYPE_CHECKING:
    from paceline.rollout.drafters.model_drafter import GuessShape, Hidden, ModelDrafter

SEARCHERS = ("ngram", "suffix")
"""Drafters of ours that look up the last few tokens in texts, which a GPU does better."""
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
        searched: Collection[str] = (),
    ) -> None:
        """`replay` holds the run-ahead text. Of `text`, `guests` are those that `behind_doors` has made, and `searched`
        those that rest because the device itself searches the texts."""
        names = [*map(_name, text), *([] if model is None else [model.name])]
        if len(set(names)) < len(names):
            raise ValueError(f"two drafters of {','.join(names)!r} have the same name; give your class another `name`")
        self.text = dict(zip(names, text, strict=False))
        self.model, self.replay = model, replay
        self.names = tuple(names)
        self.name = ",".join(names if replay is None else [replay.name, *names])
        self._shown: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """By drafter, how many tokens of each sequence it has seen; it sees nothing while it rests."""
        self._memories: dict[str, DrafterMemory] = {
            name: drafter for name, drafter in self.text.items() if isinstance(drafter, DrafterMemory)
        }
        if model is not None:
            self._memories[model.name] = model
        self._guests, self._searched = guests, frozenset(searched)
        self.hosted = {name: drafter for name, drafter in self.text.items() if name not in self._searched}
        """The text drafters that draft on the host."""

    def behind_doors(self, vocab_size: int, limit_s: float) -> DrafterSet:
        """The same drafters; a user's own ones are guests, whose calls may take `limit_s`."""
        guests = {
            name: receive(drafter, name, vocab_size, limit_s)
            for name, drafter in self.text.items()
            if not is_ours(drafter)
        }
        text = [guests.get(name, drafter) for name, drafter in self.text.items()]
        return DrafterSet(text, self.model, self.replay, guests.values(), self._searched)

    @property
    def searched_by_device(self) -> list[str]:
        """The text drafters whose search a device with texts does by itself."""
        return [name for name, drafter in self.text.items() if name in SEARCHERS and is_ours(drafter)]

    def without_searched(self) -> DrafterSet:
        """The same drafters, on a device that does their search: these keep what they remember and rest."""
        return DrafterSet(self.text.values(), self.model, self.replay, self._guests, self.searched_by_device)

    def is_hosted(self, model_too: bool) -> bool:
        """Whether anyone drafts on the host; `model_too`: whether the model drafter does."""
        return bool(self.hosted) or self.replay is not None or (model_too and self.model is not None)

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
        return DrafterSet(self.text.values(), self.model, replay, self._guests, self._searched)

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        hidden: Sequence[Hidden | None] = (),
        terms: Terms = ALL_MAY_DRAFT,
        lengths: Sequence[int] | None = None,
    ) -> list[Draft]:
        """One draft per view; a model drafter starts from `hidden`. `lengths` are those of the views' texts."""
        lengths = [len(view.token_ids) for view in views] if lengths is None else lengths
        if self.replay is None or not terms.may_draft(self.replay.name):
            return self._compete(views, budgets, hidden, terms, lengths)
        self._catch_up(self.replay.name, self.replay, views, lengths)
        led = self.replay.propose(views, budgets)
        rest = [0 if len(draft.tokens) else budget for draft, budget in zip(led, budgets, strict=True)]
        others = self._compete(views, rest, hidden, terms, lengths)
        return [
            _named(draft, self.replay.name) if len(draft.tokens) else other
            for draft, other in zip(led, others, strict=True)
        ]

    def _compete(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        hidden: Sequence[Hidden | None],
        terms: Terms,
        lengths: Sequence[int],
    ) -> list[Draft]:
        offers: dict[str, list[Draft]] = {}
        for name, drafter in self.hosted.items():
            if terms.may_draft(name):
                self._catch_up(name, drafter, views, lengths)
                offers[name] = drafter.propose(views, budgets)
        if self.model is not None and terms.may_draft(self.model.name):
            offers[self.model.name] = self.model.guess(views, hidden, budgets, terms.shape or self.model.shape)
        if not offers:
            return [EMPTY_DRAFT] * len(views)
        if len(self.names) == 1 and self.replay is None:  # the source is clear
            return next(iter(offers.values()))
        return [self._best(tuple(offers), drafts, terms.worth) for drafts in zip(*offers.values(), strict=True)]

    def _catch_up(self, name: str, drafter: Drafter, views: Sequence[SequenceView], lengths: Sequence[int]) -> None:
        """Show a drafter what was emitted while it rested; `propose` shows it the whole text of new sequences."""
        shown = self._shown[name]
        missed = []
        for view, length in zip(views, lengths, strict=True):
            start = shown.get(view.sequence_id, length)
            if start < length:
                missed.append(Verdict(view.sequence_id, "none", 0, (), tuple(view.token_ids[start:length].tolist())))
            shown[view.sequence_id] = length
        if missed:
            drafter.observe(missed)

    def _best(self, names: Sequence[str], drafts: Sequence[Draft], worth: Worth) -> Draft:
        offers = [(name, draft) for name, draft in zip(names, drafts, strict=True) if len(draft.tokens)]
        if not offers:
            return EMPTY_DRAFT
        name, best = offers[0] if len(offers) == 1 else max(offers, key=lambda offer: worth(*offer))
        return _named(best, name)

    def observe(self, verdicts: Sequence[Verdict], names: Collection[str] | None = None) -> None:
        """Pass the verdicts to the drafters that drafted for the step, None: all; the others will catch up."""
        for drafter_name, drafter in self._all():
            if names is not None and drafter_name not in names:
                continue
            shown = self._shown[drafter_name]
            for verdict in verdicts:
                if verdict.sequence_id in shown:
                    shown[verdict.sequence_id] += len(verdict.token_ids)
            drafter.observe(verdicts)

    def keep(self, view: SequenceView, length: int, names: Collection[str] | None = None) -> None:
        """Show the whole text of a sequence that is about to end to these drafters (None: all), for use in others.

        Reading a text can cost as much as generating it, so drafters that rest never get to see it.
        """
        for name, drafter in self.hosted.items():
            if names is not None and name not in names:
                continue
            if view.sequence_id in self._shown[name]:
                self._catch_up(name, drafter, [view], [length])
            else:
                drafter.propose([view], [0])

    def finish(self, sequence_id: int) -> None:
        """Tell all drafters that a sequence is finished."""
        for name, drafter in self._all():
            self._shown[name].pop(sequence_id, None)
            drafter.finish(sequence_id)

    def _all(self) -> list[tuple[str, Drafter | ModelDrafter]]:
        lead = [] if self.replay is None else [(self.replay.name, self.replay)]
        model = [] if self.model is None else [(self.model.name, self.model)]
        return [*lead, *self.hosted.items(), *model]

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
