"""The runner: lays out a plan and its drafts as flat rows and has the executor sample one token per row.

The rows of decoding sequences come first, so the sampled rows are one block. A step is launched, then collected. If the
device runs asynchronously, the next step may be launched in between: it continues from whatever the step in flight will
sample. Called by `Engine.step` and to measure the cost curve.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Sampling
from paceline.model.decoder import Decoder
from paceline.model.executor import Executor, Overlap, StepInput, TextInput
from paceline.model.ops.base import Sampled
from paceline.model.rows import Rows, SequenceRows
from paceline.rollout.drafters.model_drafter import comb_parents
from paceline.rollout.sampling_kinds import SamplingKinds
from paceline.rollout.scheduler import Plan, PrefillChunk
from paceline.rollout.sequence import Sequence
from paceline.rollout.stats import Stats, floor_power
from paceline.rollout.step import DraftRows, Step
from paceline.rollout.table import SequenceTable


class Runner:
    """Runs plans through one executor."""

    def __init__(self, decoder: Decoder, executor: Executor, cache: Any, table: SequenceTable) -> None:
        self._decoder = decoder
        self._executor = executor
        self._cache = cache
        self._table = table
        self._latest: Any = None
        """The ticket of the step collected last."""

    @property
    def can_overlap(self) -> bool:
        """Whether a step may be launched while another is in flight."""
        return self._executor.can_overlap

    def launch(
        self,
        plan: Plan,
        drafts: DraftRows,
        kinds: SamplingKinds,
        guess_depth: int = 0,
        before: Step | None = None,
        texts: TextInput | None = None,
    ) -> Step:
        """Start a step with all its rows, followed by guesses of this depth; `before` is in flight, if given."""
        table, slots, count = self._table, plan.slots, len(plan.decoding)
        overlap = None if before is None else self._overlap(plan, before)
        rows = self._lay_out(plan, drafts, overlap)
        num_sampled = int(rows.row_starts[count])
        owner = rows.sequence_of_row[:num_sampled]
        keys = table.keys[slots][owner]
        steps = rows.positions[:num_sampled] + 1 - table.prompt_lengths[slots][owner]
        next_ids = _next_ids(plan.chunks) if plan.chunks and self._executor.keeper is not None else None
        sampling = kinds.of_rows(table.kinds[slots], owner)
        ticket = self._executor.launch(
            StepInput(
                rows, keys, steps, sampling, count, overlap, next_ids, plan.num_draftable, guess_depth, texts,
                drafts.ranks, drafts.branches, drafts.depths,
            )
        )  # fmt: skip
        depths = rows.deepest[:count]
        table.land()
        table.in_flight[slots], table.entries[slots] = depths + 1, np.arange(count)
        return Step(
            plan=plan,
            drafts=drafts,
            ticket=ticket,
            num_rows=len(rows),
            num_kv_tokens=rows.num_kv_tokens,
            starts=rows.row_starts[:count],
            row_counts=drafts.counts + 1,
            parents=rows.parents[:num_sampled],
            inputs=rows.token_ids[:num_sampled],
            owners=table.owners[slots],
            depths=depths,
            guessed=self._executor.guesses(ticket),
            guessed_before=None if before is None else before.guessed,
            entries_before=None if overlap is None else overlap.entries,
            is_searched=texts is not None and texts.is_searched,
            is_branched=texts is not None and texts.is_branched,
            is_early=before is not None,
        )

    def _overlap(self, plan: Plan, before: Step) -> Overlap:
        entries = np.concatenate([self._table.entries[plan.slots], np.full(len(plan.chunks), -1)]).astype(np.int32)
        slack = np.zeros(len(entries), np.int32)
        goes_on = entries >= 0
        slack[goes_on] = before.depths[entries[goes_on]]
        return Overlap(entries, slack)

    def _lay_out(self, plan: Plan, drafts: DraftRows, overlap: Overlap | None) -> Rows:
        """The rows of a step; those of sequences in flight as if none of their drafts were accepted there."""
        table, slots, count = self._table, plan.slots, len(plan.decoding)
        contexts, counts = table.cached[slots], drafts.counts + 1
        if overlap is not None:
            contexts = contexts + (overlap.entries[:count] >= 0)
        widths = table.num_pages[slots]
        pages = table.pages[slots, : int(widths.max(initial=1))]
        if plan.chunks:
            contexts = np.append(contexts, [chunk.start for chunk in plan.chunks])
            counts = np.append(counts, [len(chunk) for chunk in plan.chunks])
            pages, widths = _with_chunks(pages, widths, plan.chunks)
        rows = Rows.lay_out(contexts, counts, pages, widths, self._cache.page_size)
        tokens, starts = rows.token_ids, rows.row_starts
        tokens[starts[:count]] = table.last[slots]
        if drafts.proposals is not None:
            _fill_proposals(rows, drafts)
        elif drafts.branches is not None:
            for entry in np.flatnonzero(drafts.branches).tolist():
                rows.set_tree(entry, branch_parents(int(drafts.branches[entry]), drafts.width))
        elif drafts.depths is not None and drafts.width > 1:
            for entry in np.flatnonzero(drafts.depths).tolist():
                parents = comb_parents(int(drafts.depths[entry]), drafts.width)
                rows.set_tree(entry, [-1, *(parent + 1 for parent in parents)])
        for nth, chunk in enumerate(plan.chunks):
            tokens[starts[count + nth] : starts[count + nth + 1]] = _text(chunk)[chunk.start : chunk.stop]
        return rows

    def collect(self, step: Step, stats: Stats) -> Sampled:
        """Wait for a step; returns one entry per decode and draft row, sequence by sequence."""
        sampled, seconds = self._executor.collect(step.ticket)
        if step.is_early and self._latest is not None:
            step.gap = self._executor.seconds_between(self._latest, step.ticket)
        self._latest = step.ticket
        step.timing = (step.num_rows, step.num_kv_tokens, seconds)
        if sampled.inputs is not None:
            step.inputs = sampled.inputs
        stats.steps += 1
        stats.rows += step.num_rows
        stats.machine_seconds += seconds
        stats.forwards[floor_power(step.num_rows)] += 1
        return sampled

    def time_rows(self, num_rows: int, num_kv_tokens: int) -> float:
        """Time one dummy step of this many rows over this much context, when nothing is cached yet; in seconds.

        The context is cut to the model's maximum: the rows then share positions, which costs the same.
        """
        size, most = self._cache.page_size, self._decoder.config.max_context - 1
        num_kv_tokens = min(num_kv_tokens, most)
        num_pages = -(-(num_rows + num_kv_tokens) // size)
        executor, pages = self._executor.for_timing(num_pages)
        rows = Rows.build([SequenceRows(np.zeros(num_rows, np.int32), num_kv_tokens, pages)], size)
        np.minimum(rows.positions, most, out=rows.positions)
        steps = np.arange(num_rows, dtype=np.int64)
        step = StepInput(rows, np.zeros(num_rows, np.uint64), steps, Sampling(), is_timed=True)
        return executor.collect(executor.launch(step))[1]


@cache
def branch_parents(size: int, width: int) -> tuple[int, ...]:
    """The parents of a sequence's rows: its own row, and so many chains of this size that begin there."""
    return (-1, *(0 if nth == 0 else 1 + branch * size + nth - 1 for branch in range(width) for nth in range(size)))


