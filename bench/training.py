"""Training runs: equal weights under any drafter, and curves of whole runs; one JSON file.

    python bench/training.py --parts equal --device cuda          5 steps without and with a drafter
    python bench/training.py --parts curve                        the demo's recipe, as `paceline train` runs it
    python bench/training.py --parts algorithms                   every algorithm, the same steps
    python bench/training.py --parts ahead --set rl.steps=6       no drafter, suffix, and suffix with run-ahead
    python bench/training.py --parts curve --recipe smollm2-135m-math --model PATH --device cuda --set rl.steps=20
    python bench/training.py --parts inflated --shape 1.7b --device cuda --set rl.steps=6      whole steps, large shapes
    python bench/training.py --parts inflated --recipe smollm2-135m-math --model PATH --shape 1.7b --device cuda

Every part trains in a new folder, through the same code as `paceline train`, and keeps the rows of its metrics.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from inflate import Inflation, inflate_eagle, mask_learner, save_inflated
from record import package_versions, result_path, write_result
from safetensors.torch import load_file

from paceline.core.config import load
from paceline.model.checkpoint import load_weights
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.folder import load_config, resolve
from paceline.rl.algorithms import ALGORITHMS
from paceline.run.open import open_run
from paceline.run.recipes import find_recipe, prepare
from paceline.run.settings import RootSettings
from paceline.run.standard_errors import gain_error
from paceline.run.store.folder import compared, read_events, read_metrics, step_name
from paceline.run.ui.display import make_display

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
KEPT = (
    "reward",
    "score",
    "accuracy",
    "completions/mean_length",
    "completions/p95_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "eval/accuracy",
    "eval/accuracy_se",
    "loss",
    "grad_norm",
    "rollout/logp_abs_diff",
    "rollout/spec_accept_length",
    "rollout/spec_ahead_offered",
    "rollout/spec_ahead_survived",
    "drafter/micro_steps",
    "drafter/version",
    "drafter/shared_1",
    "perf/throughput",
    "timing_s/gen",
    "timing_s/score",
    "timing_s/update",
    "timing_s/spot",
    "timing_s/step",
    "timing_s/eval",
)


class Bench:
    """Where runs are made, and their results."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.rows: list[dict[str, Any]] = []

    def settings(self, **overrides: str) -> RootSettings:
        given = dict(pair.split("=", 1) for pair in self.args.set)
        fixed = {"model.path": self.args.model, "model.device": self.args.device, "run.loggers": "none"}
        return load(RootSettings, find_recipe(self.args.recipe), {**fixed, **overrides, **given})

    def train(self, part: str, case: str, settings: RootSettings, **more: Any) -> Path:
        """Do one run and keep it as a row; returns its folder."""
        path, start = self.folder / f"{part}-{case}", time.perf_counter()
        with (
            make_display(settings.rl.steps) as display,
            open_run(prepare(settings), settings.model.path, path, display) as run,
        ):
            comparison = run.train()
        if comparison is not None:
            more["speculation"] = asdict(comparison)
        evaluations = [event["args"] for event in read_events(path, "eval")]
        if len(evaluations) > 1:
            more["gain_se"] = gain_error(evaluations[0], evaluations[-1])
        steps = [{"step": row["step"], **{key: row[key] for key in KEPT if key in row}} for row in read_metrics(path)]
        seconds = round(time.perf_counter() - start, 2)
        self.rows.append({"part": part, "case": case, "seconds": seconds, **more, "steps": steps})
        return path


def measure_equal(bench: Bench) -> None:
    """The same five steps without a drafter and with one: metrics and final weights."""
    paths = {}
    for drafter in ("none", "suffix"):
        settings = bench.settings(**{"engine.drafter": drafter, "rl.steps": "5", "run.compare": "false"})
        paths[drafter] = bench.train("equal", drafter, settings)
    found = [load_file(p / "checkpoints" / step_name(5) / "policy" / "model.safetensors") for p in paths.values()]
    rows = [[compared(row) for row in read_metrics(path)] for path in paths.values()]
    differences = [max((row.get("rollout/logp_abs_diff", 0.0) for row in side), default=0.0) for side in rows]
    folder = resolve(bench.args.model)
    start = load_weights(folder, load_config(folder))
    verdict = {
        "num_weights_moved": sum(not torch.equal(start[name].float(), found[0][name].float()) for name in found[0]),
        "num_weights": len(found[0]),
        "equal_weights": all(torch.equal(found[0][name], found[1][name]) for name in found[0]),
        "equal_metrics": rows[0] == rows[1],
        "largest_logp_abs_diff": max(differences),
    }
    bench.rows.append({"part": "equal", "case": "none against suffix", **verdict})
    print(verdict, flush=True)


def measure_curve(bench: Bench) -> None:
    """The recipe with its overrides."""
    bench.train("curve", bench.args.recipe, bench.settings(), overrides=bench.args.set)


def measure_algorithms(bench: Bench) -> None:
    """Every algorithm on the same task, draws and number of steps."""
    for name in ALGORITHMS:
        bench.train("algorithms", name, bench.settings(**{"rl.algorithm": name, "run.compare": "false"}))


