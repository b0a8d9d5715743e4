"""Attention on a GPU: right against float64, and bit for bit the same however the work is cut and whoever shares it.

Without a GPU the kernels run in Triton's interpreter, where a matrix product is numpy's, whose bits may depend on the
number of columns: so equality between tiles of different width is asked of a GPU only, and marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.limits import MAX_TREE_DEPTH
from paceline.kernels.triton.attention import (
    HIGH,
    HIGH_CHAINS,
    LOW,
    LOW_CHAINS,
    PAGE,
    SPLIT,
    TREES,
    AttentionRows,
    attend,
    combine,
    rotate_and_store,
)
from paceline.kernels.triton.work_list import WorkList, _plan_items, most_items, plan_items
from paceline.model.rows import depths

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
MANY = 10**6
"""Programs that no plan can fill: every entry is split. No partial results, on the other hand: every one is whole."""


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


SMALL = Shape(2, 1, 64, torch.bfloat16)


@dataclass(frozen=True)
class Text:
    """A sequence: cached tokens, then rows. All tensors on the CPU, in the cache's precision."""

    context: int
    parents: Sequence[int]
    """Per row; a chain's rows follow each other."""
    keys: Tensor
    """[context + rows, kv heads, head dim], rows in their own order."""
    values: Tensor
    queries: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.parents)

    @property
    def is_tree(self) -> bool:
        return any(parent != i - 1 for i, parent in enumerate(self.parents))

    def path(self, row: int) -> list[int]:
        """A row's ancestors, itself last."""
        path = [row]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path

    def branch(self, row: int) -> Text:
        """The tokens that lead to a row, as a chain."""
        path = self.path(row)
        slots = [*range(self.context), *(self.context + i for i in path)]
        parents = range(-1, len(path) - 1)
        return replace(
            self, parents=parents, keys=self.keys[slots], values=self.values[slots], queries=self.queries[path]
        )

    def continued(self, num_cached: int, num_rows: int) -> Text:
        """A chain again, with more of it in the cache already and fewer rows."""
        stop = num_cached + num_rows
        return Text(
            num_cached,
            range(-1, num_rows - 1),
            self.keys[:stop],
            self.values[:stop],
            self.queries[num_cached - self.context : stop - self.context],
        )


def make_text(shape: Shape, context: int, rows: int | Sequence[int], seed: int = 0) -> Text:
    """Random keys, values and queries; `rows` is a number, or the parents of a tree."""
    parents = range(-1, rows - 1) if isinstance(rows, int) else rows
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, shape.head_dim, generator=generator).to(shape.dtype)

    slots = context + len(parents)
    # Queries twice as long give a softmax with clear peaks.
    queries = 2 * draw(len(parents), shape.num_heads)
    return Text(context, parents, draw(slots, shape.num_kv_heads), draw(slots, shape.num_kv_heads), queries)


