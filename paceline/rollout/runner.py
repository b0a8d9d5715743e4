"""The runner: lays out a plan and its drafts as flat rows and has the executor sample one token per row.

The rows of decoding sequences come first, so the sampled rows are one block. A step is launched, then collected. If the
device runs asynchronously, a step that does not depend on the tokens of the previous one can be launched before that
one is collected (`launch_overlapped`). Called by `Engine.step` and to measure the cost curve.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.types import Sampling, Verdict
from paceline.kernels.limits import MAX_OVERLAP
from paceline.model.decoder import Decoder
from paceline.model.executor import Executor, Guessed, Overlap, StepInput
from paceline.model.ops.base import Sampled
from paceline.model.rows import CHAIN, Rows, SequenceRows
from paceline.rollout.drafters.model_drafter import comb_parents
from paceline.rollout.proposer import NO_PROPOSAL, NOTHING_EXPECTED, Expected, Proposal, Timing
from paceline.rollout.scheduler import Plan, PrefillChunk
from paceline.rollout.sequence import Sequence
from paceline.rollout.speculation.bandit import Arm
from paceline.rollout.speculation.forest import Forest
from paceline.rollout.stats import Stats, floor_power


@dataclass(frozen=True)
class Lane:
    """The rows of a step in which every sequence decodes one token; in the next one like it, all are one further."""

    rows: Rows
    keys: NDArray[np.uint64]
    steps: NDArray[np.int64]

    def full(self) -> list[int]:
        """The sequences that need another page in the next step."""
        room = self.rows.num_pages * self.rows.page_size
        found: list[int] = np.flatnonzero(self.rows.contexts + 2 > room).tolist()
        return found

    def advanced(self, grown: Mapping[int, SequenceOf[int]]) -> Lane:
        """The next step's; `grown`: the pages of those sequences."""
        return Lane(self.rows.advanced(grown), self.keys, self.steps + 1)


