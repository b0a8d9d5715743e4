"""The proposer: collects drafts from untrusted drafters, checks them, spends rows where they pay, learns from results.

A user's drafters are guests (`drafters/guest.py`): what they do wrong ends at their door. Should one of ours raise, all
are skipped for the rest of the call; a malformed draft is dropped; it warns once about either. Neither can change a
token, only time.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from paceline.core.types import EMPTY_DRAFT, Draft, Sampling, Verdict
from paceline.kernels.limits import MAX_GUESSES, MAX_OVERLAP, MAX_TREE_DEPTH, MAX_TREE_ROWS
from paceline.model.executor import Guessed
from paceline.model.rows import depths
from paceline.rollout.arms import Arms, describe, shape_of
from paceline.rollout.draft_format import are_sound, find_problem
from paceline.rollout.drafters.drafter_set import DrafterSet, Terms
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.scheduler import Plan, Scheduler
from paceline.rollout.sequence import Sequence
from paceline.rollout.speculation.acceptance import Acceptance
from paceline.rollout.speculation.allocate import allocate, node_limit, warm_up_choice
from paceline.rollout.speculation.bandit import OFF, Arm
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.forest import Forest
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.stats import Stats, floor_power
from paceline.rollout.token_value import TokenValues

Timing = tuple[int, int, float]
"""Rows, cached tokens read and seconds of one forward."""


class Guessing(Protocol):
    """A step that may use the device's guesses or be followed by some; the runner's `Flight`."""

    plan: Plan
    proposals: list[Proposal]
    guessed: Guessed | None
    guesses: list[Expected] | None


class Step(Protocol):
    """What is known about a finished step; the runner's `Flight`."""

    timing: Timing
    gap: float
    """Seconds before it in which an asynchronous device had nothing to do but guess."""
    wall: float
    """Wall-clock seconds from the end of the previous step to its own, the host's share included."""
    forest: Forest | None
    """The drafts from which its nodes were chosen, if they were fresh."""
    arm: Arm | None
    """The bandit's choice for it."""
    names: Collection[str] | None
    """The drafters that drafted for it; None: all."""


@dataclass(slots=True, eq=False)
class Proposal:
    """A draft as the drafter made it, and the part of it that gets rows."""

    whole: Draft
    kept: list[int]
    draft: Draft
    """The kept nodes, renumbered."""
    source: str

    def to_own(self, nodes: list[int]) -> list[int]:
        """Map nodes of `draft` to nodes of `whole`."""
        return nodes if self.draft is self.whole else [self.kept[node] for node in nodes]

    def from_own(self, nodes: SequenceOf[int]) -> SequenceOf[int]:
        """Map nodes of `whole` to nodes of `draft`."""
        return nodes if self.draft is self.whole else [self.kept.index(node) for node in nodes]


@dataclass(frozen=True, slots=True)
class Expected:
    """A draft for an overlapped step: expected text, starting at the first token that the step in flight emits."""

    tokens: SequenceOf[int]
    depth: int
    """How many positions the overlapped step drafts, after the emitted tokens."""
    source: str
    width: int = 0
    """0, or the number of tokens drafted per position if the device guesses them itself after the step in flight; the
    host does not know those yet."""

    @property
    def num_drafted(self) -> int:
        """Draft rows."""
        return self.depth * max(self.width, 1)

    @property
    def is_guessed(self) -> bool:
        """Whether the tokens are the device's own guesses."""
        return self.width > 0

    def proposal(self, num_emitted: int) -> Proposal:
        """What those rows held, once the number of emitted tokens is known."""
        tokens = list(self.tokens[num_emitted : num_emitted + self.depth])
        assert len(tokens) == self.depth, "the expected text is shorter than the emitted tokens and the draft"
        draft = Draft.chain(tokens)
        return Proposal(draft, list(range(len(tokens))), draft, self.source)


