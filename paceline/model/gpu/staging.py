"""Transfer of a step's rows to the GPU: static buffers there, pinned memory here, one copy of the used part.

`Staging` owns both sides and is refilled for every step. `Staging.rows(n)` are the buffers as the kernels of a forward
with n rows read them, always at the same addresses, so that graphs can be captured over them. Contents may change
freely; only the number of rows is fixed. Filled by `graphs.py`, or by `GpuOps.place` for a forward outside a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.types import Sampling
from paceline.kernels.cpu.jit import host_loop
from paceline.kernels.limits import MAX_TREE_DEPTH
from paceline.kernels.text_ranks import MEMBERS
from paceline.kernels.triton.attention import ALL_KINDS, ITEM_FIELDS, AttentionRows
from paceline.kernels.triton.work_list import WorkList, most_items
from paceline.model.mixed_sampling import RowSampling, columns
from paceline.model.rows import Rows, paths

HEAD_ROWS = 256
"""Rows whose logits are in memory at once."""
_ROW_FIELDS = (
    "token_ids", "positions", "entries", "local", "parents", "slots", "num_splits", "partial_base", "steps", "next_ids",
    "temperatures", "top_ks", "top_ps", "log_min_ps",
)  # fmt: skip
_ANY_SAMPLING = Sampling()
"""Of a step that samples nothing."""
_FLOAT_FIELDS = ("temperatures", "top_ps", "log_min_ps")
"""Those of them that hold float32."""
_ENTRY_FIELDS = ("given_contexts", "row_starts", "row_counts", "follows", "guessed", "ranks", "branches", "num_sampled")
_FILLED = (
    "token_ids", "positions", "entries", "local", "parents", "slots", "num_splits", "partial_base", "given_contexts",
    "row_starts", "row_counts", "follows", "guessed", "ranks", "branches",
)  # fmt: skip
"""What `_fill_rows` writes, in its order."""
_SCALARS = 8
"""Space for the work item counts and the numbers of judged and of searched entries; keeps the keys after it
aligned."""


@dataclass(frozen=True)
class Limits:
    """Capacity of a `Staging`."""

    rows: int
    pages_per_sequence: int
    partials: int
    """Rows times splits whose attention is computed in pieces."""

    @property
    def items(self) -> int:
        """Attention work items."""
        return most_items(self.rows, self.partials)


@dataclass(frozen=True)
class DeviceRows(AttentionRows):
    """Buffers of a forward with a fixed number of rows: the input of attention, and the rest of `Rows`."""

    token_ids: Tensor
    entries: Tensor
    local: Tensor
    parents: Tensor
    slots: Tensor
    steps: Tensor
    keys: Tensor
    next_ids: Tensor
    """The token after each row that is not sampled; filled only if a drafter keeps hidden states."""
    num_sampled: Tensor
    """Rows to sample, counted from the first row, from the second HEAD_ROWS rows on, and so on."""
    temperatures: Tensor
    """How each row is sampled, as are the next three; those are filled only if some row is truncated."""
    top_ks: Tensor
    top_ps: Tensor
    log_min_ps: Tensor
    given_contexts: Tensor
    """`contexts` as known to the host; `cursor.resolve` writes the final ones."""
    follows: Tensor
    """[entries]: the entry of the previous step that continues here; -1: none."""
    guessed: Tensor
    """[entries]: depth of the draft if the GPU itself guessed it after the previous step, otherwise 0."""
    ranks: Tensor
    """[entries]: from which rank on a match in a text is drafted; 0: never."""
    members: Tensor
    """[entries, MEMBERS]: the texts in which drafts are looked for; see `text_search.py`."""
    branches: Tensor
    """[entries]: the rows of each of several drafts from texts, which follow each other; 0: there is one."""
    num_searched: Tensor
    """How many entries have texts to be searched."""
    num_branched: Tensor
    """For how many of them several drafts are looked for."""
    num_judged: Tensor
    accepted: Tensor
    """[entries]; `cursor.judge` writes this and the next two for the following step."""
    landed: Tensor
    last: Tensor
    partial_acc: Tensor
    partial_stats: Tensor
    kinds: tuple[int, ...]
    """Kinds that `items` may contain; fixed when a step is captured."""

    def __len__(self) -> int:
        return len(self.token_ids)


class Staging:
    """One step's input. It may be filled while an earlier step, sent from another buffer, is running."""

    def __init__(
        self,
        limits: Limits,
        num_heads: int,
        head_dim: int,
        device: str,
        num_buffers: int = 1,
        lender: Staging | None = None,
    ) -> None:
        """`lender`: a `Staging` whose steps never run at the same time; its partial results are reused."""
        self.limits = limits
        rows, pages = limits.rows, limits.pages_per_sequence
        head = _SCALARS + 2 * rows + len(_ROW_FIELDS) * rows + len(_ENTRY_FIELDS) * rows
        self._bounds = np.cumsum(
            [head, ITEM_FIELDS * limits.items, MEMBERS * rows, pages * rows, MAX_TREE_DEPTH * rows]
        ).tolist()
        is_pinned = device != "cpu"
        size = self._bounds[-1]
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned) for _ in range(num_buffers)]
        self._blocks = [memory.numpy() for memory in self._staging]
        self._host = [_views(block, limits, self._bounds) for block in self._blocks]
        self._offsets = np.array([_offset(self._host[0][name], self._blocks[0]) for name in _FILLED])
        self._chunk_starts = HEAD_ROWS * np.arange(rows, dtype=np.int32)
        # An event that was never recorded counts as completed.
        self._sent = [torch.cuda.Event() for _ in range(num_buffers)] if is_pinned else []
        self._next = 0
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self._device = _views(self._memory, limits, self._bounds)
        self._kept = torch.zeros(4, rows, dtype=torch.int32, device=device)
        shapes = ((limits.partials, num_heads, head_dim), (limits.partials, num_heads, 2))
        own = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes] if lender is None else []
        self._partials: list[Tensor] = own if lender is None else lender._partials
        self._own = (self._memory, self._kept, *own)

    @property
    def num_bytes(self) -> int:
        """GPU memory, without what is borrowed from the lender."""
        return sum(tensor.nbytes for tensor in self._own)

    def rows(self, num_rows: int, kinds: tuple[int, ...] = ALL_KINDS) -> DeviceRows:
        """The buffers as a forward with this many rows reads them."""
        at = self._device
        cut = {name: at[name][:num_rows] for name in (*_ROW_FIELDS, "keys", "paths")}
        others = ("tables", "members", "items", "num_items", "num_judged", "num_searched", "num_branched")
        whole = {name: at[name] for name in (*_ENTRY_FIELDS, *others)}
        for name in _FLOAT_FIELDS:
            cut[name] = cut[name].view(torch.float32)
        contexts, accepted, landed, last = self._kept
        return DeviceRows(
            **cut,
            **whole,
            contexts=contexts,
            accepted=accepted,
            landed=landed,
            last=last,
            partial_acc=self._partials[0],
            partial_stats=self._partials[1],
            kinds=kinds,
        )

    def fill(
        self,
        rows: Rows,
        work: WorkList,
        num_padded: int,
        scratch_slot: int,
        num_sampled: int = 0,
        num_judged: int = 0,
        keys: NDArray[np.uint64] | Sequence[int] = (),
        steps: NDArray[np.int64] | Sequence[int] = (),
        sampling: RowSampling = _ANY_SAMPLING,
        follows: NDArray[np.int32] | None = None,
        next_ids: NDArray[np.int32] | None = None,
        guessed: NDArray[np.int32] | None = None,
        ranks: NDArray[np.int32] | None = None,
        members: NDArray[np.int32] | None = None,
        branches: NDArray[np.int32] | None = None,
        is_searched: bool = False,
        is_branched: bool = False,
    ) -> None:
        """Write a step into the next buffer and start copying it to the GPU. Judged entries are those with `guessed`,
        `ranks` and `members`."""
        index = self._next
        self._next = (index + 1) % len(self._host)
        if self._sent:
            self._sent[index].synchronize()
        at, n, num_entries = self._host[index], len(rows), len(rows.contexts)
        columns = (rows.token_ids, rows.positions, rows.sequence_of_row, rows.row_in_sequence, rows.parents, rows.slots)
        given = *columns, work.num_splits, work.partial_base, rows.contexts, rows.row_starts
        _fill_rows(self._blocks[index], self._offsets, *given, num_padded, scratch_slot)
        at["keys"][:num_sampled], at["steps"][:num_sampled] = keys, steps
        _fill_sampling(at, sampling, num_sampled)
        if next_ids is not None:
            at["next_ids"][num_sampled:n] = next_ids
        at["items"][: len(work.items)] = work.items
        for name, values in (("guessed", guessed), ("ranks", ranks), ("branches", branches)):
            if values is not None:
                at[name][: len(values)] = values
        if follows is not None:
            at["follows"][: len(follows)] = follows
        at["members"][:num_judged] = -1 if members is None else members
        at["num_searched"][0] = num_judged if is_searched else 0
        at["num_branched"][0] = num_judged if is_branched else 0
        at["num_items"][:], at["num_judged"][0] = work.ends, num_judged
        at["num_sampled"][:] = np.maximum(num_sampled - self._chunk_starts, 0)
        at["tables"][:num_entries, : rows.page_tables.shape[1]] = rows.page_tables
        has_trees = bool(rows.is_tree.any())
        if has_trees:
            _fill_paths(at["paths"], rows)
        self._send(index, num_entries, n if has_trees else 0)

    def clear(self, num_padded: int, scratch_slot: int) -> None:
        """Fill with a step of padding only."""
        nothing = np.zeros(0, np.int32)
        rows = Rows(
            nothing,
            nothing,
            nothing,
            np.zeros(1, np.int32),
            nothing,
            np.zeros(0, np.bool_),
            np.zeros((0, 1), np.int32),
            1,
            np.zeros(0, np.int64),
        )
        work = WorkList(np.zeros((0, ITEM_FIELDS), np.int32), (0, 0, 0), nothing, nothing)
        self.fill(rows, work, num_padded, scratch_slot)

    def _send(self, index: int, num_entries: int, num_paths: int) -> None:
        """Start the copies: usually one, since issuing a copy takes longer than copying all items."""
        used = (
            (0, self._bounds[2] + num_entries * self.limits.pages_per_sequence),
            (self._bounds[3], num_paths * MAX_TREE_DEPTH),
        )
        for start, length in used:
            if length:
                part = slice(start, start + length)
                self._memory[part].copy_(self._staging[index][part], non_blocking=True)
        if self._sent:
            self._sent[index].record()


