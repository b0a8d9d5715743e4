"""The scheduler: chooses the sequences and KV pages of the next step. Owns the pages; never looks at a token's value.

First come, first served. Every running sequence gets a row in each step; prompts, and sequences that lost their pages,
are prefilled in chunks beside them. When pages run out, the newest running sequence is preempted and waits. It is
prefilled again later and continues exactly where it was, because a prefilled row is bit-equal to a decoded one. Who
waits affects time, never tokens.

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
from typing import NamedTuple

from paceline.model.kv_cache import PagePool
from paceline.model.ops.base import Cache
from paceline.rollout.sequence import PromptGroup, Sequence


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

    @property
    def num_rows(self) -> int:
        """Rows without drafts."""
        return len(self.decoding) + sum(map(len, self.chunks))

    @cached_property
    def num_requested(self) -> int:
        """Decoding sequences that are not run-ahead; computed once, when the plan is made."""
        return sum(not sequence.is_ahead for sequence in self.decoding)

    def requested(self) -> list[Sequence]:
        """The decoding sequences that the caller requested."""
        return self.decoding[: self.num_requested]

    def ahead(self) -> list[Sequence]:
        """The decoding run-ahead sequences."""
        return self.decoding[self.num_requested :]

    def draftable(self) -> list[Sequence]:
        """The sequences that may get drafts."""
        return self.decoding[: self.num_requested + self.num_stragglers]

    def rest(self) -> Plan:
        """The sequences still alive after this step, to prepare the next."""
        alive = [sequence for sequence in self.decoding if sequence.finish_reason is None]
        num_stragglers = (
            sum(s.is_ahead and s.finish_reason is None for s in self.draftable()) if self.num_stragglers else 0
        )
        return Plan(decoding=alive, num_stragglers=num_stragglers)

    @property
    def num_kv_tokens(self) -> int:
        """Cached tokens that the step reads."""
        return sum(s.length for s in self.decoding) + sum(c.stop for c in self.chunks)


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
        self._has_ahead_pending = False
        """Whether a running run-ahead sequence has text to prefill."""
        self.num_preemptions = 0

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
        ahead = [sequence for sequence in self._running if sequence.is_ahead]
        num_made = sum(sequence.length - sequence.prompt_length for sequence in ahead)
        return Load(len(self._running), sum(s.length for s in self._running), len(ahead), num_made)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._groups[sequence.group_id] = sequence.group
        if sequence.is_ahead:
            self._ahead.append(sequence)
        else:
            self._waiting.append(sequence)
            self._num_open += 1

    def plan(self, ahead_rows: int = 0, stragglers: Collection[int] = ()) -> Plan:
        """Choose the step's rows; every chosen row has its page. At most `ahead_rows` start run-ahead sequences.

        Among run-ahead sequences, `stragglers` come first.
        """
        plan = Plan()
        self._planned.clear()
        while self.has_work and not plan.num_rows:
            # Oldest first: only newer sequences are preempted for pages, so no sequence placed here loses its own.
            for sequence in self._requested():
                if sequence.num_pending == 1 and self._make_room(sequence):
                    plan.decoding.append(sequence)
            self._prefill(plan)
            if plan.num_rows:
                # Last, because everything above may have dropped some of them.
                self._continue_run_ahead(plan, stragglers)
                room = self._prefill_ahead(plan, min(ahead_rows, self._max_rows - plan.num_rows))
                self._begin_ahead(plan, room)
            else:
                # Half-resumed sequences hold all pages: preempt one so that the others can continue.
                self._preempt(self._running[-1])
        plan.has_waiting = bool(self._waiting)
        return plan

    def plan_overlapped(self, plan: Plan) -> Plan | None:
        """The step after `plan`, planned before its tokens are known; None if it depends on them.

        Sequences that turn out to have finished get surplus rows in the step, which nobody reads.
        """
        alive = [sequence for sequence in plan.decoding if sequence.finish_reason is None]
        can_start = self._waiting and len(self._requested()) < self._max_sequences
        if plan.chunks or can_start or len(alive) != len(self._running):
            return None
        going_on = [sequence for sequence in alive if sequence.max_length - sequence.length > 1]
        if all(sequence.is_ahead for sequence in going_on):
            return None
        if len(going_on) == len(plan.decoding) and plan.has_waiting == bool(self._waiting):
            return plan
        draftable = {sequence.sequence_id for sequence in plan.draftable() if sequence.is_ahead}
        num_stragglers = sum(sequence.sequence_id in draftable for sequence in going_on)
        return Plan(decoding=going_on, num_stragglers=num_stragglers, has_waiting=bool(self._waiting))

    def _requested(self) -> list[Sequence]:
        """The running sequences that are not run-ahead."""
        return [sequence for sequence in self._running if not sequence.is_ahead]

    def fit_overlapped(self, plan: Plan, num_tokens: SequenceOf[int]) -> bool:
        """Take free pages for so many tokens after each sequence's cached ones; all or nothing, without preempting."""
        size = self._cache.page_size
        missing = [
            max(-(-(sequence.num_cached + count) // size) - len(sequence.pages), 0)
            for sequence, count in zip(plan.decoding, num_tokens, strict=True)
        ]
        if sum(missing) > self._pool.num_free:
            return False
        for sequence, count in zip(plan.decoding, missing, strict=True):
            sequence.pages.extend(self._pool.take(count))
        return True

    def grow(self, plan: Plan, full: SequenceOf[int]) -> dict[int, list[int]] | None:
        """Give these sequences of a plan a free page more; their pages by index, or None if too few are free."""
        if len(full) > self._pool.num_free:
            return None
        for index in full:
            plan.decoding[index].pages.extend(self._pool.take(1))
        return {index: plan.decoding[index].pages for index in full}

    def _prefill(self, plan: Plan) -> None:
        """Resume and start sequences in the rows that decoding leaves."""
        room = min(self._prefill_chunk, self._max_rows - len(plan.decoding))
        for sequence in self._requested():
            if sequence.num_pending > 1 and room > 0:
                room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
        places = self._max_sequences - len(self._requested())
        started: list[Sequence] = []
        for sequence in self._waiting:
            if places <= 0 or room <= 0:
                break
            places -= 1
            group = sequence.group
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
                    plan.decoding.append(sequence)
                    room -= 1
                else:
                    room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
            else:
                break
        for sequence in started:
            self._waiting.remove(sequence)

    def _continue_run_ahead(self, plan: Plan, stragglers: Collection[int]) -> None:
        """Give every run-ahead sequence a row, as far as pages and rows last."""
        room = self._max_rows - plan.num_rows
        running = [sequence for sequence in self._running if sequence.is_ahead]
        # An overlapped sequence cannot be drafted for: its last token is unknown.
        leads = {s.sequence_id for s in running if s.sequence_id in stragglers and s.num_pending == 1}
        if leads:
            running.sort(key=lambda sequence: sequence.sequence_id not in leads)
        for sequence in running:
            num_pending = sequence.num_pending
            # An overlapped one has a token in flight, which may be its last.
            num_left = sequence.num_left - (num_pending == 0)
            if num_pending <= 1 and num_left > 0 and room > 0 and self._make_room(sequence):
                plan.decoding.append(sequence)
                plan.num_stragglers += sequence.sequence_id in leads
                room -= 1

    def _prefill_ahead(self, plan: Plan, room: int) -> int:
        """Prefill the text that run-ahead sequences continue; returns the rows left."""
        if self._has_ahead_pending:
            pending = [sequence for sequence in self._running if sequence.is_ahead and sequence.num_pending > 1]
            self._has_ahead_pending = bool(pending)
            for sequence in pending:
                if room > 0:
                    room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
        return room

    def mark_overlapped(self, sequences: SequenceOf[Sequence]) -> None:
        """Let run-ahead sequences be planned again before their tokens are known: their rows are cached."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.num_cached += 1

    def _begin_ahead(self, plan: Plan, room: int) -> None:
        """Prefill the prompts of run-ahead sequences and start them."""
        while self._can_begin_ahead and room > 0:
            sequence = self._ahead[0]
            group = sequence.group
            if group.is_ready and self._start(sequence):
                self._ahead.popleft()
                if sequence.num_pending == 1:
                    plan.decoding.append(sequence)
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
        others = [s for s in self._running if s is not owner]
        keep = owner if isinstance(owner, PromptGroup) else owner.group
        if not self._extend(owner, stop, reserve=len(others), keep=keep):
            return 0
        plan.chunks.append(PrefillChunk(owner, owner.num_cached, stop))
        return len(plan.chunks[-1])

    def _start(self, sequence: Sequence) -> bool:
        """Start a waiting sequence on the shared pages of its prompt, if there is a page for its first row."""
        group = sequence.group
        shared, sequence.pages, sequence.num_cached = group.pages, list(group.pages), group.num_cached
        self._pool.share(shared)
        if not self._extend(sequence, sequence.num_cached + 1, reserve=len(self._running), keep=group):
            self._drop(sequence)
            return False
        if len(self._running) >= self._max_sequences:
            has_broken = self._break_newest()
            assert has_broken, "a place counts as free only if it is empty or a run-ahead sequence has it"
        self._running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """Find a page for a running sequence's next row, preempting newer ones; False: it was preempted itself."""
        if sequence.num_cached % self._cache.page_size and sequence.num_cached > sequence.group.num_shared:
            return True  # it continues in a page it has written to, which nobody shares
        while not self._extend(sequence, sequence.num_cached + 1, reserve=0, keep=sequence.group):
            newest = sequence if sequence.is_ahead else self._running[-1]
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
            if not self._drop_idle_group(keep) and (is_ahead or not self._break_newest()):
                return False
        if is_copied:
            [fresh] = self._pool.take(1)
            self._cache.copy_page(owner.pages[writes], fresh)
            self._pool.release([owner.pages[writes]])
            owner.pages[writes] = fresh
        owner.pages.extend(self._pool.take(max(missing, 0)))
        return True

    def fit_draft(self, sequence: Sequence, num_nodes: int) -> int:
        """How many draft nodes find a slot after the next row; takes free pages only, without preempting."""
        size = self._cache.page_size
        missing = -(-(sequence.num_cached + 1 + num_nodes) // size) - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self._pool.take(min(missing, self._pool.num_free)))
        return min(num_nodes, len(sequence.pages) * size - sequence.num_cached - 1)

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
        self._drop(sequence)
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def commit(self, sequence: Sequence, path: SequenceOf[int]) -> None:
        """Mark the sequence's row and its accepted draft nodes as cached; move the nodes to their positions."""
        first = sequence.num_cached + 1
        moves = [(first + node, first + depth) for depth, node in enumerate(path) if node != depth]
        if moves and self._move is not None and sequence.finish_reason is None:
            self._moves += [(self._slot(sequence, source), self._slot(sequence, target)) for source, target in moves]
        sequence.num_cached = first + len(path)

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

    def finish(self, sequence: Sequence) -> None:
        """Release all pages of the sequence, and its group's with the last sample."""
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
        self._pool.check_integrity([*(g.pages for g in self._groups.values()), *(s.pages for s in self.live())])
        assert self._pool.num_pages * self._cache.page_bytes == self._cache.num_bytes
        for sequence in self._running:
            assert sequence.num_cached <= len(sequence.pages) * self._cache.page_size
            # The next step may write only to unshared pages.
            for page in sequence.pages[sequence.num_cached // self._cache.page_size + 1 :]:
                assert not self._pool.is_shared(page)
        assert self._num_open == sum(not sequence.is_ahead for sequence in self.live())
        if not any(True for _ in self.live()):
            assert self._pool.num_free == self._pool.num_pages and not self._groups and not self._moves
