"""The comparison at the end of `make demo`, often enough to trust: on an idle machine and on a loaded one.

    python bench/demo.py                                trains the demo's recipe first, which takes minutes
    python bench/demo.py --run runs/countdown-cpu-1     of a finished demo
    python bench/demo.py --repeats 1 --prompts 1 --set rl.steps=1 --set eval.items=0     a smoke test

The run's engine, with all that it learned, and plain decoding make the same new rollouts in turns, as `run.compare`
does, but with so many repeats and a whole step's prompts. "loaded" is the same beside busy processes, one per core.
Tokens must be equal, or the bench fails. One JSON file.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import package_versions, result_path, write_result

from paceline.rollout.compare import Comparison
from paceline.run.open import open_run
from paceline.run.parts import load_policy, open_prompt_source
from paceline.run.recipes import prepare, resumed_settings, training_sampling
from paceline.run.settings import RootSettings
from paceline.run.ui.display import make_display

PACKAGES = ("paceline", "torch", "transformers", "numpy", "numba")
RECIPE = "countdown-cpu"
SPIN = "while True: pass"


def train(folder: Path, overrides: Sequence[str]) -> None:
    """Run the demo without its own comparison."""
    options = [f"--run.dir={folder}", "--run.compare=false", *(f"--{pair}" for pair in overrides)]
    subprocess.run([sys.executable, "-m", "paceline", "train", RECIPE, *options], check=True)


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Keep so many cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(settings: RootSettings, folder: Path, repeats: int, num_prompts: int) -> Comparison:
    """Resume a finished run and compare its engine with plain decoding; one more round warms both up."""
    with (
        make_display(settings.rl.steps, is_quiet=True) as display,
        open_run(settings, settings.model.path, folder, display, is_resumed=True) as run,
    ):
        source = open_prompt_source(settings, load_policy(settings, settings.model.path))
        step, first = run.state.num_steps + 1, run.state.next_draw
        draws = range(first, first + (repeats + 1) * num_prompts)
        named = [(source.question(step, draw).prompt_ids, draw) for draw in draws]
        rounds = [named[begin : begin + num_prompts] for begin in range(0, len(named), num_prompts)]
        found = run.backend.compare(rounds, training_sampling(settings), math.inf, lambda total, name: lambda _: None)
    if found is None:
        raise SystemExit("the run has nothing to compare: its drafter is none, or it has several workers")
    return found


def row_of(case: str, found: Comparison) -> dict[str, Any]:
    return {
        "case": case,
        "ratio": statistics.median(found.ratios),
        "ratios": [round(ratio, 4) for ratio in found.ratios],
        "seconds_plain": found.seconds_off,
        "seconds": found.seconds_on,
        "rollouts": found.num_rollouts,
        "tokens": found.num_tokens,
        "identical": found.num_identical,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a finished demo; without it, one is trained")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, help="prompts per repeat; a step's by default")
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="busy processes of the loaded case")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the trained run")
    parser.add_argument("--out", type=Path, default=result_path("demo"))
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.run or Path(temporary) / "demo"
        if args.run is None:
            train(folder, args.set)
        settings = prepare(resumed_settings(folder, {}))
        for case, num_busy in (("idle", 0), ("loaded", args.load)):
            with load(num_busy):
                found = compare(settings, folder, args.repeats, args.prompts or settings.rl.prompts_per_step)
            rows.append(row_of(case, found))
            ratios = f"{min(found.ratios):.2f} to {max(found.ratios):.2f}"
            print(f"{case}: {rows[-1]['ratio']:.3f}x as fast as plain, {args.repeats} repeats ({ratios})", flush=True)
    write_result(args.out, "demo", rows, argv=sys.argv, versions=package_versions(PACKAGES), busy_processes=args.load)
    return int(any(row["identical"] != row["rollouts"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
