"""The proposer: collects drafts from the drafters on the host, checks them, and gives rows to those that pay.

A user's drafters are guests (`drafters/guest.py`): what they do wrong ends at their door. Should one of ours raise, all
are skipped for the rest of the call; a malformed draft is dropped; it warns once about either. Neither can change a
token, only time. What the device finds by itself is not its business (`draft_rows.py`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from paceline.core.types import EMPTY_DRAFT, Draft, Sampling, Verdict
from paceline.kernels.limits import MAX_GUESSES, MAX_TREE_DEPTH, MAX_TREE_ROWS
from paceline.model.rows import depths
from paceline.rollout.draft_format import are_sound, find_problem
from paceline.rollout.drafters.drafter_set import DrafterSet, Terms
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.proposal import NO_PROPOSAL, Proposal
from paceline.rollout.scheduler import Plan, Scheduler
from paceline.rollout.sequence import Sequence
from paceline.rollout.speculation.acceptance import Acceptance
from paceline.rollout.speculation.allocate import allocate, node_limit, warm_up_choice
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.forest import Forest
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.token_value import TokenValues

READING_SHARE = 0.03
"""Texts are read by drafters that rest, for later use, while that costs at most this share of generating them."""


class Proposed(NamedTuple):
    """What the drafters want to try in a step."""

    proposals: list[Proposal]
    """One per decoding sequence."""
    forest: Forest | None
    """The drafts as proposed, of the first sequences."""


class Proposer:
    """Keeps the acceptance estimates across calls."""

    def __init__(
        self,
        drafters: DrafterSet,
        settings: BudgetSettings,
        curve: CostCurve,
        vocab_size: int,
        max_rows: int,
        token_values: TokenValues,
    ) -> None:
        self.name = drafters.name
        self._drafters, self._replay, self._model = drafters, drafters.replay, drafters.model
        self._token_values, self._settings, self.curve = token_values, settings, curve
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self.acceptance = Acceptance(settings.memory_steps)
        self.is_off = False
        """Whether nobody drafts for the rest of the call."""
        self._has_warned = False
        self._known_ahead: set[int] = set()
        """Run-ahead sequences that the drafters have seen and must receive verdicts for."""
        self._names: Collection[str] | None = ()
        """The drafters of the latest step; None: all."""
        self.manner = ""
        """Appended to sources: acceptance depends on the temperature."""
        self._reading = _Reading()
        self.seconds = 0.0
        """Of the latest `propose`."""
        warm_up_choice()

    def begin(self, sampling: Sampling) -> None:
        """Start a call; a drafter that failed in the last one gets another chance."""
        # Estimates are kept per temperature, in steps of a fifth: an annealed temperature continues with what its
        # neighbours taught.
        self.manner = f" at temperature {min(round(5 * sampling.temperature), 10) / 5:g}"
        self.is_off = False
        self._names = ()
        self._drafters.begin()

    def propose(
        self, plan: Plan, scheduler: Scheduler, names: Collection[str] | None, shape: GuessShape | None
    ) -> Proposed:
        """One proposal per decoding sequence, empty if nothing pays. `names`: who drafts; None: all."""
        start = time.perf_counter()
        draftable = plan.draftable()
        self._names = names
        if self._model is not None and self._model.layer is not None:
            for sequence in draftable:  # the model drafter writes to cache slots after them
                scheduler.fit_draft(sequence, MAX_GUESSES)
        drafts = self._ask(plan, draftable, names, shape)
        if drafts is None:
            self.seconds = time.perf_counter() - start
            return Proposed([NO_PROPOSAL] * len(plan.decoding), None)
        self._known_ahead.update(sequence.sequence_id for sequence in draftable[plan.num_requested :])
        forest = Forest.of(drafts)
        sources = [draft.source or self.name for draft in drafts]
        kept = self._choose(plan, forest, sources)
        proposals = []
        for sequence, draft, nodes, source in zip(draftable, drafts, kept, sources, strict=True):
            if len(nodes) >= MAX_TREE_DEPTH and not draft.is_chain:
                nodes = _shallow(draft, nodes)[: MAX_TREE_ROWS - 1]
            if nodes:
                nodes = nodes[: scheduler.fit_draft(sequence, len(nodes))]
            proposals.append(Proposal(draft, nodes, _part(draft, nodes), source))
        self.seconds = time.perf_counter() - start
        return Proposed(proposals + [NO_PROPOSAL] * (len(plan.decoding) - len(draftable)), forest)

    def _choose(self, plan: Plan, forest: Forest, sources: list[str]) -> list[list[int]]:
        if self._settings.always:
            spare = self._max_rows - plan.num_rows
            return [list(range(int(n))) for n in np.diff(np.minimum(np.cumsum([0, *forest.lengths]), spare))]
        weights, others_worth = self._token_values.weigh(plan, self.curve)
        return allocate(
            forest,
            [source + self.manner for source in sources],
            self.curve,
            self.acceptance,
            num_rows=plan.num_rows,
            num_live=len(plan.decoding),
            kv_tokens=plan.num_kv_tokens,
            max_rows=self._max_rows,
            min_gain=self._settings.min_gain,
            min_probability=self._settings.min_probability,
            weights=weights,
            others_worth=others_worth,
            idle_ms=self._idle_ms(plan),
        )

    def _ask(
        self, plan: Plan, draftable: SequenceOf[Sequence], names: Collection[str] | None, shape: GuessShape | None
    ) -> list[Draft] | None:
        """The drafters' checked drafts, within budget; None if they do not run or return nothing usable."""
        if self.is_off or not draftable:
            return None
        limit = self._limit(plan, draftable)
        if limit == 0:
            return None
        # A response's last possible token is never drafted: the previous step emits it as its bonus token.
        budgets = [min(limit, self._most(sequence), sequence.num_left - 1) for sequence in draftable]
        drafts = self._guard(lambda: self._offers(draftable, tuple(budgets), names, shape))
        self.is_off |= self._drafters.is_left_out
        if not isinstance(drafts, list) or len(drafts) != len(budgets):
            if not self.is_off:
                self._warn(f"returned {_shape(drafts)} for {len(budgets)} sequences; generation continues without it")
                self.is_off = True
            return None
        if are_sound(drafts, budgets, self._vocab_size):
            return drafts
        return [self._checked(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]

    def _offers(
        self,
        sequences: SequenceOf[Sequence],
        budgets: SequenceOf[int],
        names: Collection[str] | None,
        shape: GuessShape | None,
    ) -> list[Draft]:
        views = tuple(sequence.view for sequence in sequences)
        lengths = [sequence.length for sequence in sequences]
        hidden = () if self._model is None else [sequence.hidden for sequence in sequences]
        return self._drafters.propose(views, budgets, hidden, Terms(names, shape, self._worth), lengths)

    def _most(self, sequence: Sequence) -> int:
        """The most nodes for one sequence: many while its run-ahead text is accepted."""
        return self._settings.max_ahead_nodes if self.follows(sequence) else self._settings.max_draft_nodes

    def follows(self, sequence: Sequence) -> int:
        """How much run-ahead text it still has to verify."""
        replay = self._replay
        if replay is None or not sequence.is_foreseen:
            return 0
        return replay.num_left(sequence.sequence_id, (sequence.draw, sequence.sample_index))

    def _limit(self, plan: Plan, draftable: SequenceOf[Sequence]) -> int:
        """The most nodes that could pay for any sequence."""
        most = max(map(self._most, draftable))
        if self._settings.always:
            return min(most, self._max_rows - plan.num_rows)
        weights, others_worth = self._token_values.weigh(plan, self.curve)
        return node_limit(
            self.curve,
            num_rows=plan.num_rows,
            num_live=len(plan.decoding),
            kv_tokens=plan.num_kv_tokens,
            max_rows=self._max_rows,
            max_nodes_per_sequence=most,
            min_gain=self._settings.min_gain,
            weights=weights,
            others_worth=others_worth,
            idle_ms=self._idle_ms(plan),
        )

    def _idle_ms(self, plan: Plan) -> float:
        """How long the device has waited for the host before steps like this."""
        return self._token_values.host_gap.ms(plan.num_draftable)

    def _checked(self, draft: Any, budget: int) -> Draft:
        try:
            if len(draft.tokens) == 0:
                return EMPTY_DRAFT
            problem = find_problem(draft, self._vocab_size)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self._warn(f"returned a malformed draft, which is ignored: {problem}")
            return EMPTY_DRAFT
        checked: Draft = draft
        return checked if len(checked) <= budget else _part(checked, list(range(budget)))

    def _worth(self, name: str, draft: Draft) -> float:
        """The expected number of accepted tokens, with the drafter's scores calibrated by past acceptance."""
        forest = Forest.of([draft])
        odds = self.acceptance.probability(name + self.manner, forest.scores)
        return float(forest.fold(odds, np.multiply, 1.0).sum())

    # --- what became of it --------------------------------------------------------------------------------------------

    def tell(self, sequences: SequenceOf[Sequence], verdicts: SequenceOf[Verdict | None]) -> None:
        """Pass verdicts to the drafters that drafted for the latest step.

        Unless they draft for a run-ahead sequence, they see its text when it ends.
        """
        known = [
            verdict
            for sequence, verdict in zip(sequences, verdicts, strict=True)
            if verdict and verdict.token_ids and (not sequence.is_ahead or sequence.sequence_id in self._known_ahead)
        ]
        if known:
            self._guard(lambda: self._drafters.observe(known, self._names))

    def rest(self) -> None:
        """Nobody drafts for the step being launched; what is missed meanwhile is shown later."""
        self._names = ()

    def finish(self, sequence: Sequence, token_ms: float, is_awake: bool) -> None:
        """Tell the drafters that a sequence is finished. They may use its text for others, if that costs little.

        `token_ms`: what it cost to generate a token; `is_awake`: whether drafters that rest want to see texts at all.
        """
        is_cheap = self._reading.ms < READING_SHARE * token_ms
        if self._names is None or self._names or (is_cheap and is_awake):
            with self._reading.timed(sequence.length):
                names = None if is_cheap else self._names
                self._guard(lambda: self._drafters.keep(sequence.view, sequence.length, names))
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Tell the drafters that a sequence is gone, without showing them its text."""
        self._known_ahead.discard(sequence.sequence_id)
        self._guard(lambda: self._drafters.finish(sequence.sequence_id), even_if_off=True)

    def forget_ahead(self) -> None:
        """Finish leftover run-ahead sequences after a call: an interrupt may have prevented their `finish`."""
        known, self._known_ahead = self._known_ahead, set()
        for sequence_id in known:
            self._guard(partial(self._drafters.finish, sequence_id), even_if_off=True)

    # --- memory -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """The drafters' state; None if they have none."""
        found: dict[str, Any] | None = self._guard(self._drafters.state, even_if_off=True)
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the drafters' state; a drafter that cannot use it starts afresh."""
        try:
            self._drafters.restore(state)
        except Exception as error:
            self._warn(f"cannot restore its state ({error}); starting afresh")

    def release(self) -> None:
        """Let the drafters free what they can rebuild, while nothing is drafted."""
        self._guard(self._drafters.release, even_if_off=True)

    def _guard(self, call: Callable[[], Any], even_if_off: bool = False) -> Any:
        if self.is_off and not even_if_off:
            return None
        try:
            return call()
        except Exception as error:  # whatever a drafter does, generation continues without it
            self._warn(f"raised {type(error).__name__}: {error}; generation continues without it")
            self.is_off = True
            return None

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"drafter {self.name!r} {what}", RuntimeWarning, stacklevel=2)


