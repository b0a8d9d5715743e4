"""Ragged paged attention on a GPU: each row attends to its ancestors in position order; nothing else affects its bits.

A sequence's query vectors are columns (row j, head g of the group: column j * group + g). A tile has 16 or 64 of them,
zero-padded. Tensor cores compute every sum, so neither the height of a tile nor a column's place in it changes a bit.
Positions are cut into splits of SPLIT, aligned to position 0, and each split into tiles of TILE; sums run tile by tile
within a split, then split by split. The softmax works in base 2 with an integer running peak, so all rescaling is by
powers of two, which is exact. Where a multiplication meets an addition the kernels spell out `fma`: left to the
compiler, two kernels (or two variants of one) could round differently.

So a split computed by one program and added later (`combine`), all splits in one program, a column in any tile and a
branch of a tree give the same bits, and `work_list.py` may choose among them by speed alone. Each kind of item has its
own launch: in one kernel, the low tiles would get the registers of the high ones and be a third slower. Called by
`model/ops/gpu.py`. A kernel here must never depend on neighbouring rows, nor a grid on the contents of the row tables:
steps are captured.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.limits import MAX_TREE_DEPTH
from paceline.kernels.triton.launch import pdl_options
from paceline.kernels.triton.rowwise import load_sum, store_parts

TILE = 64
"""Positions whose keys and values are loaded for the tensor cores together."""
SPLIT = 256
"""Positions whose sums may be computed separately. Numerics: changing this or TILE changes the last bits."""
PAGE = SPLIT
"""Tokens per page: a split lies within one page."""
LOW, HIGH = 16, 64
"""Query vectors per tile: the heights of the two matrix instructions."""
LOW_CHAINS, HIGH_CHAINS, TREES = ALL_KINDS = (0, 1, 2)
"""Kinds of items: low and high tiles of consecutive rows, and single rows of trees."""
ITEM_FIELDS = 4
COMBINED_HEADS = 4
"""Heads per program of `combine`, so that rows without splits do not cost a program per head."""
STAGES, LARGE_STAGES = 3, 2
"""Position tiles in flight, including the current one: with low tiles, and with high ones."""

# Constants that kernels may read.
_PAGE, _TILE = tl.constexpr(PAGE), tl.constexpr(TILE)
_LOW = tl.constexpr(LOW)
_HIGH_CHAINS, _TREES = tl.constexpr(HIGH_CHAINS), tl.constexpr(TREES)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_PATH_LENGTH = tl.constexpr(MAX_TREE_DEPTH)
# Initial peak: below any score but finite, so that differences of peaks are never NaN.
_LOW_PEAK = tl.constexpr(-(2.0**30))
_LOW_SCORE = tl.constexpr(-1e30)
_LARGEST = tl.constexpr(3.0e38)
# Splits whose loads `combine` keeps in flight.
_COMBINE_AT_ONCE = tl.constexpr(8)


@dataclass(frozen=True)
class AttentionRows:
    """A step's rows as the kernels see them: int32 device tensors, buffers whose contents change every step."""

    positions: Tensor
    """[rows]"""
    contexts: Tensor
    """[entries]: cached tokens before an entry's first row. An entry is one sequence of this step."""
    row_starts: Tensor
    row_counts: Tensor
    tables: Tensor
    """[entries, max pages]"""
    paths: Tensor
    """[rows, MAX_TREE_DEPTH], read for tree rows: at depth d the ancestor's index among the entry's rows."""
    num_splits: Tensor
    """[rows]: number of partial results that `combine` adds; 0 for rows that `attend` finishes, and for padding."""
    partial_base: Tensor
    """[rows]: index of a row's first partial result."""
    items: Tensor
    """[capacity, ITEM_FIELDS]: entry, first column, split (-1: all), tree row (-1: none), one kind after another."""
    num_items: Tensor
    """[3]: where each kind ends."""


