"""Profile of one decoding step: time by phase of the engine and by operation of the decoder.

    python bench/step_profile.py                        random 5 M model, batch 1, 8, 32
    python bench/step_profile.py --model PATH           a model folder

Prints a table and, with --out, writes the result file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import package_versions, write_result
from rich.console import Console
from rich.table import Table

from paceline.core.types import Sampling
from paceline.model.random_model import make_random_model
from paceline.rollout.engine import Engine

OPERATIONS = ("linear", "attention", "rms_norm", "swiglu")
PHASES = ("plan", "draft", "forward", "sample", "verify", "commit")


class TimedOps:
    """Wraps the decoder's operations and sums the time of each."""

    def __init__(self, ops: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        for name in OPERATIONS:
            setattr(ops, name, self._timed(name, getattr(ops, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - start
            return result

        return call


def profile(engine: Engine, timed: TimedOps, batch: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per step in the fastest of `repeats` calls."""
    prompts = [[(7 * i + j) % 250 for j in range(32)] for i in range(batch)]
    sampling = Sampling(temperature=1.0, max_new_tokens=tokens, ignore_eos=True)
    rows = []
    for _ in range(repeats + 1):
        timed.seconds.clear()
        start = time.perf_counter()
        engine.generate(prompts, sampling)
        total, stats = time.perf_counter() - start, engine.stats
        row = {"batch": batch, "ms_per_step": 1e3 * total / stats.steps, "tokens_per_s": stats.tokens / total}
        row |= {name: 1e3 * stats.seconds[name] / stats.steps for name in PHASES}
        row |= {f"forward.{name}": 1e3 * timed.seconds[name] / stats.steps for name in OPERATIONS}
        rows.append(row)
    return min(rows[1:], key=lambda row: row["ms_per_step"])


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="milliseconds per step")
    table.add_column("")
    for row in rows:
        table.add_column(f"batch {row['batch']}", justify="right")
    for name in [name for name in rows[0] if name != "batch"]:
        table.add_row(name, *(f"{row[name]:,.3f}" for row in rows))
    Console().print(table)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="model folder; default: a random model made on the spot")
    parser.add_argument("--drafter", default="none", help="drafter, as in engine.drafter")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the result file here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_random_model(Path(folder) / "model", size="5m")
        engine = Engine.from_pretrained(model, drafter=args.drafter)
        timed = TimedOps(engine.decoder.ops)
        rows = [profile(engine, timed, batch, args.tokens, args.repeats) for batch in args.batches]
    show(rows)
    if args.out:
        versions = package_versions(("paceline", "torch", "numpy", "numba"))
        write_result(args.out, "profile", rows, argv=[sys.argv[0], *argv], versions=versions)


if __name__ == "__main__":
    main(sys.argv[1:])
