"""Merges a low-rank update into a weight on a CPU: out = round(base + scale * (b @ a)), with what rounding left of it.

Every element adds its products in the order of the rank, so an element's bits depend on nothing but its own row of `b`
and column of `a`. Called by `model/lora/merge.py`, which also says what the ways of rounding are for;
`kernels/triton/merge.py` is the twin on a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core import noise
from paceline.kernels.cpu.jit import kernel

EXACT, NEAREST, DITHER = 0, 1, 2
"""Keep float32; round to the nearest bfloat16, ties to even; round up or down by a fixed threshold per element."""

_STRIDE = np.uint32(noise.STRIDE)
_FIRST, _SECOND = np.uint32(noise.MULTIPLIERS[0]), np.uint32(noise.MULTIPLIERS[1])
_KEPT = np.uint32(0xFFFF0000)
"""The bits of a float32 that a bfloat16 has."""
_INFINITE = np.uint32(0x7F800000)


@kernel
def threshold(index: int, seed: int) -> np.uint32:
    """16 random bits of an element: how much of a bfloat16's step its value must exceed to round away from zero."""
    x = np.uint32(np.uint32(index) * _STRIDE + np.uint32(seed))
    x = np.uint32((x ^ (x >> np.uint32(16))) * _FIRST)
    x = np.uint32((x ^ (x >> np.uint32(15))) * _SECOND)
    return np.uint32(x >> np.uint32(16))


@kernel
def _round_row(bits: NDArray[np.uint32], start: int, seed: int, rounding: int) -> None:
    """Round float32 numbers, as bits, to bfloat16; `start` is the first one's index in the weight."""
    for j in range(len(bits)):
        own = bits[j]
        if own & _INFINITE == _INFINITE:  # an infinity or NaN stays one
            continue
        if rounding == DITHER:
            added = threshold(start + j, seed)
        else:
            added = np.uint32(np.uint32(0x7FFF) + ((own >> np.uint32(16)) & np.uint32(1)))
        bits[j] = np.uint32(own + added) & _KEPT


@kernel
def merge(
    base: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    scale: float,
    rounding: int,
    seed: int,
    out: NDArray[np.float32],
) -> tuple[int, float, float]:
    """Fill `out`; return how many elements differ from `base`, and two sums over all of them.

    The sums are of (out - base) * update and of update * update, where update = scale * (b @ a).
    """
    width = base.shape[1]
    update = np.empty(width, np.float32)
    factor = np.float32(scale)
    moved, kept, wanted = 0, 0.0, 0.0
    for i in range(base.shape[0]):
        update[:] = np.float32(0)
        for k in range(a.shape[0]):
            weight = b[i, k]
            for j in range(width):
                update[j] += weight * a[k, j]
        for j in range(width):
            update[j] *= factor
            out[i, j] = base[i, j] + update[j]
        if rounding != EXACT:
            _round_row(out[i].view(np.uint32), i * width, seed, rounding)
        for j in range(width):
            difference = out[i, j] - base[i, j]
            moved += difference != 0
            kept += np.float64(difference) * np.float64(update[j])
            wanted += np.float64(update[j]) * np.float64(update[j])
    return moved, kept, wanted
