"""Who runs in the next step, on which pages. Owns the page books; never looks at a token's value.

First come, first served. A step gives every running sequence its row; prompts, and sequences that lost their pages, are
prefilled in chunks beside them. When pages run out, the newest running sequence gives its pages back and waits; it is
prefilled again later and goes on exactly where it was, because a prefilled row is bit-equal to a decoded one. Who
waits is a matter of time, never of tokens.

Sequences made ahead (`is_ahead`) begin when nobody else waits and as many rows as the caller allows are left; where
they go on from text made before, they prefill it in such rows. When a page or a place is needed they break off, newest
first, and are not begun again in the same call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

from paceline.model.kv_cache import PagePool
from paceline.model.ops.base import Cache
from paceline.rollout.sequence import PromptGroup, Sequence


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, stop) of a group's prompt, or of a sequence that is resumed, to be put into the cache."""

    owner: PromptGroup | Sequence
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Plan:
    """What a step does before any draft: sequences that decode, chunks that prefill."""

    decoding: list[Sequence] = field(default_factory=list)
    """Those that are asked for come first, then those made ahead."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    num_stragglers: int = 0
    """How many of those made ahead, the first ones, may be drafted for."""

    @property
    def num_rows(self) -> int:
        """Rows without drafts."""
        return len(self.decoding) + sum(map(len, self.chunks))

    @cached_property
    def num_asked_for(self) -> int:
        """Sequences that decode and are not made ahead; to be asked when the plan is made."""
        return sum(not sequence.is_ahead for sequence in self.decoding)

    def asked_for(self) -> list[Sequence]:
        """These sequences."""
        return self.decoding[: self.num_asked_for]

    def ahead(self) -> list[Sequence]:
        """Sequences that decode and are made ahead."""
        return self.decoding[self.num_asked_for :]

    def draftable(self) -> list[Sequence]:
        """Sequences that may be drafted for."""
        return self.decoding[: self.num_asked_for + self.num_stragglers]

    def rest(self) -> Plan:
        """The sequences that have not ended with this step, to look at."""
        alive = [sequence for sequence in self.decoding if sequence.finish_reason is None]
        num_stragglers = (
            sum(s.is_ahead and s.finish_reason is None for s in self.draftable()) if self.num_stragglers else 0
        )
        return Plan(decoding=alive, num_stragglers=num_stragglers)

    @property
    def num_kv_tokens(self) -> int:
        """Cached tokens the step reads."""
        return sum(s.length for s in self.decoding) + sum(c.stop for c in self.chunks)


Move = Callable[[SequenceOf[int], SequenceOf[int]], None]
"""Copies single tokens from physical slots to others, in every layer. A source is no earlier one's target."""


