"""Ablation of speculation: every contender makes the rollouts of consecutive training steps; one JSON file.

    python bench/ablation.py                                      the demo's steps on a CPU
    python bench/ablation.py --prompts 1 --samples 4              four sequences
    python bench/ablation.py --device cuda --shape 7b --level 3 --max-new-tokens 4096      the same text at a large cost
    python bench/ablation.py --device cuda --recipe smollm2-135m-math --model PATH --shape 7b      a real model's text

A GRPO run leaves the weights of every step. Then each step's rollouts are made again and timed: by plain decoding
(`off`), with one source of drafts (`ngram`, `suffix`, run-ahead alone: `ahead`) and with all of them (`all`);
`unlimited` is `all` with a row for every draft token. `eagle` is a drafter trained beside that run, for
`--spot-seconds` after each step, alone and with all others (`eagle-all`). A step gets the version left by the steps
before it; the first step, which is left out of ratios, gets its own. Or the drafter was trained before (`--drafter`).
All contenders start a step with the same weights, take turns, and must give the same tokens, or the bench fails. Time
spent on run-ahead counts where it is spent; the first step finds no run-ahead text, so ratios are given with and
without it. `--shape` inflates the model (`inflate.py`), so that rows cost what they cost a large one. How far a step
moves the policy is printed as total variation: half the sum of the absolute differences of all token probabilities,
before and after, on the step's own texts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inflate import Inflation, inflate_eagle, shape_config
from record import package_versions, result_path, write_result
from torch import Tensor

from paceline.core.config import load
from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.eagle.files import load_eagle
from paceline.model.eagle.network import Eagle
from paceline.model.folder import load_config, resolve
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.compare import first_difference
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.run.local import LocalBackend
from paceline.run.open import open_run
from paceline.run.prompts import PromptSource, Question
from paceline.run.recipes import find_recipe, prepare, training_sampling
from paceline.run.settings import RootSettings
from paceline.run.store.folder import step_name
from paceline.run.ui.display import make_display

MOST_JUDGED = 512
"""How many tokens of a text the total variation is averaged over."""
PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Contender:
    """A way to make rollouts."""

    drafter: str | None
    run_ahead: bool = False
    exact: bool = True
    is_unlimited: bool = False


CONTENDERS = {
    "off": Contender(None),
    "off-inexact": Contender(None, exact=False),
    "ngram": Contender("ngram"),
    "suffix": Contender("suffix"),
    "ahead": Contender(None, run_ahead=True),
    "all": Contender("suffix", run_ahead=True),
    "unlimited": Contender("suffix", run_ahead=True, is_unlimited=True),
    "eagle": Contender("eagle"),
    "eagle-all": Contender("suffix,eagle", run_ahead=True),
}
DEFAULT = "off,ngram,suffix,ahead,all"


def run_settings(args: argparse.Namespace) -> RootSettings:
    given = {
        "model.path": args.model,
        "model.device": args.device,
        "engine.precision": args.precision,
        "task.level": str(args.level),
        "sampling.max_new_tokens": str(args.max_new_tokens),
        "engine.max_sequences": str(args.prompts * args.samples),
        "rl.prompts_per_step": str(args.prompts),
        "rl.group_size": str(args.samples),
        "rl.steps": str(args.steps),
        "rl.lr": args.lr,
        "eval.items": "0",
        "run.loggers": "none",
        "run.compare": "false",
        "run.rollouts": "false",
        "run.checkpoint_every": "1",
        "run.keep": str(args.steps),
        "engine.drafter": "suffix",
        "spot.enabled": str("eagle" in args.contenders and args.drafter is None).lower(),
    }
    return load(RootSettings, find_recipe(args.recipe), given | dict(pair.split("=", 1) for pair in args.set))


def make_policies(
    settings: RootSettings, folder: Path, spot_seconds: float = 0.0
) -> tuple[list[Weights], list[Eagle | None]]:
    """Train for real; returns the weights each step's rollouts are sampled from, and the drafter at that point."""
    eagles: list[Eagle | None] = []
    with (
        make_display(settings.rl.steps, is_quiet=True) as display,
        open_run(prepare(settings), settings.model.path, folder, display) as run,
    ):
        assert isinstance(run.backend, LocalBackend)
        spot = run.backend.spot
        while run.state.num_steps < settings.rl.steps:
            run.step()
            if spot is not None:
                spot.work(run.learner.weights, run.state.num_steps, spot_seconds)
                eagles.append(spot.eagle)
    start = resolve(settings.model.path)
    paths = [start, *(folder / "checkpoints" / step_name(step) / "policy" for step in range(1, settings.rl.steps))]
    return [load_weights(path, load_config(path)) for path in paths], [*eagles[:1], *eagles[:-1]]