NOTHING_EXPECTED = Expected((), 0, "none")
_REFINE_EVERY = 16
_LATE_FROM, _LATE_UNTIL = 0.9, 0.8
"""Shares of fully accepted drafts: above the first, late drafts start; below the second, they stop."""
_LATE_FADE = 0.9
_LATE = " late"
"""Late drafts have their own acceptance estimate."""
_TOKEN_FADE = 0.95
_ARMS = "arms"
READING_SHARE = 0.03
"""Texts are read by drafters that rest, for later use, while that costs at most this share of generating them."""
HOPED = 0.75
"""The share of guesses that a model drafter may be hoped to get right."""
FIRST_GAP_MS = 0.5
"""The host gap before a drafted step until one was measured."""
NO_PROPOSAL = Proposal(EMPTY_DRAFT, [], EMPTY_DRAFT, "none")


class Proposer:
    """Keeps the cost curve and the acceptance estimates across calls."""

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
        self._drafters, self._replay = drafters, drafters.replay
        self._model = model = drafters.model
        replay_name = None if drafters.replay is None else drafters.replay.name
        self._arms = (
            None
            if settings.always
            else Arms(tuple(drafters.text), model, replay_name, settings.seed, self._guesses_could_pay)
        )
        """Decides who drafts in a step, if anyone."""
        self.arm: Arm | None = None
        """The latest step's arm."""
        self._size = 1
        self._token_values = token_values
        self._settings = settings
        self.curve = curve
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._acceptance = Acceptance(settings.memory_steps)
        self._is_off = False
        self._has_warned = False
        self.forest: Forest | None = None
        """The drafts of the latest `propose`; None if there were none."""
        self.names: Collection[str] | None = ()
        """The drafters of the latest step; None: all."""
        self._known_ahead: set[int] = set()
        """Run-ahead sequences that the drafter has seen and must receive verdicts for."""
        self._share_right = 0.0
        self._is_late = False
        self._manner = ""
        self._seconds = 0.0
        self._num_steps = 0
        self.typical_rows = 0.0
        """Recent draft rows per step."""
        self._token_ms = 0.0
        """Recent wall-clock milliseconds per token of a requested sequence."""
        self._reading = _Reading()
        self._next_limit: int | None = None
        """The most nodes that could pay for any sequence in the next step, if computed in time."""
        self._has_text = False
        """Whether a sequence follows run-ahead text."""
        warm_up_choice()

    def reset(self, sampling: Sampling) -> None:
        """Start a call; a drafter that failed in the last one gets another chance."""
        # Acceptance depends on the temperature, so estimates are kept per temperature, in steps of a fifth: an annealed
        # temperature continues with what its neighbours taught.
        self._manner = f" at temperature {min(round(5 * sampling.temperature), 10) / 5:g}"
        self._is_off = False
        self._drafters.begin()
        if self._arms is not None:
            self._arms.begin()
        self._next_limit = None
        self._has_text = False

    def expect(self, has_text: bool) -> None:
        """Announce new sequences; `has_text`: whether some follow run-ahead text."""
        self._next_limit = None
        self._has_text |= has_text

    def propose(self, plan: Plan, scheduler: Scheduler) -> list[Proposal]:
        """One proposal per decoding sequence, empty if nothing pays."""
        start = time.perf_counter()
        draftable = plan.draftable()
        self.names = ()
        self._size = max(plan.num_requested, 1)
        if self._model is not None and self._model.layer is not None:
            for sequence in draftable:  # the model drafter writes to cache slots after them
                scheduler.fit_draft(sequence, MAX_GUESSES)
        drafts = self._ask(plan, draftable)
        self.forest = None
        if drafts is None:
            self._seconds = time.perf_counter() - start
            return [NO_PROPOSAL] * len(plan.decoding)
        self._known_ahead.update(sequence.sequence_id for sequence in draftable[plan.num_requested :])
        self.forest = Forest.of(drafts)
        sources = [draft.source or self.name for draft in drafts]
        kept = self._choose(plan, self.forest, sources)
        proposals = []
        for sequence, draft, nodes, source in zip(draftable, drafts, kept, sources, strict=True):
            if len(nodes) >= MAX_TREE_DEPTH and not draft.is_chain:
                nodes = _shallow(draft, nodes)[: MAX_TREE_ROWS - 1]
            if nodes:
                nodes = nodes[: scheduler.fit_draft(sequence, len(nodes))]
            proposals.append(Proposal(draft, nodes, _part(draft, nodes), source))
        self._seconds = time.perf_counter() - start
        return proposals + [NO_PROPOSAL] * (len(plan.decoding) - len(draftable))

    @property
    def is_resting(self) -> bool:
        """Whether the next step will have no drafts, whatever the tokens of this one."""
        return self._is_off or (self._arms is not None and self._arms.next == OFF)

    def _is_due(self) -> bool:
        """Whether to draft in this step; call it exactly once per step."""
        if self._arms is None:
            return True
        self.arm = self._arms.take(self._size, self._has_text)
        return self.arm != OFF

    @property
    def is_late(self) -> bool:
        """Whether to draft for a step before the previous one is known.

        A late draft is lost if a draft of the previous step is rejected, so it pays only while nearly all are accepted.
        """
        if self._settings.late != "auto":
            return self._settings.late == "on"
        return self._is_late

    def propose_overlapped(self, plan: Plan, max_emitted: SequenceOf[int]) -> list[Expected]:
        """The text expected of each sequence, with rows for the part after the step in flight.

        `max_emitted`: the most tokens that step may emit per sequence.
        """
        nothing = [NOTHING_EXPECTED] * len(plan.decoding)
        self.forest, self.names = None, ()
        if self._is_off or not self._is_due():
            return nothing
        asked = plan.requested()
        max_emitted = max_emitted[: len(asked)]
        limit = min(self._limit(plan, asked), MAX_OVERLAP - max(max_emitted) - 1)
        rooms = [
            min(limit, self._most(sequence), sequence.num_left - count - 1)
            for sequence, count in zip(asked, max_emitted, strict=True)
        ]
        budgets = [count + room if room > 0 else 0 for count, room in zip(max_emitted, rooms, strict=True)]
        drafts = self._answer(asked, budgets) if max(budgets) > 0 else None
        if drafts is None:
            return nothing
        chains = [_trunk(draft) for draft in drafts]
        tails = [_tail(chain, count) for chain, count in zip(chains, max_emitted, strict=True)]
        sources = [draft.source or self.name for draft in drafts]
        kept = self._choose(plan, Forest.of(tails), [source + _LATE for source in sources])
        expected = [
            Expected(list(map(int, chain.tokens)), len(nodes), source) if nodes else NOTHING_EXPECTED
            for chain, nodes, source in zip(chains, kept, sources, strict=True)
        ]
        return expected + nothing[len(asked) :]

    def follow(self, plan: Plan, max_emitted: SequenceOf[int], num_guesses: int) -> list[Expected]:
        """Replace `propose` when the next step uses what the device guesses after the step in flight."""
        assert self._model is not None
        self.skip(plan)
        self.names = (self._model.name,)
        most, width = (0, 1) if self.arm is None else (min(num_guesses, self.arm.depth), self.arm.width)
        rows = self._max_rows - len(plan.decoding)
        found = [NOTHING_EXPECTED] * len(plan.decoding)
        for i, sequence in enumerate(plan.draftable()):
            depth = min(most, sequence.num_left - max_emitted[i] - 1, rows // width)
            if depth > 0:
                found[i] = Expected((), depth, self._model.name, width)
                rows -= depth * width
        return found

    @property
    def is_guessing(self) -> bool:
        """Whether the next step uses only the device's own guesses and needs no drafts from the host."""
        arms = self._arms
        return arms is not None and not self._is_off and not self._has_text and arms.takes_guesses

    @property
    def guess_depth(self) -> int:
        """How many tokens the device guesses on its own after the step being launched, if it can guess."""
        if self._arms is not None:
            return self._arms.next_depth
        return 0 if self._model is None else self._model.shape.depth

    def recall(self, step: Guessing, before: Guessing) -> None:
        """Fill in the proposals of a step that used the device's guesses after the previous step."""
        assert step.guesses is not None and before.guessed is not None and self._model is not None
        index_of = {sequence.sequence_id: i for i, sequence in enumerate(before.plan.decoding)}
        for i, (sequence, guess) in enumerate(zip(step.plan.decoding, step.guesses, strict=True)):
            if guess.is_guessed:
                entry, shape = index_of[sequence.sequence_id], GuessShape(guess.depth, guess.width)
                draft = self._model.recall(sequence.sequence_id, before.guessed, entry, shape)
                step.proposals[i] = Proposal(draft, list(range(len(draft))), draft, guess.source)

    def skip(self, plan: Plan) -> None:
        """Replace `propose` while drafting rests."""
        self._size = max(plan.num_requested, 1)
        self._is_due()
        self.forest, self.names, self._seconds = None, (), 0.0

    def _choose(self, plan: Plan, forest: Forest, sources: list[str]) -> list[list[int]]:
        if self._settings.always:
            spare = self._max_rows - plan.num_rows
            return [list(range(int(n))) for n in np.diff(np.minimum(np.cumsum([0, *forest.lengths]), spare))]
        weights, others_worth = self._token_values.weigh(plan, self.curve)
        return allocate(
            forest,
            [source + self._manner for source in sources],
            self.curve,
            self._acceptance,
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

    def _ask(self, plan: Plan, draftable: SequenceOf[Sequence]) -> list[Draft] | None:
        """The drafters' checked drafts, within budget; None if they do not run or return nothing usable."""
        if not self._is_due() or self._is_off or not draftable:
            return None
        limit = self._limit(plan, draftable) if self._next_limit is None else self._next_limit
        if limit == 0:
            return None
        # A response's last possible token is never drafted: the previous step emits it as its bonus token.
        budgets = [min(limit, self._most(sequence), sequence.num_left - 1) for sequence in draftable]
        return self._answer(draftable, budgets)

    def _answer(self, sequences: SequenceOf[Sequence], budgets: list[int]) -> list[Draft] | None:
        drafts = self._guard(lambda: self._offers(sequences, tuple(budgets)))
        self._is_off |= self._drafters.is_left_out
        if not isinstance(drafts, list) or len(drafts) != len(budgets):
            if not self._is_off:
                self._warn(f"returned {_shape(drafts)} for {len(budgets)} sequences; generation continues without it")
                self._is_off = True
            return None
        if are_sound(drafts, budgets, self._vocab_size):
            return drafts
        return [self._checked(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]

    def _offers(self, sequences: SequenceOf[Sequence], budgets: SequenceOf[int]) -> list[Draft]:
        views = tuple(sequence.view for sequence in sequences)
        lengths = [sequence.length for sequence in sequences]
        hidden = () if self._model is None else [sequence.hidden for sequence in sequences]
        if self._arms is None or self.arm is None:
            self.names = None
            return self._drafters.propose(views, budgets, hidden, Terms(worth=self._worth), lengths)
        self.names = self._arms.names_of(self.arm)
        shape = shape_of(self.arm)
        return self._drafters.propose(views, budgets, hidden, Terms(self.names, shape, self._worth), lengths)

    def _most(self, sequence: Sequence) -> int:
        """The most nodes for one sequence: many while its run-ahead text is accepted."""
        return self._settings.max_ahead_nodes if self._follows(sequence) else self._settings.max_draft_nodes

    def _follows(self, sequence: Sequence) -> bool:
        """Whether it still has run-ahead text to verify."""
        replay = self._replay
        return replay is not None and replay.num_left(sequence.sequence_id, (sequence.draw, sequence.sample_index)) > 0

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
        host_gap = self._token_values.host_gap
        return host_gap.ms(plan.num_requested + plan.num_stragglers)

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

    def tell(
        self, sequences: SequenceOf[Sequence], verdicts: SequenceOf[Verdict | None], names: Collection[str] | None
    ) -> None:
        """Pass verdicts to the drafters `names` that drafted for the step (None: all).

        Unless they draft for a run-ahead sequence, they see its text when it ends.
        """
        if names is not None and not names:
            return
        known = [
            verdict
            for sequence, verdict in zip(sequences, verdicts, strict=True)
            if verdict and verdict.token_ids and (not sequence.is_ahead or sequence.sequence_id in self._known_ahead)
        ]
        if known:
            self._guard(lambda: self._drafters.observe(known, names))

    def observe(
        self,
        plan: Plan,
        proposals: list[Proposal],
        verdicts: list[Verdict | None],
        stats: Stats,
        step: Step,
    ) -> None:
        """Update the estimates and counters with the results of a step.

        A sequence that had finished before the step began has no verdict.
        """
        self._num_steps += 1
        num_requested = plan.num_requested
        if step.arm == OFF and not step.names:
            self._observe_plain(plan, stats, step)
            return
        start = time.perf_counter()
        asked = list(zip(proposals[:num_requested], verdicts[:num_requested], strict=True))
        drafted = self._count([(proposal, verdict) for proposal, verdict in asked if verdict], stats)
        num_drafted = sum(len(proposal.kept) for proposal in proposals)
        self.typical_rows += (1 - _LATE_FADE) * (num_drafted - self.typical_rows)
        if num_requested:
            arm = describe(step.arm) if step.arm is not None else self.name if num_drafted else OFF.drafter
            stats.arms[floor_power(num_requested), arm] += 1
        forest, late = step.forest, ""
        if forest is None and drafted:
            forest, late = Forest.of([proposal.whole for proposal in proposals]), _LATE
        if forest is not None and forest.num_nodes:
            count = len(forest.drafts)
            sources = [proposal.source + late + self._manner for proposal in proposals[:count]]
            emitted = [verdict.token_ids if verdict else () for verdict in verdicts[:count]]
            self._acceptance.observe_drafts(forest, sources, emitted)
        num_rows, num_kv_tokens, step_seconds = step.timing
        if num_rows and (forest is not None or self._num_steps % _REFINE_EVERY == 0):
            self.curve.refine(num_rows, num_kv_tokens, step_seconds)
        if forest is not None:
            if not late:
                self._token_values.host_gap.observe(num_requested + plan.num_stragglers, 1e3 * step.gap)
            self._seconds += time.perf_counter() - start
            spent_ms, saved_ms = self._spent_and_saved(plan, verdicts, num_rows)
            stats.saved_ms += saved_ms
            self._charge(proposals[:num_requested], spent_ms / max(num_drafted, 1), stats)
        self._report(plan, self._progress(plan, verdicts), step)
        self._prepare_next(plan)

    def _observe_plain(self, plan: Plan, stats: Stats, step: Step) -> None:
        """Learn from a step without drafts; nothing here may cost time per sequence."""
        num_rows, num_kv_tokens, step_seconds = step.timing
        self.typical_rows *= _LATE_FADE
        if plan.num_requested:
            stats.arms[floor_power(plan.num_requested), OFF.drafter] += 1
        # Steps without drafts are many and alike; sampling some of them keeps the curve up to date.
        if num_rows and self._num_steps % _REFINE_EVERY == 0:
            self.curve.refine(num_rows, num_kv_tokens, step_seconds)
        self._report(plan, 1.0, step)
        if self.is_resting:  # otherwise the next step wants to know more
            self._size, self._next_limit = max(plan.num_requested, 1), None
        else:
            self._prepare_next(plan)

    @property
    def model_could_pay(self) -> bool:
        """Whether a well-trained model drafter could save time here; if not, it need not be trained."""
        return self._arms is None or self._arms.model_could_pay

    def _guesses_could_pay(self, size: int, shape: GuessShape) -> bool:
        """Whether guesses of this shape would pay if most came true: a short step has no time for them."""
        if self._model is None or not self._model.pass_ms:
            return True
        plain_ms = self.curve.ms(size)
        gap_ms = self._token_values.host_gap.ms(size) or FIRST_GAP_MS
        tokens = sum(HOPED**depth for depth in range(shape.depth + 1))
        return tokens * plain_ms > plain_ms + gap_ms + shape.depth * self._model.pass_ms

    def _report(self, plan: Plan, progress: float, step: Step) -> None:
        """Tell the bandit what a step's way of drafting gained in wall-clock time."""
        if self._arms is not None and step.arm is not None and plan.num_requested and step.wall > 0:
            plain_ms = self.curve.ms(plan.num_rows, step.timing[1])
            token_ms = 1e3 * step.wall / max(progress * plan.num_requested, 1.0)
            self._token_ms += (1 - _TOKEN_FADE) * (token_ms - self._token_ms) if self._token_ms else token_ms
            self._arms.observe(plan.num_requested, step.arm, progress, step.wall, plain_ms / 1e3)

    def _progress(self, plan: Plan, verdicts: SequenceOf[Verdict | None]) -> float:
        """By how many plain steps this one brought the end of the call nearer.

        The sequences that are likely to finish last decide; but a sequence far in front of the others holds up no one,
        so it counts no more than with equal weights. While others wait for a place, every token counts the same.
        """
        asked = plan.requested()
        emitted = np.array([len(verdict.token_ids) if verdict else 0 for verdict in verdicts[: len(asked)]], np.float64)
        if not len(asked):
            return 0.0
        mean = float(emitted.mean())
        if plan.has_waiting:
            return mean
        shares = self._token_values.shares([sequence.sequence_id for sequence in asked])
        return min(float(emitted @ shares / shares.sum()), mean)

    def _worth(self, name: str, draft: Draft) -> float:
        """The expected number of accepted tokens, with the drafter's scores calibrated by past acceptance."""
        forest = Forest.of([draft])
        odds = self._acceptance.probability(name + self._manner, forest.scores)
        return float(forest.fold(odds, np.multiply, 1.0).sum())

    def _prepare_next(self, plan: Plan) -> None:
        """Compute what the next step needs and this one already determines: on a GPU there is time for it now."""
        rest = plan.rest()
        asked = rest.requested()
        # Overlapped steps never reach `propose`, and a batch may shrink while drafting rests.
        self._size = max(len(asked), 1)
        self._next_limit = None
        # A step without requested sequences has only prefilled, and waiting sequences may have run-ahead text as well.
        if asked and self._replay is not None and not self._replay.num_unseen:
            self._has_text = self._has_text and any(map(self._follows, asked))
        if asked and not plan.chunks and not self._settings.always and not self.is_resting:
            self._token_values.look(asked, rest.ahead())
            self._next_limit = self._limit(rest, rest.draftable())

    def _count(self, judged: list[tuple[Proposal, Verdict]], stats: Stats) -> bool:
        """Update the counters and the share of fully accepted drafts; returns whether anything was drafted."""
        num_drafted = num_right = 0
        for proposal, verdict in judged:
            if proposal.whole is not EMPTY_DRAFT:
                counters = stats.drafters[proposal.source]
                counters.proposed += len(proposal.whole)
                counters.verified += len(proposal.kept)
                counters.accepted += len(verdict.path)
                counters.firsts += bool(verdict.path) and verdict.path[0] == 0
                counters.pieces[len(proposal.kept), len(verdict.path)] += 1
            num_drafted += bool(proposal.kept)
            num_right += bool(proposal.kept) and len(verdict.path) == len(proposal.kept)
        if num_drafted:
            self._share_right += (1 - _LATE_FADE) * (num_right / num_drafted - self._share_right)
            self._is_late = self._share_right > (_LATE_UNTIL if self._is_late else _LATE_FROM)
        return num_drafted > 0

    def _charge(self, proposals: list[Proposal], row_ms: float, stats: Stats) -> None:
        """Divide the cost of a step's drafts among their sources, by rows."""
        for proposal in proposals:
            if proposal.kept:
                stats.drafters[proposal.source].milliseconds += row_ms * len(proposal.kept)

    def _spent_and_saved(self, plan: Plan, verdicts: SequenceOf[Verdict | None], num_rows: int) -> tuple[float, float]:
        """Milliseconds that the draft rows took in this step, and what their tokens would have taken without drafts.

        All tokens but one per sequence were drafted. They save rows, and steps weighted by how likely their sequence is
        to finish last, but no more than with equal weights: a sequence far in front of the others holds up no one.
        """
        plain_ms, ms = self.curve.ms_many([plan.num_rows, num_rows])
        price = self._token_values.price(plan, self.curve)
        draftable = plan.draftable()
        extra = np.array([len(verdict.token_ids) - 1 if verdict else 0 for verdict in verdicts[: len(draftable)]])
        num_requested = plan.num_requested
        saved_ms = extra[num_requested:] @ self._token_values.worth(draftable[num_requested:], price)
        extra = extra[:num_requested]
        if num_requested:
            shares = self._token_values.shares([sequence.sequence_id for sequence in draftable[:num_requested]])
            num_steps = min(extra @ shares / shares.sum(), extra.mean())
            kv_tokens = plan.num_kv_tokens / len(plan.decoding)
            saved_ms += price.step_ms * num_steps + (price.row_ms + price.kv_ms * kv_tokens) * extra.sum()
        return float(ms - plain_ms), float(saved_ms)

    def state(self) -> dict[str, Any] | None:
        """The drafters' state; None if they have none."""
        found: dict[str, Any] | None = self._guard(self._drafters.state, even_if_off=True)
        return found if self._arms is None else {**(found or {}), _ARMS: self._arms.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the drafters' state; a drafter that cannot use it starts afresh."""
        if self._arms is not None and _ARMS in state:
            self._arms.restore(state[_ARMS])
        try:
            self._drafters.restore(state)
        except Exception as error:
            self._warn(f"cannot restore its state ({error}); starting afresh")

    def release(self) -> None:
        """Let the drafters free what they can rebuild, while nothing is drafted."""
        self._guard(self._drafters.release, even_if_off=True)

    def finish(self, sequence: Sequence) -> None:
        """Tell the drafters that a sequence is finished. They may use its text for others, if that costs little."""
        is_cheap = self._reading.ms < READING_SHARE * self._token_ms
        if self.names is None or self.names or (is_cheap and self._arms is not None and self._arms.is_text_awake):
            with self._reading.timed(sequence.length):
                names = None if is_cheap else self.names
                self._guard(lambda: self._drafters.keep(sequence.view, sequence.length, names))
        self._known_ahead.discard(sequence.sequence_id)
        self._guard(lambda: self._drafters.finish(sequence.sequence_id), even_if_off=True)

    def forget_ahead(self) -> None:
        """Finish leftover run-ahead sequences after a call: an interrupt may have prevented their `finish`."""
        known, self._known_ahead = self._known_ahead, set()
        for sequence_id in known:
            self._guard(partial(self._drafters.finish, sequence_id), even_if_off=True)

    def _guard(self, call: Callable[[], Any], even_if_off: bool = False) -> Any:
        if self._is_off and not even_if_off:
            return None
        try:
            return call()
        except Exception as error:  # whatever a drafter does, generation continues without it
            self._warn(f"raised {type(error).__name__}: {error}; generation continues without it")
            self._is_off = True
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


def _trunk(draft: Draft) -> Draft:
    """The chain of first children; only chains can be drafted late."""
    if draft.is_chain:
        return draft
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if int(parent) == (path[-1] if path else -1):
            path.append(node)
    return _part(draft, path)


def _tail(chain: Draft, count: int) -> Draft:
    """A chain from node `count` on; the first score includes the probabilities of the nodes before it."""
    if len(chain) <= count:
        return EMPTY_DRAFT
    scores = None
    if chain.scores is not None:
        scores = [float(score) for score in chain.scores[count:]]
        scores[0] *= math.prod(float(score) for score in chain.scores[:count])
    return Draft.chain(chain.tokens[count:], scores)


def _shape(value: Any) -> str:
    return f"{len(value)} drafts" if isinstance(value, list) else type(value).__name__
