"""Ragged paged attention on a CPU: each row attends to its own ancestors in position order, in any batch.

Scores are summed over the head dimension in order, softmax sums run over position-aligned vectors, and values are added
key by key in position order. So a row gives the same bits alone, in a prefill chunk, in a chain or in a tree. Tree rows
read the tail of their context from a scratch copy with the ancestors at their positions. Only `model/ops/native.py`
calls this.

Layout: keys [pages, kv heads, head dim, PAGE], values [pages, kv heads, PAGE, padded head dim].
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from paceline.kernels.cpu.atomics import bools, floats, int32s, int64s
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.pool import DONE, FMAS_PER_NS, Shared, num_tasks, part_of, share_out, shared
from paceline.kernels.cpu.simd import LANES, exp, first_lanes, larger, largest, load, splat, store, total
from paceline.kernels.cpu.tile import CONTINUE, MAX_ROWS, PANEL, SET, VECTORS, make_tile

PAGE = 32
"""Tokens per page; a multiple of LANES, so that key vectors are aligned to positions."""

QUERY_BLOCK = 8 * MAX_ROWS
"""Queries of a unit of work: enough to share the pages that a long prompt's rows read."""

UNIT_NS = 600.0
"""What a sequence and kv head cost besides, to estimate work."""

_score_tile = make_tile(PAGE // LANES, SET)
_value_tile_wide = make_tile(VECTORS, CONTINUE)
_value_tile = make_tile(1, CONTINUE)


@kernel
def _softmax(scores: int, length: int) -> float:
    """Replace scores by exp(score - largest) in place; return their sum."""
    lowest = splat(np.float32(-np.inf))
    peak = lowest
    for i in range(0, length, LANES):
        peak = larger(peak, first_lanes(load(scores + 4 * i, length - i), lowest, length - i))
    top = splat(largest(peak))
    sums = splat(np.float32(0))
    for i in range(0, length, LANES):
        weight = first_lanes(exp(load(scores + 4 * i, length - i) - top), splat(np.float32(0)), length - i)
        store(scores + 4 * i, weight, length - i)
        sums = sums + weight
    return total(sums)


@kernel
def _add_values(count: int, weights: int, stride: int, page: int, width: int, depth: int, sums: int) -> None:
    """sums[c] += weights[c, :depth] @ page[:depth] for `count` rows of `width` columns."""
    column = 0
    while column < width:
        if column + PANEL <= width:
            _value_tile_wide(count, weights, stride, page + 4 * column, width, depth, sums + 4 * column, width)
            column += PANEL
        else:
            _value_tile(count, weights, stride, page + 4 * column, width, depth, sums + 4 * column, width)
            column += LANES


@kernel
def _attend_tile(
    count: int,
    queries: int,
    lengths: NDArray[np.int64],
    head_dim: int,
    key_pages: NDArray[np.int64],
    value_pages: NDArray[np.int64],
    scores: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:
    """Attend with `count` queries over the pages of one sequence and kv head; the normalised results go to `sums`."""
    stride, width = scores.shape[1], sums.shape[1]
    first_score, first_sum = scores.ctypes.data, sums.ctypes.data
    shortest, longest = lengths[0], lengths[0]
    for c in range(1, count):
        shortest, longest = min(shortest, lengths[c]), max(longest, lengths[c])
    for p in range((longest + PAGE - 1) // PAGE):
        to = first_score + p * PAGE * 4
        _score_tile(count, queries, head_dim, key_pages[p], PAGE, head_dim, to, stride)
    totals = np.empty(MAX_ROWS, np.float32)
    for c in range(count):
        totals[c] = _softmax(first_score + c * stride * 4, lengths[c])
        for i in range(0, width, LANES):
            store(first_sum + (c * width + i) * 4, splat(np.float32(0)), LANES)
    # Pages that every row sees in full share one wide tile; ragged ends go row by row.
    num_whole = shortest // PAGE
    for p in range(num_whole):
        _add_values(count, first_score + p * PAGE * 4, stride, value_pages[p], width, PAGE, first_sum)
    for c in range(count):
        for p in range(num_whole, (lengths[c] + PAGE - 1) // PAGE):
            depth = min(PAGE, lengths[c] - p * PAGE)
            weights = first_score + (c * stride + p * PAGE) * 4
            _add_values(1, weights, stride, value_pages[p], width, depth, first_sum + c * width * 4)
        for i in range(0, width, LANES):
            address = first_sum + (c * width + i) * 4
            store(address, load(address, LANES) / splat(totals[c]), LANES)


@kernel
def _copy_token(
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    page: int,
    head: int,
    offset: int,
    key_tail: NDArray[np.float32],
    value_tail: NDArray[np.float32],
    position: int,
) -> None:
    """Copy one token's key and value from its slot to `position` in the tail."""
    to, at = position // PAGE, position % PAGE
    for d in range(keys.shape[2]):
        key_tail[to, d, at] = keys[page, head, d, offset]
    for d in range(values.shape[3]):
        value_tail[to, at, d] = values[page, head, offset, d]


@kernel
def _gather_tail(
    row: int,
    context: int,
    parents: NDArray[np.int32],
    table: NDArray[np.int32],
    head: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    key_tail: NDArray[np.float32],
    value_tail: NDArray[np.float32],
) -> None:
    """Copy the committed part of the last shared page, then place each ancestor of tree row `row` at its position."""
    first = context // PAGE
    for offset in range(context % PAGE):
        _copy_token(keys, values, table[first], head, offset, key_tail, value_tail, offset)
    depth = 0
    node = row
    while node >= 0:
        depth += 1
        node = parents[node]
    node = row
    while node >= 0:
        depth -= 1
        slot = context + node
        position = context % PAGE + depth
        _copy_token(keys, values, table[slot // PAGE], head, slot % PAGE, key_tail, value_tail, position)
        node = parents[node]


@kernel
def _write_out(
    count: int, at: int, group: int, head: int, sums: NDArray[np.float32], out: int, stride: int, dim: int
) -> None:
    """Copy rows of `sums` to the output: query `at + c` is head `head + (at + c) % group` of its row."""
    width = sums.shape[1]
    for c in range(count):
        to = out + ((at + c) // group * stride + (head + (at + c) % group) * dim) * 4
        for i in range(0, dim, LANES):
            store(to + 4 * i, load(sums.ctypes.data + (c * width + i) * 4, dim - i), dim - i)


def attend(
    queries: int,
    positions: NDArray[np.int32],
    parents: NDArray[np.int32],
    row_starts: NDArray[np.int32],
    contexts: NDArray[np.int32],
    is_tree: NDArray[np.bool_],
    page_tables: NDArray[np.int32],
    num_heads: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    out: int,
    num_pairs: int,
) -> None:
    """Compute out [rows, heads * head dim] for all rows; `queries` are laid out by `rotate_and_store`.

    `num_pairs` counts the pairs of a row and a token that it attends to.
    """
    tables = positions, parents, row_starts, contexts, is_tree, page_tables
    assert all(table.flags.c_contiguous for table in tables), "tasks read them by address"
    # Two products per pair and head, and an exponential.
    work_ns = num_pairs * num_heads * (2 * keys.shape[2] + 16) / FMAS_PER_NS + len(contexts) * keys.shape[1] * UNIT_NS
    _attend(shared(_attend_task, work_ns), work_ns, queries, *tables, num_heads, keys, values, out)


@kernel
def _attend(
    to: Shared,
    work_ns: float,
    queries: int,
    positions: NDArray[np.int32],
    parents: NDArray[np.int32],
    row_starts: NDArray[np.int32],
    contexts: NDArray[np.int32],
    is_tree: NDArray[np.bool_],
    page_tables: NDArray[np.int32],
    num_heads: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    out: int,
) -> None:
    num_sequences, num_kv_heads = contexts.shape[0], keys.shape[1]
    group = num_heads // num_kv_heads
    block = np.zeros(_NUM_WORDS + num_sequences + 1, np.int64)
    # Units are (sequence, kv head, block of queries); `firsts` are the first units of the sequences.
    firsts = block[_NUM_WORDS:]
    for s in range(num_sequences):
        num_queries = (row_starts[s + 1] - row_starts[s]) * group
        firsts[s + 1] = firsts[s] + (num_queries + QUERY_BLOCK - 1) // QUERY_BLOCK * num_kv_heads
    count = num_tasks(int(firsts[num_sequences]), work_ns)
    block[0], block[1], block[2], block[3] = num_sequences, positions.shape[0], page_tables.shape[1], num_heads
    block[4], block[5], block[6], block[7] = keys.shape[0], num_kv_heads, keys.shape[2], values.shape[3]
    block[8], block[9], block[10], block[11] = queries, out, keys.ctypes.data, values.ctypes.data
    block[12], block[13], block[14] = positions.ctypes.data, parents.ctypes.data, row_starts.ctypes.data
    block[15], block[16], block[17] = contexts.ctypes.data, is_tree.ctypes.data, page_tables.ctypes.data
    block[18] = count
    share_out(to, block, count)


_NUM_WORDS = 19


def _attend_task(block: int, index: int) -> int:
    """Compute some units of `_attend`."""
    b = carray(int64s(block), _NUM_WORDS)
    num_sequences, num_rows, num_pages, num_heads = b[0], b[1], b[2], b[3]
    keys = carray(floats(b[10]), (b[4], b[5], b[6], PAGE))
    values = carray(floats(b[11]), (b[4], b[5], PAGE, b[7]))
    parents, row_starts = carray(int32s(b[13]), num_rows), carray(int32s(b[14]), num_sequences + 1)
    positions, contexts = carray(int32s(b[12]), num_rows), carray(int32s(b[15]), num_sequences)
    is_tree, tables = carray(bools(b[16]), num_sequences), carray(int32s(b[17]), (num_sequences, num_pages))
    firsts = carray(int64s(block + 8 * _NUM_WORDS), num_sequences + 1)
    scores = np.empty((MAX_ROWS, num_pages * PAGE), np.float32)
    sums = np.empty((MAX_ROWS, b[7]), np.float32)
    pages = np.empty((2, num_pages), np.int64)
    first, last = part_of(index, b[18], firsts[num_sequences])
    s = 0
    for unit in range(first, last):
        while firsts[s + 1] <= unit:
            s += 1
        start, stop = row_starts[s], row_starts[s + 1]
        num_blocks = (firsts[s + 1] - firsts[s]) // b[5]
        h, at = (unit - firsts[s]) // num_blocks, (unit - firsts[s]) % num_blocks * QUERY_BLOCK
        own, table = slice(start, stop), tables[s]
        first_query = b[8] + (h * num_rows + start) * (num_heads // b[5]) * b[6] * 4
        target = b[9] + start * num_heads * b[6] * 4
        _attend_unit(
            at,
            h,
            contexts[s],
            positions[own],
            parents[own],
            is_tree[s],
            table,
            num_heads,
            keys,
            values,
            first_query,
            target,
            pages,
            scores,
            sums,
        )
    return DONE


@kernel
def _attend_unit(
    first: int,
    head: int,
    context: int,
    positions: NDArray[np.int32],
    parents: NDArray[np.int32],
    is_tree: bool,
    table: NDArray[np.int32],
    num_heads: int,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    queries: int,
    out: int,
    pages: NDArray[np.int64],
    scores: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:
    """One sequence's queries from `first` on, a block of them, with one kv head: attend and write the results to `out`.

    `positions` and `parents` are those of the sequence's rows; `pages`, `scores` and `sums` are scratch space.
    """
    num_kv_heads, head_dim, width, group = keys.shape[1], keys.shape[2], values.shape[3], num_heads // keys.shape[1]
    key_bytes, value_bytes = head_dim * PAGE * 4, width * PAGE * 4
    num_rows, num_used = len(positions), (context + len(positions) + PAGE - 1) // PAGE
    num_tail = num_rows // PAGE + 2 if is_tree else 0
    key_tail = np.zeros((num_tail, head_dim, PAGE), np.float32)
    value_tail = np.zeros((num_tail, PAGE, width), np.float32)
    lengths = np.empty(MAX_ROWS, np.int64)
    for p in range(num_used):
        page_head = table[p] * num_kv_heads + head
        pages[0, p] = keys.ctypes.data + page_head * key_bytes
        pages[1, p] = values.ctypes.data + page_head * value_bytes
    at, stop = first, min(first + QUERY_BLOCK, num_rows * group)
    while at < stop:
        count = min(MAX_ROWS, stop - at)
        if is_tree:
            # Each tree row has its own tail, so a tile only holds the heads of one row.
            row = at // group
            count = min(count, (row + 1) * group - at)
            _gather_tail(row, context, parents, table, head, keys, values, key_tail, value_tail)
            for p in range(context // PAGE, num_used):
                pages[0, p] = key_tail.ctypes.data + (p - context // PAGE) * key_bytes
                pages[1, p] = value_tail.ctypes.data + (p - context // PAGE) * value_bytes
        for c in range(count):
            lengths[c] = positions[(at + c) // group] + 1
        _attend_tile(count, queries + at * head_dim * 4, lengths, head_dim, pages[0], pages[1], scores, sums)
        _write_out(count, at, group, head * group, sums, out, num_heads * head_dim, head_dim)
        at += count
