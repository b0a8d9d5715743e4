"""How much freedom an exact GPU path has: whether tile shapes change a bit of the result, and how fast they are.

    python bench/gpu_tiles.py [--out FILE]            needs a CUDA GPU and Triton

A linear layer is computed as W x^T, with the weight as the left operand of the matrix unit, so that the number of rows
is only the width of the instruction. Every tile shape is compared bit for bit with every other, for many row counts,
and timed (in a CUDA graph, over rotating weights) beside cuBLAS. Attention likewise, keys and values on the left.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from record import package_versions, result_path, write_result

SHAPES = {
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "7B head": (152064, 3584),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
}
# Weight rows, token rows, depth, warps and stages of a tile.
TILES = (
    (64, 16, 64, 4, 5),
    (64, 16, 128, 4, 4),
    (64, 32, 64, 4, 5),
    (64, 64, 64, 4, 5),
    (64, 64, 128, 4, 3),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
)
ROW_COUNTS = (1, 2, 5, 16, 17, 33, 64, 100, 128, 256, 512)
TIMED_ROWS = (1, 16, 64, 128, 256)
STREAMED_BYTES = 400e6
"""Weights read per timing, several times the cache."""


@triton.jit
def linear_kernel(
    x, w, y, R, N, K: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, S: tl.constexpr
):
    """y[s, r, n]: part s of S of the sum over k of x[r, k] w[n, k]."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    s = tl.program_id(2)
    k = s * (K // S) + tl.arange(0, BK)
    weights = w + n[:, None].to(tl.int64) * K + k[None, :]
    inputs = x + r[None, :] * K + k[:, None]
    total = tl.zeros((BN, BR), tl.float32)
    for _ in range(0, K // S, BK):
        left = tl.load(weights, mask=n[:, None] < N, other=0.0)
        right = tl.load(inputs, mask=r[None, :] < R, other=0.0)
        total = tl.dot(left, right, total)
        weights += BK
        inputs += BK
    out = y + s.to(tl.int64) * R * N + r[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out, total, mask=(n[:, None] < N) & (r[None, :] < R))


@triton.jit
def attention_kernel(q, k, v, lengths, out, M, T: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr):
    """Softmax attention of M query vectors, each over its first `lengths` of T keys."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    queries = tl.load(q + m[None, :] * D + d[:, None], mask=m[None, :] < M, other=0.0)
    length = tl.load(lengths + m, mask=m < M, other=1)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    total = tl.zeros((D, BM), tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        scores = tl.dot(tl.load(k + t[:, None] * D + d[None, :]), queries)
        scores = tl.where(t[:, None] < length[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        weight = tl.exp(scores - higher[None, :])
        fade = tl.exp(peak - higher)
        mass = mass * fade + tl.sum(weight, 0)
        values = tl.load(v + t[None, :] * D + d[:, None])
        total = tl.dot(values, weight.to(tl.bfloat16), total * fade[None, :])
        peak = higher
    tl.store(out + m[None, :] * D + d[:, None], total / mass[None, :], mask=m[None, :] < M)


def linear(x: torch.Tensor, w: torch.Tensor, tile: tuple[int, ...], splits: int) -> torch.Tensor:
    (rows, depth), width = x.shape, w.shape[0]
    weight_rows, token_rows, tile_depth, warps, stages = tile
    y = torch.empty(splits, rows, width, device="cuda")
    grid = (triton.cdiv(width, weight_rows), triton.cdiv(rows, token_rows), splits)
    linear_kernel[grid](
        x, w, y, rows, width, depth, weight_rows, token_rows, tile_depth, splits, num_warps=warps, num_stages=stages
    )
    return y


def microseconds(run: Callable[..., Any], x: torch.Tensor, weights: list[torch.Tensor], repeats: int = 9) -> float:
    """Median time of run(x, w) per weight, in a captured graph over all weights."""
    run(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(x, weight)
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[2:]) / len(weights)


def linear_rows() -> Iterator[dict[str, Any]]:
    """Per weight shape and number of depth splits: whether all tiles agree, and which is fastest at each row count."""
    for name, (width, depth) in SHAPES.items():
        num_weights = max(1, min(16, int(STREAMED_BYTES // (width * depth * 2))))
        weights = [torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(num_weights)]
        inputs = torch.randn(max(ROW_COUNTS), depth, device="cuda", dtype=torch.bfloat16)
        for splits in (1, 2, 4) if width < 8192 else (1,):
            tiles = [tile for tile in TILES if (depth // splits) % tile[2] == 0]
            unequal = find_unequal(inputs, weights[0], tiles, splits)
            for count in TIMED_ROWS:
                x = inputs[:count].contiguous()
                fitting = [tile for tile in tiles if tile[1] <= max(16, 2 * count)]
                times = {tile: microseconds(partial(linear, tile=tile, splits=splits), x, weights) for tile in fitting}
                best = min(times, key=times.__getitem__)
                yield {
                    "weight": name,
                    "shape": [width, depth],
                    "splits": splits,
                    "rows": count,
                    "best_tile": best,
                    "us": round(times[best], 2),
                    "cublas_us": round(microseconds(F.linear, x, weights), 2),
                    "terabytes_per_s": round(width * depth * 2 / times[best] / 1e6, 2),
                    "num_compared": len(tiles) * len(ROW_COUNTS),
                    "unequal": unequal,
                }


def find_unequal(
    inputs: torch.Tensor, weight: torch.Tensor, tiles: Sequence[tuple[int, ...]], splits: int
) -> list[tuple[tuple[int, ...], int]]:
    """Tiles and row counts whose result differs in a bit from that of the first tile on all rows."""
    reference = linear(inputs, weight, tiles[0], splits)
    return [
        (tile, count)
        for tile, count in itertools.product(tiles, ROW_COUNTS)
        if not torch.equal(linear(inputs[:count].contiguous(), weight, tile, splits), reference[:, :count])
    ]


def attention_rows() -> Iterator[dict[str, Any]]:
    """Whether results are equal for every number of query vectors and every tile width."""
    num_keys, num_queries = 1024, 256
    for dim in (64, 128):
        k, v = (torch.randn(num_keys, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(num_queries, dim, device="cuda", dtype=torch.bfloat16) * dim**-0.5
        lengths = torch.randint(1, num_keys, (num_queries,), device="cuda", dtype=torch.int32)
        found = {}
        for (width, warps), count in itertools.product(((16, 4), (32, 4), (64, 4), (128, 8)), (1, 7, 16, 100, 256)):
            out = torch.full((count, dim), float("nan"), device="cuda")
            grid = (triton.cdiv(count, width),)
            attention_kernel[grid](q, k, v, lengths, out, count, num_keys, dim, width, 64, num_warps=warps)
            found[width, warps, count] = out
        whole = found[64, 4, num_queries]
        unequal = [key for key, out in found.items() if not torch.equal(out, whole[: key[2]])]
        yield {"attention": f"head dim {dim}", "compared": len(found), "unequal": unequal}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    gpu = torch.cuda.get_device_name(0)
    rows = []
    for row in itertools.chain(attention_rows(), linear_rows()):
        rows.append(row)
        print(*row.values(), flush=True)
    path = args.out or result_path("gpu-tiles", gpu)
    versions = package_versions(("torch", "triton"))
    write_result(path, "gpu-tiles", rows, argv=[sys.argv[0], *argv], versions=versions, gpu=gpu)


if __name__ == "__main__":
    main(sys.argv[1:])