@dataclass
class Step:
    """Texts laid out as a step: pages in random places, whatever was never written NaN."""

    shape: Shape
    texts: Sequence[Text]
    seed: int = 0
    num_padding: int = 0
    num_programs: int = 3
    partial_capacity: int = 4096
    planned_programs: int = 3
    plan: WorkList = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.array([t.num_rows for t in self.texts], np.int32)
        self.starts = (np.cumsum(self.counts) - self.counts).astype(np.int32)
        self.contexts = np.array([t.context for t in self.texts], np.int32)
        is_tree = np.array([t.is_tree for t in self.texts])
        self.plan = plan_items(
            self.contexts, self.counts, self.starts, is_tree, self.shape.group, self.shape.num_kv_heads,
            self.planned_programs, self.partial_capacity,
        )  # fmt: skip
        self.num_rows = int(self.counts.sum()) + self.num_padding

    def cache(self) -> tuple[Tensor, Tensor, np.ndarray[Any, np.dtype[np.int32]]]:
        """Keys, values and page tables."""
        num_pages = [-(-len(t.keys) // PAGE) for t in self.texts]
        order = np.random.default_rng(self.seed).permutation(sum(num_pages) + 3)
        tables = np.zeros((len(self.texts), max(num_pages) + 1), np.int32)
        size = (len(order), self.shape.num_kv_heads, PAGE, self.shape.head_dim)
        keys, values = (torch.full(size, float("nan"), dtype=self.shape.dtype) for _ in range(2))
        at = 0
        for table, text, count in zip(tables, self.texts, num_pages, strict=True):
            table[:count] = order[at : at + count]
            at += count
            slot = np.arange(len(text.keys))
            page, offset = torch.from_numpy(table[slot // PAGE]).long(), torch.from_numpy(slot % PAGE)
            keys[page, :, offset], values[page, :, offset] = text.keys, text.values
        return keys.to(DEVICE), values.to(DEVICE), tables

    def rows(self, tables: np.ndarray[Any, np.dtype[np.int32]]) -> AttentionRows:
        positions = [t.context + depths(tuple(t.parents)) for t in self.texts]
        paths = np.full((self.num_rows, MAX_TREE_DEPTH), -(10**6), np.int32)  # not to be read beyond a path's end
        for text, start in zip(self.texts, self.starts, strict=True):
            for row in range(text.num_rows if text.is_tree else 0):
                path = text.path(row)
                paths[start + row, : len(path)] = path
        padding = np.zeros(self.num_padding, np.int32)
        arrays = (
            np.concatenate([*positions, padding]), self.contexts, self.starts, self.counts, tables, paths,
            np.concatenate([self.plan.num_splits, padding]), np.concatenate([self.plan.partial_base, padding]),
            self.plan.items, np.array(self.plan.ends),
        )  # fmt: skip
        return AttentionRows(*(torch.from_numpy(a.astype(np.int32)).to(DEVICE) for a in arrays))

    def run(self, num_parts: int = 3, split_size: int = SPLIT) -> Tensor:
        """[parts, rows, heads * head dim] as the kernels leave it; NaN where they wrote nothing."""
        shape = self.shape
        keys, values, tables = self.cache()
        rows = self.rows(tables)
        queries = torch.cat([t.queries for t in self.texts])
        queries = torch.cat([queries, queries[:1].expand(self.num_padding, -1, -1)]).to(DEVICE)
        size = (max(1, self.partial_capacity), shape.num_heads)
        partial_acc = torch.full((*size, shape.head_dim), float("nan"), device=DEVICE)
        partial_stats = torch.full((*size, 2), float("nan"), device=DEVICE)
        out = torch.full(
            (num_parts or 1, self.num_rows, shape.num_heads * shape.head_dim), float("nan"), device=DEVICE,
            dtype=torch.bfloat16 if num_parts else torch.float32,
        )  # fmt: skip
        scale = shape.head_dim**-0.5
        attend(
            queries, keys, values, rows, scale, partial_acc, partial_stats, out, self.num_programs,
            self.plan.kinds, split_size=split_size,
        )  # fmt: skip
        combine(partial_acc, partial_stats, rows, out)
        return out.cpu()

    def result(self) -> list[Tensor]:
        """Per text [rows, heads * head dim] in float32, exactly as written."""
        out = self.run(num_parts=0)[0, : int(self.counts.sum())]
        return list(out.split(self.counts.tolist()))


def dense(shape: Shape, text: Text) -> Tensor:
    """Plain attention in float64."""
    results = []
    for row in range(text.num_rows):
        slots = [*range(text.context), *(text.context + i for i in text.path(row))]
        keys, values = (x[slots].double().repeat_interleave(shape.group, 1) for x in (text.keys, text.values))
        scores = torch.einsum("hd,thd->th", text.queries[row].double(), keys) * shape.head_dim**-0.5
        results.append(torch.einsum("th,thd->hd", scores.softmax(0), values).flatten())
    return torch.stack(results)


BUSH = (-1, 0, 0, 1, 1, 2, 5)
"""Parents of a tree of seven rows, four deep."""
SHAPES = [
    Shape(2, 2, 64, torch.bfloat16),
    Shape(4, 2, 64, torch.float32),
    Shape(3, 1, 128, torch.bfloat16),
    Shape(7, 1, 128, torch.float32),
]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN where nothing was written counts as a difference."""
    return a.shape == b.shape and torch.equal(a, b)


def whole(step: Step) -> Step:
    return replace(step, partial_capacity=0)


def split(step: Step) -> Step:
    return replace(step, planned_programs=MANY)


@pytest.mark.parametrize("cut", [whole, split])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"group {s.group}, dim {s.head_dim}, {s.dtype}")
def test_attention_is_right(shape: Shape, cut: Callable[[Step], Step]) -> None:
    """Decode rows, draft chains, trees, prompts and chunks of prompts, over borders of pages and splits."""
    texts = [
        make_text(shape, 0, 66, 1),
        make_text(shape, 254, 3, 2),
        make_text(shape, 253, BUSH, 3),
        make_text(shape, 530, 1, 4),
        make_text(shape, 63, 1, 5),
        make_text(shape, 10, BUSH, 6),
        make_text(shape, 300, 6, 7),
    ]
    step = cut(Step(shape, texts, num_padding=2))
    for text, result in zip(texts, step.result(), strict=True):
        torch.testing.assert_close(result.double(), dense(shape, text), atol=TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_splits_change_no_bit(dtype: torch.dtype) -> None:
    shape = replace(SMALL, dtype=dtype)
    texts = [make_text(shape, 700, 2, 1), make_text(shape, 510, BUSH, 2), make_text(shape, 40, 1, 3)]
    step = Step(shape, texts)
    assert not whole(step).plan.num_splits.any() and (split(step).plan.num_splits[:9] >= 2).all()
    for a, b in zip(whole(step).result(), split(step).result(), strict=True):
        assert same_bits(a, b)


def test_splits_of_high_tiles_change_no_bit() -> None:
    step = Step(SMALL, [make_text(SMALL, 300, 20, 1)])
    assert same_bits(whole(step).result()[0], split(step).result()[0])


def test_company_and_pages_change_no_bit() -> None:
    """The same rows alone, and in other pages beside others, in another order."""
    text, other, third = make_text(SMALL, 400, 2, 1), make_text(SMALL, 100, BUSH, 2), make_text(SMALL, 0, 40, 3)
    alone = split(Step(SMALL, [text], num_programs=1)).result()[0]
    crowd = Step(SMALL, [third, other, text], seed=5, num_padding=3).result()[2]
    assert same_bits(alone, crowd)


def test_a_branch_of_a_tree_is_a_chain() -> None:
    """Rows of a tree against the same tokens one after the other, in whole and in split mode."""
    tree = make_text(SMALL, 254, BUSH, 1)
    results = [cut(Step(SMALL, [tree])).result()[0] for cut in (whole, split)]
    for row in (0, 3, 4, 6):
        branch = tree.branch(row)
        chain = Step(SMALL, [branch]).result()[0]
        for result in results:
            assert same_bits(result[tree.path(row)], chain)


def test_one_row_at_a_time_changes_no_bit() -> None:
    """A chunk of a prompt, in two chunks, and token by token, while all tiles have the same width."""
    text = make_text(SMALL, 253, 6, 1)
    chunk = Step(SMALL, [text]).result()[0]
    halves = [Step(SMALL, [text.continued(253 + i, 3)]).result()[0] for i in (0, 3)]
    single = [Step(SMALL, [text.continued(253 + i, 1)]).result()[0] for i in range(6)]
    assert same_bits(torch.cat(halves), chunk) and same_bits(torch.cat(single), chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group, dim", [(1, 64), (2, 128), (7, 128), (24, 64)])
def test_height_changes_no_bit(group: int, dim: int, dtype: torch.dtype) -> None:
    """High tiles against low ones: a prompt at once and token by token, a tree and its branches."""
    shape = Shape(2 * group, 2, dim, dtype)
    text = make_text(shape, 200, 150, 1)
    chunk = Step(shape, [text], num_programs=16).result()[0]
    for i in range(0, 150, 7):
        single = Step(shape, [text.continued(200 + i, 1)]).result()[0]
        assert same_bits(single, chunk[i : i + 1])
    tree = make_text(shape, 500, BUSH, 2)
    result = Step(shape, [tree]).result()[0]
    for row in range(len(BUSH)):
        assert same_bits(Step(shape, [tree.branch(row)]).result()[0], result[tree.path(row)])


def test_another_split_size_is_seen() -> None:
    """The control: equality of bits is not what any two orders of summation give."""
    step = whole(Step(SMALL, [make_text(SMALL, 700, 1, 1)]))
    ours, other = step.run(num_parts=0), step.run(num_parts=0, split_size=128)
    assert not same_bits(ours, other)
    torch.testing.assert_close(ours, other)


def test_extreme_scores() -> None:
    """Scores far apart: weights vanish, rescaling meets its limits, and both modes still agree."""
    text = make_text(SMALL, 600, 1, 1)
    for scale in (30.0, 300.0):
        step = Step(SMALL, [replace(text, queries=text.queries * scale)])
        result = whole(step).result()[0]
        assert same_bits(result, split(step).result()[0])
        torch.testing.assert_close(result.double(), dense(SMALL, step.texts[0]), atol=2e-2, rtol=0)


def test_parts_add_up_to_the_result() -> None:
    step = Step(SMALL, [make_text(SMALL, 300, 2, 1), make_text(SMALL, 20, 1, 2)])
    for cut in (whole, split):
        exact = cut(step).run(num_parts=0)[0]
        for num_parts, tolerance in ((1, 2**-8), (2, 2**-16), (3, 2**-23)):
            parts = cut(step).run(num_parts)
            assert parts.dtype == torch.bfloat16 and len(parts) == num_parts
            assert same_bits(parts[0], exact.bfloat16())
            error = (parts.double().sum(0) - exact.double()).abs()
            assert bool((error <= tolerance * exact.double().abs() + 1e-30).all())


def reference_rotation(
    x: Tensor, norm: Tensor | None, eps: float, cos: Tensor | None = None, sin: Tensor | None = None
) -> Tensor:
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm
    if cos is None or sin is None:
        return x
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)


@pytest.mark.parametrize("num_parts, has_bias, has_norms", [(1, False, False), (2, True, False), (4, False, True)])
@pytest.mark.parametrize("shape", [Shape(6, 2, 64, torch.bfloat16), Shape(2, 1, 128, torch.float32)], ids=str)
def test_rotate_and_store(shape: Shape, num_parts: int, has_bias: bool, has_norms: bool) -> None:
    torch.manual_seed(0)
    num_rows, heads, kv_heads, dim = 5, shape.num_heads, shape.num_kv_heads, shape.head_dim
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(num_parts, num_rows, width)
    bias = torch.randn(width) if has_bias else None
    q_norm, k_norm = (torch.randn(dim), torch.randn(dim)) if has_norms else (None, None)
    angles = torch.rand(100, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([3, 0, 99, 41, 42], dtype=torch.int32)
    slots = torch.tensor([64, 5, 191, 2, 70], dtype=torch.int32)
    queries = torch.zeros(num_rows, heads, dim, dtype=shape.dtype)
    keys, values = (torch.zeros(3, kv_heads, PAGE, dim, dtype=shape.dtype) for _ in range(2))
    given = (qkv, bias, q_norm, k_norm, 1e-6, cos, sin, positions, slots, queries, keys, values)
    on_device = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in given]
    rotate_and_store(*on_device)  # type: ignore[arg-type]
    queries, keys, values = (x.cpu() for x in on_device[-3:] if isinstance(x, Tensor))

    total = qkv.sum(0) if bias is None else qkv.sum(0) + bias
    q, k, v = total.view(num_rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    rotary = cos[positions.long()], sin[positions.long()]
    atol, rtol = (2e-2, 1e-2) if shape.dtype == torch.bfloat16 else (1e-5, 1e-5)
    page, offset = slots.long() // PAGE, slots.long() % PAGE
    for found, expected in (
        (queries, reference_rotation(q, q_norm, 1e-6, *rotary)),
        (keys[page, :, offset], reference_rotation(k, k_norm, 1e-6, *rotary)),
        (values[page, :, offset], v),
    ):
        torch.testing.assert_close(found.float(), expected, atol=atol, rtol=rtol)
    # Nothing but the slots was written.
    keys[page, :, offset], values[page, :, offset] = 0, 0
    assert not keys.any() and not values.any()


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 12))
    lists = st.lists
    contexts = draw(lists(st.integers(0, 3000), min_size=count, max_size=count))
    row_counts = draw(lists(st.sampled_from([1, 1, 2, 7, 33, 200]), min_size=count, max_size=count))
    is_tree = draw(lists(st.sampled_from([False, False, True]), min_size=count, max_size=count))
    slack = draw(lists(st.sampled_from([0, 0, 9, 63]), min_size=count, max_size=count))
    return {
        "contexts": np.array(contexts, np.int32),
        "row_counts": np.array(row_counts, np.int32),
        "row_starts": (np.cumsum(row_counts) - row_counts).astype(np.int32),
        "is_tree": np.array(is_tree),
        "group_size": draw(st.sampled_from([1, 2, 3, 7, 16, 24, 64])),
        "num_kv_heads": draw(st.sampled_from([1, 4, 8])),
        "num_programs": draw(st.sampled_from([1, 8, 264, MANY])),
        "partial_capacity": draw(st.sampled_from([0, 50, 500, 10**6])),
        "slack": np.minimum(slack, contexts),
    }


@settings(max_examples=150)
@given(steps())
def test_a_plan_covers_everything_once(step: dict[str, Any]) -> None:
    """Every row, head and split by exactly one item, in places of its own."""
    plan, group = plan_items(**step), step["group_size"]
    num_rows = int(step["row_counts"].sum())
    assert plan.items.dtype == plan.num_splits.dtype == plan.partial_base.dtype == np.int32
    assert plan.num_splits.shape == plan.partial_base.shape == (num_rows,)
    assert len(plan.items) <= most_items(num_rows, step["partial_capacity"])

    seen: dict[tuple[int, int], list[int]] = {}
    for item, (entry, first_column, split, tree_row) in enumerate(plan.items.tolist()):
        kind = next(kind for kind, end in enumerate(plan.ends) if item < end)
        count, start, context = (int(step[name][entry]) for name in ("row_counts", "row_starts", "contexts"))
        is_tree = bool(step["is_tree"][entry])
        columns = range(first_column, min(first_column + (LOW if kind == LOW_CHAINS else HIGH), count * group))
        if tree_row >= 0:
            assert kind == TREES and is_tree and first_column == 0
            columns = range(tree_row * group, (tree_row + 1) * group)
        elif kind == HIGH_CHAINS:
            assert split >= 0 or context + count <= SPLIT, "a high tile sees one split"
        if is_tree and tree_row < 0:
            shortest = context - int(step["slack"][entry])
            assert 0 <= split < shortest // SPLIT, "only context is the same for all rows of a tree"
        assert columns
        for column in columns:
            seen.setdefault((start + column // group, column % group), []).append(split)

    owned = np.zeros(step["partial_capacity"] + 1, np.int64)
    entry_of_row = np.repeat(np.arange(len(step["contexts"])), step["row_counts"])
    for row in range(num_rows):
        entry = entry_of_row[row]
        local = row - int(step["row_starts"][entry])
        deepest = min(local, MAX_TREE_DEPTH - 1) if step["is_tree"][entry] else local
        needed = (int(step["contexts"][entry]) + deepest) // SPLIT + 1
        splits, base = int(plan.num_splits[row]), int(plan.partial_base[row])
        for head in range(group):
            found = sorted(seen.pop((row, head)))
            if splits:
                # A tile may go on to splits that its first rows do not see.
                assert splits >= needed and found[:splits] == list(range(splits)) and len(set(found)) == len(found)
            else:
                assert found == [-1]
        if splits:
            assert base + max(found) < step["partial_capacity"]
            owned[base : base + max(found) + 1] += 1
    assert not seen and owned.max() <= 1, "partial results must not share a place"


@settings(max_examples=300)
@given(steps())
def test_the_compiled_plan_of_chains_is_the_plan(step: dict[str, Any]) -> None:
    step["is_tree"] = np.zeros(len(step["contexts"]), np.bool_)
    plan, twin = plan_items(**step), _plan_items(**step)
    assert tuple(plan.ends) == tuple(twin.ends)
    for found, expected in ((plan.items, twin.items), (plan.num_splits, twin.num_splits)):
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
    assert plan.partial_base.tolist() == twin.partial_base.tolist()


def test_a_plan_follows_speed() -> None:
    def plan(contexts: Sequence[int], capacity: int = 4096, num_rows: int = 1) -> WorkList:
        counts = np.full(len(contexts), num_rows, np.int32)
        starts = (np.cumsum(counts) - counts).astype(np.int32)
        return plan_items(np.array(contexts, np.int32), counts, starts, counts < 0, 7, 4, 264, capacity)

    assert not plan([200] * 4).num_splits.any(), "one split is never worth a detour"
    assert plan([3000] * 4).num_splits.all(), "few sequences are split"
    assert not plan([3000] * 200).num_splits.any(), "many are not"
    assert plan([1000] * 200 + [200_000]).num_splits.tolist() == [0] * 200 + [200_001 // SPLIT + 1]
    assert plan([3000, 9000], capacity=40).num_splits.tolist() == [0, 9000 // SPLIT + 1], "the longest come first"
    assert not plan([3000], num_rows=700).num_splits.any(), "a long chunk fills the GPU by itself"
    assert plan([100, 150, 3000, 900], capacity=4).items[:, [0, 2]].tolist() == [
        [2, -1], [3, 0], [3, 1], [3, 2], [3, 3], [1, -1], [0, -1],
    ], "the longest items come first"  # fmt: skip
    assert plan([3000] * 4).kinds == (LOW_CHAINS,) and plan([3000] * 4, num_rows=3).ends[LOW_CHAINS] == 0
    assert len(plan([]).items) == 0
