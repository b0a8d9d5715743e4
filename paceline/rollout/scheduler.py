"""The scheduler: chooses the sequences and KV pages of the next step. Owns the pages; never looks at a token's value.

First come, first served. Every running sequence gets a row in each step; prompts, and sequences that lost their pages,
are prefilled in chunks beside them. When pages run out, the newest running sequence is preempted and waits. It is
prefilled again later and continues exactly where it was, because a prefilled row is bit-equal to a decoded one. Who
waits affects time, never tokens.

A step may be planned while another is in flight (`is_early`): pages then cover the most that both can emit, and if they
do not suffice without preempting somebody, there is no plan until that step is settled.

Run-ahead sequences (`is_ahead`) start when no requested sequence waits, on as many spare rows as the caller allows; if
they continue earlier run-ahead text, they prefill it in such rows. When a page or a place is needed, the scheduler
drops them first, newest first, and does not restart them in the same call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import host_loop
from paceline.model.kv_cache import PagePool
from paceline.model.ops.base import Cache
from paceline.rollout.prefix_cache import PrefixCache
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.table import SequenceTable


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, stop) of a group's prompt, or of a resumed sequence, to prefill into the cache."""

    owner: PromptGroup | Sequence
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Plan:
    """The rows of a step before drafting: decoding sequences and prefill chunks."""

    decoding: list[Sequence] = field(default_factory=list)
    """Requested sequences first, then run-ahead ones."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    num_stragglers: int = 0
    """How many of the run-ahead sequences, from the first, may get drafts."""
    has_waiting: bool = False
    """Whether requested sequences wait for a place."""

    def add(self, *sequences: Sequence) -> None:
        """Give more sequences a row, after the others."""
        self.decoding = [*self.decoding, *sequences]
        self.__dict__.pop("slots", None)
        self.__dict__.pop("num_requested", None)

    @property
    def num_rows(self) -> int:
        """Rows without drafts."""
        return len(self.decoding) + sum(map(len, self.chunks))

    @cached_property
    def num_requested(self) -> int:
        """Decoding sequences that are not run-ahead; computed once, when the plan is made."""
        return sum([not sequence.is_ahead for sequence in self.decoding])

    @property
    def num_draftable(self) -> int:
        """How many of the decoding sequences, from the first, may get drafts."""
        return self.num_requested + self.num_stragglers

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """The table's slots of the decoding sequences, when the plan was made."""
        return np.array([sequence.slot for sequence in self.decoding], np.int64)

    def requested(self) -> list[Sequence]:
        """The decoding sequences that the caller requested."""
        return self.decoding[: self.num_requested]

    def ahead(self) -> list[Sequence]:
        """The decoding run-ahead sequences."""
        return self.decoding[self.num_requested :]

    def draftable(self) -> list[Sequence]:
        """The sequences that may get drafts."""
        return self.decoding[: self.num_draftable]

    @property
    def num_kv_tokens(self) -> int:
        """Cached tokens that the step reads."""
        return sum(s.length for s in self.decoding) + sum(c.stop for c in self.chunks)


class Members(NamedTuple):
    """The running sequences, and their slots in the table."""

    asked: list[Sequence]
    """The requested ones."""
    asked_slots: NDArray[np.int64]
    slots: NDArray[np.int64]
    """Of all, in the order in which they started."""
    num_changes: int
    """Of the table, when this was true."""


NOBODY = Members([], np.zeros(0, np.int64), np.zeros(0, np.int64), -1)


class Unsettled(Exception):
    """A step cannot be planned before the one in flight is settled."""


class Load(NamedTuple):
    """The work of a step: rows and cached tokens; run-ahead sequences among them, and the tokens they have made."""

    num_rows: int
    kv_tokens: int
    num_ahead: int
    num_made: int


Move = Callable[[SequenceOf[int], SequenceOf[int]], None]
"""Copies single tokens between physical slots, in every layer. A source is never an earlier move's target."""


