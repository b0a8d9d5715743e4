"""Memory read bandwidth of this GPU: the best of several ways to add up a few gigabytes, each a median.

Dividing the bytes a decoding step must read by it gives the step's floor. `gpu.py` and `rows.py` call it.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

NUM_BYTES = 8 << 30
REPEATS = 12


@triton.jit
def _sum_kernel(x, out, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up `NUM_BLOCKS` consecutive blocks; the size divides evenly, so nothing is masked."""
    start = tl.program_id(0).to(tl.int64) * NUM_BLOCKS * BLOCK
    at = x + start + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in tl.range(0, NUM_BLOCKS, num_stages=4):
        total += tl.load(at)
        at += BLOCK
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth(num_bytes: int = NUM_BYTES) -> dict[str, float]:
    """Bytes per second for each way of reading; the maximum is the GPU's."""
    numbers = torch.zeros(num_bytes // 4, dtype=torch.int32, device="cuda")
    numbers.random_(0, 2**30)
    ways: dict[str, Callable[[], Any]] = {
        "torch float32 sum": numbers.view(torch.float32).sum,
        "torch bfloat16 amax": numbers.view(torch.bfloat16).amax,
    }
    for block, num_blocks in ((2048, 4), (4096, 4), (8192, 4), (8192, 16)):
        grid = (len(numbers) // (block * num_blocks),)
        out = torch.empty(grid, dtype=torch.int32, device="cuda")
        ways[f"triton sum {block} x {num_blocks}"] = _triton_way(numbers, out, num_blocks, block)
    return {name: num_bytes / seconds(way) for name, way in ways.items()}


def _triton_way(numbers: torch.Tensor, out: torch.Tensor, num_blocks: int, block: int) -> Callable[[], Any]:
    return lambda: _sum_kernel[(len(out),)](numbers, out, num_blocks, block, num_warps=8)


def seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median by the GPU's clock, with calls queued back to back."""
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[1:])) / 1e3
