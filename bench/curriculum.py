"""Easy against mixed data at equal size: GRPO on counting, graph and spatial, each from one warm start; one JSON file.

    python bench/curriculum.py                              everything, three seeds; over an hour on one core
    python bench/curriculum.py --device cuda                the same on a GPU
    python bench/curriculum.py --tasks graph --seeds 1,2    a part of it
    python bench/curriculum.py --warm-only --device cuda    only the warm starts, which take the longest on a CPU
    python bench/curriculum.py --quick                      a smoke test of a few seconds that writes nothing

A small model learns worked solutions, mostly easy ones. From there GRPO trains on easy items alone (level 0) or on all
levels equally, through the same code as `paceline train`, with the same number of steps, prompts and responses. Every
model solves the same held-out items of every level with the same keys. Cases whose row is in the JSON already are
skipped, so an interrupted run continues where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from record import package_versions, result_path, write_result

from paceline.core.config import load, validate
from paceline.model.folder import load_config
from paceline.run.evaluate import Evaluation, evaluate
from paceline.run.open import open_run
from paceline.run.parts import load_policy, open_engine, open_prompt_source
from paceline.run.recipes import newest_policy, prepare, training_sampling
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics
from paceline.run.ui.display import make_display
from paceline.tasks.answers import final_answer
from paceline.tasks.grading import Grader
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings
from paceline.warmup.checks import RECIPE
from paceline.warmup.settings import WarmupSettings
from paceline.warmup.train import warm_up

TASKS = ("counting", "graph", "spatial")
WARM = "warm start"
KINDS = ("easy", "mixed")
"""Values of `task.curriculum`; the warm start's own row comes before them."""
LEVELS = (0, 1, 2)
"""Easy data is the first level, mixed data all of them equally; all are evaluated."""
WARM_SEED, EVAL_SEED = 0, 1000
"""Of the warm start's texts and weights, and of held-out items and their keys; training has its own seeds."""
PACKAGES = ("paceline", "torch", "numpy", "numba")
NUM_ENDS = 5
"""How many steps at each end of the reward curve are averaged."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """Everything a result depends on, besides task, data and seed. Kept in the JSON: one file has one setup."""

    warm_steps: int = 1500
    """At most; training stops early once `warm_stop_at` of the easy held-out items are solved, which leaves room to
    improve and successes to learn from."""
    warm_check_every: int = 25
    warm_check_items: int = 512
    warm_stop_at: float = 0.5
    warm_levels: dict[int, float] = field(default_factory=lambda: {0: 0.7, 1: 0.15, 2: 0.15})
    """Mostly easy, but every kind of question is seen, or the harder levels would test nothing but that."""
    warm_batch_tokens: int = 16384
    warm_lr: float = 2e-3
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 6
    head_dim: int = 32
    steps: int = 60
    prompts_per_step: int = 32
    group_size: int = 8
    lr: float = 1e-4
    max_new_tokens: int = 128
    eval_items: int = 512


QUICK = Setup(
    warm_steps=2,
    warm_check_items=4,
    warm_batch_tokens=512,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    head_dim=16,
    steps=2,
    prompts_per_step=2,
    group_size=2,
    max_new_tokens=12,
    eval_items=4,
)


class Bench:
    """The cases to run, their results, and the file that keeps them."""

    def __init__(self, setup: Setup, args: argparse.Namespace, models: Path, path: Path | None) -> None:
        self.setup, self.device, self.models, self.path, self._args = setup, args.device, models, path, args
        self.rows: list[Row] = _read_rows(path, setup) if path is not None and path.exists() else []

    def has(self, task: str, data: str, seed: int | None) -> bool:
        return any((row["task"], row["data"], row["seed"]) == (task, data, seed) for row in self.rows)

    def keep(self, row: Row) -> None:
        """Record a finished case."""
        self.rows.append(row)
        print(describe(row), flush=True)
        if self.path is not None:
            extra = {"setup": _as_json(self.setup), "commit_hash": self._args.commit, "gpu": gpu_of(self.device)}
            versions = package_versions(PACKAGES)
            write_result(self.path, "curriculum", self.rows, argv=self._args.argv, versions=versions, **extra)


def gpu_of(device: str) -> str | None:
    return None if device == "cpu" else torch.cuda.get_device_name(device)


def _as_json(setup: Setup) -> Any:
    return json.loads(json.dumps(asdict(setup)))


def _read_rows(path: Path, setup: Setup) -> list[Row]:
    found = json.loads(path.read_text())
    if found["setup"] != _as_json(setup):
        raise ValueError(f"{path} holds results of another setup; name another file with --out, or remove it")
    rows: list[Row] = found["rows"]
    return rows


# --- the two trainings ------------------------------------------------------------------------------------------------


def warmup_settings(setup: Setup, task: str, device: str) -> WarmupSettings:
    tree = {
        "data": {
            "task": task,
            "levels": setup.warm_levels,
            "seed": WARM_SEED,
            "batch_tokens": setup.warm_batch_tokens,
            "workers": 2,
        },
        "model": {
            "hidden_size": setup.hidden_size,
            "intermediate_size": setup.intermediate_size,
            "num_layers": setup.num_layers,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": setup.head_dim,
            "max_context": 512,
        },
        "train": {
            "steps": setup.warm_steps,
            "seed": WARM_SEED,
            "device": device,
            "lr": setup.warm_lr,
            "pack_tokens": setup.warm_batch_tokens + 512,  # a batch may overshoot by one text
        },
        "check": {
            "every": setup.warm_check_every,
            "items": setup.warm_check_items,
            "max_new_tokens": setup.max_new_tokens,
            "stop_at": setup.warm_stop_at,
        },
    }
    return validate(WarmupSettings, tree)


def warm_start(setup: Setup, task: str, folder: Path, device: str) -> Path:
    """The model that all cases of a task start from; made once, on either device."""
    settings, out = warmup_settings(setup, task, device), folder / task
    if not is_made(settings, out):
        print(f"{task}: warm start of at most {settings.train.steps} steps", flush=True)
        warm_up(settings, out)
    return out


def is_made(settings: WarmupSettings, out: Path) -> bool:
    """Whether a folder holds a complete warm start; an interrupted one leaves an earlier check's weights."""
    if not (out / RECIPE).is_file():
        return False
    found = load(WarmupSettings, out / RECIPE)
    result, check = found.made["result"], settings.check
    is_over = result["steps"] == settings.train.steps or result["eval/accuracy"] >= (check.stop_at or math.inf)
    return is_over and _without_device(found) == _without_device(settings)


