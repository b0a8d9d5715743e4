"""Linear layers on packed CPU weights: y = x W^T, or y += x W^T.

Weights are packed once into panels of PANEL output columns, so that a step streams through them. bfloat16 weights stay
bfloat16 in memory, which halves the traffic of a memory-bound step, and are widened exactly in registers. A float32
weight whose values all fit bfloat16 is packed as bfloat16 too: the results are the same bits. Only
`model/ops/native.py` calls this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from paceline.kernels.cpu.atomics import int64s
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.pool import BYTES_PER_NS, DONE, FMAS_PER_NS, Shared, num_tasks, part_of, share_out, shared
from paceline.kernels.cpu.simd import LANES, load, store
from paceline.kernels.cpu.tile import ADD, MAX_ROWS, PANEL, SET, VECTORS, make_tile

# Module-level names rather than a closure: numba cannot cache a closure on disk.
_set_float, _add_float = make_tile(VECTORS, SET), make_tile(VECTORS, ADD)
_set_bf16, _add_bf16 = make_tile(VECTORS, SET, is_bf16=True), make_tile(VECTORS, ADD, is_bf16=True)

_BLOCK_ELEMENTS = 131072
"""Input elements processed while a panel is hot: 512 KiB, about half of a core's L2 cache."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features] as panels [ceil(out / PANEL), in, PANEL], the last one zero-padded."""

    panels: Tensor
    out_features: int
    in_features: int


def empty(*shape: int) -> Tensor:
    """Allocate a kernel's float32 CPU output, whatever default dtype or device the process has set."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def pack(weight: Tensor) -> PackedWeight:
    """Pack an [out, in] weight in float32 or bfloat16; other dtypes are first widened to float32."""
    out_features, in_features = weight.shape
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
        narrow = weight.bfloat16()
        weight = narrow if torch.equal(narrow.float(), weight) else weight
    num_panels = -(-out_features // PANEL)
    panels = torch.zeros(num_panels, in_features, PANEL, dtype=weight.dtype, device="cpu")
    for p in range(num_panels):
        columns = weight[p * PANEL : (p + 1) * PANEL]
        panels[p, :, : len(columns)] = columns.T
    return PackedWeight(panels, out_features, in_features)


def unpack(packed: PackedWeight) -> Tensor:
    """Return the [out, in] weight in its stored dtype."""
    whole = packed.panels.transpose(1, 2).reshape(-1, packed.in_features)
    return whole[: packed.out_features].contiguous()


def linear(x: Tensor, weight: PackedWeight, onto: Tensor | None = None) -> Tensor:
    """x [R, in] float32 contiguous -> [R, out]; with `onto`, add the product to it in place."""
    num_rows, depth = x.shape
    assert x.dtype == torch.float32 and x.is_contiguous() and depth == weight.in_features
    y = empty(num_rows, weight.out_features) if onto is None else onto
    assert y.dtype == torch.float32 and y.is_contiguous() and y.shape == (num_rows, weight.out_features)
    is_bf16 = weight.panels.dtype == torch.bfloat16
    weights = depth * weight.out_features
    work_ns = max(weights * num_rows / FMAS_PER_NS, weights * (2 if is_bf16 else 4) / BYTES_PER_NS)
    _linear(
        shared(_linear_task, work_ns),
        work_ns,
        x.data_ptr(),
        num_rows,
        depth,
        weight.panels.data_ptr(),
        is_bf16,
        weight.out_features,
        y.data_ptr(),
        onto is not None,
    )
    return y


@kernel
def _linear(
    to: Shared,
    work_ns: float,
    x: int,
    num_rows: int,
    depth: int,
    panels: int,
    is_bf16: bool,
    width: int,
    y: int,
    onto: bool,
) -> None:
    rows = max(MAX_ROWS, _BLOCK_ELEMENTS // depth)
    num_panels = (width + PANEL - 1) // PANEL
    num_units = num_panels * ((num_rows + rows - 1) // rows)
    count = num_tasks(num_units, work_ns)
    block = np.empty(11, np.int64)
    block[0], block[1], block[2], block[3], block[4] = x, num_rows, depth, panels, is_bf16
    block[5], block[6], block[7], block[8], block[9], block[10] = width, y, onto, rows, num_units, count
    share_out(to, block, count)


def _linear_task(block: int, index: int) -> int:
    """Compute some panels of output columns for a block of rows, or several such pieces."""
    x, num_rows, depth, panels, is_bf16, width, y, onto, rows, num_units, count = carray(int64s(block), 11)
    weight_bytes = 2 if is_bf16 else 4
    num_panels = (width + PANEL - 1) // PANEL
    first, last = part_of(index, count, num_units)
    for unit in range(first, last):
        column = unit % num_panels * PANEL
        start = unit // num_panels * rows
        panel = panels + column * depth * weight_bytes
        _panel(x, start, min(start + rows, num_rows), depth, panel, is_bf16 != 0, column, width, y, onto != 0)
    return DONE


@kernel
def _panel(
    x: int, start: int, stop: int, depth: int, panel: int, is_bf16: bool, column: int, width: int, y: int, onto: bool
) -> None:
    """Compute one panel of output columns for a block of rows."""
    # Even tiles: split 8 rows as 4 + 4 rather than 6 + 2.
    num_tiles = (stop - start + MAX_ROWS - 1) // MAX_ROWS
    step = (stop - start + num_tiles - 1) // num_tiles
    is_whole = column + PANEL <= width
    edge = np.empty(0 if is_whole else MAX_ROWS * PANEL, np.float32)
    for m in range(start, stop, step):
        count = min(step, stop - m)
        rows, out = x + m * depth * 4, y + (m * width + column) * 4
        if is_whole:
            _tile(count, rows, depth, panel, is_bf16, out, width, onto)
        else:
            _tile(count, rows, depth, panel, is_bf16, edge.ctypes.data, PANEL, False)
            _copy_columns(count, edge.ctypes.data, out, width, width - column, onto)


@kernel
def _tile(count: int, x: int, depth: int, panel: int, is_bf16: bool, y: int, stride: int, onto: bool) -> None:
    """Compute one tile of a panel with the variant for this weight dtype and output mode."""
    if is_bf16:
        if onto:
            _add_bf16(count, x, depth, panel, PANEL, depth, y, stride)
        else:
            _set_bf16(count, x, depth, panel, PANEL, depth, y, stride)
    elif onto:
        _add_float(count, x, depth, panel, PANEL, depth, y, stride)
    else:
        _set_float(count, x, depth, panel, PANEL, depth, y, stride)


@kernel
def _copy_columns(num_rows: int, edge: int, y: int, stride: int, width: int, onto: bool) -> None:
    """Copy the valid columns of an edge panel to the output."""
    for m in range(num_rows):
        for i in range(0, width, LANES):
            value = load(edge + (m * PANEL + i) * 4, width - i)
            to = y + (m * stride + i) * 4
            store(to, load(to, width - i) + value if onto else value, width - i)