class Scheduler:
    """Waiting and running sequences, and the pages they hold."""

    def __init__(
        self, cache: Cache, max_sequences: int, max_rows: int, prefill_chunk: int, move: Move | None = None
    ) -> None:
        """`move`: gives tokens other slots of the cache, where steps do not move accepted nodes of trees themselves."""
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
        """Sequences that are asked for and not finished."""
        self._broken: list[Sequence] = []
        self._groups: dict[int, PromptGroup] = {}
        self._planned: set[int] = set()
        """Groups with a chunk in the plan being made: they must keep their pages."""
        self._moves: list[tuple[int, int]] = []
        self._has_ahead_pending = False
        """Whether a running sequence made ahead has text to prefill."""
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence that is asked for is unfinished."""
        return self._num_open > 0

    @property
    def has_ahead_waiting(self) -> bool:
        """Whether a sequence could be begun ahead, or brought to where it was, if rows are left."""
        return self._can_begin_ahead or self._has_ahead_pending

    @property
    def _can_begin_ahead(self) -> bool:
        return bool(self._ahead) and not self._waiting and len(self._running) < self._max_sequences

    @property
    def most_tokens(self) -> int:
        """The longest sequence that can run when it is alone; one page is its group's own copy of the prompt's end."""
        return (self._pool.num_pages - 1) * self._cache.page_size

    def live(self) -> Iterator[Sequence]:
        """All unfinished sequences, those made ahead included."""
        yield from self._running
        yield from self._waiting
        yield from self._ahead

    def load(self) -> tuple[int, int, int]:
        """Rows and cached tokens of a step as things are, and tokens made ahead that still run."""
        num_made = sum(s.length - s.prompt_length for s in self._running if s.is_ahead)
        return len(self._running), sum(sequence.length for sequence in self._running), num_made

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._groups[sequence.group_id] = sequence.group
        if sequence.is_ahead:
            self._ahead.append(sequence)
        else:
            self._waiting.append(sequence)
            self._num_open += 1

    def plan(self, ahead_rows: int = 0, stragglers: Collection[int] = ()) -> Plan:
        """Choose the step's rows; every chosen row has its page. At most `ahead_rows` go to beginning ahead.

        Of the sequences made ahead `stragglers` come first.
        """
        plan = Plan()
        self._planned.clear()
        while self.has_work and not plan.num_rows:
            # Oldest first: room is made at the expense of the newest, so nobody placed here is touched again.
            for sequence in self._asked_for():
                if sequence.num_pending == 1 and self._make_room(sequence):
                    plan.decoding.append(sequence)
            self._prefill(plan)
            if plan.num_rows:
                # Last, for all before may have broken some of them off.
                self._go_on_ahead(plan, stragglers)
                room = self._prefill_ahead(plan, min(ahead_rows, self._max_rows - plan.num_rows))
                self._begin_ahead(plan, room)
            else:
                # Half-resumed sequences hold all pages: one must yield for the others to go on.
                self._preempt(self._running[-1])
        return plan

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step after `plan`, planned before anybody knows the tokens of `plan`; None where it depends on them.

        Sequences that turn out to have ended have rows too many in the step; nobody reads them.
        """
        alive = [sequence for sequence in plan.decoding if sequence.finish_reason is None]
        can_start = self._waiting and len(self._asked_for()) < self._max_sequences
        if plan.chunks or can_start or len(alive) != len(self._running):
            return None
        going_on = [sequence for sequence in alive if sequence.num_left > 1]
        if all(sequence.is_ahead for sequence in going_on):
            return None
        draftable = {sequence.sequence_id for sequence in plan.draftable() if sequence.is_ahead}
        return Plan(decoding=going_on, num_stragglers=sum(sequence.sequence_id in draftable for sequence in going_on))

    def _asked_for(self) -> list[Sequence]:
        """The running sequences that are not made ahead."""
        return [sequence for sequence in self._running if not sequence.is_ahead]

    def fit_overlapped(self, plan: Plan, num_tokens: SequenceOf[int]) -> bool:
        """Free pages for so many tokens behind what each sequence has cached; takes all or nothing, never anybody's."""
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

    def _prefill(self, plan: Plan) -> None:
        """Resume and start sequences with the rows that decoding leaves."""
        room = min(self._prefill_chunk, self._max_rows - len(plan.decoding))
        for sequence in self._asked_for():
            if sequence.num_pending > 1 and room > 0:
                room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
        places = self._max_sequences - len(self._asked_for())
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

    def _go_on_ahead(self, plan: Plan, stragglers: Collection[int]) -> None:
        """A row for every sequence made ahead, as far as pages and rows are left."""
        room = self._max_rows - plan.num_rows
        running = [sequence for sequence in self._running if sequence.is_ahead]
        # Whoever has gone on cannot be drafted for: nobody knows its last token.
        leads = {s.sequence_id for s in running if s.sequence_id in stragglers and s.num_pending == 1}
        if leads:
            running.sort(key=lambda sequence: sequence.sequence_id not in leads)
        for sequence in running:
            num_pending = sequence.num_pending
            # Of one that has gone on, a token is not known yet; it may be the last.
            num_left = sequence.num_left - (num_pending == 0)
            if num_pending <= 1 and num_left > 0 and room > 0 and self._make_room(sequence):
                plan.decoding.append(sequence)
                plan.num_stragglers += sequence.sequence_id in leads
                room -= 1

    def _prefill_ahead(self, plan: Plan, room: int) -> int:
        """Cache what sequences made ahead recall; returns the rows that are left."""
        if self._has_ahead_pending:
            pending = [sequence for sequence in self._running if sequence.is_ahead and sequence.num_pending > 1]
            self._has_ahead_pending = bool(pending)
            for sequence in pending:
                if room > 0:
                    room -= self._plan_chunk(plan, sequence, sequence.length - 1, room)
        return room

    def let_go_on(self, sequences: SequenceOf[Sequence]) -> None:
        """Some made ahead may be planned again before it is known what they drew: their rows are cached."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.num_cached += 1

    def _begin_ahead(self, plan: Plan, room: int) -> None:
        """Prefill prompts of, and start, sequences that nobody has asked for yet."""
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
        """Move a waiting sequence onto the shared pages of its prompt, if a page for its first row can be had."""
        group = sequence.group
        shared, sequence.pages, sequence.num_cached = group.pages, list(group.pages), group.num_cached
        self._pool.share(shared)
        if not self._extend(sequence, sequence.num_cached + 1, reserve=len(self._running), keep=group):
            self._drop(sequence)
            return False
        if len(self._running) >= self._max_sequences:
            has_broken = self._break_newest()
            assert has_broken, "a place is counted as free only if nobody or somebody ahead has it"
        self._running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for a running sequence's next row, at the expense of newer ones; False: it had to yield itself."""
        if sequence.num_cached % self._cache.page_size and sequence.num_cached > sequence.group.num_shared:
            return True  # it goes on in a page that it has written to, so nobody shares it
        while not self._extend(sequence, sequence.num_cached + 1, reserve=0, keep=sequence.group):
            newest = sequence if sequence.is_ahead else self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _extend(self, owner: PromptGroup | Sequence, num_tokens: int, reserve: int, keep: PromptGroup) -> bool:
        """Pages for `num_tokens`, and the page next written unshared, leaving `reserve` free; idle prompts give way."""
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
        """How many draft nodes find a slot behind the next row; takes free pages, never anybody's."""
        size = self._cache.page_size
        missing = -(-(sequence.num_cached + 1 + num_nodes) // size) - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self._pool.take(min(missing, self._pool.num_free)))
        return min(num_nodes, len(sequence.pages) * size - sequence.num_cached - 1)

    def _drop_idle_group(self, keep: PromptGroup) -> bool:
        """Forget the cached prompt of a group none of whose samples runs; it is prefilled again when needed."""
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
        """End the newest sequence made ahead; False if none runs."""
        newest = next((sequence for sequence in reversed(self._running) if sequence.is_ahead), None)
        if newest is not None:
            self.break_off(newest)
        return newest is not None

    def break_off(self, sequence: Sequence) -> None:
        """End a sequence made ahead where it is."""
        assert sequence.is_ahead
        sequence.finish_reason = "abort"
        self._broken.append(sequence)
        self.finish(sequence)

    def end_ahead(self, draws: Collection[int]) -> None:
        """These draws are asked for now: nothing is made ahead for them any more."""
        for sequence in [s for s in self._running if s.is_ahead and s.draw in draws]:
            self.break_off(sequence)
        self._forget_unbegun([s for s in self._ahead if s.draw in draws])

    def forget_unbegun(self) -> None:
        """A call is over: sequences to be made ahead that never began leave nothing behind, nor do unfinished books."""
        self._forget_unbegun(list(self._ahead))
        # An interrupt may have come before they were carried out, and the pages belong to others next time.
        self._moves.clear()
        self._broken.clear()

    def _forget_unbegun(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._ahead.remove(sequence)
            self._leave_group(sequence)

    def take_broken(self) -> list[Sequence]:
        """The sequences made ahead that were broken off since the last call."""
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
        """The sequence's row and its accepted draft nodes are cached; move the nodes to their positions."""
        first = sequence.num_cached + 1
        moves = [(first + node, first + depth) for depth, node in enumerate(path) if node != depth]
        if moves and self._move is not None and sequence.finish_reason is None:
            self._moves += [(self._slot(sequence, source), self._slot(sequence, target)) for source, target in moves]
        sequence.num_cached = first + len(path)

    def commit_chunks(self, plan: Plan) -> None:
        """The step's prompts are cached as far as planned."""
        for chunk in plan.chunks:
            chunk.owner.num_cached = chunk.stop

    def apply_moves(self) -> None:
        """Carry out the moves of a step, in one go."""
        if self._moves and self._move is not None:
            self._move(*zip(*self._moves, strict=True))
            self._moves.clear()

    def _slot(self, sequence: Sequence, index: int) -> int:
        page, offset = divmod(index, self._cache.page_size)
        return sequence.pages[page] * self._cache.page_size + offset

    def finish(self, sequence: Sequence) -> None:
        """Take back everything the sequence held, and its group's pages with the last sample."""
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
        """Every page and byte is accounted for."""
        self._pool.check_integrity([*(g.pages for g in self._groups.values()), *(s.pages for s in self.live())])
        assert self._pool.num_pages * self._cache.page_bytes == self._cache.num_bytes
        for sequence in self._running:
            assert sequence.num_cached <= len(sequence.pages) * self._cache.page_size
            # What the next step writes must be nobody else's.
            for page in sequence.pages[sequence.num_cached // self._cache.page_size + 1 :]:
                assert not self._pool.is_shared(page)
        assert self._num_open == sum(not sequence.is_ahead for sequence in self.live())
        if not any(True for _ in self.live()):
            assert self._pool.num_free == self._pool.num_pages and not self._groups and not self._moves
