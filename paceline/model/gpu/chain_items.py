"""`work_list.plan_items` for steps without trees, which is nearly all of them: the same list, compiled.

A card waits while a step is cut up, and numpy takes a fifth of a millisecond for it, however little there is to do.
`work_list.py` explains what is decided; it calls this where it can and is its slow twin. Numba caches by file: every
constant of the kernels comes as an argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

ENTRY, FIRST_COLUMN, SPLIT_NUMBER, TREE_ROW = range(4)
"""Fields of an item."""
WHOLE = NO_TREE = -1

_compiled: Any = njit(cache=True, nogil=True)


@_compiled
def chain_items(
    contexts: Any,
    row_counts: Any,
    group_size: int,
    num_kv_heads: int,
    num_programs: int,
    partial_capacity: int,
    low: int,
    high: int,
    split: int,
    tile: int,
) -> Any:
    """Items, where the low and the high ones end, and per row its splits and the first of its partial results.

    No items at all where the partial results that are wanted find no room: then somebody has to choose.
    """
    count = len(contexts)
    is_cut, num_tiles = np.zeros(count, np.bool_), 0
    heights, tiles = np.empty(count, np.int64), np.empty(count, np.int64)
    work = 0.0
    for i in range(count):
        columns = row_counts[i] * group_size
        heights[i] = low if columns <= low else high
        tiles[i] = (columns + heights[i] - 1) // heights[i]
        num_tiles += tiles[i]
        work += float(contexts[i] + row_counts[i]) * tiles[i]
    is_idle = num_tiles * num_kv_heads < 2 * num_programs
    share = work * num_kv_heads / num_programs
    num_rows, used = 0, 0
    for i in range(count):
        length = contexts[i] + row_counts[i]
        num_splits = (length + split - 1) // split
        is_filling = tiles[i] * num_kv_heads >= num_programs
        gains = not is_filling and (is_idle or length > share)
        is_cut[i] = (heights[i] == high or gains) and num_splits > 1
        if is_cut[i]:
            used += row_counts[i] * num_splits
        elif num_splits > 1 and heights[i] == high:
            heights[i] = low  # a high tile has no registers to go on to another split
            tiles[i] = (row_counts[i] * group_size + low - 1) // low
        num_rows += row_counts[i]
    if used > partial_capacity:
        return np.empty((0, 4), np.int32), 0, 0, np.empty(0, np.int32), np.empty(0, np.int32)
    # How many items there are of each kind and size, for sorting them by counting: the most to read first.
    most = 0
    for i in range(count):
        most = max(most, (contexts[i] + row_counts[i] + tile - 1) // tile)
    most = max(most, split // tile)
    starts = np.zeros(2 * (most + 1) + 1, np.int64)
    row_splits, row_base = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    for pass_ in range(2):
        if pass_ == 1:
            for slot in range(len(starts) - 1, 0, -1):
                starts[slot] = starts[slot - 1]
            starts[0] = 0
            for slot in range(1, len(starts)):
                starts[slot] += starts[slot - 1]
            items = np.empty((starts[-1], 4), np.int32)
        base, first_row = 0, 0
        for i in range(count):
            rows = row_counts[i]
            kind = 1 if heights[i] == high else 0
            for nth in range(tiles[i]):
                column = nth * heights[i]
                last_row = min((column + heights[i] - 1) // group_size, rows - 1)
                length = contexts[i] + last_row + 1
                splits = (length + split - 1) // split if is_cut[i] else 1
                to_read = split // tile if is_cut[i] else (length + tile - 1) // tile
                slot = kind * (most + 1) + most - to_read
                if pass_ == 0:
                    starts[slot] += splits
                else:
                    for number in range(splits):
                        at = starts[slot]
                        starts[slot] += 1
                        items[at, ENTRY], items[at, FIRST_COLUMN] = i, column
                        items[at, SPLIT_NUMBER], items[at, TREE_ROW] = (number if is_cut[i] else WHOLE), NO_TREE
            if pass_ == 1 and is_cut[i]:
                num_splits = (contexts[i] + rows + split - 1) // split
                for row in range(rows):
                    row_splits[first_row + row] = (contexts[i] + row) // split + 1
                    row_base[first_row + row] = base + row * num_splits
                base += rows * num_splits
            first_row += rows
    # By now every place has moved on to where the next kind and size begins.
    return items, starts[most], len(items), row_splits, row_base
