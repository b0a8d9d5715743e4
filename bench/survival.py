"""How much run-ahead text survives a learning step: the same draws before and after it; one JSON file.

    python bench/survival.py                                  the demo's model, at lr 1e-5 and at the demo's own
    python bench/survival.py --recipe smollm2-135m-math --model PATH --device cuda --lr 1e-6 --precision bf16,float32
    ... --shape 1.7b                                          the same model inflated, beside the original

Before every step the rollouts of the next one are made in full, once with their own keys and once with others, as a
system without shared noise would make them. One training step later the true ones are made, and their common prefix is
counted: tokens up to the first that differs, as a share of the run-ahead text. No scheduling is involved: this is the
most that run-ahead can keep.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from inflate import mask_learner, save_inflated
from record import package_versions, result_path, write_result

from paceline.core.config import load
from paceline.core.types import Rollout, Sampling
from paceline.model.policy import Policy
from paceline.rollout.engine import Engine
from paceline.rollout.run_ahead.store import common_prefix
from paceline.run.local import LocalBackend
from paceline.run.open import open_run
from paceline.run.parts import open_prompt_source
from paceline.run.prompts import Question
from paceline.run.recipes import find_recipe, prepare, training_sampling
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics
from paceline.run.ui.display import make_display

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
OTHER_SEED = 1_000_003
Texts = dict[tuple[int, int], list[int]]


def settings_of(args: argparse.Namespace, model: str, precision: str, lr: str) -> RootSettings:
    given = dict(pair.split("=", 1) for pair in args.set)
    fixed = {
        "model.path": model,
        "model.device": args.device,
        "engine.precision": precision,
        "rl.lr": lr,
        "rl.steps": str(args.steps),
        "rl.warmup_steps": "0",
        "eval.items": "0",
        "run.loggers": "none",
        "run.compare": "false",
        "run.checkpoint_every": "0",
    }
    return load(RootSettings, find_recipe(args.recipe), {**fixed, **given})


def write_texts(engine: Engine, questions: Sequence[Question], sampling: Sampling) -> Texts:
    """Rollouts under today's weights."""
    prompts, draws = [question.prompt_ids for question in questions], [question.draw for question in questions]
    return texts_of(engine.generate(prompts, sampling, draws))


def texts_of(rollouts: Sequence[Rollout]) -> Texts:
    return {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in rollouts}


def survival(ahead: Texts, true: Texts) -> dict[str, float]:
    """Total tokens, tokens in the surviving prefix, and texts that survived whole."""
    kept = {key: common_prefix(text, true[key]) for key, text in ahead.items()}
    return {
        "tokens": sum(map(len, ahead.values())),
        "survived": sum(kept.values()),
        "whole": sum(kept[key] == len(text) for key, text in ahead.items()),
        "texts": len(ahead),
    }


def measure(args: argparse.Namespace, precision: str, lr: str, folder: Path) -> list[dict[str, Any]]:
    """Every step of one run but the first."""
    inflation = save_inflated(folder / "model", args.model, args.shape) if args.shape else None
    model = args.model if inflation is None else str(folder / "model")
    settings = settings_of(args, model, precision, lr)
    sampling = training_sampling(settings)
    size, rows = settings.rl.prompts_per_step, []
    with (
        make_display(settings.rl.steps, is_quiet=True) as display,
        open_run(prepare(settings), model, folder / "run", display) as run,
    ):
        assert isinstance(run.backend, LocalBackend)
        if inflation is not None:
            mask_learner(run.learner, inflation)
        engine = run.backend.engine
        assert engine.tokenizer is not None
        prompt_source = open_prompt_source(settings, Policy(engine.decoder, engine.tokenizer))
        for step in range(1, settings.rl.steps):
            questions = [prompt_source.question(step + 1, draw) for draw in range(step * size, (step + 1) * size)]
            ahead = {
                noise: write_texts(engine, questions, replace(sampling, seed=seed))
                for noise, seed in (("shared", sampling.seed), ("other", OTHER_SEED))
            }
            run.step()  # learns from the draws before these
            true = write_texts(engine, questions, sampling)
            for noise, texts in ahead.items():
                found = survival(texts, true)
                rows.append(
                    {
                        "shape": args.shape,
                        "lr": float(lr),
                        "precision": precision,
                        "step": step,
                        "noise": noise,
                        **found,
                    }
                )
                share = found["survived"] / found["tokens"]
                print(f"{precision} lr {lr} step {step} {noise:>6}: {share:.1%}", flush=True)
    assert len(read_metrics(folder / "run")) == settings.rl.steps - 1
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for case in dict.fromkeys((row["precision"], row["lr"]) for row in rows):
        shares = []
        for noise in ("shared", "other"):
            own = [row for row in rows if (row["precision"], row["lr"]) == case and row["noise"] == noise]
            shares.append(f"{noise} noise {sum(r['survived'] for r in own) / sum(r['tokens'] for r in own):.1%}")
        lines.append(f"{case[0]}, lr {case[1]:g}: {', '.join(shares)}")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="countdown-cpu", help="a recipe's name or file")
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--shape", help="inflate the model to this shape of its family (shapes.py)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="see engine.precision; comma-separated")
    parser.add_argument("--lr", default="1e-5,5e-5", help="learning rates, comma-separated")
    parser.add_argument("--steps", type=int, default=5, help="training steps at each learning rate")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/survival-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be 2 or more: before the first step there is nothing to survive")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    rows: list[dict[str, Any]] = []
    for precision, lr in product(args.precision.split(","), args.lr.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(args, precision, lr, Path(folder))
    path = args.out or result_path("survival", gpu)
    versions = package_versions(PACKAGES)
    write_result(path, "survival", rows, argv=[sys.argv[0], *argv], versions=versions, gpu=gpu, commit_hash=args.commit)
    print(summary(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
