"""Adapters on models of real shapes: does a step run, in how much memory, and is it exact?

    python bench/lora.py --shapes 1.5b,8b,14b
    python bench/lora.py --shapes 32b --base host --kv-tokens 65536

For each shape, with random weights: rollouts without and with drafts, which must be equal; steps of the learner, whose
log-probabilities must be the rollouts'; the peak of allocated memory beside the plan; and the time of a merge and of a
step. `--device cpu --shapes tiny` is a smoke test.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from record import package_versions, result_path, write_result
from shapes import TITLES, LazyWeights, model_config

from paceline.core.types import Rollout, Sampling
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.rl.lora import LoraLearner
from paceline.rl.memory_plan import plan_learner
from paceline.rl.packing import Sample
from paceline.rl.settings import RlSettings
from paceline.rollout.engine import Engine
from paceline.rollout.memory_plan import plan_memory
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

GIB = 2**30
PACKAGES = ("torch", "triton", "numpy")


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One shape."""
    is_gpu = args.device != "cpu"
    config = model_config(name)
    settings = RlSettings(
        lr=1e-4,
        pack_tokens=args.pack_tokens,
        checkpoint_activations=True,
        lora={"rank": args.rank, "base": args.base},
    )
    sampling = Sampling(n=args.samples, max_new_tokens=args.tokens, temperature=1.0, ignore_eos=True, stream="train")
    reset_peak(is_gpu)
    precision = "bf16" if is_gpu else "mixed"
    decoder = Decoder(config, LazyWeights(config, args.device), device=args.device, precision=precision)
    given = EngineSettings(kv_tokens=args.kv_tokens, max_sequences=args.prompts * args.samples)
    learner = LoraLearner(decoder, settings, sampling)
    plain, drafted = (Engine(decoder, None, drafter, given, BudgetSettings(always=True)) for drafter in (None, "ngram"))
    steps = [step(learner, plain, drafted, sampling, args.prompts, number) for number in range(args.steps)]
    base = 0 if learner.merged.is_on_host else learner.merged.num_base_bytes
    found = {
        "shape": TITLES[name],
        "rank": args.rank,
        "base_on_host": learner.merged.is_on_host,
        "trained": sum(tensor.numel() for tensor in learner.weights.values()),
        "merge_ms": 1e3 * timed(lambda: learner.merged.load(learner.weights), is_gpu),
        **steps[-1],
        "equal": all(row["equal"] for row in steps),
        "logp_abs_diff": max(row["logp_abs_diff"] for row in steps),
    }
    return found | memory(config, settings, args, base, is_gpu)


def step(
    learner: LoraLearner, plain: Engine, drafted: Engine, sampling: Sampling, num_prompts: int, number: int
) -> dict[str, Any]:
    """Rollouts of both engines, and one update."""
    prompts = [list(range(10 + index, 42 + index)) for index in range(num_prompts)]
    draws = [number * num_prompts + index for index in range(num_prompts)]
    rollouts = plain.generate(prompts, sampling, draws)
    others = drafted.generate(prompts, sampling, draws)
    is_equal = [(r.token_ids, r.logprobs) for r in rollouts] == [(r.token_ids, r.logprobs) for r in others]
    samples = [as_sample(rollout, prompts) for rollout in rollouts]
    metrics: dict[str, float] = {}

    def learn() -> None:
        metrics.update(learner.step(samples))

    seconds = timed(learn, learner.decoder.ops.device != "cpu")
    return {
        "equal": is_equal,
        "step_s": seconds,
        "logp_abs_diff": metrics["rollout/logp_abs_diff"],
        "moved_share": metrics["lora/moved_share"],
        "kept_share": metrics["lora/kept_share"],
    }


def as_sample(rollout: Rollout, prompts: Sequence[Sequence[int]]) -> Sample:
    """With an advantage of 1 or -1 by its first token."""
    worth = np.full(len(rollout.token_ids), 1.0 - 2.0 * (rollout.token_ids[0] % 2))
    prompt = prompts[rollout.prompt_index]
    return Sample.of(rollout.draw, rollout.sample_index, prompt, rollout.token_ids, rollout.logprobs, worth)


def memory(
    config: ModelConfig, settings: RlSettings, args: argparse.Namespace, base: int, is_gpu: bool
) -> dict[str, Any]:
    """The plan, and the peak; two engines share the weights, and each has a cache."""
    engine = plan_memory(config, args.device, "bf16" if is_gpu else "mixed", args.kv_tokens)
    learner = plan_learner(config, settings, args.device, 2)
    planned = engine.weights + 2 * engine.cache + learner.total - learner.base + base
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    return {"planned_gib": planned / GIB, "peak_gib": peak / GIB, "peak_over_plan": peak / planned}


def reset_peak(is_gpu: bool) -> None:
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(work: Any, is_gpu: bool) -> float:
    """Seconds of a call, with what the GPU still does."""
    if is_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1.5b,8b,14b", help=f"some of {', '.join(TITLES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--base", default="auto", choices=("auto", "device", "host"))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--pack-tokens", type=int, default=4096)
    parser.add_argument("--kv-tokens", type=int, default=32_768)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    rows = []
    for name in args.shapes.split(","):
        rows.append(measure(name, args))
        print(", ".join(f"{key} {shown(value)}" for key, value in rows[-1].items()))
    if args.device != "cpu":
        gpu = torch.cuda.get_device_name()
        command, versions = [sys.argv[0], *argv], package_versions(PACKAGES)
        write_result(result_path("lora", gpu), "lora", rows, argv=command, versions=versions, gpu=gpu)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(sys.argv[1:])