def _without_device(settings: WarmupSettings) -> WarmupSettings:
    train = settings.train.model_copy(update={"device": "cpu"})
    return settings.model_copy(update={"made": {}, "train": train})


def run_settings(setup: Setup, model: Path, task: str, data: str, seed: int, device: str) -> RootSettings:
    """One case. Everything else has the defaults of `paceline train`."""
    tree = {
        "model": {"path": str(model), "device": device},
        "task": {"name": task, "curriculum": data, "max_level": LEVELS[-1], "seed": seed},
        "sampling": {"max_new_tokens": setup.max_new_tokens},
        "rl": {
            "steps": setup.steps,
            "prompts_per_step": setup.prompts_per_step,
            "group_size": setup.group_size,
            "lr": setup.lr,
            "seed": seed,
        },
        "eval": {"items": 0},
        "run": {"rollouts": False, "loggers": "none", "checkpoint_every": 0},
    }
    return validate(RootSettings, tree)


def train(settings: RootSettings, folder: Path) -> Row:
    """Run GRPO in a new folder; returns its summary."""
    with (
        make_display(settings.rl.steps, is_quiet=True) as display,
        open_run(prepare(settings), settings.model.path, folder, display) as run,
    ):
        run.train()
    steps = read_metrics(folder)
    responses = [round(step["draws"]) * settings.rl.group_size for step in steps]
    lengths = [step["completions/mean_length"] for step in steps]
    rewards = [step["reward"] for step in steps]
    return {
        "num_prompts": sum(responses) // settings.rl.group_size,
        "num_responses": sum(responses),
        "num_tokens": round(sum(count * length for count, length in zip(responses, lengths, strict=True))),
        "reward_first": fmean(rewards[:NUM_ENDS]),
        "reward_last": fmean(rewards[-NUM_ENDS:]),
        "uniform_groups": fmean(step["frac_reward_zero_std"] for step in steps),
        "rewards": rewards,
    }


# --- what they are measured on ----------------------------------------------------------------------------------------


def solve(setup: Setup, model: Path, task: str, device: str) -> list[Row]:
    """How many held-out items of each level a model solves, sampled at temperature 1 and greedily."""
    settings = run_settings(setup, model, task, "easy", EVAL_SEED, device)
    drawn = replace(training_sampling(settings), n=1)
    found = []
    with Grader(settings.task) as grader:  # a task at any level scores the items of all levels
        policy = load_policy(settings, str(model))
        engine = open_engine(settings, policy)
        for level in LEVELS:
            prompt_source = open_prompt_source(settings.model_copy(update={"task": held_out(task, level)}), policy)
            questions = prompt_source.test_questions(setup.eval_items)
            at_random = evaluate(engine, grader, questions, drawn, print)
            greedy = evaluate(engine, grader, questions, replace(drawn, temperature=0.0), print)
            constant = best_constant(setup, task, level)["answer"]
            found.append({"level": level} | describe_answers(at_random, greedy, constant))
    return found