class Policy:
    """One decoder for all exact contenders, small or inflated, that can load the weights of any step."""

    def __init__(self, args: argparse.Namespace, config: ModelConfig, weights: Weights, exact: bool = True) -> None:
        self._inflation = Inflation(config, shape_config(args.shape, config)) if args.shape else None
        self._is_shared = args.device != "cpu"
        own = {name: weight.to(args.device) for name, weight in weights.items()}
        if self._inflation is not None:
            config, own = self._inflation.large, self._inflation.inflate(own)
        self.decoder = Decoder(config, own, exact=exact, device=args.device, precision=args.precision)

    def grow(self, eagle: Eagle) -> Eagle:
        """A drafter for this policy."""
        return eagle if self._inflation is None else inflate_eagle(self._inflation, eagle)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Load the next step's weights."""
        if self._inflation is None:
            self.decoder.load_weights(weights)
        elif self._is_shared:
            self._inflation.inflate_into(weights, self.decoder.shared_weights())
        else:
            self.decoder.load_weights(self._inflation.inflate(weights))


class Bench:
    """Engines that make the same rollouts, and their times."""

    def __init__(
        self,
        args: argparse.Namespace,
        settings: RootSettings,
        policies: list[Weights],
        eagles: Sequence[Eagle | None] = (),
    ) -> None:
        self.args, self._policies, self._eagles = args, policies, eagles
        self._sampling = training_sampling(settings)
        folder = resolve(settings.model.path)
        config, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
        names = args.contenders.split(",")
        kinds = {CONTENDERS[name].exact for name in names}
        self._small = Decoder(config, policies[0], exact=True, device=args.device, precision="float32")
        self._policy = {exact: Policy(args, config, policies[0], exact) for exact in sorted(kinds, reverse=True)}
        self._engines = {name: self._open(CONTENDERS[name], settings, tokenizer) for name in names}
        assert tokenizer is not None
        prompt_source = PromptSource(settings.task, tokenizer, settings.model.chat, config.max_context)
        # As in training, the engine knows the prompts of some steps to come.
        count = args.prompts * (args.steps + EngineSettings().ahead_calls)
        self._questions = [prompt_source.foresee(1, draw) for draw in range(count)]
        self.rows: list[dict[str, Any]] = []

    def _open(self, contender: Contender, settings: RootSettings, tokenizer: Tokenizer | None) -> Engine:
        # As many sequences again for run-ahead; the same KV pages for all, enough that nobody waits for one.
        places = settings.engine.max_sequences * (2 if contender.run_ahead else 1)
        kv_tokens = 2 * settings.engine.max_sequences * (settings.sampling.max_new_tokens // 4 + 512)
        engine = EngineSettings(
            max_sequences=places, kv_tokens=kv_tokens, run_ahead=contender.run_ahead, precision=self.args.precision
        )
        decoder = self._policy[contender.exact].decoder
        return Engine(decoder, tokenizer, contender.drafter, engine, BudgetSettings(always=contender.is_unlimited))

    def _ask(self, step: int) -> list[Question]:
        return self._questions[step * self.args.prompts : (step + 1) * self.args.prompts]

    def _use_eagle(self, step: int) -> None:
        """Publish a step's drafter to all contenders that use it."""
        drafters = [engine.eagle for engine in self._engines.values() if engine.eagle is not None]
        eagle = self._eagles[step] if drafters else None
        if eagle is not None:
            grown = self._policy[True].grow(eagle)
            for drafter in drafters:
                drafter.use(grown)

    def measure(self) -> None:
        self._use_eagle(0)
        self._warm_up()
        names = list(self._engines)
        for step, weights in enumerate(self._policies):
            for policy in self._policy.values():
                policy.take(weights)
            self._use_eagle(step)
            made: dict[str, list[Rollout]] = {}
            turn = step % len(names)
            for name in (*names[turn:], *names[:turn]):
                made[name] = self._generate(name, step)
            reference = made[next(name for name in names if CONTENDERS[name].exact)]
            for name, rollouts in made.items():
                difference = first_difference(reference, rollouts) if CONTENDERS[name].exact else None
                assert difference is None, f"{name} in step {step}: {difference}"
            if step + 1 < len(self._policies):
                moved = self._total_variation(step, reference)
                self.rows += [{"change_after": step, "total_variation": round(moved, 6)}]
                print(f"step {step}: total variation {moved:.5f} a token", flush=True)

    def _total_variation(self, step: int, rollouts: Sequence[Rollout]) -> float:
        """Between the policies of this step and the next, per token, on some of this step's texts."""
        prompts = {question.draw: question.prompt_ids for question in self._ask(step)}
        texts = [[*prompts[r.draw], *r.token_ids[:MOST_JUDGED]] for r in rollouts[:: max(1, len(rollouts) // 16)]]
        found = []
        for weights in self._policies[step : step + 2]:
            self._small.load_weights(weights)
            found.append([torch.as_tensor(self._small.score(text)).float().softmax(-1) for text in texts])
        return torch.cat([(a - b).abs().sum(-1) / 2 for a, b in zip(*found, strict=True)]).mean().item()

    def _warm_up(self) -> None:
        """Compile and touch memory, on draws of another stream: one call, then the same again with its text known."""
        prompts = [question.prompt_ids for question in self._ask(0)]
        short = Sampling(max_new_tokens=48, n=self.args.samples, stream="warm-up")
        half = len(prompts) // 2 or 1
        for engine in self._engines.values():
            for _ in range(2):
                engine.generate(prompts[:half], short, range(half))

    def _generate(self, name: str, step: int) -> list[Rollout]:
        engine, questions = self._engines[name], self._ask(step)
        later = range(step + 1, step + 1 + engine.settings.ahead_calls)
        ahead = [(question.prompt_ids, question.draw) for future in later for question in self._ask(future)]
        prompts, draws = [question.prompt_ids for question in questions], [question.draw for question in questions]
        start = time.perf_counter()
        rollouts = engine.generate(prompts, self._sampling, draws, ahead=ahead)
        seconds = time.perf_counter() - start
        stats, lengths = engine.stats, sorted(len(rollout.token_ids) for rollout in rollouts)
        self.rows.append(
            {
                "contender": name,
                "step": step,
                "seconds": round(seconds, 4),
                "tokens": stats.tokens,
                "rows": stats.rows,
                "forwards": stats.steps,
                "preemptions": stats.preemptions,
                "machine_seconds": round(stats.machine_seconds, 4),
                "host_seconds": {phase: round(seconds, 4) for phase, seconds in stats.seconds.items()},
                "accept_length": round(stats.accept_length, 4),
                "median_length": lengths[len(lengths) // 2],
                "longest": lengths[-1],
                "ahead": [stats.ahead_made, stats.ahead_offered, stats.ahead_survived],
                "sources": {source: drafter.describe() for source, drafter in stats.drafters.items()},
            }
        )
        survived = f", {stats.ahead_survived / stats.ahead_offered:.1%} survived" if stats.ahead_offered else ""
        print(
            f"step {step} {name:>14}: {seconds:7.3f} s, accept length {stats.accept_length:.2f}{survived}", flush=True
        )
        return rollouts


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per contender, over all steps and without the first: ratio to the fastest plain one; median of steps' ratios."""
    rows = [row for row in rows if "contender" in row]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    seconds = {name: [r["seconds"] for r in sorted(rows, key=_step) if r["contender"] == name] for name in names}
    plain = min(
        (name for name in names if CONTENDERS[name].drafter is None and not CONTENDERS[name].run_ahead),
        key=lambda name: sum(seconds[name]),
    )
    return [
        {
            "contender": name,
            "against": plain,
            "seconds": round(sum(own), 3),
            "ratio": round(sum(seconds[plain]) / sum(own), 4),
            "ratio_later": round(sum(seconds[plain][1:]) / sum(own[1:]), 4) if own[1:] else None,
            "median_ratio": round(statistics.median(a / b for a, b in zip(seconds[plain], own, strict=True)), 4),
        }
        for name, own in seconds.items()
    ]


def _step(row: dict[str, Any]) -> int:
    return int(row["step"])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--contenders", default=DEFAULT, help=f"of {', '.join(CONTENDERS)} (default: {DEFAULT})")
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--recipe", default="countdown-cpu", help="a recipe's name or file: its task and sampling")
    parser.add_argument("--shape", help="inflate the model to this shape of its family (shapes.py)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="see engine.precision")
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--level", type=int, default=0, help="of the task")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", default="1e-5", help="learning rate of the training between steps")
    parser.add_argument("--spot-seconds", type=float, default=20.0, help="drafter training after every step")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter to use throughout instead")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override its settings")
    parser.add_argument("--name", default="ablation", help="name of the result file, before the hardware")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    args = parser.parse_args(argv)
    unknown = [name for name in args.contenders.split(",") if name not in CONTENDERS]
    if unknown:
        parser.error(f"no contender {unknown[0]!r}: there are {', '.join(CONTENDERS)}")
    if not {"off", "off-inexact"} & set(args.contenders.split(",")):
        parser.error("a plain contender, off or off-inexact, is needed to compare with")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    settings = run_settings(args)
    with tempfile.TemporaryDirectory() as folder:
        policies, eagles = make_policies(settings, Path(folder) / "run", args.spot_seconds)
    if args.drafter is not None:
        eagles = [load_eagle(args.drafter)] * len(policies)
    bench = Bench(args, settings, policies, eagles)
    bench.measure()
    found = summary(bench.rows)
    versions, path = package_versions(PACKAGES), args.out or result_path(args.name, gpu)
    write_result(
        path,
        "ablation",
        bench.rows,
        argv=[sys.argv[0], *argv],
        versions=versions,
        gpu=gpu,
        commit_hash=args.commit,
        summary=found,
    )
    for line in found:
        later = f", after the first step {line['ratio_later']:.3f}x" if line["ratio_later"] else ""
        print(f"{line['contender']:>14}: {line['seconds']:8.2f} s, {line['ratio']:.3f}x of {line['against']}{later}")


if __name__ == "__main__":
    main(sys.argv[1:])
