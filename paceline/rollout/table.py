"""The running sequences as arrays, one slot each: a step lays out, checks and advances all of them at once.

The scheduler gives a sequence a slot when it starts and takes it back when it stops. `verify.write` adds the tokens of
a step; a sequence fetches its own when somebody asks for them, so that Python's work in a step depends on how many
sequences change state, not on how many tokens are emitted. `in_flight` and `entries` describe the newest step that was
launched and not settled. Nothing here decides anything.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SPANS = 128
"""Accepted drafts that wait to be fetched."""
LEAST_RECENT = 256


class Running(Protocol):
    """What the table needs of a sequence; `sequence.Sequence` has it."""

    sequence_id: int
    group_id: int
    key: int
    prompt_length: int
    max_length: int
    is_ahead: bool
    kind: int
    pages: list[int]
    slot: int
    table: SequenceTable | None

    @property
    def length(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def last_token(self) -> int: ...

    def enter(self, table: SequenceTable, slot: int) -> None:
        """From now on the numbers are there."""

    def leave(self) -> None:
        """Take everything back from there."""

    def fetch(self) -> None:
        """Copy the latest tokens from there."""


class SequenceTable:
    """Slots are numbered from 0; those without a sequence hold nothing of use."""

    def __init__(self, num_slots: int, max_rows: int) -> None:
        """`max_rows`: no step emits more tokens than this."""
        self._max_rows = max_rows
        self.sequences: list[Running | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.num_changes = 0
        """How often a sequence has come or gone."""
        self.owners = np.zeros(num_slots, np.int64)
        """The sequences' ids; 0: free."""
        self.keys = np.zeros(num_slots, np.uint64)
        self.prompt_lengths = np.zeros(num_slots, np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        """Tokens of prompt and response."""
        self.max_lengths = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.last = np.zeros(num_slots, np.int32)
        """The latest token."""
        self.is_ahead = np.zeros(num_slots, np.bool_)
        self.kinds = np.zeros(num_slots, np.int64)
        """The numbers of their sampling settings; see `sampling_kinds.py`."""
        self.shares = np.full(num_slots, np.nan)
        """How likely the sequence is to finish last; NaN: not known yet. Written by `token_value.py`."""
        self.speeds = np.full(num_slots, np.nan)
        """Recent tokens per drafted step; NaN: not known yet. Written by `token_value.py`."""
        self.num_pages = np.zeros(num_slots, np.int64)
        self.pages = np.zeros((num_slots, 8), np.int32)
        self.in_flight = np.zeros(num_slots, np.int64)
        """The most tokens that the step in flight may emit; 0: it has no row there."""
        self.entries = np.full(num_slots, -1, np.int64)
        """The sequence's place in the step in flight, or -1."""
        recent = max(2 * max_rows, LEAST_RECENT)
        self.tokens = np.zeros((num_slots, recent), np.int32)
        """Tokens that wait to be fetched."""
        self.logprobs = np.zeros((2, num_slots, recent), np.float32)
        """Before and after truncation."""
        self.num_recent = np.zeros(num_slots, np.int64)
        self.spans = np.zeros((num_slots, SPANS, 3), np.int64)
        """Start, end and source of accepted drafts."""
        self.num_spans = np.zeros(num_slots, np.int64)
        self.sources: list[str] = []
        """The names of the sources."""

    def source_id(self, name: str) -> int:
        """The number of a source of drafts."""
        if name not in self.sources:
            self.sources.append(name)
        return self.sources.index(name)

    def enter(self, sequence: Running) -> None:
        """Give a sequence that starts a slot."""
        slot = self._free.pop()
        self.num_changes += 1
        self.owners[slot], self.keys[slot] = sequence.sequence_id, sequence.key
        self.prompt_lengths[slot], self.max_lengths[slot] = sequence.prompt_length, sequence.max_length
        self.lengths[slot], self.cached[slot] = sequence.length, sequence.num_cached
        self.last[slot], self.is_ahead[slot] = sequence.last_token, sequence.is_ahead
        self.kinds[slot] = sequence.kind
        self.in_flight[slot], self.entries[slot] = 0, -1
        self.shares[slot] = self.speeds[slot] = np.nan
        self.num_recent[slot] = self.num_spans[slot] = 0
        self.sequences[slot] = sequence
        sequence.enter(self, slot)
        self.set_pages(sequence)

    def leave(self, sequence: Running) -> None:
        """Take the slot of a sequence that stops."""
        slot = sequence.slot
        sequence.leave()
        self.num_changes += 1
        self.sequences[slot] = None
        self.owners[slot] = self.num_pages[slot] = self.in_flight[slot] = 0
        self.entries[slot] = -1
        self._free.append(slot)

    def set_pages(self, sequence: Running) -> None:
        """Note a sequence's pages after they have changed."""
        slot, count = sequence.slot, len(sequence.pages)
        if count > self.pages.shape[1]:
            wider = np.zeros((len(self.pages), 2 * count), np.int32)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider
        self.pages[slot, :count] = sequence.pages
        self.num_pages[slot] = count

    def take_recent(self, slot: int) -> tuple[NDArray[np.int32], list[float], list[float], list[tuple[int, int, str]]]:
        """Remove and return the tokens that wait to be fetched, their log-probabilities and the accepted drafts."""
        count = int(self.num_recent[slot])
        spans = [(start, end, self.sources[i]) for start, end, i in self.spans[slot, : self.num_spans[slot]].tolist()]
        tokens = self.tokens[slot, :count].copy()
        logprobs, truncated = self.logprobs[:, slot, :count].tolist()
        self.num_recent[slot] = self.num_spans[slot] = 0
        return tokens, logprobs, truncated, spans

    def make_room(self, slots: NDArray[np.int64]) -> None:
        """Before a step is written: have the sequences fetch what leaves too little room for it."""
        is_full = (self.num_recent[slots] > self.tokens.shape[1] - self._max_rows) | (self.num_spans[slots] >= SPANS)
        for slot in slots[is_full].tolist():
            sequence = self.sequences[slot]
            if sequence is not None:
                sequence.fetch()

    def land(self) -> None:
        """No step is in flight any more."""
        self.in_flight[:] = 0
        self.entries[:] = -1

    def check_integrity(self) -> None:
        """Check that slots and sequences agree."""
        for slot, sequence in enumerate(self.sequences):
            assert (sequence is None) == (self.owners[slot] == 0) == (slot in self._free)
            if sequence is not None:
                assert sequence.slot == slot and sequence.table is self and self.owners[slot] == sequence.sequence_id
                assert self.pages[slot, : self.num_pages[slot]].tolist() == sequence.pages

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What `verify.write` writes to."""
        return (
            self.lengths, self.cached, self.last, self.tokens, self.logprobs, self.num_recent, self.spans,
            self.num_spans, self.prompt_lengths,
        )  # fmt: skip
