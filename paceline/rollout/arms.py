"""The bandit's choice, one step early, of the way to run a step: who drafts, and how deep and wide.

The governor creates it and asks it once per step. Not drafting at all is always among the arms, and so is verifying
nothing but run-ahead text while there is some. What an arm earns is progress per second of wall-clock time, the host's
share included, so that an arm which only looks cheap on the GPU loses. Within a step the chosen drafters still compete
per sequence, and `allocate` still decides who gets rows.

A choice is for the step after the one being planned, because a GPU guesses right after a step, before the host sees its
tokens. Nothing here can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.kernels.text_ranks import BRANCHES
from paceline.rollout.drafters.model_drafter import GuessShape, ModelDrafter
from paceline.rollout.speculation.bandit import OFF, Arm, Bandit

SHAPES: dict[int, tuple[GuessShape, GuessShape, GuessShape]] = {
    1: (GuessShape(4, 1), GuessShape(8, 3), GuessShape(6, 2)),
    8: (GuessShape(6, 1), GuessShape(2, 1), GuessShape(8, 1)),
    64: (GuessShape(2, 1), GuessShape(4, 1), GuessShape(1, 1)),
    256: (GuessShape(1, 1), GuessShape(2, 1), GuessShape(3, 1)),
}
"""By the smallest number of sequences: measured on an H200 up to 32 (`bench/strategies.py`), above that from the cost
of rows there. The first two are also used beside other drafters: one pays with a good drafter, one with a poor one."""
SLEEP, CLOSE = 16, 0.97
"""Sleeping drafters are woken in one of this many calls; those this close to the best do not sleep."""
MOST_BRANCHED = 16
"""The most sequences for which several drafts from texts are tried: the rows of more are not cheap anywhere."""
KNOWN = 12
"""Drafters sleep only on the word of this many steps: the first ones may have met a machine that was busy."""
TRIED = "tried"
"""The key of the tried version in a state."""
MOST_SIZES = 12
"""How many powers of two are checked."""
OTHER = 2
"""A version with this many times the number of the tried one counts as a new drafter: a young drafter learns fast."""
JOINT = "+"
"""Separates the names of drafters that run together."""


class Arms:
    """The bandit and its arms."""

    def __init__(
        self,
        text: Sequence[str],
        model: ModelDrafter | None = None,
        replay: str | None = None,
        seed: int = 0,
        search: str | None = None,
        is_model_hosted: bool = False,
    ) -> None:
        """`text` names the drafters that read text on the host, `replay` the source of run-ahead text there, `search`
        what the device finds in texts by itself; `is_model_hosted`: whether the network guesses on the host."""
        self._text, self._model, self._replay, self._search = tuple(text), model, replay, search
        self._is_model_hosted = is_model_hosted
        self.could_pay: Callable[[int, GuessShape], bool] = lambda size, shape: True
        """Whether a network's guesses of a shape would pay for so many sequences if most of them came true."""
        self._members: dict[str, frozenset[str]] = {}
        self.bandit = Bandit({size: self._arms(size, self._text, model is not None) for size in SHAPES}, seed)
        self._num_calls = self._tried = 0
        """The number of calls, and the drafter version with which the current estimates began."""
        self.is_text_awake = True
        """Whether the drafters that read text are awake in this call."""
        self._latest: Arm | None = None
        self.next: Arm | None = None
        """The arm for the next step; None if not chosen yet."""

    def begin(self) -> None:
        """Start a call. Drafters that have paid nowhere sleep, except in an occasional call.

        Awake, they cost a little in every step, even without drafting. A network that has learned much since is tried
        again, and so is one of an earlier version: it was rolled back, or belongs to another run.
        """
        self._num_calls += 1
        self.next = None
        is_try = self._num_calls % SLEEP == 0
        self.is_text_awake = is_try or self._may_pay(lambda arm: not self.names_of(arm).isdisjoint(self._text))
        if self._model is None:
            return
        version = self._model.version or 0
        if version < self._tried or OTHER * self._tried <= version != 0:  # one from a folder may stay at version 0
            self._tried = version
            self.bandit.forget(lambda arm: arm.depth > 0)
        if is_try or self._may_pay(lambda arm: arm.depth > 0):
            self._model.wake()
        else:
            self._model.sleep()

    def _may_pay(self, is_meant: Callable[[Arm], bool]) -> bool:
        """Whether one of these arms is among the best, or untried, for some number of sequences."""
        is_known = False
        for size in (2**exponent for exponent in range(MOST_SIZES)):
            rates = self.bandit.rates(size)
            own = [rate for arm, rate in rates.items() if is_meant(arm)]
            others = [rate for arm, rate in rates.items() if not is_meant(arm)]
            if own and others:
                is_known |= any(self.bandit.num_reports(arm) >= KNOWN for arm in rates if is_meant(arm))
                if max(own) >= CLOSE * max(others):
                    return True
        return not is_known

    def take(self, size: int, has_text: bool = False) -> Arm:
        """Return the arm for this step with `size` requested sequences, and choose the one for the next step.

        `has_text`: whether a sequence follows run-ahead text.
        """
        arm = self.next or self._choose(size, has_text)
        self.next = self._choose(size, has_text)
        return arm

    @property
    def model_could_pay(self) -> bool:
        """Whether a network could pay for any number of sequences."""
        return any(self.could_pay(size, shape) for size, shapes in SHAPES.items() for shape in shapes)

    def asks_host(self, arm: Arm) -> bool:
        """Whether drafters on the host draft, so that they have to see the tokens of the step before."""
        model = (self._model.name,) if self._model is not None and self._is_model_hosted else ()
        return arm != OFF and not self.names_of(arm).isdisjoint((*self._text, self._replay, *model))

    def searches(self, arm: Arm) -> bool:
        """Whether the device drafts from texts."""
        return self._search is not None and self._search in self.names_of(arm)

    @property
    def next_depth(self) -> int:
        """How many tokens to guess after the step being launched, for the next step."""
        return 0 if self.next is None else self.next.depth

    def names_of(self, arm: Arm) -> frozenset[str]:
        """The drafters of an arm."""
        return self._members.get(arm.drafter) or frozenset(arm.drafter.split(JOINT))  # some come from a saved state

    def _choose(self, size: int, has_text: bool) -> Arm:
        text = self._text if self.is_text_awake else ()
        has_version = self._model is not None and self._model.layer is not None
        lead = () if self._replay is None or not has_text else (self._replay,)
        found = self._arms(size, text, has_version, lead)
        return self.bandit.choose(size, [arm for arm in found if not arm.depth or self.could_pay(size, shape_of(arm))])

    def _arms(self, size: int, text: Sequence[str], has_version: bool, lead: Sequence[str] = ()) -> list[Arm]:
        """The arms for this many sequences; `lead`: run-ahead text, which leads in all of them but OFF."""
        alone = [(name,) for name in text]
        members = [*([()] if lead else []), *alone, *([tuple(text)] if len(text) > 1 else [])]
        found = [OFF, *(self._arm((*lead, *names)) for names in members)]
        beside = lead if self._search is None else (self._search,)
        if self._search is not None:
            found.append(self._arm((self._search,)))
            if size <= MOST_BRANCHED:
                found.append(Arm(self._search, 0, BRANCHES, 0))
        if self._model is not None and has_version:
            others = (*beside, *text) if self._search is None else beside
            shapes = SHAPES[max(start for start in SHAPES if start <= max(size, 1))]
            # Every arm has to be tried: with two arms per shape, two shapes are enough.
            for shape in shapes[:2] if others != lead else shapes:
                found.append(self._arm((*lead, self._model.name), shape))
                if others != lead:
                    found.append(self._arm((*others, self._model.name), shape))
        return found

    def _arm(self, members: Sequence[str], shape: GuessShape | None = None) -> Arm:
        name = JOINT.join(members)
        self._members[name] = frozenset(members)
        return Arm(name, 0, 1, 0) if shape is None else Arm(name, *shape, shape.depth * shape.width)

    def observe(self, size: int, arm: Arm, progress: float, seconds: float, plain_seconds: float) -> None:
        """Record a step's progress and wall-clock time, and how long the GPU would need for it without drafts.

        The first step after a change of arms pays for what others left undone, so it says nothing about its own.
        """
        is_change, self._latest = arm != self._latest, arm
        if size > 0 and plain_seconds > 0 and not is_change:
            self.bandit.observe(size, arm, progress, seconds, 1 / plain_seconds)

    def state(self) -> dict[str, Any]:
        """What the bandit has learned."""
        return self.bandit.state() | {TRIED: self._tried}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. An unreadable one costs what was learned."""
        self.bandit.restore(state)
        tried = state.get(TRIED) if isinstance(state, Mapping) else None
        self._tried = tried if isinstance(tried, int) else 0


def shape_of(arm: Arm) -> GuessShape:
    """The shape of an arm's guesses."""
    return GuessShape(arm.depth, arm.width)


def describe(arm: Arm) -> str:
    """An arm as reports show it, such as `eagle 4x2`."""
    if arm.depth:
        return f"{arm.drafter} {arm.depth}x{arm.width}"
    return f"{arm.drafter} x{arm.width}" if arm.width > 1 else arm.drafter