@triton.jit
def _power_of_two(exponent):
    """2**exponent for integers <= 0, built from its bits: exact, and 0 instead of a subnormal."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_split(total, top, sum_, acc, peak, mass):
    """Add a split's (acc, peak, mass) to those of the splits before it; columns are the first dimension.

    The only place where splits are merged, for both `attend` and `combine`. Adding to zeros at the low peak is exact.
    """
    higher = tl.maximum(top, peak)
    fade, gain = _power_of_two(top - higher), _power_of_two(peak - higher)
    sum_ = tl.fma(sum_, fade, mass * gain)
    fade, gain = tl.broadcast_to(fade[:, None], total.shape), tl.broadcast_to(gain[:, None], total.shape)
    return tl.fma(total, fade, acc * gain), higher, sum_


@triton.jit
def _store_result(out, total, sum_, offset, mask, stride, PARTS: tl.constexpr):
    """Store total / sum as an activation; `div_rn` because an approximate division may be compiled in several ways."""
    mass = tl.broadcast_to(tl.where(sum_ > 0, sum_, 1.0)[:, None], total.shape)
    store_parts(out, offset, stride, tl.div_rn(total, mass), mask, PARTS)


@triton.jit
def _gathered(t, table, path, context, limit, head, KV: tl.constexpr, D: tl.constexpr):
    """Offsets of the keys at positions `t`, where positions after the context are looked up along a tree path."""
    depth = t - context
    node = tl.load(path + depth, mask=(depth >= 0) & (t <= limit), other=0)
    slot = tl.where(depth >= 0, context + node, t)
    page = tl.load(table + slot // _PAGE, mask=t <= limit, other=0)
    return ((page.to(tl.int64) * KV + head) * _PAGE + slot % _PAGE) * D


@triton.jit
def _sum_split(
    q,
    keys,
    values,
    table,
    path,
    position,
    context,
    limit,
    num_written,
    head,
    page,
    start,
    scale,
    D: tl.constexpr,
    KV: tl.constexpr,
    HEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    TREE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with columns `q` [columns, D] to positions from `start` on, tile by tile: value sums, peaks, masses."""
    d = tl.arange(0, D)
    # A split lies within one page, so the loads in the loop depend on no other load.
    first_slot = (page.to(tl.int64) * KV + head) * _PAGE + start % _PAGE
    acc, masses = tl.zeros((HEIGHT, D), tl.float32), tl.zeros((HEIGHT, _LOW), tl.float32)
    # The tensor cores sum the weights too, in equal columns: a reduction's order would depend on the tile's layout.
    ones = tl.full((_TILE, _LOW), 1.0, tl.float32).to(keys.dtype.element_ty)
    peak = tl.full((HEIGHT,), _LOW_PEAK, tl.float32)
    num_tiles = (tl.minimum(limit + 1 - start, SIZE) + _TILE - 1) // _TILE
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        inside = tile * _TILE + tl.arange(0, _TILE)
        t = start + inside
        at = _gathered(t, table, path, context, limit, head, KV, D) if TREE else (first_slot + inside) * D
        k = tl.load(keys + at[:, None] + d[None, :])
        # Unwritten slots may hold NaN. Such a key is masked below, but such a value would survive a weight of 0.
        v = tl.load(values + at[:, None] + d[None, :], mask=(t < num_written)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # Far enough below any peak for a weight of exactly 0.
        scores = tl.where(t[None, :] <= position[:, None], scores, _LOW_SCORE)
        higher = tl.maximum(peak, tl.ceil(tl.max(scores, 1) * scale))
        shift = tl.broadcast_to(-higher[:, None], scores.shape)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), shift))
        fade = _power_of_two(peak - higher)
        # The scaling is exact, so it does not matter whether the compiler fuses it with the addition.
        weights = weights.to(v.dtype)
        masses = tl.dot(weights, ones, masses * fade[:, None], input_precision=PRECISION)
        acc = tl.dot(weights, v, acc * fade[:, None], input_precision=PRECISION)
        peak = higher
    return acc, peak, tl.max(masses, 1)


@triton.jit
def _store_sums(partial_acc, partial_stats, at, inside, total, top, sum_, D: tl.constexpr):
    """Store the columns' value sums, peaks and masses at `at`."""
    d = tl.arange(0, D)[None, :]
    tl.store(partial_acc + at[:, None] * D + d, total, mask=inside[:, None] & (d >= 0))
    tl.store(partial_stats + at * 2, top, mask=inside)
    tl.store(partial_stats + at * 2 + 1, sum_, mask=inside)


@triton.jit
def _load_sums(partial_acc, partial_stats, at, inside, D: tl.constexpr):
    """Load what `_store_sums` stored; where not `inside`, a split that adds nothing."""
    d = tl.arange(0, D)[None, :]
    total = tl.load(partial_acc + at[:, None] * D + d, mask=inside[:, None] & (d >= 0), other=0.0)
    top = tl.load(partial_stats + at * 2, mask=inside, other=_LOW_PEAK)
    sum_ = tl.load(partial_stats + at * 2 + 1, mask=inside, other=0.0)
    return total, top, sum_