def _views(memory: Any, limits: Limits, bounds: list[int]) -> dict[str, Any]:
    """The fields of an int32 block, the same for numpy and torch."""
    rows = limits.rows
    is_numpy = isinstance(memory, np.ndarray)
    views = {"num_items": memory[0:3], "num_judged": memory[3:4]}
    views["num_searched"], views["num_branched"] = memory[4:5], memory[5:6]
    at = _SCALARS
    views["keys"] = memory[at : at + 2 * rows].view(np.uint64 if is_numpy else torch.int64)
    at += 2 * rows
    for name in (*_ROW_FIELDS, *_ENTRY_FIELDS):
        views[name] = memory[at : at + rows]
        at += rows
    views["items"] = memory[bounds[0] : bounds[1]].reshape(limits.items, ITEM_FIELDS)
    views["members"] = memory[bounds[1] : bounds[2]].reshape(rows, MEMBERS)
    views["tables"] = memory[bounds[2] : bounds[3]].reshape(rows, limits.pages_per_sequence)
    views["paths"] = memory[bounds[3] : bounds[4]].reshape(rows, MAX_TREE_DEPTH)
    return views


def _offset(view: NDArray[np.int32], block: NDArray[np.int32]) -> int:
    """Where in a block a field begins."""
    return (view.__array_interface__["data"][0] - block.__array_interface__["data"][0]) // block.itemsize