def _with_chunks(
    pages: NDArray[np.int32], widths: NDArray[np.int64], chunks: SequenceOf[PrefillChunk]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The page tables of the decoding sequences and of the owners of chunks."""
    more = [chunk.owner.pages for chunk in chunks]
    widths = np.append(widths, [len(own) for own in more])
    found = np.zeros((len(pages) + len(more), int(widths.max())), np.int32)
    found[: len(pages), : pages.shape[1]] = pages
    for nth, own in enumerate(more):
        found[len(pages) + nth, : len(own)] = own
    return found, widths


def _fill_proposals(rows: Rows, drafts: DraftRows) -> None:
    """Put the drafts that the host knows into their rows."""
    assert drafts.proposals is not None
    for entry in np.flatnonzero(drafts.counts).tolist():
        draft, start = drafts.proposals[entry].draft, int(rows.row_starts[entry])
        rows.token_ids[start + 1 : start + 1 + len(draft)] = draft.tokens
        if not draft.is_chain:
            rows.set_tree(entry, [-1, *(int(parent) + 1 for parent in draft.parents)])


def _next_ids(chunks: SequenceOf[PrefillChunk]) -> NDArray[np.int32]:
    """The token after each of the chunks' rows; a chunk never holds the last token of its owner."""
    return np.concatenate([_text(chunk)[chunk.start + 1 : chunk.stop + 1] for chunk in chunks])


def _text(chunk: PrefillChunk) -> NDArray[np.int32]:
    return chunk.owner.token_ids if isinstance(chunk.owner, Sequence) else chunk.owner.prompt
