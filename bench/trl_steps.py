"""Seconds per step of TRL's GRPOTrainer as it is, against the same trainer with Paceline's engine.

    python bench/trl_steps.py                        the shipped model, on this CPU
    python bench/trl_steps.py --model PATH --device cuda --prompts 32 --group 16 --micro 32 --tokens 512

The batch is that of TRL's own defaults: 8 completions of one prompt, up to 256 tokens each, gradient checkpointing on.
Same model, prompts, rewards, settings and machine; the two take turns in alternating order. Every turn starts from the
model's own weights with a new trainer. Its first step, which compiles kernels and creates an engine, is reported
separately. A ratio is the median of the ratios within a repeat. Samples differ between the two (other noise), so
lengths are recorded. First, equal greedy completions are counted.

Not called trl.py: Python would import it in place of TRL.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from record import package_versions, result_path, write_result
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from paceline.integrations.trl import PacelineGRPOTrainer
from paceline.model.folder import resolve
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

PACKAGES = ("paceline", "trl", "transformers", "accelerate", "torch", "triton", "numpy", "numba")
GREEDY = 16
"""How many prompts both complete greedily."""
SIDES: dict[str, type[Any]] = {"trl": GRPOTrainer, "paceline": PacelineGRPOTrainer}


class Clock(TrainerCallback):
    """Seconds of every step, from data to optimizer, and of the generation in it."""

    def __init__(self, trainer: Any) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.cpu: list[float] = []
        """The same steps in CPU seconds, which other work on the machine does not affect."""
        self._start = self._cpu_start = 0.0
        self._is_gpu = trainer.accelerator.device.type == "cuda"
        own = trainer._generate_single_turn

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            found = own(*args, **kwargs)
            self.generation.append(self._now() - start)
            return found

        trainer._generate_single_turn = timed

    def _now(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start, self._cpu_start = self._now(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self._now() - self._start)
        self.cpu.append(time.process_time() - self._cpu_start)


def own_dtype(args: argparse.Namespace) -> str:
    return "float32" if args.device == "cpu" else "bfloat16"


def make_trainer(args: argparse.Namespace, side: str, folder: str, dtype: str, **generation: Any) -> Any:
    task = make_task(TaskSettings(name=args.task))
    items = [task.item(0, index) for index in range(max(args.prompts * (args.steps + 1), GREEDY))]

    def reward(completions: Sequence[Any], index: Sequence[int], **columns: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [task.score(items[at], text) for at, text in zip(index, texts, strict=True)]

    prompts = [[{"role": "user", "content": item.prompt}] if args.chat else item.prompt for item in items]
    data = Dataset.from_list([{"prompt": prompt, "index": at} for at, prompt in enumerate(prompts)])
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=args.steps + 1,
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.prompts * args.group // args.micro,
        num_generations=args.group,
        max_completion_length=args.tokens,
        temperature=args.temperature,
        learning_rate=args.lr,
        generation_kwargs=generation or None,
        model_init_kwargs={"dtype": dtype},
        bf16=dtype == "bfloat16",
        use_cpu=args.device == "cpu",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return SIDES[side](model=str(resolve(args.model)), reward_funcs=reward, args=settings, train_dataset=data)


def measure(args: argparse.Namespace, side: str, repeat: int) -> dict[str, Any]:
    """One turn of one side."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, side, folder, own_dtype(args))
        clock = Clock(trainer)
        trainer.add_callback(clock)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    found = {
        "side": side,
        "repeat": repeat,
        "threads": torch.get_num_threads(),
        "first_step_s": clock.steps[0],
        "step_s": clock.steps[1:],
        "generate_s": clock.generation[1:],
        "cpu_s": clock.cpu[1:],
        "length": [row["completions/mean_length"] for row in logs[1:]],
        "longest": [row["completions/max_length"] for row in logs[1:]],
        "reward": [row["reward"] for row in logs[1:]],
        "accept_length": [row.get("rollout/spec_accept_length", 1.0) for row in logs[1:]],
    }
    del trainer, clock
    gc.collect()
    if args.device != "cpu":
        torch.cuda.empty_cache()
    return found


def count_equal(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """How many greedy completions of both are the same, token for token.

    In bfloat16 two likely tokens often have the same logit up to rounding, and TRL's own completions change with their
    batch: there it says little.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, "paceline", folder, dtype, do_sample=False)
        prompts = [row["prompt"] for row in trainer.train_dataset.select(range(GREEDY))]
        ids = trainer._tokenize_prompts(prompts)[0]
        theirs, _ = GRPOTrainer._generate_single_turn(trainer, ids, None, {}, 1)
        ours, _ = trainer._generate_single_turn(ids, None, {}, 1)
    same = [a == b for a, b in zip(theirs, ours, strict=True)]
    tokens = sum(map(len, theirs))
    return {"side": "greedy", "dtype": dtype, "equal": sum(same), "completions": len(same), "tokens": tokens}


def ratios(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """TRL's median over ours, repeat by repeat."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["side"] in SIDES:
            found.setdefault(row["repeat"], {})[row["side"]] = statistics.median(row[key])
    return [pair["trl"] / pair["paceline"] for pair in found.values()]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"greedy, {row['dtype']}: {row['equal']} of {row['completions']} completions equal"
        for row in rows
        if row["side"] == "greedy"
    ]
    if not ratios(rows, "step_s"):
        return "\n".join(lines)
    for side in SIDES:
        own = [row for row in rows if row["side"] == side]
        figures = {
            key: statistics.median([value for row in own for value in row[key]])
            for key in ("step_s", "generate_s", "length")
        }
        first = statistics.median([row["first_step_s"] for row in own])
        lines.append(
            f"{side:>8}: {figures['step_s']:.2f} s a step, of which {figures['generate_s']:.2f} generation "
            f"({figures['length']:.0f} tokens a completion); first step {first:.2f} s"
        )
    for key, what in (("step_s", "a step"), ("generate_s", "generation"), ("cpu_s", "a step, in seconds of a core")):
        found = ratios(rows, key)
        lines.append(f"{what}: {statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--task", default="countdown", help="prompts and rewards; `paceline tasks` lists them")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user turn")
    parser.add_argument("--prompts", type=int, default=1, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--micro", type=int, default=8, help="completions per forward of the loss")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per completion")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per turn, after a first one kept apart")
    parser.add_argument("--repeats", type=int, default=5, help="turns per side; 0: only greedy completions")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the engine on a CPU has one")
    parser.add_argument("--name", default="trl", help="name of the result file, before the hardware")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    args = parser.parse_args(argv)
    if args.prompts * args.group % args.micro:
        parser.error(f"--micro must divide the {args.prompts * args.group} completions of a step")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    gpu = torch.cuda.get_device_name(0) if args.device == "cuda" else None
    rows = [count_equal(args, dtype) for dtype in dict.fromkeys(("float32", own_dtype(args)))]
    for repeat in range(args.repeats):
        for side in list(SIDES)[:: 1 if repeat % 2 else -1]:
            rows.append(measure(args, side, repeat))
            seconds = statistics.median(rows[-1]["step_s"])
            print(f"repeat {repeat + 1}, {side}: {seconds:.2f} s a step", flush=True)
    path = args.out or result_path(args.name, gpu)
    versions = package_versions(PACKAGES)
    write_result(path, "trl", rows, argv=[sys.argv[0], *argv], versions=versions, gpu=gpu, commit_hash=args.commit)
    print(summary(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