@host_loop
def _fill_rows(
    block: Any,
    offsets: Any,
    token_ids: Any,
    positions: Any,
    entries: Any,
    local: Any,
    parents: Any,
    slots: Any,
    num_splits: Any,
    partial_base: Any,
    contexts: Any,
    row_starts: Any,
    num_padded: int,
    scratch_slot: int,
) -> None:
    """Write the rows and what is padding, and the entries of a step without drafts. A loop, as it runs every step."""
    for row in range(len(token_ids)):
        block[offsets[0] + row], block[offsets[1] + row] = token_ids[row], positions[row]
        block[offsets[2] + row], block[offsets[3] + row] = entries[row], local[row]
        block[offsets[4] + row], block[offsets[5] + row] = parents[row], slots[row]
        block[offsets[6] + row], block[offsets[7] + row] = num_splits[row], partial_base[row]
    for row in range(len(token_ids), num_padded):
        for field in (0, 1, 3, 6, 7):
            block[offsets[field] + row] = 0
        block[offsets[2] + row], block[offsets[5] + row] = -1, scratch_slot
    for entry in range(len(contexts)):
        block[offsets[8] + entry], block[offsets[9] + entry] = contexts[entry], row_starts[entry]
        block[offsets[10] + entry] = row_starts[entry + 1] - row_starts[entry]
        block[offsets[11] + entry] = -1
        for field in (12, 13, 14):
            block[offsets[field] + entry] = 0


def _fill_sampling(at: dict[str, Any], sampling: RowSampling, num_sampled: int) -> None:
    """Write how each row is sampled."""
    given = columns(sampling)
    at["temperatures"].view(np.float32)[:num_sampled] = given.temperatures
    if sampling.is_truncated:
        at["top_ks"][:num_sampled] = given.top_ks
        at["top_ps"].view(np.float32)[:num_sampled] = given.top_ps
        at["log_min_ps"].view(np.float32)[:num_sampled] = given.log_min_ps


def _fill_paths(found: NDArray[np.int32], rows: Rows) -> None:
    """For every tree row, the rows from the first one down to itself."""
    for entry in np.flatnonzero(rows.is_tree):
        span = slice(*rows.row_starts[entry : entry + 2].tolist())
        found[span] = paths(tuple(rows.parents[span].tolist()))
