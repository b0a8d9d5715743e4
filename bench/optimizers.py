"""AdamW, Muon and CELO2 on the drafter's training and on the demo's policy, in equal time; and what a step costs.

    python bench/optimizers.py --celo2 FILE                             all parts on a CPU
    python bench/optimizers.py --celo2 FILE --device cuda --parts step,drafter,policy,memory
    python bench/optimizers.py --celo2 FILE --parts step --quick        a smoke test, writes nothing

FILE holds CELO2's published weights. Parts:

    step      ms per optimizer step over all weights of a model, the plain form of CELO2 beside the fast one
    sweep     the drafter's loss at three learning rates of each optimizer, with a seed that is not used again
    drafter   a drafter from scratch: accept length on held-out texts after the same time for everybody
    policy    the demo's recipe for the same time: accuracy on held-out items before and after
    memory    on a GPU: one step of full fine-tuning at 7B shapes, its peak against the plan

Time is the process's own (one thread; what a CPU core would take if it were idle), on a GPU the clock's. Contenders
take turns, seed by seed. Evaluation costs nobody time. The drafter's rates are the best of a sweep. The policy's move a
matrix equally far per step: CELO2's steps have a root mean square of 1, Muon's and AdamW's about a fifth, so that it
gets a fifth of their rate, and `adam_lr_mult` gives vectors and tables their own.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import spot
import torch
from record import package_versions, result_path, write_result
from shapes import model_config, random_weights
from torch import Tensor

from paceline.core.config import load
from paceline.core.types import Sampling
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.eagle.network import Eagle
from paceline.model.folder import load_config, resolve
from paceline.rl.learner import Learner, WorkerSum
from paceline.rl.memory_plan import plan_learner
from paceline.rl.optimizers import build_optimizer, take_step
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.run.evaluate import eval_sampling, evaluate
from paceline.run.loop import Run
from paceline.run.open import open_run
from paceline.run.parts import load_policy, open_prompt_source
from paceline.run.recipes import find_recipe, prepare, training_sampling
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics
from paceline.run.ui.display import make_display
from paceline.spot.trainer import Trainer
from paceline.tasks.grading import Grader

PACKAGES = ("paceline", "torch", "numpy", "numba", "triton")
CONTENDERS = ("adamw", "muon", "celo2")
DRAFTER_RATES = {"adamw": (2.5e-4, 5e-4, 1e-3), "muon": (2e-3, 4e-3, 8e-3), "celo2": (8e-4, 1.6e-3, 3.2e-3)}
POLICY_RATE = 5e-5
"""The demo's; for CELO2 divided by ADAM_LR_MULT, which moves matrices as far."""
ADAM_LR_MULT = 5
"""Of the policy's part; the drafter's has none."""
ROUNDS = {"ns_dtype": "bf16"}
"""CELO2's orthogonalisation in the precision that Muon's has."""
SWEEP_SEED = 100
STEP_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "adamw, one kernel": ("adamw", {"fused": True}),
    "adamw_bf16": ("adamw_bf16", {}),
    "adamw_8bit": ("adamw_8bit", {}),
    "muon": ("muon", {}),
    "celo2, plain": ("celo2", {"plain": True}),
    "celo2": ("celo2", {}),
    "celo2, bf16 rounds": ("celo2", {"ns_dtype": "bf16"}),
}


