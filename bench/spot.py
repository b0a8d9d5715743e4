"""How fast a drafter learns from scratch, and its accept length, offline; one JSON file.

    python bench/spot.py                     the shipped model: accept length by micro-steps and draft temperature
    python bench/spot.py --parts time,packing,checkpoint     the time of a micro-step; what packing and a thread save
    python bench/spot.py --recipe smollm2-135m-math --model PATH --device cuda

The policy generates rollouts at temperature 1 with known keys; a quarter of the prompts is held out. After some number
of micro-steps, chains are drafted from every position of the held-out texts by argmax(log q / tau + noise), with the
noise of the true token's position (tau 0 is greedy), and compared with what the policy wrote. Accept length includes
the policy's own token; `beside` is what it would gain with the second, third and fourth choice beside every draft
token. No engine is involved: this is what a drafter is worth where rows are free.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import package_versions, result_path, write_result
from torch import Tensor

from paceline.core.config import load
from paceline.core.noise import derive_key, gumbel
from paceline.kernels.limits import MAX_GUESS_WIDTH
from paceline.model.backward.packed import Text
from paceline.model.backward.policy import TrainablePolicy
from paceline.model.backward.states import States
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.eagle.unroll import Layout, Unroll, Window
from paceline.model.policy import Policy
from paceline.model.rope import rope_table
from paceline.rollout.engine import Engine
from paceline.run.parts import load_policy, open_engine, open_prompt_source
from paceline.run.recipes import find_recipe, training_sampling
from paceline.run.settings import RootSettings
from paceline.spot.batch import Piece
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.loss import Teacher
from paceline.spot.plan import MicroStep, Planner
from paceline.spot.ring import Ring, StoredText
from paceline.spot.settings import SpotSettings
from paceline.spot.trainer import Trainer
from paceline.spot.worker import MICRO_TOKENS

PACKAGES = ("paceline", "torch", "numpy")
TAUS = (0.0, 0.5, 0.7, 0.85, 1.0)
PACK = 16
"""How many texts the policy reads at a time."""


@dataclass(frozen=True, eq=False)
class Known:
    """A text and the key its tokens were sampled with."""

    text: StoredText
    key: int


def make_texts(engine: Engine, settings: RootSettings, num_prompts: int) -> list[Known]:
    """Rollouts with the policy's hidden states."""
    prompt_source, sampling = (
        open_prompt_source(settings, Policy(engine.decoder, engine.tokenizer)),
        training_sampling(settings),
    )
    prompts = [prompt_source.foresee(1, draw).prompt_ids for draw in range(num_prompts)]
    policy = TrainablePolicy(engine.decoder, engine.decoder.weights())
    found: list[Known] = []
    rollouts = engine.generate(prompts, sampling)
    for first in range(0, len(rollouts), PACK):
        own = rollouts[first : first + PACK]
        texts = [
            Text(np.array([*prompts[it.prompt_index], *it.token_ids], np.int32), len(prompts[it.prompt_index]))
            for it in own
        ]
        seen: list[States] = []
        with torch.no_grad():
            policy.log_probs(texts, 1.0, seen.append)
        for it, text, (start, stop) in zip(own, texts, pairwise(seen[0].row_starts), strict=True):
            key = derive_key(sampling.seed, sampling.stream, it.draw, it.sample_index)
            states = seen[0].taps[start:stop], seen[0].final[start:stop]
            found.append(Known(StoredText(len(found), text.token_ids, text.prompt_length, *states, 0), key))
    return found


# --- accept length ----------------------------------------------------------------------------------------------------


def noise_table(known: Known, draft_ids: Tensor, depth: int) -> Tensor:
    """Noise of every position of the response, and of a draft's length after it."""
    ids = draft_ids.numpy()
    rows = [gumbel(known.key, step, ids) for step in range(known.text.response_length + depth)]
    return torch.from_numpy(np.stack(rows)).float()


