"""ms(rows): the time of one forward step on a GPU by number of rows, exact and not exact, for every precision.

    python bench/rows.py                                      the shapes of Qwen3-0.6B, Qwen3-1.7B and Qwen2.5-7B
    python bench/rows.py --models 7b --precisions bf16        part of it

Times are the GPU's own, of steps queued back to back, a median per case; exact and not exact take turns. Rows come as
up to 8 per sequence, each sequence with 1,024 cached tokens, as in speculation. `gpu.py` uses the same `Stepper`.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import package_versions, result_path, write_result
from shapes import SHAPES, floor_bytes, model_config, random_weights

from paceline.core.types import Sampling
from paceline.model.decoder import Decoder
from paceline.model.executor import StepInput
from paceline.model.executors import make_executor
from paceline.model.rows import Rows, SequenceRows

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROWS_PER_SEQUENCE = 8
CONTEXT = 1024
MAX_ROWS = 512
WARM_UP = 3


@dataclass(frozen=True)
class Layout:
    """The rows of a step: rows per sequence, number of sequences, cached tokens of each."""

    sequences: int
    rows_each: int
    context: int = CONTEXT

    def __str__(self) -> str:
        return f"{self.sequences} x {self.rows_each} over {self.context}"

    @property
    def num_rows(self) -> int:
        return self.sequences * self.rows_each

    def num_pages(self, page_size: int) -> int:
        """Pages of one sequence."""
        return -(-(self.context + self.rows_each) // page_size)


EXTRA = {"7b": (Layout(16, 1, 4096), Layout(16, 8, 4096))}
"""Layouts beside the grid."""


class Stepper:
    """One decoder, a cache filled with noise and an executor; runs synthetic steps and reads the GPU's clock."""

    def __init__(self, decoder: Decoder, layouts: Sequence[Layout], max_rows: int = MAX_ROWS) -> None:
        self.decoder = decoder
        size = decoder.ops.page_size
        self._cache = decoder.allocate_cache(max(layout.sequences * layout.num_pages(size) for layout in layouts))
        self._cache.memory.normal_()
        self.executor: Any = make_executor(decoder, self._cache, max_rows)
        self._steps: dict[Layout, StepInput] = {}

    def times(self, layout: Layout, count: int, warm_up: int = WARM_UP) -> list[float]:
        """Seconds of `count` steps; like the engine, it launches each while the one before runs."""
        step = self._step(layout)
        found, ticket = [], self.executor.launch(step)
        for _ in range(warm_up + count - 1):
            following = self.executor.launch(step)
            found.append(self.executor.collect(ticket)[1])
            ticket = following
        found.append(self.executor.collect(ticket)[1])
        return found[warm_up:]

    def _step(self, layout: Layout) -> StepInput:
        if layout not in self._steps:
            size, random = self.decoder.ops.page_size, np.random.default_rng(0)
            pages = layout.num_pages(size)
            sequences = [
                SequenceRows(
                    random.integers(0, self.decoder.config.vocab_size, layout.rows_each, dtype=np.int32),
                    layout.context,
                    range(i * pages, (i + 1) * pages),
                )
                for i in range(layout.sequences)
            ]
            keys = random.integers(0, 2**63, layout.num_rows, dtype=np.uint64)
            steps = np.arange(layout.num_rows, dtype=np.int64)
            self._steps[layout] = StepInput(Rows.build(sequences, size), keys, steps, Sampling())
        return self._steps[layout]


def compare(steppers: Sequence[Stepper], layout: Layout, rounds: int = 5, count: int = 6) -> list[list[float]]:
    """Milliseconds per stepper and round, the steppers taking turns; each is the median of `count` steps."""
    found: list[list[float]] = [[] for _ in steppers]
    for stepper in steppers:
        stepper.times(layout, 1)  # captures the graph
    for _ in range(rounds):
        for times, stepper in zip(found, steppers, strict=True):
            times.append(1e3 * statistics.median(stepper.times(layout, count)))
    return found


