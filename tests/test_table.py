"""The table of running sequences: what enters it comes back out of it, and slots that disagree are noticed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import Prefix, Sampling
from paceline.model.ops.base import Sampled
from paceline.rollout.sequence import NO_SLOT, PromptGroup, Sequence
from paceline.rollout.table import SequenceTable
from paceline.rollout.verify import Walked, write

MAX_ROWS = 8


def make_sequence(number: int, prompt_length: int = 3, limit: int = 100, is_ahead: bool = False) -> Sequence:
    prompt = np.arange(10, 10 + prompt_length, dtype=np.int32)
    group = PromptGroup(number, number, number, number, prompt, num_open=1, is_ahead=is_ahead)
    return Sequence(number, group, 0, Sampling(seed=number), prompt_length + limit)


def emit(table: SequenceTable, sequences: list[Sequence], tokens: list[list[int]], source: str = "suffix") -> None:
    """Write a step in which these sequences emit these tokens, each after an accepted draft of the others."""
    counts = np.array([len(own) for own in tokens])
    starts = np.cumsum([0, *counts])[:-1].astype(np.int32)
    flat = np.concatenate([np.array(own, np.int32) for own in tokens])
    path = np.concatenate([np.arange(count) for count in counts])
    rows = Sampled(flat, -0.5 * flat.astype(np.float32), -0.25 * flat.astype(np.float32), np.ones(len(flat), np.bool_))
    slots = np.array([sequence.slot for sequence in sequences])
    sources = np.full(len(sequences), table.source_id(source))
    write(table, slots, starts, Walked(counts, np.zeros_like(counts), path), sources, rows)


def test_a_sequence_enters_with_all_its_numbers() -> None:
    table, sequence = SequenceTable(3, MAX_ROWS), make_sequence(5, is_ahead=True)
    sequence.append(7, -1.0, -0.5)
    sequence.num_cached, sequence.pages = 3, [4, 2]
    table.enter(sequence)
    slot = sequence.slot
    assert table.sequences[slot] is sequence and table.owners[slot] == 5 and table.keys[slot] == sequence.key
    numbers = (table.prompt_lengths, table.lengths, table.max_lengths, table.cached, table.last, table.is_ahead)
    assert [int(column[slot]) for column in numbers] == [3, 4, 103, 3, 7, True]
    assert table.in_flight[slot] == 0 and table.entries[slot] == -1 and np.isnan(table.shares[slot])
    assert table.num_pages[slot] == 2 and table.pages[slot, :2].tolist() == [4, 2]
    table.check_integrity()


def test_what_is_written_is_what_is_fetched() -> None:
    """At once or later, by whoever asks first; before that, the numbers are known already."""
    table, one, other = SequenceTable(2, MAX_ROWS), make_sequence(1), make_sequence(2)
    for sequence in (one, other):
        sequence.num_cached = 2
        table.enter(sequence)
    emit(table, [one, other], [[7, 8, 9], [5]])
    emit(table, [other], [[6, 4]], "ahead")
    assert (one.length, one.num_cached, one.last_token, one.num_left) == (6, 5, 9, 97)
    assert (other.length, other.num_cached, other.last_token, other.num_left) == (6, 5, 4, 97)
    assert one.response_ids.tolist() == [7, 8, 9] and one.spans == [(0, 2, "suffix")]
    assert one.logprobs == [-3.5, -4.0, -4.5] and one.truncated_logprobs == [-1.75, -2.0, -2.25]
    emit(table, [one], [[3]])
    assert other.spans == [(1, 2, "ahead")] and other.view.token_ids.tolist() == [10, 11, 12, 5, 6, 4]
    assert one.view.token_ids.tolist() == [10, 11, 12, 7, 8, 9, 3] and one.logprobs[-1] == -1.5
    assert table.num_recent.tolist() == [0, 0] == table.num_spans.tolist()


def test_who_leaves_takes_everything_along_and_may_come_back() -> None:
    table, sequence = SequenceTable(1, MAX_ROWS), make_sequence(1)
    sequence.num_cached = 2
    table.enter(sequence)
    emit(table, [sequence], [[7, 8]])
    table.leave(sequence)
    assert sequence.slot == NO_SLOT and sequence.table is None and table.sequences == [None]
    assert (sequence.length, sequence.num_cached, sequence.last_token) == (5, 4, 8)
    assert sequence.response_ids.tolist() == [7, 8] and sequence.spans == [(0, 1, "suffix")]
    table.check_integrity()
    stranger = make_sequence(2)
    stranger.num_cached = 2
    table.enter(stranger)
    emit(table, [stranger], [[1, 1, 1]])
    table.leave(stranger)
    sequence.num_cached = 0  # it lost its pages meanwhile
    table.enter(sequence)
    assert (sequence.length, sequence.num_cached, sequence.last_token) == (5, 0, 8)
    sequence.num_cached = 4
    emit(table, [sequence], [[9]])
    assert sequence.response_ids.tolist() == [7, 8, 9] and stranger.response_ids.tolist() == [1, 1, 1]


def test_a_slot_is_nobody_s_step_in_flight_after_a_change() -> None:
    table, one, other = SequenceTable(1, MAX_ROWS), make_sequence(1), make_sequence(2)
    table.enter(one)
    table.in_flight[one.slot], table.entries[one.slot], table.shares[one.slot] = 5, 0, 0.5
    table.leave(one)
    assert table.in_flight.tolist() == [0] and table.entries.tolist() == [-1]
    table.enter(other)
    assert table.in_flight.tolist() == [0] and table.entries.tolist() == [-1] and np.isnan(table.shares).all()
    table.in_flight[:], table.entries[:] = 3, 0
    table.land()
    assert table.in_flight.tolist() == [0] and table.entries.tolist() == [-1]


def test_a_sequence_that_continues_a_prefix_keeps_it() -> None:
    table, sequence = SequenceTable(1, MAX_ROWS), make_sequence(1)
    prefix = Prefix(Sampling(seed=1), [7, 8], [-0.1, -0.2], spans=((0, 1, "ahead"),))
    sequence.go_on_from(prefix)
    sequence.num_cached = 4
    table.enter(sequence)
    emit(table, [sequence], [[9, 3]])
    assert sequence.response_ids.tolist() == [7, 8, 9, 3] and sequence.spans == [(0, 1, "ahead"), (2, 3, "suffix")]
    assert sequence.logprobs == [-0.1, -0.2, -4.5, -1.5] and sequence.prefix().token_ids == [7, 8, 9, 3]


def test_pages_may_outgrow_the_table() -> None:
    """The table becomes wider for all; those of the others stay what they are."""
    table, one, other = SequenceTable(2, MAX_ROWS), make_sequence(1), make_sequence(2)
    width = table.pages.shape[1]
    one.pages = list(range(50, 50 + width))
    table.enter(one)
    table.enter(other)
    before = table.pages
    for count in (1, width, width + 1, 5 * width, 5 * width + 1):
        other.pages = list(range(count))
        table.set_pages(other)
        table.check_integrity()
        assert table.num_pages[other.slot] == count
    assert table.pages.shape[1] > width and table.pages is not before
    assert table.pages[one.slot, :width].tolist() == one.pages
    other.pages = [3]
    table.set_pages(other)
    table.check_integrity()
    # A sequence may also have them when it comes.
    narrow = SequenceTable(1, MAX_ROWS)
    late = make_sequence(3)
    late.pages = list(range(3 * width))
    narrow.enter(late)
    narrow.check_integrity()


def test_sources_are_numbered_once() -> None:
    table = SequenceTable(1, MAX_ROWS)
    assert [table.source_id(name) for name in ("a", "b", "a", "c", "b")] == [0, 1, 0, 2, 1]


def wrong_owner(table: SequenceTable, sequence: Sequence) -> None:
    table.owners[sequence.slot] += 1


def wrong_slot(table: SequenceTable, sequence: Sequence) -> None:
    sequence.slot = 1 - sequence.slot


def wrong_table(table: SequenceTable, sequence: Sequence) -> None:
    sequence.table = SequenceTable(2, MAX_ROWS)


def lost_page(table: SequenceTable, sequence: Sequence) -> None:
    sequence.pages.append(9)


def other_page(table: SequenceTable, sequence: Sequence) -> None:
    table.pages[sequence.slot, 0] += 1


def free_twice(table: SequenceTable, sequence: Sequence) -> None:
    table._free.append(sequence.slot)


def freed(table: SequenceTable, sequence: Sequence) -> None:
    table.owners[sequence.slot] = 0


def forgotten(table: SequenceTable, sequence: Sequence) -> None:
    table.sequences[sequence.slot] = None


@pytest.mark.parametrize(
    "damage", [wrong_owner, wrong_slot, wrong_table, lost_page, other_page, free_twice, freed, forgotten]
)
def test_a_slot_that_disagrees_is_noticed(damage: Callable[[SequenceTable, Sequence], None]) -> None:
    table, sequence = SequenceTable(2, MAX_ROWS), make_sequence(4)
    sequence.pages = [1, 2]
    table.enter(sequence)
    table.check_integrity()
    damage(table, sequence)
    with pytest.raises(AssertionError):
        table.check_integrity()


@settings(max_examples=60)
@given(num_slots=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_coming_and_going_at_random_loses_nothing(num_slots: int, seed: int) -> None:
    rng = random.Random(seed)
    table = SequenceTable(num_slots, MAX_ROWS)
    told: dict[int, list[int]] = {}
    running: list[Sequence] = []
    resting: list[Sequence] = []
    for number in range(1, 120):
        if len(running) < num_slots and rng.random() < 0.4:
            is_back = bool(resting) and rng.random() < 0.5
            sequence = resting.pop(rng.randrange(len(resting))) if is_back else make_sequence(number, limit=2000)
            sequence.num_cached = sequence.length - 1
            told.setdefault(sequence.sequence_id, [])
            table.enter(sequence)
            running.append(sequence)
        elif running and rng.random() < 0.2:
            sequence = running.pop(rng.randrange(len(running)))
            table.leave(sequence)
            resting.append(sequence)
        elif running:
            chosen = rng.sample(running, rng.randint(1, len(running)))
            tokens = [[rng.randrange(50) for _ in range(rng.randint(1, MAX_ROWS))] for _ in chosen]
            emit(table, chosen, tokens)
            for sequence, own in zip(chosen, tokens, strict=True):
                told[sequence.sequence_id] += own
                if rng.random() < 0.1:
                    assert sequence.response_ids.tolist() == told[sequence.sequence_id]
        table.check_integrity()
    for sequence in (*running, *resting):
        own = told[sequence.sequence_id]
        assert sequence.length == sequence.prompt_length + len(own) and sequence.num_pending == 1
        assert sequence.response_ids.tolist() == own and sequence.logprobs == [-0.5 * token for token in own]