@triton.jit
def _sum_values(
    q,
    keys,
    values,
    table,
    path,
    position,
    context,
    num_written,
    head,
    page,
    split,
    scale,
    D: tl.constexpr,
    KV: tl.constexpr,
    HEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    TREE: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`_sum_split` over one split or, if WHOLE allows it, over all of them in order."""
    limit = tl.max(position)
    first, last = tl.maximum(split, 0), tl.maximum(split, 0) + 1
    if WHOLE and split < 0:
        last = limit // SIZE + 1
    total, sum_ = tl.zeros((HEIGHT, D), tl.float32), tl.zeros((HEIGHT,), tl.float32)
    top = tl.full((HEIGHT,), _LOW_PEAK, tl.float32)
    if not WHOLE:
        acc, peak, mass = _sum_split(
            q, keys, values, table, path, position, context, limit, num_written, head, page, first * SIZE, scale,
            D, KV, HEIGHT, SIZE, TREE, STAGES, PRECISION,
        )  # fmt: skip
        return _add_split(total, top, sum_, acc, peak, mass)
    for at in range(first, last):
        start = tl.zeros((), tl.int32) + at * SIZE
        next_page = tl.load(table + (start + SIZE) // _PAGE, mask=at + 1 < last, other=0)
        acc, peak, mass = _sum_split(
            q, keys, values, table, path, position, context, limit, num_written, head, page, start, scale,
            D, KV, HEIGHT, SIZE, TREE, STAGES, PRECISION,
        )  # fmt: skip
        total, top, sum_ = _add_split(total, top, sum_, acc, peak, mass)
        page = next_page
    return total, top, sum_


@triton.jit
def _attend_columns(
    queries,
    keys,
    values,
    positions,
    contexts,
    row_starts,
    row_counts,
    tables,
    paths,
    partial_base,
    partial_acc,
    partial_stats,
    out,
    entry,
    first_column,
    split,
    tree_row,
    head,
    num_rows,
    table_length,
    scale,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    TREE: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One item and kv head: a column tile, or the heads of one tree row, over one split or all."""
    group: tl.constexpr = H // KV
    start, count = tl.load(row_starts + entry), tl.load(row_counts + entry)
    table = tables + entry.to(tl.int64) * table_length
    page = tl.load(table + tl.maximum(split, 0) * SIZE // _PAGE)
    if PDL:  # so far only data from the host; from here on, results of other kernels
        gdc_wait()
    context = tl.load(contexts + entry)
    column = tl.arange(0, HEIGHT)
    if TREE:
        local = column * 0 + tree_row
        inside = column < group
    else:
        column += first_column
        local = column // group
        inside = local < count
    row = (start + local).to(tl.int64)
    position = tl.load(positions + row, mask=inside, other=-1)
    # A tree row sees only its ancestors, so anything beyond it counts as unwritten.
    num_written = tl.max(position) + 1 if TREE else context + count
    d = tl.arange(0, D)[None, :]
    query_head = head * group + column % group
    q_at = (row * (H * D) + query_head * D)[:, None] + d
    mask = inside[:, None] & (d >= 0)
    q = tl.load(queries + q_at, mask=mask, other=0.0)
    path = paths + (start + tree_row).to(tl.int64) * _PATH_LENGTH
    total, top, sum_ = _sum_values(
        q, keys, values, table, path, position, context, num_written, head, page, split, scale,
        D, KV, HEIGHT, SIZE, TREE, WHOLE, STAGES, PRECISION,
    )  # fmt: skip
    if split >= 0:
        slot = tl.load(partial_base + row, mask=inside, other=0).to(tl.int64) + split
        _store_sums(partial_acc, partial_stats, slot * H + query_head, inside, total, top, sum_, D)
    else:
        _store_result(out, total, sum_, q_at, mask, num_rows.to(tl.int64) * (H * D), PARTS)


# Not specialized on sizes that vary between launches: one kernel variant, one set of roundings.
@triton.jit(do_not_specialize=["num_rows", "table_length"])
def _attend_kernel(
    queries,
    keys,
    values,
    positions,
    contexts,
    row_starts,
    row_counts,
    tables,
    paths,
    partial_base,
    items,
    num_items,
    partial_acc,
    partial_stats,
    out,
    num_rows,
    table_length,
    scale,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program takes every `num_programs`-th pair of an item of this kind and a kv head."""
    if PDL:
        gdc_launch_dependents()
    first, last = 0, tl.load(num_items + KIND)
    if KIND > 0:
        first = tl.load(num_items + KIND - 1)
    for work in range(first * KV + tl.program_id(0), last * KV, tl.num_programs(0)):
        item = items + (work // KV) * _ITEM_FIELDS
        head = work % KV
        entry, first_column = tl.load(item), tl.load(item + 1)
        split, tree_row = tl.load(item + 2), tl.load(item + 3)
        _attend_columns(
            queries, keys, values, positions, contexts, row_starts, row_counts, tables, paths, partial_base,
            partial_acc, partial_stats, out, entry, first_column, split, tree_row, head, num_rows, table_length,
            scale, H, KV, D, HEIGHT, SIZE, KIND == _TREES, KIND != _HIGH_CHAINS, PARTS, STAGES, PRECISION, PDL,
        )  # fmt: skip
    if PDL:  # idle programs too: dependents of this kernel also rely on its predecessors
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    partial_acc,
    partial_stats,
    num_splits,
    partial_base,
    out,
    num_rows,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the split results of HEADS heads of one row in order."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_splits + row)
    base = tl.load(partial_base + row).to(tl.int64)
    if PDL:  # even with nothing to add: dependents of this kernel also rely on its predecessors
        gdc_wait()
    if count == 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D)[None, :]
    is_head = head < H
    total, sum_ = tl.zeros((HEADS, D), tl.float32), tl.zeros((HEADS,), tl.float32)
    top = tl.full((HEADS,), _LOW_PEAK, tl.float32)
    for first in range(0, count, _COMBINE_AT_ONCE):
        loaded = ()  # all loads precede the first addition, to be in flight together
        for i in tl.static_range(_COMBINE_AT_ONCE):
            # Past the last split, load one that adds nothing.
            inside = is_head & (first + i < count)
            at = (base + first + i) * H + head
            loaded = loaded + (_load_sums(partial_acc, partial_stats, at, inside, D),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(_COMBINE_AT_ONCE):
            total, top, sum_ = _add_split(total, top, sum_, loaded[i][0], loaded[i][1], loaded[i][2])
    offset = row * (H * D) + head[:, None] * D + d
    mask = is_head[:, None] & (d >= 0)
    _store_result(out, total, sum_, offset, mask, num_rows.to(tl.int64) * (H * D), PARTS)


@triton.jit
def _rotated(qkv, bias, norm, row, head, inside, cos, sin, stride, eps, W: tl.constexpr, D: tl.constexpr,
             NUM: tl.constexpr):  # fmt: skip
    """The two halves [heads, D / 2] of some heads of a row: parts summed, bias, norm and rotation applied."""
    half: tl.constexpr = D // 2
    column = head[:, None] * D + tl.arange(0, half)[None, :]
    mask = inside[:, None] & (column >= 0)
    a = load_sum(qkv, row * W + column, stride, mask, NUM)
    b = load_sum(qkv, row * W + column + half, stride, mask, NUM)
    if bias is not None:
        a += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        b += tl.load(bias + column + half, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        a = a * inverse * tl.load(norm + tl.arange(0, half)).to(tl.float32)[None, :]
        b = b * inverse * tl.load(norm + half + tl.arange(0, half)).to(tl.float32)[None, :]
    if cos is not None:
        c, s = tl.broadcast_to(cos[None, :], a.shape), tl.broadcast_to(sin[None, :], a.shape)
        a, b = tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)
    return a, b


@triton.jit
def _finite(value):
    """Keep NaN and infinity out of the values: a weight of 0 would not hide them from rows that must not see them.

    A row that does see one meets the NaN of its key, and that position's logits are NaN anyway.
    """
    value = tl.where(value == value, value, 0.0)
    return tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    qkv,
    bias,
    q_norm,
    k_norm,
    eps,
    cos_table,
    sin_table,
    positions,
    slots,
    queries,
    keys,
    values,
    num_rows,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and kv head: the group's queries, the key and the value."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group: tl.constexpr = H // KV
    half: tl.constexpr = D // 2
    width: tl.constexpr = (H + 2 * KV) * D
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions + row).to(tl.int64), tl.load(slots + row).to(tl.int64)
    stride = num_rows.to(tl.int64) * width
    at = tl.arange(0, half)
    cos, sin = tl.load(cos_table + position * half + at), tl.load(sin_table + position * half + at)
    member, one = tl.arange(0, HEADS), tl.arange(0, 1)
    always = one >= 0
    if H > 0:
        q_head, inside = head * group + member, member < group
        a, b = _rotated(qkv, bias, q_norm, row, q_head, inside, cos, sin, stride, eps, width, D, NUM)
        to = queries + row * (H * D) + q_head[:, None] * D + at[None, :]
        mask = inside[:, None] & (at >= 0)[None, :]
        tl.store(to, a.to(queries.dtype.element_ty), mask=mask)
        tl.store(to + half, b.to(queries.dtype.element_ty), mask=mask)
    to = ((slot // _PAGE * KV + head) * _PAGE + slot % _PAGE) * D + at[None, :]
    a, b = _rotated(qkv, bias, k_norm, row, H + head + one, always, cos, sin, stride, eps, width, D, NUM)
    tl.store(keys + to, a.to(keys.dtype.element_ty))
    tl.store(keys + to + half, b.to(keys.dtype.element_ty))
    a, b = _rotated(qkv, bias, None, row, H + KV + head + one, always, None, None, stride, eps, width, D, NUM)
    tl.store(values + to, _finite(a).to(values.dtype.element_ty))
    tl.store(values + to + half, _finite(b).to(values.dtype.element_ty))


def rotate_and_store(
    qkv: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """From a product's parts (`num_rows` rows apart) to `queries` [rows, heads, head dim] and the cache slots."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = _check_cache(queries, keys, values)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    assert qkv.is_contiguous() and qkv.shape[-1] == width and qkv.dtype == torch.float32
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape[-1] == head_dim // 2
    _rotate_kernel[(num_rows, num_kv_heads)](
        qkv, bias, q_norm, k_norm, eps, cos, sin, positions, slots, queries, keys, values, num_rows,
        num_heads, num_kv_heads, head_dim, triton.next_power_of_2(max(num_heads // num_kv_heads, 1)),
        qkv.numel() // (num_rows * width), num_warps=1, **pdl_options(),
    )  # fmt: skip


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionRows,
    scale: float,
    partial_acc: Tensor,
    partial_stats: Tensor,
    out: Tensor,
    num_programs: int,
    kinds: tuple[int, ...] = ALL_KINDS,
    precision: str = "tf32x3",
    split_size: int = SPLIT,
) -> None:
    """Process `rows.items`. Afterwards rows in whole mode are finished; the others need `combine`.

    `kinds`: the kinds that occur; each is one kernel launch. `precision` is that of float32 matrix products.
    `split_size` exists for tests, which check that it matters.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = _check_cache(queries, keys, values)
    assert num_heads // num_kv_heads <= HIGH, "a row's heads must fit into one tile"
    assert rows.tables.stride(1) == 1 and rows.paths.shape[1] == MAX_TREE_DEPTH and rows.items.is_contiguous()
    assert partial_acc.is_contiguous() and partial_stats.is_contiguous() and out.is_contiguous()
    is_float32 = keys.dtype == torch.float32
    row_height = LOW if num_heads <= LOW * num_kv_heads else HIGH
    heights = {LOW_CHAINS: LOW, HIGH_CHAINS: HIGH, TREES: row_height}
    for kind in kinds:
        height = heights[kind]
        stages = STAGES if height == LOW and head_dim * keys.itemsize <= 256 else LARGE_STAGES
        _attend_kernel[(num_programs,)](
            queries, keys, values, rows.positions, rows.contexts, rows.row_starts, rows.row_counts, rows.tables,
            rows.paths, rows.partial_base, rows.items, rows.num_items, partial_acc, partial_stats, out, num_rows,
            rows.tables.stride(0), scale * math.log2(math.e), num_heads, num_kv_heads, head_dim, kind, height,
            split_size, out.shape[0], stages, precision if is_float32 else "tf32",
            num_warps=8 if is_float32 else 4, **pdl_options(),
        )  # fmt: skip


def combine(partial_acc: Tensor, partial_stats: Tensor, rows: AttentionRows, out: Tensor) -> None:
    """Add up the partial results of rows that `attend` left in splits, and write their `out`."""
    _, num_heads, head_dim = partial_acc.shape
    num_parts, num_rows, _ = out.shape
    heads = min(COMBINED_HEADS, triton.next_power_of_2(num_heads))
    _combine_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        partial_acc, partial_stats, rows.num_splits, rows.partial_base, out, num_rows,
        num_heads, head_dim, heads, num_parts, num_warps=max(heads * head_dim // 256, 1), **pdl_options(),
    )  # fmt: skip


def _check_cache(queries: Tensor, keys: Tensor, values: Tensor) -> int:
    """Check what the kernels take for granted; return the number of kv heads."""
    _, num_kv_heads, page, head_dim = keys.shape
    assert page == PAGE and head_dim == queries.shape[2] and queries.shape[1] % num_kv_heads == 0
    assert head_dim & (head_dim - 1) == 0 and head_dim >= 16, "head dims are powers of two"
    assert keys.is_contiguous() and values.is_contiguous() and queries.is_contiguous()
    assert keys.dtype == values.dtype == queries.dtype and keys.shape == values.shape
    return num_kv_heads
