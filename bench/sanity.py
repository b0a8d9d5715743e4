"""A sanity check of training: items that the model sometimes solves must become items that it solves; one JSON file.

    python bench/sanity.py --model PATH --device cuda                     exact, and the control, which is not
    python bench/sanity.py --model PATH --device cuda --cases exact --set rl.lr=2e-5

After a published check for numeric mismatch: of the recipe's training items, those are picked of which the model solves
20 to 80 % of its responses. It knows them and errs on them, so nothing but the training itself can keep it from solving
nearly all: the run has passed when more than 95 % of responses to the picked items score. The control has engine and
learner use fast kernels whose log-probabilities differ (`engine.exact` and `rl.exact` false); same items, draws and
seeds. Both are judged on the items that they train on: this says whether training works, not whether it generalises.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from picked import write_picked
from record import package_versions, result_path, write_result
from training import PACKAGES, Bench

from paceline.model.policy import Policy
from paceline.rollout.engine import Engine
from paceline.run.prompts import PromptSource, Question
from paceline.run.recipes import training_sampling
from paceline.run.settings import RootSettings

PICKED = Path(__file__).resolve().parent / "picked.py"
CASES = {"exact": {}, "not exact": {"engine.exact": "false", "rl.exact": "false"}}
SOME, MOST, PASSED = 0.2, 0.8, 0.95
STREAM = "pick"
"""Keys of their own: the run must not meet the responses that its items were picked by."""
BATCH = 64
"""Prompts whose responses are made at once."""


def pick(args: argparse.Namespace, settings: RootSettings) -> list[tuple[Question, float]]:
    """The first items of which the model solves some responses, not all, each with its share."""
    policy = Policy.load(args.model, args.device, settings.engine.exact, settings.engine.precision)
    if policy.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, and the task's prompts are texts")
    engine = Engine(policy.decoder, policy.tokenizer, None, settings.engine)
    source = PromptSource(settings.task, policy.tokenizer, settings.model.chat, policy.decoder.config.max_context)
    sampling = replace(training_sampling(settings), stream=STREAM)
    found: dict[str, tuple[Question, float]] = {}
    for start in range(0, args.candidates, BATCH):
        questions = [source.foresee(1, draw) for draw in range(start, min(start + BATCH, args.candidates))]
        rollouts = engine.generate([q.prompt_ids for q in questions], sampling, [q.draw for q in questions])
        scores: dict[int, list[float]] = {}
        for rollout in rollouts:
            item = questions[rollout.prompt_index].item
            scores.setdefault(rollout.prompt_index, []).append(source.task.score(item, rollout.text))
        for index, own in scores.items():
            share = sum(own) / len(own)
            if SOME <= share <= MOST:
                found.setdefault(questions[index].item.key, (questions[index], share))
        print(f"picked {len(found)} of {start + len(questions)} items", flush=True)
        if len(found) >= args.items:
            break
    return list(found.values())[: args.items]


def passed_at(steps: Sequence[dict[str, Any]]) -> int | None:
    """The first evaluated step at which more than 95 % were solved."""
    return next((row["step"] for row in steps if row.get("eval/accuracy", 0.0) > PASSED), None)


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    """What a run's row of metrics says."""
    accuracies = [step["eval/accuracy"] for step in row["steps"] if "eval/accuracy" in step]
    differences = [step.get("rollout/logp_abs_diff", 0.0) for step in row["steps"]]
    return {
        "before": accuracies[0],
        "after": accuracies[-1],
        "passed_at": passed_at(row["steps"]),
        "largest_logp_abs_diff": max(differences),
    }


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    bench = Bench(args, folder)
    settings = bench.settings()
    picked = pick(args, settings)
    if not picked:
        raise SystemExit("the model solves none of these items only sometimes: try another --recipe or a task.level")
    data = folder / "picked.jsonl"
    write_picked(data, settings.task, [question.item for question, _ in picked])
    fixed = {"task.name": f"{PICKED}:Picked", "task.data": str(data), "task.level": "0", "rl.steps": str(args.steps)}
    fixed |= {"eval.items": str(len(picked)), "eval.every": str(args.every), "eval.samples": str(args.samples)}
    # Judged as it was picked: a greedy response would say nothing about shares.
    fixed |= {"eval.temperature": str(settings.sampling.temperature), "run.compare": "false"}
    rows: list[dict[str, Any]] = [{"case": "picked", "items": len(picked), "shares": [share for _, share in picked]}]
    for case in args.cases:
        bench.train("sanity", case, bench.settings(**fixed, **CASES[case]))
        found = verdict(bench.rows[-1])
        print(f"{case}: {found}", flush=True)
        rows.append({**bench.rows[-1], **found})
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="smollm2-135m-sums", help="a recipe's name or file")
    parser.add_argument("--model", required=True, help="model folder or name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--items", type=int, default=64, help="to train on")
    parser.add_argument("--candidates", type=int, default=1024, help="most items to pick from")
    parser.add_argument("--samples", type=int, default=16, help="responses of an item when it is evaluated")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/sanity-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    path, versions = args.out or result_path("sanity", gpu), package_versions(PACKAGES)
    write_result(path, "sanity", rows, argv=[sys.argv[0], *argv], versions=versions, gpu=gpu, commit_hash=args.commit)


if __name__ == "__main__":
    main(sys.argv[1:])