class Scheduler:
    """Waiting and running sequences, and the pages they hold."""

    def __init__(
        self, cache: Cache, max_sequences: int, max_rows: int, prefill_chunk: int, move: Move | None = None
    ) -> None:
        """`move` copies tokens to other cache slots, if steps do not move accepted tree nodes themselves."""
        self._cache = cache
        self._move = move
        self._pool = PagePool(cache.num_pages)
        self._max_sequences = min(max_sequences, max_rows)
        self._max_rows = max_rows
        self.table = SequenceTable(self._max_sequences, max_rows)
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self._ahead: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._num_open = 0
        """Unfinished requested sequences."""
        self._broken: list[Sequence] = []
        self._groups: dict[int, PromptGroup] = {}
        self._planned: set[int] = set()
        """Groups with a chunk in the plan being made: they must keep their pages."""
        self._moves: list[tuple[int, int]] = []
        self._members = NOBODY
        self._has_ahead_pending = False
        """Whether a running run-ahead sequence has text to prefill."""
        self._prefixes = PrefixCache(cache.page_size, 0)
        self.num_preemptions = 0
        self.num_prefix_tokens = 0
        """Tokens of prompts that were found cached."""

    @property
    def has_work(self) -> bool:
        """Whether any requested sequence is unfinished."""
        return self._num_open > 0

    @property
    def has_ahead_waiting(self) -> bool:
        """Whether spare rows could start a run-ahead sequence, or prefill the text it continues."""
        return self._can_begin_ahead or self._has_ahead_pending

    @property
    def _can_begin_ahead(self) -> bool:
        return bool(self._ahead) and not self._waiting and len(self._running) < self._max_sequences

    @property
    def most_tokens(self) -> int:
        """The longest sequence that can run alone; one page goes to its group's own copy of the prompt's end."""
        return (self._pool.num_pages - 1) * self._cache.page_size

    def live(self) -> Iterator[Sequence]:
        """All unfinished sequences, run-ahead ones included."""
        yield from self._running
        yield from self._waiting
        yield from self._ahead

    def load(self) -> Load:
        """What a step has to do as things stand."""
        slots, table = self._now().slots, self.table
        lengths, is_ahead = table.lengths[slots], table.is_ahead[slots]
        num_made = int((lengths - table.prompt_lengths[slots])[is_ahead].sum())
        return Load(len(slots), int(lengths.sum()), int(is_ahead.sum()), num_made)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._groups[sequence.group_id] = sequence.group
        if sequence.is_ahead:
            self._ahead.append(sequence)
        else:
            self._waiting.append(sequence)
            self._num_open += 1

    def plan(self, ahead_rows: int = 0, stragglers: Collection[int] = (), is_early: bool = False) -> Plan | None:
        """Choose the step's rows; every chosen row has its page. At most `ahead_rows` start run-ahead sequences.

        Among run-ahead sequences, `stragglers` come first. `is_early`: a step is in flight whose tokens are unknown.
        Sequences that turn out to have finished in it get rows that nobody reads. Then there may be no plan.
        """
        plan = Plan()
        self._planned.clear()
        try:
            while self.has_work and not plan.num_rows:
                # Oldest first: only newer sequences are preempted for pages, so none placed here loses its own.
                members = self._now()
                plan.decoding = self._place(members.asked, members.asked_slots, is_early)
                if plan.decoding is members.asked:
                    plan.slots, plan.num_requested = members.asked_slots, len(members.asked)
                self._prefill(plan)
                if plan.num_rows:
                    # Last, because everything above may have dropped some of them.
                    self._continue_run_ahead(plan, stragglers, is_early)
                    room = self._prefill_ahead(plan, min(ahead_rows, self._max_rows - plan.num_rows))
                    self._begin_ahead(plan, room)
                elif is_early:
                    return None
                else:
                    # Half-resumed sequences hold all pages: preempt one so that the others can continue.
                    self._preempt(self._running[-1])
        except Unsettled:
            return None
        plan.has_waiting = bool(self._waiting)
        return plan

    def _place(self, sequences: list[Sequence], slots: NDArray[np.int64], is_early: bool) -> list[Sequence]:
        """Those of the running sequences that decode a token in the step; they have a page for it."""
        table = self.table
        columns = table.lengths, table.cached, table.in_flight, table.max_lengths, table.num_pages
        is_due, is_full, num_due, num_full = _due(slots, *columns, self._cache.page_size)
        if not num_full:
            return sequences if num_due == len(slots) else [sequences[i] for i in np.flatnonzero(is_due).tolist()]
        found = []
        for sequence, due, full in zip(sequences, is_due.tolist(), is_full.tolist(), strict=True):
            if due and sequence.slot >= 0 and (not full or self._make_room(sequence, is_early)):
                found.append(sequence)
        return found

    def _now(self) -> Members:
        """The running sequences."""
        if self._members.num_changes != self.table.num_changes:
            asked = [sequence for sequence in self._running if not sequence.is_ahead]
            self._members = Members(asked, _slots(asked), _slots(self._running), self.table.num_changes)
        return self._members

    def reserve(self, plan: Plan, num_drafted: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many draft rows of each decoding sequence find a slot; takes free pages only, without preempting."""
        table, size = self.table, self._cache.page_size
        slots = plan.slots
        room = table.num_pages[slots] * size - (table.cached[slots] + table.in_flight[slots] + 1)
        missing = num_drafted > room
        if not missing.any():
            return num_drafted
        granted = num_drafted.copy()
        for i in np.flatnonzero(missing).tolist():
            granted[i] = self.fit_draft(plan.decoding[i], int(num_drafted[i]))
        return granted

    def _prefill(self, plan: Plan) -> None:
        """Resume and start sequences in the rows that decoding leaves."""
        room = min(self._prefill_chunk, self._max_rows - len(plan.decoding))
        for sequence in self._unready():
            if room > 0 and not sequence.is_ahead:
                room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
        places = self._max_sequences - len(self._now().asked) if self._waiting else 0
        started: list[Sequence] = []
        for sequence in self._waiting:
            if places <= 0 or room <= 0:
                break
            places -= 1
            group = sequence.group
            if not group.is_ready and group.group_id not in self._planned:
                self._find_prefix(group)
            if not group.is_ready:
                if group.group_id in self._planned:
                    continue
                used = self._plan_chunk(plan, group, group.num_shared, room)
                if not used:
                    break
                self._planned.add(group.group_id)
                room -= used
            elif self._start(sequence):
                started.append(sequence)
                if sequence.num_pending == 1:
                    plan.add(sequence)
                    room -= 1
                else:
                    room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
            else:
                break
        for sequence in started:
            self._waiting.remove(sequence)

    def _unready(self) -> list[Sequence]:
        """The running sequences with text to prefill."""
        slots = self._now().slots
        is_unready = self.table.lengths[slots] - self.table.cached[slots] > 1
        return [self._running[i] for i in np.flatnonzero(is_unready).tolist()] if is_unready.any() else []

    def _continue_run_ahead(self, plan: Plan, stragglers: Collection[int], is_early: bool) -> None:
        """Give every run-ahead sequence a row, as far as pages and rows last."""
        members = self._now()
        if len(members.asked) == len(self._running):
            return
        running = [sequence for sequence in self._running if sequence.is_ahead]
        if stragglers:
            running.sort(key=lambda sequence: sequence.sequence_id not in stragglers)
        room = self._max_rows - plan.num_rows
        found = self._place(running, _slots(running), is_early)[:room]
        plan.add(*found)
        plan.num_stragglers = sum(sequence.sequence_id in stragglers for sequence in found) if stragglers else 0

    def _prefill_ahead(self, plan: Plan, room: int) -> int:
        """Prefill the text that run-ahead sequences continue; returns the rows left."""
        if self._has_ahead_pending:
            pending = [sequence for sequence in self._unready() if sequence.is_ahead]
            self._has_ahead_pending = bool(pending)
            for sequence in pending:
                if room > 0:
                    room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
        return room

    def _begin_ahead(self, plan: Plan, room: int) -> None:
        """Prefill the prompts of run-ahead sequences and start them."""
        while self._can_begin_ahead and room > 0:
            sequence = self._ahead[0]
            group = sequence.group
            if group.is_ready and self._start(sequence):
                self._ahead.popleft()
                if sequence.num_pending == 1:
                    plan.add(sequence)
                    room -= 1
                else:
                    self._has_ahead_pending = True
                    room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
            elif group.is_ready or group.group_id in self._planned:
                return
            else:
                used = self._plan_chunk(plan, group, group.num_shared, room)
                if not used:
                    return
                self._planned.add(group.group_id)
                room -= used

    def _plan_chunk(self, plan: Plan, owner: PromptGroup | Sequence, end: int, room: int) -> int:
        """Plan the owner's next chunk if free pages allow; returns its rows."""
        stop = min(owner.num_cached + room, end)
        keep = owner if isinstance(owner, PromptGroup) else owner.group
        if not self._extend(owner, stop, reserve=self._num_growing(owner), keep=keep):
            return 0
        plan.chunks.append(PrefillChunk(owner, owner.num_cached, stop))
        return len(plan.chunks[-1])

    def _start(self, sequence: Sequence) -> bool:
        """Start a waiting sequence on the shared pages of its prompt, if there is a page for its first row."""
        group = sequence.group
        shared, sequence.pages, sequence.num_cached = group.pages, list(group.pages), group.num_cached
        self._pool.share(shared)
        if not self._extend(sequence, sequence.num_cached + 1, reserve=self._num_growing(), keep=group):
            self._drop(sequence)
            return False
        if len(self._running) >= self._max_sequences:
            has_broken = self._break_newest()
            assert has_broken, "a place counts as free only if it is empty or a run-ahead sequence has it"
        self._running.append(sequence)
        self.table.enter(sequence)
        return True

    def _num_growing(self, besides: PromptGroup | Sequence | None = None) -> int:
        """How many running sequences may need a page more than they have: a newcomer leaves one for each."""
        table = self.table
        may_grow = (table.owners != 0) & (table.max_lengths > table.num_pages * self._cache.page_size)
        if isinstance(besides, Sequence) and besides.slot >= 0:
            may_grow[besides.slot] = False
        return int(np.count_nonzero(may_grow))

    def _make_room(self, sequence: Sequence, is_early: bool) -> bool:
        """Find a page for a running sequence's next row, preempting newer ones; False: it was preempted itself."""
        needed = sequence.num_cached + int(self.table.in_flight[sequence.slot]) + 1
        while not self._extend(sequence, needed, reserve=0, keep=sequence.group):
            newest = sequence if sequence.is_ahead else self._running[-1]
            if is_early and not newest.is_ahead:
                raise Unsettled
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _extend(self, owner: PromptGroup | Sequence, num_tokens: int, reserve: int, keep: PromptGroup) -> bool:
        """Take pages for `num_tokens`, unshare the next page to write, keep `reserve` free; evicts idle prompts."""
        size = self._cache.page_size
        missing = -(-num_tokens // size) - len(owner.pages)
        writes = owner.num_cached // size
        is_copied = writes < len(owner.pages) and self._pool.is_shared(owner.pages[writes])
        needed = max(missing, 0) + is_copied
        if needed == 0:
            return True
        is_ahead = keep.is_ahead
        while self._pool.num_free < needed + reserve:
            if self._evict_prefix():
                continue
            if not self._drop_idle_group(keep) and (is_ahead or not self._break_newest()):
                return False
        if is_copied:
            [fresh] = self._pool.take(1)
            self._cache.copy_page(owner.pages[writes], fresh)
            self._pool.release([owner.pages[writes]])
            owner.pages[writes] = fresh
        owner.pages.extend(self._pool.take(max(missing, 0)))
        self._note_pages(owner)
        return True

    def _note_pages(self, owner: PromptGroup | Sequence) -> None:
        if isinstance(owner, Sequence) and owner.slot >= 0:
            self.table.set_pages(owner)

    def fit_draft(self, sequence: Sequence, num_nodes: int) -> int:
        """How many draft nodes find a slot after the next row; takes free pages only, without preempting."""
        size = self._cache.page_size
        used = sequence.num_cached + 1
        if sequence.slot >= 0:
            used += int(self.table.in_flight[sequence.slot])
        missing = -(-(used + num_nodes) // size) - len(sequence.pages)
        if missing > 0:
            while self._pool.num_free < missing and self._evict_prefix():
                pass
            sequence.pages.extend(self._pool.take(min(missing, self._pool.num_free)))
            self._note_pages(sequence)
        return min(num_nodes, len(sequence.pages) * size - used)

    def _drop_idle_group(self, keep: PromptGroup) -> bool:
        """Evict the cached prompt of a group without running samples; it is prefilled again when needed."""
        busy = {s.group_id for s in self._running} | self._planned | {keep.group_id}
        for group in reversed(self._groups.values()):
            if group.pages and group.group_id not in busy:
                self._drop(group)
                return True
        return False

    def _drop(self, owner: PromptGroup | Sequence) -> None:
        self._pool.release(owner.pages)
        owner.pages, owner.num_cached = [], 0

    def _break_newest(self) -> bool:
        """Drop the newest run-ahead sequence; False if none runs."""
        newest = next((sequence for sequence in reversed(self._running) if sequence.is_ahead), None)
        if newest is not None:
            self.break_off(newest)
        return newest is not None

    def break_off(self, sequence: Sequence) -> None:
        """Stop a run-ahead sequence where it is."""
        assert sequence.is_ahead
        sequence.finish_reason = "abort"
        self._broken.append(sequence)
        self.finish(sequence)

    def end_ahead(self, draws: Collection[int]) -> None:
        """Stop running ahead for these draws: the caller requests them now."""
        for sequence in [s for s in self._running if s.is_ahead and s.draw in draws]:
            self.break_off(sequence)
        self._forget_unbegun([s for s in self._ahead if s.draw in draws])

    def forget_unbegun(self) -> None:
        """End a call: forget run-ahead sequences that never started, and discard unfinished moves."""
        self._forget_unbegun(list(self._ahead))
        self._members = NOBODY
        # An interrupt may have prevented the moves, and the pages will belong to others next time.
        self._moves.clear()
        self._broken.clear()

    def _forget_unbegun(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._ahead.remove(sequence)
            self._leave_group(sequence)

    def take_broken(self) -> list[Sequence]:
        """The run-ahead sequences dropped since the last call."""
        broken, self._broken = self._broken, []
        return broken

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.is_ahead:
            self.break_off(sequence)
            return
        self.table.leave(sequence)
        self._drop(sequence)
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def forget_cached(self) -> None:
        """Drop all cached tokens, with no step in flight; running sequences wait and are prefilled again, in order."""
        running, self._running = self._running, []
        for sequence in running:
            self.table.leave(sequence)
            self._drop(sequence)
        self._waiting.extendleft(reversed(running))
        for group in self._groups.values():
            self._drop(group)
        self.forget_prefixes()

    # --- finished texts -----------------------------------------------------------------------------------------------

    def keep_prefixes(self, share: float) -> None:
        """From now on, keep finished texts in this share of the pages; 0: in none."""
        self.forget_prefixes()
        self._prefixes = PrefixCache(self._cache.page_size, int(share * self._pool.num_pages))

    def forget_prefixes(self) -> None:
        """Free the pages of finished texts."""
        self._pool.release(self._prefixes.clear())

    def _find_prefix(self, group: PromptGroup) -> None:
        """Let a prompt begin with the pages of a finished text, as far as they agree."""
        if group.pages or not len(self._prefixes):
            return
        group.pages = self._prefixes.find(group.prompt[: group.num_shared], group.salt)
        group.num_cached = len(group.pages) * self._cache.page_size
        self._pool.share(group.pages)
        self.num_prefix_tokens += group.num_cached

    def _keep_prefix(self, sequence: Sequence, count: int) -> None:
        new, evicted = self._prefixes.keep(sequence.token_ids[:count], sequence.group.salt, sequence.pages)
        self._pool.share(new)
        self._pool.release(evicted)

    def _evict_prefix(self) -> bool:
        """Free the page of a finished text that was used longest ago; it may be in use elsewhere as well."""
        if not len(self._prefixes):
            return False
        self._pool.release([self._prefixes.evict()])
        return True

    # --- the end of a step and of a sequence --------------------------------------------------------------------------

    def commit(self, sequence: Sequence, path: SequenceOf[int]) -> None:
        """Mark the sequence's row and its accepted draft nodes as cached; move the nodes to their positions."""
        self.move(sequence, path)
        sequence.num_cached += 1 + len(path)

    def move(self, sequence: Sequence, path: SequenceOf[int]) -> None:
        """Have the accepted draft nodes of a step moved to their positions, before they count as cached."""
        first = sequence.num_cached + 1
        moves = [(first + node, first + depth) for depth, node in enumerate(path) if node != depth]
        if moves and self._move is not None and sequence.finish_reason is None:
            self._moves += [(self._slot(sequence, source), self._slot(sequence, target)) for source, target in moves]

    def commit_chunks(self, plan: Plan) -> None:
        """Mark the step's prefill chunks as cached."""
        for chunk in plan.chunks:
            chunk.owner.num_cached = chunk.stop

    def apply_moves(self) -> None:
        """Carry out a step's moves in one go."""
        if self._moves and self._move is not None:
            self._move(*zip(*self._moves, strict=True))
            self._moves.clear()

    def _slot(self, sequence: Sequence, index: int) -> int:
        page, offset = divmod(index, self._cache.page_size)
        return sequence.pages[page] * self._cache.page_size + offset

    def finish(self, sequence: Sequence, num_kept: int = 0) -> None:
        """Release the sequence's pages, and its group's with the last sample; `num_kept` tokens may stay cached."""
        if num_kept > 0 and not sequence.is_ahead:
            self._keep_prefix(sequence, num_kept)
        if sequence.slot >= 0:
            self.table.leave(sequence)
        self._drop(sequence)
        waiting = self._ahead if sequence.is_ahead else self._waiting
        (self._running if sequence in self._running else waiting).remove(sequence)
        self._num_open -= not sequence.is_ahead
        self._leave_group(sequence)

    def _leave_group(self, sequence: Sequence) -> None:
        sequence.group.num_open -= 1
        if sequence.group.num_open == 0:
            sequence.group.is_closed = True
            self._drop(sequence.group)
            del self._groups[sequence.group_id]

    def check_integrity(self) -> None:
        """Check that every page and byte is accounted for."""
        prefixes = self._prefixes.pages()
        self._pool.check_integrity(
            [*(g.pages for g in self._groups.values()), *(s.pages for s in self.live()), prefixes]
        )
        assert self._pool.num_pages * self._cache.page_bytes == self._cache.num_bytes
        for sequence in self._running:
            assert sequence.num_cached <= len(sequence.pages) * self._cache.page_size
            # The next step may write only to unshared pages.
            for page in sequence.pages[sequence.num_cached // self._cache.page_size + 1 :]:
                assert not self._pool.is_shared(page)
        self.table.check_integrity()
        assert self._num_open == sum(not sequence.is_ahead for sequence in self.live())
        if not any(True for _ in self.live()):
            assert self._pool.num_free == self._pool.num_pages - len(prefixes) and not self._groups and not self._moves


def _slots(sequences: SequenceOf[Sequence]) -> NDArray[np.int64]:
    return np.array([sequence.slot for sequence in sequences], np.int64)


@host_loop
def _due(
    slots: Any, lengths: Any, cached: Any, in_flight: Any, max_lengths: Any, num_pages: Any, page_size: int
) -> Any:
    """Which sequences decode a token, which of them lack a page for it, and how many are either."""
    is_due, is_full = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.bool_)
    num_due, num_full = 0, 0
    for i in range(len(slots)):
        slot = slots[i]
        # With a step in flight, one token will certainly come, and it may be the last.
        certain = 1 if in_flight[slot] > 0 else 0
        if lengths[slot] - cached[slot] == 1 and max_lengths[slot] - lengths[slot] > certain:
            is_due[i], is_full[i] = True, cached[slot] + in_flight[slot] >= num_pages[slot] * page_size
            num_due += 1
            num_full += is_full[i]
    return is_due, is_full, num_due, num_full