def options_of(name: str, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What an optimizer needs besides its rate."""
    return more if name != "celo2" else {"weights": str(args.celo2), **more}


class Clock:
    """Seconds of this process, or of the clock where a GPU does the work."""

    def __init__(self, device: str) -> None:
        self._is_gpu = device.startswith("cuda")

    def now(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


# --- what a step costs ------------------------------------------------------------------------------------------------


def step_models(args: argparse.Namespace) -> dict[str, ModelConfig]:
    demo = {"the demo's policy": load_config(resolve(args.model))}
    if args.quick or not args.device.startswith("cuda"):
        return demo
    return demo | {name: model_config(name) for name in ("0.6b", "1.7b")}


def measure_step(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step over all weights of a model, forms in turns."""
    clock, rows = Clock(args.device), []
    for model, config in step_models(args).items():
        times: dict[str, list[float]] = {form: [] for form in STEP_FORMS}
        state_bytes: dict[str, int] = {}
        for repeat in range(args.repeats + 1):
            for form, (name, options) in STEP_FORMS.items():
                parameters = random_parameters(config, args.device)
                optimizer = build_optimizer(name, parameters, lr=1e-4, options=options_of(name, args, **options))
                take_step(optimizer, 0.0)  # states are made, kernels compiled
                start = clock.now()
                for _ in range(args.steps):
                    take_step(optimizer, 0.0)
                if repeat:  # the first round warms up
                    times[form].append(1e3 * (clock.now() - start) / args.steps)
                state_bytes[form] = sum(tensor.nbytes for tensor in tensors_in(optimizer.state_dict()))
                del optimizer, parameters
                free(args.device)
        for form, found in times.items():
            row = {"part": "step", "model": model, "form": form, "ms": statistics.median(found), "repeats": found}
            rows.append({**row, "state_bytes": state_bytes[form], "parameters": config.num_parameters})
            print(f"{model}: {form} {row['ms']:.2f} ms, state of {state_bytes[form] / 2**20:.0f} MiB", flush=True)
    return rows


def random_parameters(config: ModelConfig, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, shape in config.weight_shapes().items():
        weight = torch.nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02)
        weight.grad = torch.randn(shape, generator=generator, device=device) * 1e-3
        found[name] = weight
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_in(value) if not isinstance(tensor, torch.nn.Parameter)]


