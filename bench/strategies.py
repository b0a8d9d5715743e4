"""What a draft shape is worth: the learned drafter alone, by depth and width, against plain decoding; one JSON file.

    python bench/strategies.py                                              the demo's model on a CPU
    python bench/strategies.py --device cuda --shape 7b --sizes 1 8 32      the same text at a large cost
    python bench/strategies.py --device cuda --recipe smollm2-135m-math --model PATH --shape 7b      a real model's text

A drafter is trained offline on the policy's rollouts (`spot.py`), or read from `--drafter`, and inflated with the
policy. Then one shape at a time is fixed for all steps, where a bandit would otherwise choose (`bandit` is that
choice), and each makes the same rollouts, alternating with plain decoding; all must be equal, or the bench fails. A
shape has a maximum number of verified rows per sequence, including its own: a GPU always verifies that many, a CPU
those that the budget finds worth it (`rows` is how many there were per step). Sequences end when they end, so a batch
shrinks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ablation import Policy
from record import package_versions, result_path, write_result
from spot import open_bench as open_training
from spot import parse as parse_training

from paceline.core.config import load
from paceline.core.types import Rollout
from paceline.model.checkpoint import load_weights
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.eagle.network import Eagle
from paceline.model.folder import load_config, resolve
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.compare import first_difference
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.drafters.eagle import TAUS, EagleDrafter
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.bandit import Arm
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.run.prompts import PromptSource
from paceline.run.recipes import find_recipe
from paceline.run.settings import RootSettings
from paceline.spot.trainer import Trainer

PACKAGES = ("paceline", "torch", "triton", "numpy", "numba")
WARM_UP = 48
"""Tokens per response while everything is captured and compiled."""


def make_drafter(args: argparse.Namespace) -> Eagle:
    """Read the drafter, or train one."""
    if args.drafter is not None:
        return load_eagle(args.drafter)
    start = time.perf_counter()
    training = open_training(
        parse_training(
            [
                *("--recipe", args.recipe, "--model", args.model, "--prompts", str(args.train_prompts)),
                *("--tokens", str(min(args.max_new_tokens, 512)), "--set", f"task.level={args.level}", *args.spot),
            ]
        )
    )
    trainer = Trainer(training.eagle, training.settings)
    steps = training.micro_steps(trainer)
    while trainer.num_micro_steps < args.micro_steps:
        trainer.train(next(steps), training.ring, training.teacher)
    print(f"trained {args.micro_steps} micro-steps in {time.perf_counter() - start:.0f} s", flush=True)
    eagle = trainer.publish()
    if args.save is not None:
        save_eagle(args.save, eagle)
    return eagle


class Bench:
    """A plain engine and one that drafts, over one decoder."""

    def __init__(self, args: argparse.Namespace, eagle: Eagle) -> None:
        self._args = args
        folder = resolve(args.model)
        config, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
        policy = Policy(args, config, load_weights(folder, config))
        self._drafter = EagleDrafter(policy.grow(eagle))
        most = max(args.sizes)
        settings = EngineSettings(
            max_sequences=most, kv_tokens=2 * most * (args.max_new_tokens + 512), precision=args.precision
        )
        budget = BudgetSettings(max_draft_nodes=64)
        self._plain = Engine(policy.decoder, tokenizer, None, settings, budget)
        self._engine = Engine(policy.decoder, tokenizer, DrafterSet(model=self._drafter), settings, budget)
        arms = self._engine._governor.arms
        assert arms is not None
        self._bandit = arms.bandit
        self._choose = self._bandit.choose
        assert tokenizer is not None
        # Not the items that the drafter was trained on.
        root = load(RootSettings, find_recipe(args.recipe), {"task.level": str(args.level), "task.seed": "1"})
        source = PromptSource(root.task, tokenizer, root.model.chat, config.max_context)
        self._prompts = [source.foresee(1, draw).prompt_ids for draw in range(most * args.calls)]
        self._sampling = replace(root.sampling.build(), max_new_tokens=args.max_new_tokens, seed=args.seed)
        self.rows: list[dict[str, Any]] = []

    def measure(self, size: int) -> None:
        """All shapes for calls of `size` sequences, alternating with plain decoding."""
        shapes: list[Arm | None] = [None]
        shapes += [
            Arm("eagle", depth, width, depth * width)
            for depth in self._args.depths
            for width in self._args.widths
            if size * (1 + depth * width) <= self._args.most_rows
        ]
        for shape in shapes:
            self._fix(shape)
            self._calls(self._engine, size, WARM_UP, count=1)
        self._calls(self._plain, size, WARM_UP, count=1)
        for repeat in range(self._args.repeats):
            plain, reference = self._timed(self._plain, size)
            for shape in shapes:
                self._fix(shape)
                row, rollouts = self._timed(self._engine, size)
                difference = first_difference(reference, rollouts)
                assert difference is None, f"{shape} with {size} sequences: {difference}"
                self._note(size, repeat, shape, row, plain)

    def _fix(self, shape: Arm | None) -> None:
        """Draft every step in this shape; None: as the bandit chooses, which keeps what it has learned."""

        def choose(size: int, available: Collection[Arm] | None = None) -> Arm:
            return self._choose(size, available) if shape is None else shape

        self._bandit.choose = choose  # type: ignore[method-assign]

    def _calls(self, engine: Engine, size: int, most: int, count: int) -> tuple[list[Rollout], list[Any]]:
        sampling = replace(self._sampling, max_new_tokens=most)
        rollouts, stats = [], []
        for call in range(count):
            draws = range(call * size, (call + 1) * size)
            rollouts += engine.generate([self._prompts[draw] for draw in draws], sampling, draws)
            stats.append(engine.stats)
        return rollouts, stats

    def _timed(self, engine: Engine, size: int) -> tuple[dict[str, Any], list[Rollout]]:
        start = time.perf_counter()
        rollouts, stats = self._calls(engine, size, self._args.max_new_tokens, self._args.calls)
        seconds = time.perf_counter() - start
        steps = sum(own.steps for own in stats)
        row = {
            "seconds": round(seconds, 4),
            "tokens": sum(own.tokens for own in stats),
            "steps": steps,
            "rows": round(sum(own.rows for own in stats) / steps, 2),
            "accept_length": round(sum(own.tokens for own in stats) / sum(own.visits for own in stats), 3),
            "step_ms": round(1e3 * seconds / steps, 3),
            "machine_ms": round(1e3 * sum(own.machine_seconds for own in stats) / steps, 3),
        }
        return row, rollouts

    def _note(self, size: int, repeat: int, shape: Arm | None, row: dict[str, Any], plain: dict[str, Any]) -> None:
        name = "bandit" if shape is None else f"{shape.depth}x{shape.width}"
        given = {"depth": shape.depth, "width": shape.width, "verified": 1 + shape.verified} if shape else {}
        self.rows.append(
            {
                "size": size,
                "repeat": repeat,
                "shape": name,
                **given,
                **row,
                "tau": TAUS[self._drafter.chosen],
                "plain_seconds": plain["seconds"],
                "plain_step_ms": plain["step_ms"],
                "ratio": round(plain["seconds"] / row["seconds"], 3),
            }
        )
        print(
            f"{size:>3} sequences {name:>7}: {self.rows[-1]['ratio']:.2f}x, accept length {row['accept_length']:.2f}, "
            f"{row['step_ms']:.2f} ms a step (plain {plain['step_ms']:.2f})",
            flush=True,
        )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Median ratios, one line per number of sequences."""
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        own = [row for row in rows if row["size"] == size]
        found = {
            shape: statistics.median(row["ratio"] for row in own if row["shape"] == shape)
            for shape in dict.fromkeys(row["shape"] for row in own)
        }
        lines.append(f"{size:>3} sequences: " + "  ".join(f"{shape} {ratio:.2f}x" for shape, ratio in found.items()))
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--recipe", default="countdown-cpu", help="a recipe's name or file: its task and sampling")
    parser.add_argument("--shape", help="inflate the model to this shape of its family (shapes.py)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="see engine.precision")
    parser.add_argument("--level", type=int, default=0, help="level of the task")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="sequences per call")
    parser.add_argument("--calls", type=int, default=4, help="number of calls, each with new prompts")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8], help="draft tokens in a row")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4], help="candidates per position")
    parser.add_argument("--most-rows", type=int, default=512, help="most rows per step; larger shapes are skipped")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter")
    parser.add_argument("--save", type=Path, help="folder for the trained drafter")
    parser.add_argument("--micro-steps", type=int, default=1600, help="micro-steps to train the drafter")
    parser.add_argument("--train-prompts", type=int, default=64, help="prompts whose rollouts it is trained on")
    parser.add_argument(
        "--spot", action="append", default=[], metavar="OPTION", help="for spot.py, as --spot=--set=spot.KEY=VALUE"
    )
    parser.add_argument("--name", default="strategies", help="name of the result file, before the hardware")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    bench = Bench(args, make_drafter(args))
    for size in args.sizes:
        bench.measure(size)
    path = args.out or result_path(args.name, gpu)
    versions = package_versions(PACKAGES)
    write_result(
        path, "strategies", bench.rows, argv=[sys.argv[0], *argv], versions=versions, gpu=gpu, commit_hash=args.commit
    )
    print(summary(bench.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