def layout_of(num_rows: int, context: int = CONTEXT) -> Layout:
    """The grid's layout for a number of rows."""
    each = min(num_rows, ROWS_PER_SEQUENCE)
    return Layout(-(-num_rows // each), each, context)


def free_memory() -> None:
    """Free unreferenced memory."""
    gc.collect()
    torch.cuda.empty_cache()


def gpu_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "interpreter"


def grid(model: str, rows: Sequence[int], context: int) -> list[Layout]:
    layouts = [layout_of(num_rows, context) for num_rows in rows]
    single = [Layout(64, 1, context)] if 64 in rows else []
    return [*layouts, *single, *EXTRA.get(model, ())]


def measure(model: str, precision: str, layouts: Sequence[Layout], rounds: int) -> Iterator[dict[str, Any]]:
    """One line per layout: exact and not exact."""
    config = model_config(model)
    exact = Decoder(config, random_weights(config, _device()), exact=True, device="cuda", precision=precision)
    free_memory()
    plain = Decoder(config, exact.shared_weights(), exact=False, device="cuda", precision=precision)
    steppers = [Stepper(decoder, layouts) for decoder in (exact, plain)]
    for layout in layouts:
        exact_ms, plain_ms = compare(steppers, layout, rounds)
        ratio = statistics.median(a / b for a, b in zip(exact_ms, plain_ms, strict=True))
        yield {
            "model": model,
            "precision": precision,
            "rows": layout.num_rows,
            "sequences": layout.sequences,
            "rows_per_sequence": layout.rows_each,
            "context": layout.context,
            "exact_ms": round(statistics.median(exact_ms), 4),
            "not_exact_ms": round(statistics.median(plain_ms), 4),
            "exact_over_not": round(ratio, 4),
            "weight_bytes": floor_bytes(config),
        }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def show(row: dict[str, Any], elapsed: float) -> None:
    layout = Layout(row["sequences"], row["rows_per_sequence"], row["context"])
    print(
        f"{elapsed:6.1f} s  {row['model']:>5} {row['precision']:>5} {layout!s:>20}: exact {row['exact_ms']:8.3f} ms, "
        f"not {row['not_exact_ms']:8.3f} ms, ratio {row['exact_over_not']:.3f}",
        flush=True,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=_names, default=["0.6b", "7b", "1.7b"], help="of " + ", ".join(SHAPES))
    parser.add_argument("--precisions", type=_names, default=["bf16", "split", "mixed"])
    parser.add_argument("--rows", type=_numbers, default=list(ROWS), help="row counts of the grid")
    parser.add_argument("--context", type=int, default=CONTEXT, help="cached tokens per sequence")
    parser.add_argument("--rounds", type=int, default=5, help="turns per case, of 6 timed steps each")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no new model is started")
    parser.add_argument("--quick", action="store_true", help="the tiny model, two row counts, nothing written")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/rows-<hardware>.json)")
    no_git = None if shutil.which("git") else "unknown"
    parser.add_argument("--commit", default=no_git, help="commit measured, if there is no git checkout")
    args = parser.parse_args(argv)
    if args.quick:
        args.models, args.precisions, args.rows, args.context, args.rounds = ["tiny"], ["bf16"], [1, 4], 64, 2
    for name in set(args.models) - set(SHAPES):
        parser.error(f"unknown model {name!r}: --models takes {', '.join(SHAPES)}")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    start, gpu = time.perf_counter(), gpu_name()
    path = args.out or (None if args.quick else result_path("rows", gpu))
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    # For every model, the most common precision comes first, in case time runs out.
    for precision, model in ((precision, model) for precision in args.precisions for model in args.models):
        if time.perf_counter() - start > args.limit:
            failed[f"{model} {precision}"] = f"not begun: {args.limit:.0f} s were over"
            continue
        try:
            for row in measure(model, precision, grid(model, args.rows, args.context), args.rounds):
                rows.append(row)
                show(row, time.perf_counter() - start)
        except Exception as error:  # a failing case must not lose the others
            traceback.print_exc()
            failed[f"{model} {precision}"] = f"{type(error).__name__}: {error}"
        free_memory()
        if path:
            command, versions = [sys.argv[0], *argv], package_versions(PACKAGES)
            extra = {"gpu": gpu, "commit_hash": args.commit, "failed": failed}
            write_result(path, "rows", rows, argv=command, versions=versions, **extra)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


if __name__ == "__main__":
    main(sys.argv[1:])