class _Reading:
    """What it costs the drafters to read a token of a text that was generated without them."""

    def __init__(self) -> None:
        self.ms = 0.005
        """Per token; a first guess, and then measured."""

    @contextmanager
    def timed(self, num_tokens: int) -> Iterator[None]:
        """Measure the reading of at most so many tokens."""
        start = time.perf_counter()
        yield
        ms = 1e3 * (time.perf_counter() - start) / max(num_tokens, 1)
        self.ms += 0.1 * (min(ms, 4 * self.ms) - self.ms)


def _part(draft: Draft, nodes: list[int]) -> Draft:
    """The draft reduced to some of its nodes (closed under parents), renumbered."""
    if len(nodes) == len(draft):
        return draft
    if not nodes:
        return EMPTY_DRAFT
    if draft.has_plain_parents:  # closed under parents, so these are the first ones
        scores = None if draft.scores is None else draft.scores[: len(nodes)]
        return Draft(draft.tokens[: len(nodes)], range(-1, len(nodes) - 1), scores, draft.source)
    place = {-1: -1, **{node: i for i, node in enumerate(nodes)}}
    return Draft(
        [int(draft.tokens[node]) for node in nodes],
        [place[int(draft.parents[node])] for node in nodes],
        None if draft.scores is None else [float(draft.scores[node]) for node in nodes],
        draft.source,
    )


def _shallow(draft: Draft, nodes: list[int]) -> list[int]:
    """The nodes of a tree that lie within the maximum depth."""
    depth = depths(tuple(map(int, draft.parents)))
    # The sequence's own last token is the first row of every path.
    return [node for node in nodes if depth[node] < MAX_TREE_DEPTH - 1]


def _shape(value: Any) -> str:
    return f"{len(value)} drafts" if isinstance(value, list) else type(value).__name__