def describe_answers(drawn: Evaluation, greedy: Evaluation, constant: str) -> Row:
    metrics = drawn.metrics()
    return {
        "accuracy": metrics["eval/accuracy"],
        "greedy": float(greedy.is_solved.mean()),
        # A model that learns the distribution of answers instead of the problem gives this one more and more often.
        "constant_share": fmean(final_answer(rollout.text) == constant for rollout in drawn.rollouts),
        "mean_length": metrics["eval/mean_length"],
        "clipped": metrics["eval/clipped_ratio"],
    }


def held_out(task: str, level: int) -> TaskSettings:
    return TaskSettings(name=task, level=level, seed=EVAL_SEED)


def best_constant(setup: Setup, task: str, level: int) -> Row:
    """What the best constant answer scores on these items, and how many distinct templates they have."""
    made = make_task(held_out(task, level))
    items = [made.item(EVAL_SEED, index, "test") for index in range(setup.eval_items)]
    [(answer, count)] = Counter(item.answer["value"] for item in items).most_common(1)
    num_templates = len({item.key for item in items})
    return {"level": level, "answer": answer, "accuracy": count / len(items), "num_templates": num_templates}


# --- cases ------------------------------------------------------------------------------------------------------------


def measure_warm_start(bench: Bench, task: str, model: Path) -> None:
    begun = time.perf_counter()
    row: Row = {"task": task, "data": WARM, "seed": None, "eval": solve(bench.setup, model, task, bench.device)}
    row |= {
        "floor": [best_constant(bench.setup, task, level) for level in LEVELS],
        "num_parameters": load_config(model).num_parameters,
        "warmup": load(WarmupSettings, model / RECIPE).made,
    }
    bench.keep(row | {"seconds": round(time.perf_counter() - begun, 1)})


def measure(bench: Bench, task: str, data: str, seed: int, model: Path) -> None:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        trained = train(run_settings(bench.setup, model, task, data, seed, bench.device), path)
        middle = time.perf_counter()
        solved = solve(bench.setup, newest_policy(path), task, bench.device)
    seconds = {"train_seconds": round(middle - begun, 1), "seconds": round(time.perf_counter() - begun, 1)}
    bench.keep({"task": task, "data": data, "seed": seed, "eval": solved, "train": trained, **seconds})


def describe(row: Row) -> str:
    """A case in one line, for the console."""
    name = row["data"] if row["seed"] is None else f"{row['data']}, seed {row['seed']}"
    levels = "  ".join(f"{100 * each['accuracy']:5.1f} ({100 * each['greedy']:5.1f})" for each in row["eval"])
    return f"{row['task']:>8}  {name:<14}  % solved by level (greedy): {levels}  {row['seconds']:.0f} s"


# --- the command ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--seeds", default="1,2,3", help="training seeds, for items and rollouts")
    parser.add_argument("--steps", type=int, help=f"GRPO steps (default: {Setup.steps})")
    parser.add_argument(
        "--models", type=Path, default=Path("runs/curriculum"), help="folder that keeps the warm starts"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--warm-only", action="store_true", help="make the warm starts and stop")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    parser.add_argument("--quick", action="store_true", help="smoke test: everything tiny, nothing written")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/curriculum-<hardware>.json)")
    args = parser.parse_args(argv, argparse.Namespace(argv=[sys.argv[0], *argv]))
    args.tasks, args.seeds = args.tasks.split(","), [int(seed) for seed in args.seeds.split(",")]
    unknown = [task for task in args.tasks if task not in TASKS]
    if unknown:
        parser.error(f"no task {unknown[0]!r}: there are {', '.join(TASKS)}")
    return args


def run_cases(bench: Bench, tasks: Sequence[str], seeds: Sequence[int]) -> None:
    """Run every case that has no row yet; both kinds of data of a seed run back to back."""
    for task in tasks:
        left = [(data, seed) for seed in seeds for data in KINDS if not bench.has(task, data, seed)]
        if not left and bench.has(task, WARM, None):
            continue
        model = warm_start(bench.setup, task, bench.models, bench.device)
        if not bench.has(task, WARM, None):
            measure_warm_start(bench, task, model)
        for data, seed in left:
            measure(bench, task, data, seed, model)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    setup = QUICK if args.quick else Setup()
    if args.steps is not None:
        setup = replace(setup, steps=args.steps)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) if args.quick else args.models
        if args.warm_only:
            for task in args.tasks:
                warm_start(setup, task, models, args.device)
            return
        path = args.out or (None if args.quick else result_path("curriculum", gpu_of(args.device)))
        run_cases(Bench(setup, args, models, path), args.tasks, args.seeds)


if __name__ == "__main__":
    main(sys.argv[1:])