def measure_ahead(bench: Bench) -> None:
    """The same steps without drafts, with suffix, and with a second process that runs ahead; alternating, repeated."""
    ahead = {"engine.run_ahead": "true", "run.ahead_worker": "true"}
    cases = {"none": {"engine.drafter": "none"}, "suffix": {}, "suffix, ahead": ahead}
    metrics: dict[str, list[list[dict[str, Any]]]] = {case: [] for case in cases}
    for repeat in range(bench.args.repeats):
        for case, given in cases.items():
            settings = bench.settings(**given, **{"eval.items": "0", "run.compare": "false"})
            name = f"{case}, {repeat + 1}" if repeat else case
            metrics[case].append(read_metrics(bench.train("ahead", name, settings)))
    true = [compared(row) for row in metrics["none"][0]]
    for case, runs in metrics.items():
        verdict: dict[str, Any] = {"equal_metrics": all([compared(row) for row in rows] == true for rows in runs)}
        for phase in ("gen", "update", "step"):
            sums = _later_seconds(runs, phase)
            verdict |= {phase: statistics.median(sums), f"{phase}_repeats": sums}
        bench.rows.append({"part": "ahead", "case": f"{case}, in all", **verdict})
        print(case, verdict, flush=True)


def measure_inflated(bench: Bench) -> None:
    """Whole steps of the model inflated to a shape (or as it is): plain, with suffix and run-ahead, and, if there is a
    drafter to start from, with that as well, trained within `spot.open_share`."""
    inflation, model = None, bench.args.model
    if bench.args.shape:
        model = str(bench.folder / "model")
        inflation = save_inflated(Path(model), bench.args.model, bench.args.shape)
    cases = {"plain": {"engine.drafter": "none"}, "suffix, ahead": {"engine.drafter": "suffix"}}
    if bench.args.drafter is not None:
        eagle, folder = load_eagle(bench.args.drafter), bench.folder / "drafter"
        save_eagle(folder, eagle if inflation is None else inflate_eagle(inflation, eagle))
        cases["suffix, ahead, eagle"] = {"engine.drafter": f"suffix,eagle:{folder}"}
    found: dict[str, list[list[dict[str, Any]]]] = {case: [] for case in cases}
    for repeat in range(bench.args.repeats):
        for case, given in cases.items():
            name = f"{case}, {repeat + 1}" if repeat else case
            is_ahead = str(case != "plain").lower()
            found[case].append(walk(bench, name, model, {**given, "engine.run_ahead": is_ahead}, inflation))
    true = [compared(row) for row in found["plain"][0]]
    plain = _later_seconds(found["plain"], "step")
    for case, runs in found.items():
        verdict: dict[str, Any] = {"equal_metrics": all([compared(row) for row in rows] == true for rows in runs)}
        sums = {phase: _later_seconds(runs, phase) for phase in ("gen", "update", "spot", "step")}
        medians = {phase: statistics.median(repeats) for phase, repeats in sums.items()}
        verdict |= {"rollout_share": medians["gen"] / medians["step"], "spot_share": medians["spot"] / medians["step"]}
        verdict["ratio"] = statistics.median(a / b for a, b in zip(plain, sums["step"], strict=True))
        verdict |= medians | {"step_repeats": sums["step"]}
        bench.rows.append({"part": "inflated", "case": f"{case}, in all", "shape": bench.args.shape, **verdict})
        print(case, verdict, flush=True)


def _later_seconds(runs: Sequence[Sequence[Mapping[str, Any]]], phase: str) -> list[float]:
    """Of each run without its first step, which has no run-ahead text and pays for first use."""
    return [round(sum(row.get(f"timing_s/{phase}", 0.0) for row in rows[1:]), 3) for rows in runs]


def walk(
    bench: Bench, case: str, model: str, given: Mapping[str, str], inflation: Inflation | None
) -> list[dict[str, Any]]:
    """Steps without a final checkpoint, which would take longer than they do; returns their metrics."""
    settings = bench.settings(**given, **{"eval.items": "0", "run.compare": "false", "run.checkpoint_every": "0"})
    num_steps, path = settings.rl.steps, bench.folder / f"inflated-{case}"
    longer = settings.model_copy(update={"rl": settings.rl.model_copy(update={"steps": num_steps + 1})})
    with make_display(num_steps) as display, open_run(prepare(longer), model, path, display) as run:
        if inflation is not None:
            mask_learner(run.learner, inflation)
        for _ in range(num_steps):
            run.step()
    # Before the next case is opened: reference cycles would keep its weights on the GPU.
    del run
    gc.collect()
    torch.cuda.empty_cache()
    rows = read_metrics(path)
    kept = [{"step": row["step"], **{key: row[key] for key in KEPT if key in row}} for row in rows]
    bench.rows.append({"part": "inflated", "case": case, "shape": bench.args.shape, "steps": kept})
    return rows


PARTS = {
    "equal": measure_equal,
    "curve": measure_curve,
    "algorithms": measure_algorithms,
    "ahead": measure_ahead,
    "inflated": measure_inflated,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default="equal", help="of " + ", ".join(PARTS) + ", comma-separated")
    parser.add_argument("--recipe", default="countdown-cpu", help="a recipe's name or file")
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--shape", help="for the part `inflated`: 0.6b, 1.7b or 7b")
    parser.add_argument("--drafter", type=Path, help="for the part `inflated`: folder of a drafter of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--repeats", type=int, default=1, help="for the parts `ahead` and `inflated`")
    parser.add_argument("--name", default="training", help="name of the result file, before the hardware")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for part in args.parts.split(","):
            PARTS[part](bench)
            extra = {"commit_hash": args.commit} | ({"gpu": gpu} if gpu else {})
            path = args.out or result_path(args.name, gpu)
            write_result(
                path, "training", bench.rows, argv=[sys.argv[0], *argv], versions=package_versions(PACKAGES), **extra
            )


if __name__ == "__main__":
    main(sys.argv[1:])
