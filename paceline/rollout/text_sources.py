"""The texts that the device searches for drafts: which text stands in which row of its table, and who may look there.

A sequence's own text is sent when it starts; the device continues it by itself. Its group's texts, finished ones too,
are its siblings; run-ahead text for it stands in a row of its own. Texts stay until their row is needed. The engine
asks for `input` when it launches a step and reports what came back with `settle`. Nothing here can change a token: a
row with the wrong text costs time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Int32Array
from paceline.kernels.cpu.jit import host_loop
from paceline.kernels.text_ranks import LONGEST, MEMBERS
from paceline.model.executor import TextInput, TextTable
from paceline.model.ops.base import Sampled
from paceline.rollout.drafters.replay import Replay, ReplayText
from paceline.rollout.scheduler import Plan
from paceline.rollout.sequence import Sequence
from paceline.rollout.step import Step
from paceline.rollout.table import SequenceTable

NO_TEXT = -1
TEXTS_PER_SEQUENCE = 4
"""Rows for every place: own text, run-ahead text, and two for siblings that have finished."""
MOST_BYTES = 1 << 28
"""Memory for texts; with fewer rows than sequences, some have no text and no drafts from texts."""


def num_texts(max_sequences: int, max_context: int) -> int:
    """How many rows an engine of this size should have."""
    return max(min(TEXTS_PER_SEQUENCE * max_sequences, MOST_BYTES // (4 * max_context)), 2)


class Judged(NamedTuple):
    """What a step says about the matches that its sequences had, one entry per sequence that had any."""

    ranks: NDArray[np.int32]
    """The rank that the host knew when it shared the rows."""
    num_drafted: NDArray[np.int64]
    num_right: NDArray[np.int64]


class TextSources:
    """One per engine whose device searches texts."""

    def __init__(
        self, device: TextTable, table: SequenceTable, run_ahead: Replay | None = None, has_siblings: bool = False
    ) -> None:
        """`run_ahead` has the run-ahead texts of the call."""
        self._device, self._table, self._run_ahead, self._has_siblings = device, table, run_ahead, has_siblings
        num_slots = len(table.owners)
        self._owners = np.zeros(num_slots, np.int64)
        """The sequence whose texts a slot's members are."""
        self._members = np.full((num_slots, MEMBERS), NO_TEXT, np.int32)
        self.ends = np.zeros(num_slots, np.int64)
        """Where the run-ahead text of a slot's sequence ends; 0: there is none."""
        self.ranks = np.zeros(num_slots, np.int32)
        """The latest rank that the host knows; 0: no match."""
        self._predicted = np.full(num_slots, NO_TEXT, np.int32)
        self.begin()

    def begin(self) -> None:
        """Start a call: all rows are free."""
        self._free = list(range(self._device.num_texts - 1, -1, -1))
        self._owners[:] = 0
        self._groups: dict[int, list[int]] = {}
        """Texts by group, oldest first."""
        self._group_of: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        """Texts of sequences that have left, oldest first, and their groups."""

    def input(self, plan: Plan, is_searched: bool, is_branched: bool = False) -> TextInput:
        """The texts of a step's sequences; those of new ones are on their way to the device."""
        slots = plan.slots
        new = np.flatnonzero(self._owners[slots] != self._table.owners[slots]).tolist()
        if new:
            self._open([plan.decoding[i] for i in new])
        members = self._members[slots]
        if not is_searched:
            return TextInput(members, False)
        members[plan.num_draftable :, 0] = NO_TEXT  # these grow, but nobody drafts for them
        return TextInput(members, True, is_branched)

    def follows(self, sequence: Sequence) -> int:
        """How many tokens of its run-ahead text a sequence still has before it, if it follows that; otherwise 0."""
        slot = sequence.slot
        if slot < 0 or self._owners[slot] != sequence.sequence_id:
            return len(self._text_for(sequence))
        if self.ranks[slot] < 2 * LONGEST:
            return 0
        return max(int(self.ends[slot] - self._table.lengths[slot]), 0)

    def settle(
        self, step: Step, sampled: Sampled, is_live: NDArray[np.bool_], counts: NDArray[np.int64]
    ) -> Judged | None:
        """Take note of a step's matches; returns what became of those known before it, drafted or not."""
        slots, drafts = step.plan.slots, step.drafts
        judged = None
        if drafts.known_ranks is not None:
            rows = np.where(drafts.is_from_text, drafts.counts, 0) if drafts.depths is not None else drafts.counts
            if drafts.branches is not None:
                rows = np.where(
                    drafts.branches == 0, rows, 0
                )  # one of several was right more often than the best alone
            given = slots, is_live, drafts.known_ranks, rows, counts, self._predicted, sampled.tokens, step.starts
            judged = Judged(*_judge(*given))
        if sampled.ranks is None or sampled.predicted is None:
            live = slots[is_live]
            self.ranks[live], self._predicted[live] = 0, NO_TEXT
        else:
            _note(slots, is_live, sampled.ranks, sampled.predicted, self.ranks, self._predicted)
        return judged

    def _open(self, sequences: list[Sequence]) -> None:
        rows: list[int] = []
        texts: list[Int32Array] = []
        for sequence in sequences:
            slot = sequence.slot
            self._close(slot)
            self._owners[slot] = sequence.sequence_id
            self._members[slot] = NO_TEXT
            self.ranks[slot], self._predicted[slot], self.ends[slot] = 0, NO_TEXT, 0
            own = self._take()
            if own == NO_TEXT:
                continue
            self._members[slot, 1] = own
            self._groups.setdefault(sequence.group_id, []).append(own)
            self._group_of[own] = sequence.group_id
            rows.append(own)
            texts.append(sequence.token_ids)
            text = self._text_for(sequence)
            place = self._take() if len(text) else NO_TEXT
            if place != NO_TEXT:
                whole = np.concatenate([sequence.group.prompt, np.asarray(text, np.int32)])
                self._members[slot, 0], self.ends[slot] = place, len(whole)
                rows.append(place)
                texts.append(whole)
        if rows:
            self._device.write(rows, texts)
        if self._has_siblings:
            for group_id in {sequence.group_id for sequence in sequences}:
                self._introduce(group_id)

    def _text_for(self, sequence: Sequence) -> ReplayText:
        if self._run_ahead is None or sequence.is_ahead or not sequence.is_foreseen:
            return ()
        return self._run_ahead.texts.get((sequence.draw, sequence.sample_index), ())

    def _introduce(self, group_id: int) -> None:
        """Show the running sequences of a group each other's latest texts."""
        texts = self._groups.get(group_id, [])
        for sequence in self._table.sequences:
            if sequence is not None and sequence.group_id == group_id:
                own = self._members[sequence.slot, 1]
                others = [row for row in texts if row != own][-(MEMBERS - 2) :]
                self._members[sequence.slot, 2:] = NO_TEXT
                self._members[sequence.slot, 2 : 2 + len(others)] = others

    def _close(self, slot: int) -> None:
        """Keep the text of the sequence that had a slot, as long as its row is not needed."""
        twin, own = self._members[slot, :2].tolist()
        if self._owners[slot] == 0:
            return
        if twin != NO_TEXT:
            self._free.append(twin)
        if own != NO_TEXT:
            self._kept[own] = self._group_of[own]
        self._owners[slot] = 0
        self._members[slot] = NO_TEXT

    def _take(self) -> int:
        """A free row, or that of the text that was kept longest; NO_TEXT if there is none."""
        if self._free:
            return self._free.pop()
        for row, group_id in self._kept.items():
            del self._kept[row], self._group_of[row]
            self._groups[group_id].remove(row)
            if not self._groups[group_id]:
                del self._groups[group_id]
            # Whoever may still look there sees another text now: a poor draft at worst, but better none.
            self._members[self._members == row] = NO_TEXT
            return row
        return NO_TEXT


@host_loop
def _judge(
    slots: Any,
    is_live: Any,
    known_ranks: Any,
    num_rows: Any,
    counts: Any,
    predicted: Any,
    sampled: Any,
    starts: Any,
) -> Any:
    """The fields of `Judged`. Without rows, the token that would have been drafted is held against the sampled one."""
    ranks = np.empty(len(slots), np.int32)
    num_drafted, num_right = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    at = 0
    for i in range(len(slots)):
        if not is_live[i]:
            continue
        ranks[at] = known_ranks[i]
        num_drafted[at] = num_rows[i] if num_rows[i] > 0 else 1
        is_right = predicted[slots[i]] == sampled[starts[i]]
        num_right[at] = counts[i] - 1 if num_rows[i] > 0 else (1 if is_right else 0)
        at += 1
    return ranks[:at], num_drafted[:at], num_right[:at]


@host_loop
def _note(slots: Any, is_live: Any, found_ranks: Any, found_next: Any, ranks: Any, predicted: Any) -> None:
    for i in range(len(slots)):
        if is_live[i]:
            ranks[slots[i]], predicted[slots[i]] = found_ranks[i], found_next[i]