def free(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


# --- the drafter ------------------------------------------------------------------------------------------------------


def open_texts(args: argparse.Namespace) -> spot.Bench:
    """Texts of the demo's policy, the same for everybody."""
    given = ["--device", args.device, "--model", args.model, "--prompts", str(args.prompts), "--dry"]
    return spot.open_bench(spot.parse([*given, "--tokens", str(args.tokens), "--held-out", "48"]))


def train_drafter(bench: spot.Bench, args: argparse.Namespace, name: str, lr: float, seed: int, seconds: float) -> Any:
    """A drafter from scratch for so many seconds; returns the trainer and the loss of its last fifty micro-steps."""
    options = options_of(name, args, **(ROUNDS if name == "celo2" else {}))
    settings = bench.settings.model_copy(
        update={"optimizer": name, "lr": lr, "seed": seed, "optimizer_options": options}
    )
    eagle = Eagle.fresh(bench.eagle.config, bench.weights, bench.eagle.draft_ids, seed)
    seeded = replace(bench, settings=settings, eagle=eagle)
    trainer, clock, loss = Trainer(eagle, settings, args.device), Clock(args.device), []
    steps = seeded.micro_steps(trainer)
    trainer.train(next(steps), bench.ring, bench.teacher)  # kernels are compiled
    start = clock.now()
    while clock.now() - start < seconds:
        loss.append(trainer.train(next(steps), bench.ring, bench.teacher).loss)
    return trainer, statistics.mean(loss[-50:])


def measure_sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    bench, rows = open_texts(args), []
    for name in CONTENDERS:
        for lr in DRAFTER_RATES[name]:
            trainer, loss = train_drafter(bench, args, name, lr, SWEEP_SEED, args.drafter_seconds / 2)
            row = {"part": "sweep", "optimizer": name, "lr": lr, "loss": loss, "micro_steps": trainer.num_micro_steps}
            rows.append(row)
            print(f"sweep: {name} at {lr:g}: loss {loss:.4f} after {trainer.num_micro_steps} micro-steps", flush=True)
    return rows


def best_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each optimizer, the rate with the lowest loss in the sweep; the middle one without a sweep."""
    found = {name: rates[1] for name, rates in DRAFTER_RATES.items()}
    for name in CONTENDERS:
        own = [row for row in rows if row["part"] == "sweep" and row["optimizer"] == name]
        if own:
            found[name] = min(own, key=lambda row: float(row["loss"]))["lr"]
    return found


def measure_drafter(args: argparse.Namespace, earlier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    bench, rates, rows = open_texts(args), best_rates(earlier), []
    depth, embedding = bench.args.depth, bench.teacher.embedding.float()
    noises = [spot.noise_table(known, bench.eagle.draft_ids, depth) for known in bench.held_out]
    for seed in range(args.seeds):
        for name in CONTENDERS:
            trainer, loss = train_drafter(bench, args, name, rates[name], seed, args.drafter_seconds)
            by_tau = spot.accept_lengths(trainer.publish(), embedding, bench.held_out, noises, depth)
            best = max(by_tau, key=lambda row: float(row["accept_length"]))
            row = {"part": "drafter", "optimizer": name, "lr": rates[name], "seed": seed, "loss": loss}
            row |= {"seconds": args.drafter_seconds, "micro_steps": trainer.num_micro_steps}
            rows.append({**row, "accept_length": best["accept_length"], "tau": best["tau"]})
            text = f"accept length {best['accept_length']}, loss {loss:.4f}"
            print(f"drafter: {name}, seed {seed}: {text} after {trainer.num_micro_steps} micro-steps", flush=True)
    return rows


# --- the policy -------------------------------------------------------------------------------------------------------


def measure_policy(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for seed in range(args.seeds):
        for name in args.optimizers.split(","):
            rows.append({"part": "policy", "optimizer": name, "seed": seed, **train_policy(args, name, seed)})
            row = rows[-1]
            change = f"{100 * row['before']:.1f} -> {100 * row['after']:.1f} %"
            print(f"policy: {name}, seed {seed}: {change} in {row['num_steps']} steps", flush=True)
            free(args.device)
    return rows


def train_policy(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """The demo's recipe with its own seed for noise and data."""
    given = {"model.path": args.model, "model.device": args.device, "rl.steps": "100000", "rl.optimizer": name}
    lr = POLICY_RATE / ADAM_LR_MULT if name == "celo2" else POLICY_RATE
    given |= {"rl.lr": str(lr), "rl.seed": str(seed), "task.seed": str(seed), "run.loggers": "none"}
    given |= {"run.checkpoint_every": "0", "run.compare": "false", "eval.items": str(args.items)}
    given |= dict(pair.split("=", 1) for pair in args.set)
    settings = load(RootSettings, find_recipe(args.recipe), given)
    options = options_of(name, args, **({"adam_lr_mult": ADAM_LR_MULT, **ROUNDS} if name == "celo2" else {}))
    rl = settings.rl.model_copy(update={"optimizer_options": options})
    settings = prepare(settings.model_copy(update={"rl": rl}))
    with tempfile.TemporaryDirectory() as temporary:
        folder, clock, seconds = Path(temporary) / "run", Clock(args.device), 0.0
        with (
            make_display(1, is_quiet=True) as display,
            Grader(settings.task) as grader,
            open_run(settings, settings.model.path, folder, display) as run,
        ):
            before = accuracy(run, grader, settings)
            while seconds < args.policy_seconds:
                start = clock.now()
                run.step()
                seconds += clock.now() - start
            after = accuracy(run, grader, settings)
        rewards = [row["reward"] for row in read_metrics(folder)]
        updates = [row["timing_s/update"] for row in read_metrics(folder)]
    found = {"lr": lr, "seconds": seconds, "num_steps": len(rewards), "before": before, "after": after}
    return found | {"items": args.items, "rewards": rewards, "update_s": statistics.median(updates)}


def accuracy(run: Run, grader: Grader, settings: RootSettings) -> float:
    """Share of held-out items solved, without a row in the run's records."""
    source = open_prompt_source(settings, load_policy(settings, settings.model.path))
    sampling = eval_sampling(settings.eval, training_sampling(settings))
    found = evaluate(run.backend, grader, source.test_questions(settings.eval.items), sampling, print)
    return found.metrics()["eval/accuracy"]


# --- memory -----------------------------------------------------------------------------------------------------------


def measure_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One step of full fine-tuning with random weights: its peak, its time, and what the plan said."""
    rows = []
    for name in ("adamw_8bit", "adamw_bf16"):
        torch.cuda.reset_peak_memory_stats()
        rows.append({"part": "memory", "shape": args.shape, "optimizer": name, **step_memory(args, name)})
        row = rows[-1]
        sizes = f"peak {row['peak_bytes'] / 1e9:.1f} GB, planned at most {row['planned_bytes'] / 1e9:.1f}"
        print(f"memory: {args.shape} with {name}: {sizes}, optimizer step {row['optimizer_ms']:.0f} ms", flush=True)
        free(args.device)
    return rows


def step_memory(args: argparse.Namespace, name: str) -> dict[str, Any]:
    config, tokens = model_config(args.shape), 2048
    given = {"optimizer": name, "virtual_workers": 1, "checkpoint_activations": True, "pack_tokens": 8192}
    settings = RlSettings.model_validate({**given, "lr": 1e-6, "exact": True})
    decoder = Decoder(config, random_weights(config, args.device), device=args.device)
    free(args.device)
    learner = Learner(decoder, settings, Sampling(max_new_tokens=tokens))
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 1000, (8, tokens))
    samples = [
        Sample.of(draw, 0, row[:128], row[128:], np.zeros(tokens - 128, np.float32), float(draw % 2) - 0.5)
        for draw, row in enumerate(ids)
    ]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        learner.step(samples)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    planned = decoder.num_bytes + plan_learner(config, settings, args.device).total
    found = {"peak_bytes": torch.cuda.max_memory_allocated(), "planned_bytes": planned, "step_s": seconds}
    return found | {"optimizer_ms": optimizer_ms(learner), "tokens": ids.size, "parameters": config.num_parameters}


def optimizer_ms(learner: Learner) -> float:
    """Of a step alone, on gradients of zero."""
    batch = {name: torch.zeros_like(weight) for name, weight in learner.weights.items()}
    torch.cuda.synchronize()
    start = time.perf_counter()
    learner.apply([WorkerSum(batch, {"num_tokens": torch.ones(()), "loss": torch.zeros(())})])
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


# --- the command ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--celo2", type=Path, required=True, help="safetensors file with CELO2's weights")
    parser.add_argument("--parts", default="step,sweep,drafter,policy", help="comma-separated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--recipe", default="countdown-cpu", help="of the policy's part")
    parser.add_argument("--shape", default="7b", help="of the memory's part")
    parser.add_argument("--optimizers", default=",".join(CONTENDERS), help="of the policy's part")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of the step's part")
    parser.add_argument("--steps", type=int, default=5, help="steps timed together")
    parser.add_argument("--prompts", type=int, default=48, help="of the drafter's texts, eight responses each")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per response")
    parser.add_argument("--drafter-seconds", type=float, default=30.0)
    parser.add_argument("--policy-seconds", type=float, default=75.0)
    parser.add_argument("--items", type=int, default=512, help="held-out items of the policy's part")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the policy's part")
    parser.add_argument("--quick", action="store_true", help="a smoke test that writes nothing")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/optimizers-<hardware>.json)")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds = args.repeats = args.steps = 1
        args.prompts, args.tokens, args.items = 4, 24, 4
        args.drafter_seconds = args.policy_seconds = 0.05
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    for part in args.parts.split(","):
        measure = {
            "step": measure_step,
            "sweep": measure_sweep,
            "policy": measure_policy,
            "memory": measure_memory,
        }.get(part)
        rows += measure_drafter(args, rows) if measure is None else measure(args)
        if not args.quick:
            write(args, argv, rows)


def write(args: argparse.Namespace, argv: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """After every part, so that a stop costs one."""
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    path = args.out or result_path("optimizers", gpu)
    versions, command = package_versions(PACKAGES), [sys.argv[0], *argv]
    write_result(path, "optimizers", rows, argv=command, versions=versions, gpu=gpu, commit_hash=args.commit)


if __name__ == "__main__":
    main(sys.argv[1:])
