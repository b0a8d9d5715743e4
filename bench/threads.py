"""What threads gain on a CPU: decoding and training steps with 1 and more threads, in turns.

    python bench/threads.py                              random 50 M model and the demo's model, 1 and 2 threads
    python bench/threads.py --threads 1,2,4,8            more of them
    python bench/threads.py --parts decode --models 50m  one part

Every round runs each number of threads once, in alternating order, in one process; a time is the median over rounds and
a speedup the median of the ratios within a round. Tokens, log-probabilities and weights must be equal. `cores` is CPU
time over wall time: well below the number of threads, the machine was busy with something else or there was too
little to share.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import package_versions, result_path, write_result
from rich.console import Console
from rich.table import Table

from paceline.core.types import Sampling
from paceline.kernels.cpu.pool import set_num_threads
from paceline.model.folder import resolve
from paceline.model.random_model import make_random_model
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.rollout.engine import Engine

PACKAGES = ("paceline", "torch", "numpy", "numba")
MODELS = ("50m", "demo")
PARTS = ("decode", "learn")
PROMPT_LENGTH = 12

Work = Callable[[], str]
"""One measurement; returns a digest of what it computed."""


def cases(args: argparse.Namespace, folder: Path) -> Iterator[tuple[dict[str, Any], Work]]:
    """What to measure, and under which name."""
    for model in args.models:
        path = resolve("shipped:countdown") if model == "demo" else make_random_model(folder / model, size=model)
        engine = Engine.from_pretrained(path, drafter=None)
        if "decode" in args.parts:
            for batch in args.batches:
                yield {"part": "decode", "model": model, "batch": batch}, decode(engine, batch, args.tokens)
        if "learn" in args.parts:
            yield {"part": "learn", "model": model, "batch": args.texts}, learn(engine, args.texts, args.text_tokens)


def prompts_of(batch: int) -> list[list[int]]:
    draw = random.Random(batch)
    return [[draw.randrange(1, 30) for _ in range(PROMPT_LENGTH)] for _ in range(batch)]


def decode(engine: Engine, batch: int, tokens: int) -> Work:
    """Rollouts of `tokens` tokens each."""
    prompts, sampling = prompts_of(batch), Sampling(max_new_tokens=tokens, ignore_eos=True)

    def work() -> str:
        return digest(repr([(r.token_ids, r.logprobs) for r in engine.generate(prompts, sampling)]).encode())

    return work


def learn(engine: Engine, num_texts: int, tokens: int) -> Work:
    """One step from the same weights on texts of `tokens` tokens each."""
    draw = np.random.default_rng(0)
    samples = [
        Sample.of(i // 4, i % 4, prompt, draw.integers(1, 30, tokens), np.full(tokens, -3.0), 1.0 - i % 2 * 2)
        for i, prompt in enumerate(prompts_of(num_texts))
    ]
    learner = Learner(engine.decoder, RlSettings(), Sampling(max_new_tokens=tokens))
    start = {name: weight.clone() for name, weight in learner.weights.items()}
    state = learner.state_dict()["optimizer"]

    def work() -> str:
        learner.load_state_dict({"num_steps": 0, "num_skipped": 0, "weights": start, "optimizer": state})
        learner.step(samples)
        return digest(*(weight.numpy().tobytes() for weight in learner.weights.values()))

    return work


def digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def measure(work: Work, counts: Sequence[int], repeats: int) -> tuple[dict[int, list[float]], dict[int, float], bool]:
    """Seconds of every round, cores used, and whether all results were equal; a first round only warms up."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    cpu = dict.fromkeys(counts, 0.0)
    results = set()
    for number in range(repeats + 1):
        for count in counts if number % 2 else reversed(counts):
            set_num_threads(count)
            wall, used = time.perf_counter(), time.process_time()
            results.add(work())
            wall, used = time.perf_counter() - wall, time.process_time() - used
            if number:
                seconds[count].append(wall)
                cpu[count] += used
    cores = {count: cpu[count] / sum(seconds[count]) for count in counts}
    return seconds, cores, len(results) == 1


def rows_of(
    name: dict[str, Any], counts: Sequence[int], found: tuple[dict[int, list[float]], dict[int, float], bool]
) -> Iterator[dict[str, Any]]:
    seconds, cores, is_equal = found
    for count in counts:
        ratios = [one / own for one, own in zip(seconds[counts[0]], seconds[count], strict=True)]
        yield {
            **name,
            "threads": count,
            "ms": round(1e3 * statistics.median(seconds[count]), 2),
            "speedup": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "cores": round(cores[count], 2),
            "equal": is_equal,
        }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=_numbers, default=[1, 2], help="numbers of threads (default: 1,2)")
    parser.add_argument("--models", type=_names, default=list(MODELS), help="random sizes, or demo (default: 50m,demo)")
    parser.add_argument("--parts", type=_names, default=list(PARTS), help="decode, learn (default: both)")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32], help="sequences (default: 1,8,32)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per sequence (default: 48)")
    parser.add_argument("--texts", type=int, default=32, help="texts of a training step (default: 32)")
    parser.add_argument("--text-tokens", type=int, default=120, help="tokens of each (default: 120)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny, one round, nothing written")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/threads-<hardware>.json)")
    args = parser.parse_args(argv)
    if args.quick:
        args.models, args.batches, args.tokens, args.texts, args.repeats = ["tiny"], [2], 4, 4, 1
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, work in cases(args, Path(folder)):
            rows += rows_of(name, args.threads, measure(work, args.threads, args.repeats))
            print(rows[-1], file=sys.stderr)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    path = args.out or (None if args.quick else result_path("threads"))
    if path is not None:
        write_result(path, "threads", rows, argv=[sys.argv[0], *argv], versions=package_versions(PACKAGES))


if __name__ == "__main__":
    main(sys.argv[1:])
