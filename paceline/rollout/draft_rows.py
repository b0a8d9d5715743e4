"""Which rows of a step are drafts: asks the proposer, or shares rows among what the device will find by itself.

The governor has chosen the way; this decides how many rows each sequence gets in it. Drafts of the host need the tokens
of the step before. Those of the device do not: the host only decides how many rows each sequence gets, from what it
knew one step ago, and the device fills them in. Called by the engine when it launches a step; returns everything it
decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import host_loop
from paceline.kernels.limits import MAX_TREE_DEPTH, MAX_TREE_ROWS
from paceline.kernels.text_ranks import LONGEST
from paceline.rollout.arms import Arms, shape_of
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.rollout.proposer import Proposer
from paceline.rollout.scheduler import Plan, Scheduler
from paceline.rollout.speculation.bandit import OFF, Arm
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.speculation.share_rows import TextOdds, share_rows
from paceline.rollout.step import DraftRows, Step
from paceline.rollout.text_sources import TextSources
from paceline.rollout.token_value import TokenValues

ANY_RANK, RUN_AHEAD_RANK = 1, LONGEST + 1
"""The least ranks of a match, and of one in run-ahead text."""
BRANCH_PRICE = 1.1
"""Several drafts per sequence may make a step this much longer than one; whether they pay is the governor's affair."""
TYPICAL_FADE = 0.9
FIRST_GUESS_ODDS = 0.6
_TEXT_ODDS, _GUESS_ODDS = "text_odds", "guess_odds"


class TextLimits(NamedTuple):
    """What bounds the drafts of a step, one entry per decoding sequence."""

    num_left: NDArray[np.int64]
    """Tokens it may still get after the row it has anyway; 0 if nothing can be drafted for it."""
    known_ranks: NDArray[np.int32]
    """The rank of its match in a text that the host knows of."""
    least_ranks: NDArray[np.int32]
    """From which rank on a match is drafted; 0: never."""
    caps: NDArray[np.int64]
    """The most rows it may use for a match."""
    num_tokens: int
    """Of all sequences together."""


@host_loop
def _limits(
    slots: Any,
    max_lengths: Any,
    lengths: Any,
    in_flight: Any,
    entries: Any,
    ranks: Any,
    ends: Any,
    num_draftable: int,
    least_rank: int,
    max_draft_nodes: int,
    max_ahead_nodes: int,
    run_ahead_rank: int,
    most: int,
) -> Any:
    """The fields of `TextLimits`. `ends`: where run-ahead text ends, by slot."""
    num_left, caps = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
    known, least = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.int32)
    num_tokens = 0
    for i in range(len(slots)):
        slot = slots[i]
        known[i] = ranks[slot]
        num_tokens += lengths[slot]
        if i >= num_draftable or entries[slot] < 0:
            continue
        left = max_lengths[slot] - lengths[slot] - in_flight[slot] - 1
        if left <= 0:
            continue
        text_left = ends[slot] - lengths[slot]
        is_led = known[i] >= run_ahead_rank and text_left > 0
        num_left[i], least[i] = left, least_rank
        caps[i] = min(min(max_ahead_nodes, text_left) if is_led else max_draft_nodes, left, most)
    return num_left, known, least, caps, num_tokens


