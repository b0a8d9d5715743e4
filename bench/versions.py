"""This tree against another checkout of Paceline: the same rollouts and training steps, in turns, and the ratio of
times.

    python bench/versions.py --before ../paceline-old                      CPU: decoding and training steps
    python bench/versions.py --before ../paceline-old --device cuda        GPU: decoding at 0.6B and 7B shapes

Each side is a process of its own that stays warm and answers one request at a time; rounds alternate who goes first.
Token ids and log-probabilities of both sides are compared bit for bit. Only names that both checkouts share are used:
the public API, `model/config.py`, `model/decoder.py` and the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import ROOT, package_versions, result_path, write_result

PACKAGES = ("torch", "triton", "transformers", "numba")
SIDES = ("before", "after")
CPU_CASES = ("5m plain", "5m drafted")
GPU_CASES = ("0.6b plain", "0.6b drafted", "7b plain", "7b drafted")
NUM_PROMPTS, PROMPT_LENGTH = 16, 64
TRAINED_STEPS = 4
"""Steps of a training run; the first one compiles and is left out."""


class Side:
    """One checkout in a process of its own."""

    def __init__(self, tree: Path, device: str) -> None:
        self.tree = tree
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def ask(self, case: str, tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"case": case, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.tree} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# --- one side ---------------------------------------------------------------------------------------------------------


def serve(device: str) -> None:
    """Answer requests until the input ends."""
    import torch

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    engines: dict[str, Any] = {}
    decoders: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        model, _, mode = asked["case"].partition(" ")
        if model not in decoders:
            decoders.clear()  # two large models need not fit side by side
            engines.clear()
            decoders[model] = make_decoder(model, device)
        if mode not in engines:
            engines[mode] = make_engine(decoders[model], mode)
        print(json.dumps(generate(engines[mode], asked["tokens"])), file=answers, flush=True)


def make_decoder(model: str, device: str) -> Any:
    from shapes import model_config, random_weights

    import paceline
    from paceline.model.decoder import Decoder
    from paceline.model.random_model import make_random_model

    if device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            path = make_random_model(Path(folder) / "model", size="5m")
            return paceline.Engine.from_pretrained(path, drafter=None).decoder
    config = model_config(model)
    return Decoder(config, random_weights(config, device), exact=True, device=device)


def make_engine(decoder: Any, mode: str) -> Any:
    """Drafted, every guess is verified: what is verified must not depend on the time that a guess takes."""
    import paceline

    tokens = 2 * NUM_PROMPTS * (PROMPT_LENGTH + 1024)
    settings = paceline.EngineSettings(max_sequences=NUM_PROMPTS, kv_tokens=tokens)
    budget = paceline.BudgetSettings(always=True, max_draft_nodes=4)
    return paceline.Engine(decoder, None, None if mode == "plain" else "ngram", settings, budget)


def generate(engine: Any, tokens: int) -> dict[str, Any]:
    import numpy as np

    import paceline

    random = np.random.default_rng(1)
    phrases = random.integers(0, 500, (NUM_PROMPTS, PROMPT_LENGTH // 4))
    prompts = [[int(token) for token in np.tile(phrase, 4)] for phrase in phrases]  # repetitive, or nobody would guess
    sampling = paceline.Sampling(temperature=1.0, max_new_tokens=tokens, seed=3, ignore_eos=True)
    start = time.perf_counter()
    rollouts = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    digest = hashlib.blake2b(digest_size=8)
    for rollout in rollouts:
        digest.update(struct.pack(f"<{tokens}i{tokens}d", *rollout.token_ids, *rollout.logprobs))
    return {"seconds": seconds, "steps": engine.stats.steps, "rows": engine.stats.rows, "digest": digest.hexdigest()}


# --- both sides -------------------------------------------------------------------------------------------------------


def decode(sides: dict[str, Side], case: str, tokens: int, repeats: int) -> dict[str, Any]:
    for side in sides.values():
        side.ask(case, min(tokens, 16))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for turn in range(repeats):
        for name in SIDES if turn % 2 else reversed(SIDES):
            found[name].append(sides[name].ask(case, tokens))
    ms = {name: [1e3 * run["seconds"] / run["steps"] for run in runs] for name, runs in found.items()}
    digests = {run["digest"] for runs in found.values() for run in runs}
    return row_of(case, ms, len(digests) == 1) | {
        "rows_per_step": round(found["after"][0]["rows"] / found["after"][0]["steps"], 2)
    }


def train(sides: dict[str, Side], repeats: int) -> dict[str, Any]:
    """Whole training runs; a row of metrics is compared but for what depends on time."""
    ms: dict[str, list[float]] = {name: [] for name in SIDES}
    rewards = set()
    for turn in range(repeats):
        for name in SIDES if turn % 2 else reversed(SIDES):
            with tempfile.TemporaryDirectory() as folder:
                rows = train_once(sides[name], Path(folder) / "run")
            ms[name].append(1e3 * statistics.median(row["timing_s/step"] for row in rows[1:]))
            rewards.add(json.dumps([(row["reward"], row["grad_norm"], row["loss"]) for row in rows]))
    return row_of("training step, countdown-cpu", ms, len(rewards) == 1)


def train_once(side: Side, folder: Path) -> list[dict[str, Any]]:
    given = {
        "rl.steps": TRAINED_STEPS,
        "eval.items": 0,
        "run.compare": "false",
        "run.loggers": "none",
        "run.dir": folder,
    }
    command = [sys.executable, "-m", "paceline", "train", "countdown-cpu", "--quiet"]
    command += [f"--{key}={value}" for key, value in given.items()]
    subprocess.run(command, check=True, env=side.environment, stdout=subprocess.DEVNULL, cwd=folder.parent)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def row_of(case: str, ms: dict[str, list[float]], is_equal: bool) -> dict[str, Any]:
    before, after = (statistics.median(ms[name]) for name in SIDES)
    row = {"case": case, "before_ms": round(before, 3), "after_ms": round(after, 3), "ratio": round(after / before, 4)}
    print(
        f"{case:<32} {before:9.3f} -> {after:9.3f} ms  x{row['ratio']:.3f}  {'equal' if is_equal else 'DIFFERENT'}",
        flush=True,
    )
    return row | {"is_equal": is_equal, "all_ms": {name: [round(value, 3) for value in ms[name]] for name in SIDES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--parts", default="decode,train")
    parser.add_argument("--commit", help="of this tree, where its history is not at hand")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.device)
    if args.before is None:
        parser.error("--before is needed: the checkout to compare with")
    is_gpu, gpu = args.device != "cpu", None
    if is_gpu:
        import torch

        gpu = torch.cuda.get_device_name()
    sides = {"before": Side(args.before.resolve(), args.device), "after": Side(ROOT, args.device)}
    try:
        rows = []
        if "decode" in args.parts:
            rows += [decode(sides, case, args.tokens, args.repeats) for case in (GPU_CASES if is_gpu else CPU_CASES)]
        if "train" in args.parts and not is_gpu:
            rows.append(train(sides, args.repeats))
    finally:
        for side in sides.values():
            side.close()
    path = args.out or result_path("versions", gpu)
    versions = package_versions(PACKAGES)
    write_result(path, "versions", rows, argv=sys.argv, versions=versions, gpu=gpu, commit_hash=args.commit)


if __name__ == "__main__":
    main()
