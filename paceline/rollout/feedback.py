"""Feedback: what became of a step's drafts, told to everything that learns from it, and counted.

The engine calls `observe` once per settled step, when the device is already busy with the next. What it says may change
what is tried, never a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import EMPTY_DRAFT, Verdict
from paceline.kernels.cpu.jit import host_loop
from paceline.kernels.text_ranks import LONGEST
from paceline.model.ops.base import Sampled
from paceline.rollout.draft_counts import DraftCounts
from paceline.rollout.draft_rows import RowPlanner
from paceline.rollout.drafters.model_drafter import GuessShape, ModelDrafter
from paceline.rollout.governor import Governor
from paceline.rollout.proposer import Proposer
from paceline.rollout.scheduler import Plan
from paceline.rollout.speculation.forest import Forest
from paceline.rollout.stats import Stats
from paceline.rollout.step import Step
from paceline.rollout.table import SequenceTable
from paceline.rollout.text_sources import TextSources
from paceline.rollout.token_value import TokenValues
from paceline.rollout.verify import Walked

REFINE_EVERY, REFINE_DRAFTED = 16, 8
"""One in so many steps refines the cost curve: those without drafts are many and alike."""
PRICE_EVERY = 8
"""One in so many drafted steps is priced, for reports, and stands for the others."""
RECALL_EVERY = 4
"""One in so many steps tells the network's noise scale how its guesses did."""
GUESS_FADE = 0.98


class Settled(NamedTuple):
    """What the engine knows of a step when it is done."""

    step: Step
    sampled: Sampled
    walked: Walked
    is_live: NDArray[np.bool_]
    """Which of its sequences had not finished before."""
    sources: NDArray[np.int64]
    """Whose drafts they had, as the table numbers them."""