class RowPlanner:
    """Turns a way to run a step into draft rows."""

    def __init__(
        self,
        scheduler: Scheduler,
        proposer: Proposer | None,
        texts: TextSources | None,
        arms: Arms | None,
        curve: CostCurve,
        token_values: TokenValues,
        settings: BudgetSettings,
        max_rows: int,
        buckets: NDArray[np.int64],
        guesses_on_device: GuessShape | None,
        least_rank: int,
    ) -> None:
        """`buckets[n]`: how many rows the device computes for n; `guesses_on_device`: the default shape of the guesses
        that the device makes by itself, if it does; `least_rank`: from which rank on matches in texts are drafted."""
        self._scheduler, self._proposer, self._texts, self._arms = scheduler, proposer, texts, arms
        self._curve, self._token_values, self._settings = curve, token_values, settings
        self._max_rows, self._buckets, self._guess = max_rows, buckets, guesses_on_device
        self._least_rank = least_rank
        self._stairs: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self.odds = TextOdds()
        self.guess_odds = FIRST_GUESS_ODDS
        """How often the device's first guess has come true lately."""
        self.typical_rows = 0.0
        """Recent draft rows per step."""

    def state(self) -> dict[str, Any]:
        """How often the device's drafts come true."""
        found: dict[str, Any] = {} if self._texts is None else {_TEXT_ODDS: self.odds.state()}
        return found if self._guess is None else found | {_GUESS_ODDS: self.guess_odds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; what does not fit is ignored."""
        self.odds.restore(state.get(_TEXT_ODDS))
        odds = state.get(_GUESS_ODDS)
        if isinstance(odds, int | float) and 0 <= odds <= 1:
            self.guess_odds = float(odds)

    def asks_host(self, arm: Arm | None) -> bool:
        """Whether drafts in this way need the tokens of the step before."""
        if self._proposer is None or self._proposer.is_off:
            return False
        return arm is None or self._arms is None or self._arms.asks_host(arm)

    def searches(self, arm: Arm | None) -> bool:
        """Whether the device looks for drafts in texts before a step in this way."""
        if self._texts is None:
            return False
        return arm is None or self._arms is None or self._arms.searches(arm)

    def branches(self, arm: Arm | None) -> int:
        """How many drafts from texts a sequence may have in this way."""
        return arm.width if arm is not None and self.searches(arm) and not arm.depth else 1

    def guess_depth(self, arm: Arm | None) -> int:
        """How many tokens the device has to guess before a step in this way."""
        if self._guess is None:
            return 0
        return self._guess.depth if self._arms is None else 0 if arm is None else arm.depth

    def rows(self, plan: Plan, arm: Arm | None, before: Step | None) -> DraftRows:
        """The draft rows of a step; `before` is in flight, if given."""
        found = self._rows(plan, arm, before)
        self.typical_rows += (1 - TYPICAL_FADE) * (int(found.counts.sum()) - self.typical_rows)
        return found

    def _rows(self, plan: Plan, arm: Arm | None, before: Step | None) -> DraftRows:
        if arm != OFF and not self._settings.always:
            self._token_values.look(plan)
        if arm != OFF and self._proposer is not None and self.asks_host(arm):
            assert before is None, "a drafter on the host has to see the tokens"
            return self._proposed(plan, arm, self._proposer)
        if self._proposer is not None:
            self._proposer.rest()
        if arm == OFF or before is None or (self._texts is None and self._guess is None):
            return DraftRows.none(len(plan.decoding))
        return self._found_on_device(plan, arm, before)

    def _proposed(self, plan: Plan, arm: Arm | None, proposer: Proposer) -> DraftRows:
        names = None if arm is None or self._arms is None else self._arms.names_of(arm)
        proposals, forest = proposer.propose(plan, self._scheduler, names, None if arm is None else shape_of(arm))
        counts = np.array([len(proposal.kept) for proposal in proposals], np.int64)
        return DraftRows(counts, proposals, forest)

    def _found_on_device(self, plan: Plan, arm: Arm | None, before: Step) -> DraftRows:
        """Rows for matches in texts and for guesses after the step in flight, for sequences that are in it."""
        limits, shape = self._limits(plan), self._shape(arm, before)
        found = DraftRows(np.zeros(len(plan.slots), np.int64))
        depths = np.minimum(limits.num_left, shape.depth) if shape.depth else found.counts
        if self._texts is not None and before.is_searched and self.searches(arm):
            found.known_ranks, found.ranks = limits.known_ranks, limits.least_ranks
            if shape.depth:
                found.ranks, depths = self._text_or_guess(found.known_ranks, found.ranks, depths)
        if shape.depth:
            found.depths, found.width = self._fitting(plan, depths, shape.width), shape.width
            found.counts = found.depths.astype(np.int64) * shape.width
        if found.known_ranks is not None:
            self._add_texts(plan, found, limits, self.branches(arm) if before.is_branched else 1)
        self._reserve(plan, found)
        return found

    def _limits(self, plan: Plan) -> TextLimits:
        table, texts, settings = self._scheduler.table, self._texts, self._settings
        ranks, ends = (table.entries, table.entries) if texts is None else (texts.ranks, texts.ends)
        numbers = plan.num_draftable, self._least_rank, settings.max_draft_nodes, settings.max_ahead_nodes
        given = plan.slots, table.max_lengths, table.lengths, table.in_flight, table.entries, ranks, ends, *numbers
        return TextLimits(*_limits(*given, RUN_AHEAD_RANK, MAX_TREE_ROWS - 1))

    def _add_texts(self, plan: Plan, found: DraftRows, limits: TextLimits, num_branches: int) -> None:
        """Add rows for matches in texts, at most for `num_branches` of each sequence."""
        caps = limits.caps if found.depths is None else np.where(found.is_from_text, limits.caps, 0)
        num_guessed = 0 if found.depths is None else int(found.counts.sum())
        shared = self._share(plan, limits, caps, num_guessed)
        found.counts = shared if found.depths is None else found.counts + shared
        if num_branches > 1:
            found.width, found.branches = num_branches, self._branched(plan, found.counts, num_branches)
            found.counts = np.where(found.branches > 0, found.branches * num_branches, found.counts)

    def _reserve(self, plan: Plan, found: DraftRows) -> None:
        """Cut the rows to those that find a slot. Several drafts, or a comb, are there as a whole or not at all."""
        granted = self._scheduler.reserve(plan, found.counts)
        if granted is found.counts:
            return
        is_whole = granted == found.counts
        found.counts = granted
        if found.branches is not None:
            is_cut = ~is_whole & (found.branches > 0)
            found.counts = np.where(is_cut, np.minimum(granted, found.branches), granted)
            found.branches = np.where(is_cut, 0, found.branches).astype(np.int32)
        if found.depths is not None:
            is_cut = ~is_whole & (found.depths > 0)
            found.counts = np.where(is_cut, 0, found.counts)
            found.depths = np.where(is_cut, 0, found.depths).astype(np.int32)

    def _shape(self, arm: Arm | None, before: Step) -> GuessShape:
        """The shape of the device's guesses in this step; of depth 0 if there are none."""
        if self._guess is None or before.guessed is None:
            return GuessShape(0, 1)
        wanted = self._guess if arm is None or self._arms is None else shape_of(arm)
        return GuessShape(min(wanted.depth, before.guessed.depth), max(wanted.width, 1))

    def _text_or_guess(
        self, known: NDArray[np.int32], ranks: NDArray[np.int32], depths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Draft from a text where its match is as good as a guess, otherwise guess."""
        is_text = self.odds.table[known, 0] >= self.guess_odds
        return np.where(is_text, ranks, 0).astype(np.int32), np.where(is_text & (ranks > 0), 0, depths)

    def _fitting(self, plan: Plan, depths: NDArray[np.int64], width: int) -> NDArray[np.int32]:
        """As many guesses as there are rows for, first come, first served."""
        room = self._max_rows - plan.num_rows
        fits = np.cumsum(depths * width) <= room
        return np.where(fits, depths, 0).astype(np.int32)

    def _branched(self, plan: Plan, counts: NDArray[np.int64], width: int) -> NDArray[np.int32]:
        """The rows of each draft where sequences get several: where that costs little, everybody who has one does."""
        stairs, few = self._staircase(), plan.num_rows + int(counts.sum())
        sizes = np.minimum(counts, min((MAX_TREE_ROWS - 1) // width, MAX_TREE_DEPTH - 1))
        many = plan.num_rows + int((sizes * width).sum())
        is_cheap = many <= self._max_rows and stairs[many] <= BRANCH_PRICE * stairs[few]
        return (sizes if is_cheap else np.zeros_like(sizes)).astype(np.int32)

    def _staircase(self) -> NDArray[np.float64]:
        """Milliseconds by rows, where a bucket's padding is free."""
        if self._stairs is None or self._stairs[0] is not self._curve.grid[1]:  # the curve has changed
            self._stairs = self._curve.grid[1], self._curve.ms_many(self._buckets)
        return self._stairs[1]

    def _share(self, plan: Plan, limits: TextLimits, caps: NDArray[np.int64], num_guessed: int) -> NDArray[np.int64]:
        if self._settings.always:
            granted = np.minimum(np.cumsum(caps), self._max_rows - plan.num_rows - num_guessed)
            return np.diff(np.maximum(granted, 0), prepend=0)
        weights, others_worth = self._token_values.weigh(plan, self._curve)
        live_ms = self._curve.ms(max(len(plan.decoding), 1))
        num_rows = plan.num_rows + num_guessed
        return share_rows(
            limits.known_ranks,
            caps,
            weights,
            others_worth,
            self.odds,
            self._staircase(),
            num_rows=num_rows,
            # Rows that are there anyway have to run some time; only the rows above them are charged.
            more_ms=live_ms - self._curve.ms(num_rows) + self._curve.kv_ms * limits.num_tokens,
            min_gain=self._settings.min_gain,
            min_probability=self._settings.min_probability,
        )