@dataclass
class Flight:
    """A step in flight."""

    plan: Plan
    proposals: list[Proposal]
    ticket: Any
    num_rows: int
    num_kv_tokens: int
    depths: list[int]
    """How many drafted tokens of each decoding sequence may be accepted."""
    row_starts: list[int] = field(default_factory=list)
    """The first row of each sequence."""
    gap: float = 0.0
    """Seconds from the end of the previous step to the launch (if overlapped: to the start), in which an asynchronous
    device has nothing to do but guess."""
    timing: Timing = (0, 0, 0.0)
    """Rows, cached tokens and seconds; set when collected."""
    states: Tensor | None = None
    guessed: Guessed | None = None
    """See `Sampled`; set when collected."""

    wall: float = 0.0
    """Wall-clock seconds from the end of the previous step to its own; set when collected."""
    forest: Forest | None = None
    """The fresh drafts from which its nodes were chosen."""
    arm: Arm | None = None
    """The bandit's choice for it, if there is a bandit."""
    names: Collection[str] | None = ()
    """The drafters that drafted for it; None: all."""
    guesses: list[Expected] | None = None
    """Of an overlapped step: its drafts, as far as they were known at launch."""

    lane: Lane | None = None
    """Its rows, if the sequences do nothing but decode."""

    @property
    def takes_guesses(self) -> bool:
        """Whether its drafts are the device's own guesses after the previous step."""
        return self.guesses is not None and any(guess.is_guessed for guess in self.guesses)

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step may be launched before this one is collected."""
        return max(self.depths, default=0) < MAX_OVERLAP

    num_guesses: int = 0
    """Tokens that the device guesses after it, for every sequence that may be drafted for."""

    def tapped(self, row: int, entry: int) -> tuple[Tensor | None, Guessed | None, int, int] | None:
        """Where a model drafter starts after one of its sequences; see `Sequence.tapped`."""
        is_kept = self.states is not None or self.guessed is not None
        return (self.states, self.guessed, row, entry) if is_kept else None

    def resolve(self, verdicts: SequenceOf[Verdict | None], before: Flight) -> None:
        """Fill in which of the expected tokens its rows held, once the previous step is verified."""
        assert self.guesses is not None
        emitted = {s.sequence_id: v for s, v in zip(before.plan.decoding, verdicts, strict=True)}
        for i, (sequence, guess) in enumerate(zip(self.plan.decoding, self.guesses, strict=True)):
            verdict = emitted[sequence.sequence_id]
            if guess.num_drafted and verdict is not None and not guess.is_guessed:
                self.proposals[i] = guess.proposal(len(verdict.token_ids))


class Runner:
    """Runs plans through one executor."""

    def __init__(self, decoder: Decoder, executor: Executor, cache: Any) -> None:
        self._decoder = decoder
        self._executor = executor
        self._cache = cache
        self._latest: Any = None
        """The ticket of the step collected last."""

    @property
    def can_overlap(self) -> bool:
        """Whether a step may be launched while another is in flight."""
        return self._executor.can_overlap

    def launch(
        self,
        plan: Plan,
        proposals: list[Proposal],
        sampling: Sampling,
        guess_depth: int = 0,
        before: Flight | None = None,
    ) -> Flight:
        """Start a step with all its rows, followed by guesses of this depth.

        `before` is the previous step if it was collected, but some of its tokens are not verified yet.
        """
        if not plan.num_rows:
            return Flight(plan, proposals, None, 0, 0, [])
        decoding = [_decode_rows(s, p) for s, p in zip(plan.decoding, proposals, strict=True)]
        overlap = None if before is None else _overlap(plan, before)
        return self._launch(plan, proposals, decoding, sampling, guess_depth, overlap)

    def launch_overlapped(
        self, plan: Plan, before: Flight, guesses: list[Expected], sampling: Sampling, guess_depth: int = 0
    ) -> Flight:
        """Start the step after `before` while that is in flight; every sequence continues from its sampled token."""
        index_of = {sequence.sequence_id: i for i, sequence in enumerate(before.plan.decoding)}
        entries = np.array([index_of[sequence.sequence_id] for sequence in plan.decoding], np.int32)
        slack = np.array([before.depths[entry] for entry in entries], np.int32)
        decoding = [_expected_rows(s, guess) for s, guess in zip(plan.decoding, guesses, strict=True)]
        guessed = np.array([guess.depth if guess.is_guessed else 0 for guess in guesses], np.int32)
        has_text = any(guess.tokens for guess in guesses)
        expected = [guess.tokens for guess in guesses] if has_text else ()
        overlap = Overlap(entries, slack, expected, guessed if guessed.any() else None)
        flight = self._launch(plan, [NO_PROPOSAL] * len(decoding), decoding, sampling, guess_depth, overlap)
        flight.guesses = guesses
        return flight

    def _launch(
        self,
        plan: Plan,
        proposals: list[Proposal],
        decoding: list[SequenceRows],
        sampling: Sampling,
        guess_depth: int,
        overlap: Overlap | None,
    ) -> Flight:
        rows = Rows.build([*decoding, *map(_chunk_rows, plan.chunks)], self._cache.page_size)
        num_sampled = int(rows.row_starts[len(decoding)])
        owner = rows.sequence_of_row[:num_sampled]
        keys = np.array([s.key for s in plan.decoding], np.uint64)[owner]
        lengths = np.array([s.prompt_length for s in plan.decoding], np.int64)[owner]
        steps = rows.positions[:num_sampled] + 1 - lengths
        next_ids = _next_ids(plan.chunks) if plan.chunks and self._executor.keeper is not None else None
        num_draftable = plan.num_requested + plan.num_stragglers
        ticket = self._executor.launch(
            StepInput(rows, keys, steps, sampling, len(decoding), overlap, next_ids, num_draftable, guess_depth)
        )
        depths = rows.deepest[: len(decoding)].tolist()
        starts, num_guesses = rows.row_starts.tolist(), self._executor.num_guesses(ticket)
        is_plain = len(rows) == len(decoding) and (overlap is None or not overlap.slack.any())
        lane = Lane(rows, keys, steps) if is_plain else None
        return Flight(
            plan, proposals, ticket, len(rows), rows.num_kv_tokens, depths, starts, num_guesses=num_guesses, lane=lane
        )

    def launch_again(
        self, before: Flight, grown: Mapping[int, SequenceOf[int]], sampling: Sampling, guess_depth: int = 0
    ) -> Flight:
        """Start the same step as `before` one token further, while that is in flight; like `launch_overlapped`, but
        without work per sequence. `grown`: the pages of sequences that have got another one."""
        assert before.lane is not None
        lane, count = before.lane.advanced(grown), len(before.plan.decoding)
        overlap = Overlap(np.arange(count, dtype=np.int32), np.zeros(count, np.int32), ())
        num_draftable = before.plan.num_requested + before.plan.num_stragglers
        rows = lane.rows
        step = StepInput(
            rows, lane.keys, lane.steps, sampling, count, overlap, num_draftable=num_draftable, guess_depth=guess_depth
        )
        ticket = self._executor.launch(step)
        flight = Flight(
            before.plan, [NO_PROPOSAL] * count, ticket, count, rows.num_kv_tokens, before.depths, before.row_starts
        )
        flight.num_guesses, flight.lane = self._executor.num_guesses(ticket), lane
        flight.guesses = [NOTHING_EXPECTED] * count
        return flight

    def collect(self, flight: Flight, stats: Stats) -> Sampled:
        """Wait for a step; returns one entry per decode and draft row, sequence by sequence."""
        if flight.ticket is None:
            return Sampled.empty(0)
        sampled, seconds = self._executor.collect(flight.ticket)
        if flight.guesses is not None and self._latest is not None:
            flight.gap = self._executor.seconds_between(self._latest, flight.ticket)
        self._latest = flight.ticket
        flight.timing = (flight.num_rows, flight.num_kv_tokens, seconds)
        flight.states, flight.guessed = sampled.states, sampled.guessed
        stats.steps += 1
        stats.rows += flight.num_rows
        stats.machine_seconds += seconds
        stats.forwards[floor_power(flight.num_rows)] += 1
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
        step = StepInput(rows, np.zeros(num_rows, np.uint64), steps, Sampling())
        return executor.collect(executor.launch(step))[1]


def _overlap(plan: Plan, before: Flight) -> Overlap | None:
    """Where sequences find a latest token that the host does not know: in the previous step, where they had one row."""
    unknown = {s.sequence_id: i for i, s in enumerate(before.plan.decoding) if s.num_pending == 0}
    if not unknown:
        return None
    entries = [unknown.get(sequence.sequence_id, -1) for sequence in plan.decoding] + [-1] * len(plan.chunks)
    return Overlap(np.array(entries, np.int32), np.zeros(len(entries), np.int32), ())


def _decode_rows(sequence: Sequence, proposal: Proposal) -> SequenceRows:
    last, draft = sequence.last_token, proposal.draft
    if not len(draft):
        return SequenceRows([last], sequence.num_cached, sequence.pages)
    tokens = [last, *np.asarray(draft.tokens).tolist()]
    parents = CHAIN if draft.is_chain else [-1, *(int(parent) + 1 for parent in draft.parents)]
    return SequenceRows(tokens, sequence.num_cached, sequence.pages, parents)


def _expected_rows(sequence: Sequence, guess: Expected) -> SequenceRows:
    """Rows whose tokens the device fills in."""
    parents = CHAIN if guess.width <= 1 else [-1, *(parent + 1 for parent in comb_parents(guess.depth, guess.width))]
    return SequenceRows([0] * (1 + guess.num_drafted), sequence.num_cached + 1, sequence.pages, parents)


def _chunk_rows(chunk: PrefillChunk) -> SequenceRows:
    return SequenceRows(_text(chunk)[chunk.start : chunk.stop], chunk.start, chunk.owner.pages)


def _next_ids(chunks: SequenceOf[PrefillChunk]) -> NDArray[np.int32]:
    """The token after each of the chunks' rows; a chunk never holds the last token of its owner."""
    return np.concatenate([_text(chunk)[chunk.start + 1 : chunk.stop + 1] for chunk in chunks])


def _text(chunk: PrefillChunk) -> NDArray[np.int32]:
    return chunk.owner.token_ids if isinstance(chunk.owner, Sequence) else chunk.owner.prompt