@torch.no_grad()
def accepted(eagle: Eagle, embedding: Tensor, known: Known, noise: Tensor, tau: float, depth: int) -> Tensor:
    """[chains, depth, MAX_GUESS_WIDTH]: whether the chain is right so far and its first, second, third choice here is,
    for chains with a true token at every position. All tensors are on the embedding's device."""
    text, config, device = known.text, eagle.config, embedding.device
    first, last = text.prompt_length - 1, len(text.token_ids) - 1 - depth
    if last <= first:
        return torch.zeros(0, depth, MAX_GUESS_WIDTH, dtype=torch.bool, device=device)
    ids = torch.from_numpy(text.token_ids.astype(np.int64)).to(device)
    layout = Layout.of([Window(0, first, last)], device)
    cos, sin = rope_table(config.rope, config.head_dim, last + depth)
    unroll = Unroll(config, eagle.weights, layout, (cos.to(device), sin.to(device)))
    states = unroll.begin(text.taps[:last].to(device).float(), embedding[ids[1 : last + 1]])
    is_true = torch.ones(last - first, dtype=torch.bool, device=device)
    found = []
    for number in range(depth):
        scores = eagle.logits(states).log_softmax(-1)
        position = layout.base_positions + 2 + number
        if tau:
            scores = scores / tau + noise[position - text.prompt_length]
        drafted = eagle.draft_ids[scores.topk(MAX_GUESS_WIDTH).indices]
        is_right = is_true[:, None] & (drafted == ids[position][:, None])
        found.append(is_right)
        is_true = is_right[:, 0]
        states = unroll.advance(states, embedding[drafted[:, 0]])
    return torch.stack(found, dim=1)


def accept_lengths(
    eagle: Eagle, embedding: Tensor, texts: Sequence[Known], noises: Sequence[Tensor], depth: int
) -> list[dict[str, Any]]:
    """By draft temperature: accept length, and the share of chains still alive at each position."""
    device = embedding.device
    weights = {name: weight.to(device) for name, weight in eagle.weights.items()}
    eagle = replace(eagle, weights=weights, draft_ids=eagle.draft_ids.to(device))
    found: dict[float, list[Tensor]] = {tau: [] for tau in TAUS}
    for known, noise in zip(texts, noises, strict=True):
        there = noise.to(device)  # once for all temperatures: it is the largest tensor here
        for tau, own in found.items():
            own.append(accepted(eagle, embedding, known, there, tau, depth))
    rows = []
    for tau, own in found.items():
        by_position = torch.cat(own).float().mean(0)
        first, *others = by_position.sum(0).tolist()
        row = {"tau": tau, "accept_length": round(1 + first, 3), "beside": [round(other, 3) for other in others]}
        rows.append({**row, "alive": _rounded(by_position[:, 0])})
    return rows


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


# --- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bench:
    args: argparse.Namespace
    settings: SpotSettings
    weights: Mapping[str, Tensor]
    """The policy's, which a fresh drafter begins from."""
    eagle: Eagle
    teacher: Teacher
    ring: Ring
    held_out: list[Known]

    def micro_steps(self, trainer: Trainer) -> Iterator[MicroStep]:
        tokens = self.settings.micro_tokens
        assert tokens is not None
        planner = Planner(tokens, self.settings.context_tokens, self.settings.seed)
        while True:
            step = planner.next(self.ring, trainer.learning_rate, self.teacher.version)
            assert step is not None
            yield step


