"""Compiled `work_list.plan_items` for steps without trees, which is nearly all of them.

The GPU idles while the host cuts up a step, and numpy takes a fifth of a millisecond for that however little there is
to do. `work_list.py` explains the decisions; it calls this where it can and is its slow twin. Numba caches by file, so
every kernel constant comes in as an argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.kernels.cpu.jit import host_loop

WHOLE = NO_TREE = -1
"""Item fields: not split, not a tree row."""

_compiled: Any = host_loop


@_compiled
def _cut(
    contexts: Any,
    row_counts: Any,
    group_size: int,
    num_kv_heads: int,
    num_programs: int,
    low: int,
    high: int,
    split: int,
) -> Any:
    """Per sequence its tile height, tile count and whether its tiles are split; and the total of partial results."""
    count = len(contexts)
    heights, tiles, is_cut = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.bool_)
    num_tiles, work, used = 0, 0.0, 0
    for i in range(count):
        columns = row_counts[i] * group_size
        heights[i] = low if columns <= low else high
        tiles[i] = (columns + heights[i] - 1) // heights[i]
        num_tiles += tiles[i]
        work += float(contexts[i] + row_counts[i]) * tiles[i]
    is_idle = num_tiles * num_kv_heads < 2 * num_programs
    share = work * num_kv_heads / num_programs
    for i in range(count):
        length = contexts[i] + row_counts[i]
        num_splits = (length + split - 1) // split
        gains = tiles[i] * num_kv_heads < num_programs and (is_idle or length > share)
        is_cut[i] = (heights[i] == high or gains) and num_splits > 1
        if is_cut[i]:
            used += row_counts[i] * num_splits
        elif num_splits > 1 and heights[i] == high:
            heights[i] = low  # a high tile has no registers left to continue into another split
            tiles[i] = (row_counts[i] * group_size + low - 1) // low
    return heights, tiles, is_cut, used


@_compiled
def _place(i: int, nth: int, contexts: Any, row_counts: Any, height: int, group_size: int, split: int) -> Any:
    """Of a sequence's nth tile: the positions it sees, and the number of splits they span."""
    last_row = min((nth * height + height - 1) // group_size, row_counts[i] - 1)
    length = contexts[i] + last_row + 1
    return length, (length + split - 1) // split


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
    """Return the items, where the low ones end, and per row its split count and the index of its first partial result.

    Returns no items if the partial results do not fit: the caller then has to choose which sequences to split.
    """
    heights, tiles, is_cut, used = _cut(contexts, row_counts, group_size, num_kv_heads, num_programs, low, high, split)
    row_splits, row_base = np.zeros(row_counts.sum(), np.int32), np.zeros(row_counts.sum(), np.int32)
    if used > partial_capacity:
        return np.empty((0, 4), np.int32), 0, row_splits, row_base
    # Counting sort: low tiles before high ones, and within each kind the longest reads first.
    most = max((contexts + row_counts).max() + tile - 1, split) // tile
    ends = np.zeros(2 * (most + 1) + 1, np.int64)
    for i in range(len(contexts)):
        for nth in range(tiles[i]):
            length, splits = _place(i, nth, contexts, row_counts, heights[i], group_size, split)
            to_read = split // tile if is_cut[i] else (length + tile - 1) // tile
            ends[(most + 1 if heights[i] == high else 0) + most - to_read + 1] += splits if is_cut[i] else 1
    ends = np.cumsum(ends)
    items = np.empty((ends[-1], 4), np.int32)
    row, base, num_low = 0, 0, ends[most + 1]
    for i in range(len(contexts)):
        for nth in range(tiles[i]):
            length, splits = _place(i, nth, contexts, row_counts, heights[i], group_size, split)
            to_read = split // tile if is_cut[i] else (length + tile - 1) // tile
            slot = (most + 1 if heights[i] == high else 0) + most - to_read
            for number in range(splits if is_cut[i] else 1):
                items[ends[slot]] = (i, nth * heights[i], number if is_cut[i] else WHOLE, NO_TREE)
                ends[slot] += 1
        if is_cut[i]:
            num_splits = (contexts[i] + row_counts[i] + split - 1) // split
            for local in range(row_counts[i]):
                row_splits[row + local] = (contexts[i] + local) // split + 1
                row_base[row + local] = base + local * num_splits
            base += row_counts[i] * num_splits
        row += row_counts[i]
    return items, num_low, row_splits, row_base
