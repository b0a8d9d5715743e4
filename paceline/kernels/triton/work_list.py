"""Work list of the attention kernel: the host cuts a step's columns and positions into items for its programs.

An item is a tile of columns over one split of the positions, whose result `combine` adds later, or over all of them
("whole"). Splits fill the GPU when columns are few and even out sequences of different lengths; whole items save the
round trip through memory. Both give the same bits (see `attention.py`), so every decision here follows speed and none
may affect numerics. `model/ops/gpu.py` calls it once per step; `chain_items.py` handles most steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import IntArray
from paceline.kernels.limits import MAX_TREE_DEPTH
from paceline.kernels.triton.attention import (
    ALL_KINDS,
    HIGH,
    HIGH_CHAINS,
    ITEM_FIELDS,
    LOW,
    LOW_CHAINS,
    SPLIT,
    TILE,
    TREES,
)
from paceline.kernels.triton.chain_items import NO_TREE, WHOLE, chain_items

SPLIT_FIELD = 2
_MOST_TILES = 1 << 13
"""More position tiles than any sequence has; three times this fits in 16 bits."""


class WorkList(NamedTuple):
    """The input of `attend` and `combine` before it is copied into their buffers; see `attention.AttentionRows`."""

    items: NDArray[np.int32]
    ends: tuple[int, int, int]
    """Where the items of each kind end."""
    num_splits: NDArray[np.int32]
    partial_base: NDArray[np.int32]

    @property
    def kinds(self) -> tuple[int, ...]:
        """Kinds to launch kernels for: the only kind present, or all of them, so that there are few variants."""
        starts = (0, *self.ends[:-1])
        found = tuple(kind for kind in ALL_KINDS if self.ends[kind] > starts[kind])
        return found if len(found) == 1 else ALL_KINDS if found else (LOW_CHAINS,)


class _Entries(NamedTuple):
    """The step's sequences. Every array has one number per entry."""

    contexts: IntArray
    row_counts: IntArray
    lengths: IntArray
    """Positions up to and including the last one that any row sees; an upper bound for trees."""
    num_splits: IntArray
    heights: IntArray
    num_tiles: IntArray
    """Column tiles."""
    is_tree: NDArray[np.bool_]


class _Tiles(NamedTuple):
    """Column tiles before their positions are split. Every array has one number per tile."""

    entry: IntArray
    first_column: IntArray
    kind: IntArray
    tree_row: IntArray
    first_split: IntArray
    end_split: IntArray
    """Equal to `first_split` if the tile is one whole item."""
    length: IntArray
    """Positions up to and including the last one it sees."""