def open_bench(args: argparse.Namespace) -> Bench:
    torch.set_num_threads(1)
    fixed = {
        "model.path": args.model,
        "model.device": args.device,
        "sampling.temperature": "1",
        "sampling.max_new_tokens": str(args.tokens),
        "rl.group_size": str(args.samples),
    }
    root = load(RootSettings, find_recipe(args.recipe), fixed | dict(pair.split("=", 1) for pair in args.set))
    engine = open_engine(root, load_policy(root, args.model))
    texts = make_texts(engine, root, args.prompts)
    is_train = [known.text.serial < len(texts) * 3 // 4 for known in texts]
    kind = torch.device(args.device).type
    ring = Ring(2**33, torch.float32 if kind == "cpu" else torch.bfloat16)
    for known in (known for known, train in zip(texts, is_train, strict=True) if train):
        ring.put(known.text.token_ids, known.text.prompt_length, known.text.taps, known.text.final, 0)
    config, weights = engine.decoder.config, engine.decoder.weights()
    eagle = load_eagle(args.drafter) if args.drafter else Eagle.fresh(EagleConfig.for_policy(config), weights)
    settings = root.spot.model_copy(update={"micro_tokens": root.spot.micro_tokens or MICRO_TOKENS[kind]})
    teacher = Teacher.of(config, weights, eagle.draft_ids, 0)
    held_out = [known for known, train in zip(texts, is_train, strict=True) if not train]
    return Bench(args, settings, weights, eagle, teacher, ring, held_out[: args.held_out])


def measure_learning(bench: Bench) -> list[dict[str, Any]]:
    """Accept length before training and after each number of micro-steps."""
    trainer = Trainer(bench.eagle, bench.settings, bench.args.device)
    depth, embedding = bench.args.depth, bench.teacher.embedding.float()
    noises = [noise_table(known, bench.eagle.draft_ids, depth) for known in bench.held_out]
    rows: list[dict[str, Any]] = []
    steps, seconds, loss = bench.micro_steps(trainer), 0.0, []
    for count in sorted({0, *bench.args.at}):
        if seconds >= bench.args.most_seconds:
            break
        while trainer.num_micro_steps < count and seconds < bench.args.most_seconds:
            start = time.perf_counter()
            loss.append(trainer.train(next(steps), bench.ring, bench.teacher).loss)
            seconds += time.perf_counter() - start
        count = trainer.num_micro_steps
        eagle = trainer.publish() if count else bench.eagle
        for found in accept_lengths(eagle, embedding, bench.held_out, noises, depth):
            kl = round(statistics.mean(loss[-50:]), 4) if loss else None
            rows.append({"part": "learning", "micro_steps": count, "seconds": round(seconds, 2), "loss": kl, **found})
            three = found["accept_length"] + sum(found["beside"][:2])
            text = f"tau {found['tau']}: {found['accept_length']}, three wide {three:.3f}"
            print(f"{count:>5} micro-steps {seconds:6.1f} s  {text}", flush=True)
    if bench.args.save is not None:
        save_eagle(bench.args.save, eagle)
    return rows


def measure_time(bench: Bench) -> list[dict[str, Any]]:
    """Milliseconds per micro-step."""
    trainer = Trainer(bench.eagle, bench.settings, bench.args.device)
    steps, times, cpu_times, tokens = bench.micro_steps(trainer), [], [], []
    for _ in range(bench.args.repeats):
        step = next(steps)
        start, cpu_start = time.perf_counter(), time.process_time()
        trainer.train(step, bench.ring, bench.teacher)
        times.append(1e3 * (time.perf_counter() - start))
        cpu_times.append(1e3 * (time.process_time() - cpu_start))
        tokens.append(step.num_bases)
    times, cpu_times = sorted(times[5:]), sorted(cpu_times[5:])
    row = {"part": "time", "ms_median": statistics.median(times), "ms_p95": times[int(0.95 * len(times))]}
    row |= {"ms_max": times[-1], "tokens_mean": statistics.mean(tokens), "unroll": bench.settings.unroll}
    row |= {"cpu_ms_median": statistics.median(cpu_times)}  # the time on an otherwise idle core
    text = f"median {row['ms_median']:.1f} ms, 95 % {row['ms_p95']:.1f}, of a core {row['cpu_ms_median']:.1f}"
    print(f"micro-step: {text}, {row['tokens_mean']:.0f} tokens")
    return [row]


def padded(text: StoredText, num_rows: int) -> StoredText:
    """The text with unneeded rows appended."""
    added = num_rows - text.num_rows
    states = (torch.cat((part, part.new_zeros(added, part.shape[1]))) for part in (text.taps, text.final))
    taps, final = states
    ids = np.concatenate((text.token_ids, np.zeros(added, np.int32)))
    return replace(text, token_ids=ids, taps=taps, final=final)


def measure_packing(bench: Bench, num_texts: int = 16) -> list[dict[str, Any]]:
    """One micro-step over the same texts, packed and padded to the longest."""
    rows, gains = [], []
    texts = list(bench.ring.values())
    for first in range(0, min(len(texts), 6 * num_texts), num_texts):
        packed = {text.serial: text for text in texts[first : first + num_texts]}
        longest = max(text.num_rows for text in packed.values())
        filled = {serial: padded(text, longest) for serial, text in packed.items()}
        times: dict[str, list[float]] = {"packed": [], "padded": []}
        for _ in range(5):
            for name, given in (("packed", packed), ("padded", filled)):
                times[name].append(_time_texts(bench, given))
        row = {name: 1e3 * statistics.median(found) for name, found in times.items()}
        gains.append(row["padded"] / row["packed"])
        rows.append({"part": "packing", "texts": num_texts, "longest": longest, **row, "gain": gains[-1]})
    print(f"packing: {statistics.median(gains):.2f} times as fast as padding")
    return rows


def _time_texts(bench: Bench, texts: Mapping[int, StoredText]) -> float:
    trainer = Trainer(bench.eagle, bench.settings, bench.args.device)
    pieces = [Piece(text.serial, 0, text.prompt_length - 1, text.num_rows - 1) for text in texts.values()]
    start = time.perf_counter()
    trainer.train(MicroStep(tuple(pieces), 1e-3, bench.teacher.version), texts, bench.teacher)
    return time.perf_counter() - start


def measure_checkpoints(bench: Bench) -> list[dict[str, Any]]:
    """How long a checkpoint stalls training: written in full by the caller, and copied for a thread.

    In full means with the policy's embedding and head beside the drafter, as for a model that owns its parts.
    """
    trainer = Trainer(bench.eagle, bench.settings, bench.args.device)
    trainer.train(next(bench.micro_steps(trainer)), bench.ring, bench.teacher)
    eagle, copies = (
        trainer.publish(),
        {"policy/embedding": bench.teacher.embedding, "policy/head": bench.teacher.head.clone()},
    )
    stalls: dict[str, list[float]] = {"full": [], "selective": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = DrafterCheckpoints(Path(folder))
        for step in range(2 * bench.args.repeats // 5):
            start = time.perf_counter()
            checkpoints.save(2 * step, eagle, trainer.tensors() | copies, trainer.counts())
            checkpoints.wait()
            stalls["full"].append(time.perf_counter() - start)
            stalls["selective"].append(checkpoints.save(2 * step + 1, eagle, trainer.tensors(), trainer.counts()))
            checkpoints.wait()
        checkpoints.close()
    row = {f"ms_{name}": 1e3 * statistics.median(found) for name, found in stalls.items()}
    megabytes = sum(tensor.nbytes for tensor in trainer.tensors().values()) / 2**20
    print(
        f"checkpoint of {megabytes:.1f} MiB: stalls {row['ms_full']:.1f} ms full, {row['ms_selective']:.2f} ms beside"
    )
    return [{"part": "checkpoint", "mebibytes": megabytes, **row}]


PARTS = {
    "learning": measure_learning,
    "time": measure_time,
    "packing": measure_packing,
    "checkpoint": measure_checkpoints,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--recipe", default="countdown-cpu", help="a recipe's name or file")
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts; a quarter is held out")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--held-out", type=int, default=64, help="texts to draft for")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per response")
    parser.add_argument("--depth", type=int, default=8, help="draft tokens per chain")
    parser.add_argument("--at", type=int, nargs="+", default=[50, 100, 200, 400, 800, 1600], help="micro-steps")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter to start from; `--at 0` only judges it")
    parser.add_argument("--save", type=Path, help="folder for the drafter after the most micro-steps")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="most learning time before judging")
    parser.add_argument("--repeats", type=int, default=60, help="number of timed micro-steps")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--name", default="spot", help="name of the result file, before the hardware")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    bench = open_bench(args)
    rows = [row for part in args.parts.split(",") for row in PARTS[part](bench)]
    if not args.dry:
        gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
        versions, command = package_versions(PACKAGES), [sys.argv[0], *argv]
        path = args.out or result_path(args.name, gpu)
        write_result(path, "spot", rows, argv=command, versions=versions, gpu=gpu, commit_hash=args.commit)


if __name__ == "__main__":
    main(sys.argv[1:])