class Feedback:
    """Everything that learns from steps."""

    def __init__(
        self,
        table: SequenceTable,
        governor: Governor,
        rows: RowPlanner,
        proposer: Proposer | None,
        texts: TextSources | None,
        token_values: TokenValues,
        model: ModelDrafter | None,
        search_name: str,
        ahead_name: str,
    ) -> None:
        """`search_name` and `ahead_name`: what drafts from texts on the device, and run-ahead text, are called."""
        self._table, self._governor, self._rows, self._proposer = table, governor, rows, proposer
        self._texts, self._token_values, self._model = texts, token_values, model
        self._search_id, self._ahead_id = table.source_id(search_name), table.source_id(ahead_name)
        self._guess_id = -1 if model is None else table.source_id(model.name)
        self._counts = DraftCounts(len(table.sequences))
        self._num_steps = self._num_drafted = 0

    def sources(self, step: Step) -> NDArray[np.int64]:
        """Whose drafts the sequences of a step have."""
        drafts, slots = step.drafts, step.plan.slots
        if drafts.proposals is not None:
            return np.array([self._table.source_id(proposal.source) for proposal in drafts.proposals], np.int64)
        if drafts.ranks is None or self._texts is None:
            return np.full(len(slots), max(self._guess_id, 0), np.int64)
        ranks = self._texts.ranks[slots]  # as of the step before, where the device looked
        found = self._search_id + (ranks > LONGEST) * (self._ahead_id - self._search_id)
        return found if drafts.depths is None else np.where(drafts.is_from_text, found, self._guess_id)

    def observe(self, settled: Settled, stats: Stats) -> None:
        """Learn from a settled step. The device's texts have to hear of every step, the others of most."""
        step, walked, num_requested = settled.step, settled.walked, settled.step.plan.num_requested
        self._num_steps += 1
        num_drafted, num_from_ahead = int(step.drafts.counts.sum()), 0
        if num_drafted:
            num_from_ahead = _accepted_from(self._ahead_id, settled.sources, walked.counts, num_requested)
            self._count(settled, stats)
        self._learn(settled)
        num_rows, num_kv_tokens, seconds = step.timing
        if num_rows and self._num_steps % (REFINE_DRAFTED if num_drafted else REFINE_EVERY) == 0:
            self._governor.curve.refine(num_rows, num_kv_tokens, seconds)
        if step.drafts.proposals is not None:
            self._token_values.host_gap.observe(step.plan.num_draftable, 1e3 * step.gap)
        if num_drafted:
            if self._num_drafted % PRICE_EVERY == 0:
                spent_ms, saved_ms = self._spent_and_saved(step.plan, walked.counts, num_rows)
                stats.saved_ms += PRICE_EVERY * saved_ms
                self._charge(settled, PRICE_EVERY * spent_ms / num_drafted, stats)
            self._num_drafted += 1
        self._governor.observe(step, walked.counts, num_from_ahead, stats)

    def _learn(self, settled: Settled) -> None:
        """Tell estimates of acceptance what came true."""
        step, drafts, walked = settled.step, settled.step.drafts, settled.walked
        if self._texts is not None:
            judged = self._texts.settle(step, settled.sampled, settled.is_live, walked.counts)
            if judged is not None and len(judged.ranks):
                self._rows.odds.observe(*judged)
        if drafts.forest is not None and drafts.forest.num_nodes and self._proposer is not None:
            assert drafts.proposals is not None
            self._proposer.acceptance.observe_drafts(
                drafts.forest, *_outcomes(drafts.forest, settled, self._proposer.manner)
            )
        if drafts.depths is not None and self._model is not None:
            self._recall(settled, self._model)

    def _recall(self, settled: Settled, model: ModelDrafter) -> None:
        """How the network's own guesses did; its noise scale hears of some of them."""
        step, walked = settled.step, settled.walked
        depths = step.drafts.depths
        assert depths is not None
        guessed = np.flatnonzero((depths > 0) & settled.is_live & (step.drafts.counts > 0))
        if not len(guessed):
            return
        right = float((walked.counts[guessed] > 1).mean())
        self._rows.guess_odds += (1 - GUESS_FADE) * (right - self._rows.guess_odds)
        if self._num_steps % RECALL_EVERY or step.guessed_before is None or step.entries_before is None:
            return
        verdicts: list[Verdict] = []
        for i in guessed.tolist():
            shape = GuessShape(int(depths[i]), step.drafts.width)
            sequence_id = int(step.owners[i])
            model.recall(sequence_id, step.guessed_before, int(step.entries_before[i]), shape)
            verdict = verdict_of(settled, i, model.name)
            if verdict is not None:
                verdicts.append(verdict)
        model.observe(verdicts)

    def _count(self, settled: Settled, stats: Stats) -> None:
        """Count the drafts of requested sequences, by source."""
        step, walked, drafts = settled.step, settled.walked, settled.step.drafts
        is_counted = settled.is_live[: step.plan.num_requested]
        given = settled.sources, drafts.counts, walked.counts, is_counted, step.starts, walked.path
        if self._counts.note(*given, is_proposed=drafts.proposals is not None):
            self.count(stats)
        if drafts.proposals is not None:
            for i in np.flatnonzero(is_counted).tolist():
                proposal = drafts.proposals[i]
                if proposal.whole is not EMPTY_DRAFT:
                    counters = stats.drafters[proposal.source]
                    counters.proposed += len(proposal.whole)
                    if not proposal.kept:
                        counters.pieces[0, 0] += 1

    def count(self, stats: Stats) -> None:
        """Count the drafts that were noted so far."""
        self._counts.count(self._table.sources, stats)

    def _charge(self, settled: Settled, row_ms: float, stats: Stats) -> None:
        """Divide the cost of a step's drafts for requested sequences among their sources, by rows."""
        asked = slice(settled.step.plan.num_requested)
        sources, counts = np.maximum(settled.sources[asked], 0), settled.step.drafts.counts[asked]
        by_source = np.bincount(sources, counts, len(self._table.sources))
        for source in np.flatnonzero(by_source).tolist():
            stats.drafters[self._table.sources[source]].milliseconds += row_ms * float(by_source[source])

    def _spent_and_saved(self, plan: Plan, counts: NDArray[np.int64], num_rows: int) -> tuple[float, float]:
        """Milliseconds that the draft rows took in this step, and what their tokens would have taken without drafts.

        All tokens but one per sequence were drafted. They save rows, and steps weighted by how likely their sequence is
        to finish last, but no more than with equal weights: a sequence far in front of the others holds up no one.
        """
        curve = self._governor.curve
        plain_ms, ms = curve.ms_many([plan.num_rows, num_rows])
        price = self._token_values.price(plan, curve)
        slots, num_requested = plan.slots[: plan.num_draftable], plan.num_requested
        extra = np.maximum(counts[: len(slots)] - 1, 0).astype(np.float64)
        saved_ms = extra[num_requested:] @ self._token_values.worth(slots[num_requested:], price)
        extra = extra[:num_requested]
        if num_requested:
            shares = self._token_values.shares(slots[:num_requested])
            num_steps = min(extra @ shares / shares.sum(), extra.mean())
            kv_tokens = float(self._table.lengths[plan.slots].mean())
            saved_ms += price.step_ms * num_steps + (price.row_ms + price.kv_ms * kv_tokens) * extra.sum()
        return float(ms - plain_ms), float(saved_ms)


@host_loop
def _accepted_from(source: int, sources: Any, counts: Any, num_requested: int) -> int:
    """How many accepted tokens of requested sequences one source drafted."""
    found = 0
    for i in range(num_requested):
        if sources[i] == source and counts[i] > 1:
            found += counts[i] - 1
    return found


def verdict_of(settled: Settled, entry: int, source: str) -> Verdict | None:
    """What one sequence's drafter is told; None if the sequence had finished before."""
    step, walked = settled.step, settled.walked
    count, start = int(walked.counts[entry]), int(step.starts[entry])
    if not settled.is_live[entry]:
        return None
    path = walked.path_of(start, entry)
    rows = start + walked.path[start : start + count]
    num_proposed = int(step.drafts.counts[entry])
    if step.drafts.proposals is not None:
        proposal = step.drafts.proposals[entry]
        path, num_proposed = proposal.to_own(path), len(proposal.whole)
    tokens = settled.sampled.tokens[rows].tolist()
    return Verdict(int(step.owners[entry]), source, num_proposed, tuple(path), tuple(tokens))


def _outcomes(forest: Forest, settled: Settled, manner: str) -> tuple[list[str], list[list[int]]]:
    """The sources of the drafts as proposed, and the tokens that their sequences emitted."""
    proposals, sampled, walked = settled.step.drafts.proposals, settled.sampled, settled.walked
    assert proposals is not None
    count = len(forest.drafts)
    emitted = []
    for i in range(count):
        start = int(settled.step.starts[i])
        rows = start + walked.path[start : start + int(walked.counts[i])]
        emitted.append(sampled.tokens[rows].tolist())
    return [proposal.source + manner for proposal in proposals[:count]], emitted