def most_items(num_rows: int, partial_capacity: int) -> int:
    """Capacity that `items` needs: each split has a partial result, and a row is in at most four whole items."""
    return num_rows * (HIGH // LOW) + partial_capacity


def usual_kinds(num_rows: int, group_size: int) -> list[tuple[int, ...]]:
    """Kinds that a step of this many rows may launch: all of them, or low chains only."""
    if num_rows * group_size <= LOW and num_rows <= 2:  # a tree forks, so it has at least three rows
        return [(LOW_CHAINS,)]
    return [ALL_KINDS, (LOW_CHAINS,)]


def plan_items(
    contexts: IntArray,
    row_counts: IntArray,
    row_starts: IntArray,
    is_tree: NDArray[np.bool_],
    group_size: int,
    num_kv_heads: int,
    num_programs: int,
    partial_capacity: int,
    slack: IntArray | int = 0,
) -> WorkList:
    """Cut a step into items, longest first, with at most `partial_capacity` partial results.

    `slack`: by how much each context may turn out shorter.
    """
    assert group_size <= HIGH, "a row's heads must fit into one tile"
    if len(contexts) and not is_tree.any():
        given = (group_size, num_kv_heads, num_programs, partial_capacity, LOW, HIGH, SPLIT, TILE)
        items, num_low, num_splits, partial_base = chain_items(contexts, row_counts, *given)
        if len(items):
            return WorkList(items, (num_low, len(items), len(items)), num_splits, partial_base)
    return _plan_items(
        contexts, row_counts, row_starts, is_tree, group_size, num_kv_heads, num_programs, partial_capacity, slack
    )


def _plan_items(
    contexts: IntArray,
    row_counts: IntArray,
    row_starts: IntArray,
    is_tree: NDArray[np.bool_],
    group_size: int,
    num_kv_heads: int,
    num_programs: int,
    partial_capacity: int,
    slack: IntArray | int = 0,
) -> WorkList:
    has_trees = bool(is_tree.any())
    depths = np.minimum(row_counts, np.where(is_tree, MAX_TREE_DEPTH, row_counts)) if has_trees else row_counts
    lengths = contexts + depths
    columns = row_counts * group_size
    heights = np.where(columns <= LOW, LOW, HIGH)
    entries = _Entries(contexts, row_counts, lengths, -(-lengths // SPLIT), heights, -(-columns // heights), is_tree)
    wanted = is_tree | (heights == HIGH) | _gain_from_splits(entries, num_kv_heads, num_programs)
    is_split = wanted & (entries.num_splits > 1)
    num_rows = int(row_starts[-1] + row_counts[-1]) if len(contexts) else 0
    if not is_split.any():
        num_splits = partial_base = np.zeros(num_rows, np.int32)
    else:
        is_split, bases = _grant(is_split, entries, partial_capacity)
        num_splits, partial_base = _row_tables(entries, row_starts, is_split, bases, num_rows)
        # A high tile has no registers left to continue into another split.
        heights = np.where(is_split | (entries.num_splits == 1), heights, LOW)
        entries = entries._replace(heights=heights, num_tiles=-(-columns // heights))
    tiles = [_column_tiles(entries, np.flatnonzero(~is_tree), is_split, group_size)]
    if has_trees:
        tiles += _tree_tiles(entries, is_split, group_size, slack)
    return WorkList(*_items(tiles), num_splits, partial_base)


def _gain_from_splits(entries: _Entries, num_kv_heads: int, num_programs: int) -> NDArray[np.bool_] | np.bool_:
    """Where whole items would leave programs idle: with few items, or if one outlasts an even share of the work."""
    is_filling = entries.num_tiles * num_kv_heads >= num_programs
    if int(entries.num_tiles.sum()) * num_kv_heads < 2 * num_programs:
        # An entry that fills the GPU on its own (a long prompt chunk) gains nothing and would write the most.
        return ~is_filling
    share = np.dot(entries.lengths.astype(np.float64), entries.num_tiles) * num_kv_heads / num_programs
    return ~is_filling & (entries.lengths > share)


def _grant(
    wanted: NDArray[np.bool_], entries: _Entries, partial_capacity: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which entries may be split, and where each one's partial results begin.

    Trees come first, since an unsplit tree reads its context once per row; then the longest entries.
    """
    needs = np.where(wanted, entries.row_counts * entries.num_splits, 0)
    ends = np.cumsum(needs)
    if ends[-1] <= partial_capacity:
        return wanted, ends - needs
    order = np.lexsort((-entries.lengths, ~entries.is_tree))
    granted, bases, used = np.zeros_like(wanted), np.zeros(len(wanted), np.int64), 0
    for entry in order[wanted[order]]:
        if used + needs[entry] <= partial_capacity:
            granted[entry], bases[entry] = True, used
            used += int(needs[entry])
    return granted, bases


def _spread(counts: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For counts 2, 1, 3: the owner of each of the six, 0 0 1 2 2 2, and its index within that owner, 0 1 0 0 1 2."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts).take(owner)


def _row_tables(
    entries: _Entries, row_starts: IntArray, is_split: NDArray[np.bool_], bases: IntArray, num_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per row its number of partial results and where they begin."""
    num_splits, partial_base = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    cut = np.flatnonzero(is_split)
    owner, local = _spread(entries.row_counts[cut])
    entry = cut[owner]
    most = entries.num_splits[entry]
    # A chain row skips the splits that begin after it; a tree row's position is not known here.
    own = np.where(entries.is_tree[entry], most, (entries.contexts[entry] + local) // SPLIT + 1)
    at = row_starts[entry] + local
    num_splits[at], partial_base[at] = own, bases[entry] + local * most
    return num_splits, partial_base


def _column_tiles(entries: _Entries, chosen: IntArray, is_split: NDArray[np.bool_], group_size: int) -> _Tiles:
    """The columns of the chosen entries, tiled as if they were chains."""
    owner, nth = _spread(entries.num_tiles[chosen])
    entry = chosen[owner]
    height = entries.heights[entry]
    first_column = nth * height
    last_row = np.minimum((first_column + height - 1) // group_size, entries.row_counts[entry] - 1)
    lengths = entries.contexts[entry] + last_row + 1
    end = np.where(is_split[entry], -(-lengths // SPLIT), 0)
    nothing = np.zeros_like(entry)
    kind = np.where(height == HIGH, HIGH_CHAINS, LOW_CHAINS)
    return _Tiles(entry, first_column, kind, nothing + NO_TREE, nothing, end, lengths)


def _tree_tiles(entries: _Entries, is_split: NDArray[np.bool_], group_size: int, slack: IntArray | int) -> list[_Tiles]:
    """Rows of a tree share the splits of their context and go one by one through the rest, which holds their paths."""
    own_splits = (entries.contexts - slack) // SPLIT
    shared = _column_tiles(entries, np.flatnonzero(entries.is_tree & is_split & (own_splits > 0)), is_split, group_size)
    end = own_splits[shared.entry]
    shared = shared._replace(end_split=end, length=end * SPLIT)
    trees = np.flatnonzero(entries.is_tree)
    owner, tree_row = _spread(entries.row_counts[trees])
    entry = trees[owner]
    first = np.where(is_split[entry], own_splits[entry], 0)
    end = np.where(is_split[entry], entries.num_splits[entry], 0)
    nothing = np.zeros_like(entry)
    return [shared, _Tiles(entry, nothing, nothing + TREES, tree_row, first, end, entries.lengths[entry])]


def _items(tiles: list[_Tiles]) -> tuple[NDArray[np.int32], tuple[int, int, int]]:
    """Cut tiles into their splits, one kind after another, and return where each kind ends.

    Within a kind the longest reads come first; a split counts as full.
    """
    entry, first_column, kind, tree_row, first, end, length = (
        tiles[0] if len(tiles) == 1 else map(np.concatenate, zip(*tiles, strict=True))
    )
    table = np.zeros((len(entry), ITEM_FIELDS), np.int32)
    for field, values in enumerate((entry, first_column, first, tree_row)):
        table[:, field] = values
    is_cut = end > first
    table[~is_cut, SPLIT_FIELD] = WHOLE
    tiles_to_read = np.where(is_cut, SPLIT // TILE, (length + TILE - 1) // TILE)
    # numpy radix-sorts 16-bit numbers, in linear time.
    order = np.argsort((kind * _MOST_TILES - tiles_to_read).astype(np.int16), kind="stable")
    num_items = np.maximum(end - first, 1)
    low, high = (int(num_items[kind <= last].sum()) for last in (LOW_CHAINS, HIGH_CHAINS))
    ends = low, high, int(num_items.sum())
    if not is_cut.any():
        return table.take(order, axis=0), ends
    tile, nth = _spread(num_items.take(order))
    items = table.take(order.take(tile), axis=0)
    items[:, SPLIT_FIELD] += nth.astype(np.int32)
    return items, ends
