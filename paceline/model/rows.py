"""Flat token rows, the one input shape of every forward pass.

Decode rows, draft nodes, prefill chunks and run-ahead rows are all just rows; each knows its sequence, position and
parent. The scheduler's plan becomes `Rows`; `decoder.py` and the ops only read them.

A sequence's rows are contiguous. Row i of a sequence with `context` cached tokens writes its keys and values to logical
slot `context + i`, found through the sequence's page table; in a chain that slot is also its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.cpu.jit import host_loop
from paceline.kernels.limits import MAX_TREE_DEPTH

CHAIN: Sequence[int] = ()
"""The parents of a chain, the common case, which needs no list."""


class SequenceRows(NamedTuple):
    """The rows that one sequence contributes to a step."""

    token_ids: Sequence[int] | NDArray[np.int32]
    context: int
    """Tokens whose keys and values are already cached; the first row's position."""
    pages: Sequence[int]
    parents: Sequence[int] = CHAIN
    """Per row the index of its parent row, -1 for the first."""


@dataclass(frozen=True)
class Rows:
    """A step's input."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    parents: NDArray[np.int32]
    """Index of the parent among the sequence's rows; -1 if the parent is in the cached context."""
    row_starts: NDArray[np.int32]
    contexts: NDArray[np.int32]
    is_tree: NDArray[np.bool_]
    page_tables: NDArray[np.int32]
    page_size: int
    num_pages: NDArray[np.int64]
    """Per sequence, the number of valid page table entries."""

    @classmethod
    def build(cls, sequences: Sequence[SequenceRows], page_size: int) -> Rows:
        """Concatenate the rows of all sequences."""
        counts = [len(s.token_ids) for s in sequences]
        contexts = np.array([s.context for s in sequences], np.int32)
        is_tree = np.zeros(len(sequences), np.bool_)
        num_pages = np.array([len(s.pages) for s in sequences])
        assert (num_pages * page_size >= contexts + counts).all(), "every row needs a slot"
        tables = np.zeros((len(sequences), num_pages.max()), np.int32)
        pages = np.fromiter(chain.from_iterable(s.pages for s in sequences), np.int32, num_pages.sum())
        tables[np.arange(tables.shape[1]) < num_pages[:, None]] = pages
        if sum(counts) == len(counts):  # plain decoding must be fast
            tokens = np.array([s.token_ids[0] for s in sequences], np.int32)
            starts = np.arange(len(counts) + 1, dtype=np.int32)
            return cls(
                tokens,
                contexts.copy(),
                np.full(len(counts), -1, np.int32),
                starts,
                contexts,
                is_tree,
                tables,
                page_size,
                num_pages,
            )
        starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        local = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], counts)
        positions, parents = np.repeat(contexts, counts) + local, local - 1
        for i, sequence in enumerate(sequences):
            if len(sequence.parents):
                is_tree[i] = True
                span = slice(starts[i], starts[i + 1])
                parents[span] = sequence.parents
                positions[span] = sequence.context + depths(tuple(sequence.parents))
        # Iterating over a list is several times faster than turning it into an array first.
        lists = (s.token_ids.tolist() if isinstance(s.token_ids, np.ndarray) else s.token_ids for s in sequences)
        tokens = np.fromiter(chain.from_iterable(lists), np.int32, int(starts[-1]))
        return cls(tokens, positions, parents, starts, contexts, is_tree, tables, page_size, num_pages)

    @classmethod
    def lay_out(
        cls,
        contexts: NDArray[np.int64],
        counts: NDArray[np.int64],
        page_tables: NDArray[np.int32],
        num_pages: NDArray[np.int64],
        page_size: int,
    ) -> Rows:
        """Chains of so many rows after each context, with tokens still to be filled in; `set_tree` makes trees.

        The fast twin of `build`: no work per sequence.
        """
        is_placed, starts, before, *columns = _lay_out(contexts, counts, page_tables, num_pages, page_size)
        assert is_placed, "every row needs a slot"
        positions, parents, owners, local, slots, deepest = columns
        tokens, is_tree = np.zeros(len(positions), np.int32), np.zeros(len(counts), np.bool_)
        rows = cls(tokens, positions, parents, starts, before, is_tree, page_tables, page_size, num_pages)
        rows.__dict__.update(sequence_of_row=owners, row_in_sequence=local, slots=slots, deepest=deepest)
        return rows

    def set_tree(self, entry: int, parents: Sequence[int]) -> None:
        """Make the rows of one sequence a tree."""
        span = slice(*self.row_starts[entry : entry + 2].tolist())
        self.is_tree[entry] = True
        self.parents[span] = parents
        self.positions[span] = self.contexts[entry] + depths(tuple(parents))
        self.__dict__.pop("deepest", None)

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def sequence_of_row(self) -> NDArray[np.int64]:
        """The sequence each row belongs to."""
        if len(self) == len(self.contexts):
            return np.arange(len(self))
        return np.repeat(np.arange(len(self.contexts)), np.diff(self.row_starts))

    @cached_property
    def row_in_sequence(self) -> NDArray[np.int64]:
        """Index of each row among the rows of its sequence."""
        return np.arange(len(self)) - self.row_starts[self.sequence_of_row]

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """Physical slot (page * page_size + offset) that each row writes to."""
        logical = self.contexts[self.sequence_of_row] + self.row_in_sequence
        pages = self.page_tables[self.sequence_of_row, logical // self.page_size].astype(np.int64)
        return pages * self.page_size + logical % self.page_size

    @cached_property
    def deepest(self) -> NDArray[np.int32]:
        """Per sequence, the length of its longest path after the first row."""
        if len(self) == len(self.contexts):
            return np.zeros(len(self), np.int32)
        return np.maximum.reduceat(self.positions, self.row_starts[:-1]) - self.contexts

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a row and a token that it attends to: the work of attention."""
        return int(self.positions.sum(dtype=np.int64)) + len(self)

    @cached_property
    def num_kv_tokens(self) -> int:
        """Cached tokens the step reads, counting each sequence once."""
        return int(self.contexts.sum()) + len(self)


@host_loop
def _lay_out(contexts: Any, counts: Any, page_tables: Any, num_pages: Any, page_size: int) -> Any:
    """Whether every row has a slot; where rows start, contexts; by row what `Rows` names, and depths by sequence."""
    starts, before = np.zeros(len(counts) + 1, np.int32), np.empty(len(counts), np.int32)
    deepest = np.empty(len(counts), np.int32)
    is_placed = True
    for i in range(len(counts)):
        starts[i + 1], before[i], deepest[i] = starts[i] + counts[i], contexts[i], counts[i] - 1
        is_placed = is_placed and num_pages[i] * page_size >= contexts[i] + counts[i]
    total = starts[len(counts)]
    positions, parents = np.empty(total, np.int32), np.empty(total, np.int32)
    owners, local, slots = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    if is_placed:
        row = 0
        for i in range(len(counts)):
            for nth in range(counts[i]):
                position = before[i] + nth
                positions[row], parents[row], owners[row], local[row] = position, nth - 1, i, nth
                slots[row] = page_tables[i, position // page_size] * page_size + position % page_size
                row += 1
    return is_placed, starts, before, positions, parents, owners, local, slots, deepest


@lru_cache(maxsize=256)  # a drafter makes the same few shapes again and again
def depths(parents: tuple[int, ...]) -> NDArray[np.int32]:
    """Distance of each row from the first; a parent always precedes its child."""
    result = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents):
        if parent >= 0:
            result[i] = result[parent] + 1
    result.setflags(write=False)
    return result


@lru_cache(maxsize=256)
def paths(parents: tuple[int, ...]) -> NDArray[np.int32]:
    """For each row of a tree, the rows from the first one down to itself: [rows, MAX_TREE_DEPTH]."""
    depth = depths(parents)
    assert depth.max() < MAX_TREE_DEPTH, "the engine cuts drafts to this depth"
    result = np.zeros((len(parents), MAX_TREE_DEPTH), np.int32)
    for row, parent in enumerate(parents):
        if parent >= 0:  # a child's path begins with its parent's
            result[row, : depth[row]] = result[parent, : depth[row]]
        result[row, depth[row]] = row
    result.setflags(write=False)
    return result
