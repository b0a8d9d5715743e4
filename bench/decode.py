"""Decoding speed: tokens per second of Paceline, `transformers.generate` and vLLM in one interleaved run.

    python bench/decode.py                                            random models of 5 M and 50 M parameters
    python bench/decode.py --model PATH --vllm-python PYTHON          a real model, then speculation on against off

This file plans what to measure; `contest.py` measures it. No test calls it for its timings: a time is a measurement,
not a property of the code.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoints import fill_float32
from contest import Case, Contender, Contest, Effort, Part, Prompts, print_tables
from record import ROOT, package_versions, result_path, write_result
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

RANDOM_PROMPT_LENGTH = 32
PACKAGES = ("paceline", "torch", "transformers", "numpy", "numba")
PARTS = ("plain", "speculation")
PEERS = ("transformers", "vllm")
FULL: dict[str, Any] = {"tokens": 128, "repeats": 5, "batches": [1, 8, 32], "sizes": ["5m", "50m"]}
QUICK: dict[str, Any] = {"tokens": 8, "repeats": 2, "batches": [1, 2], "sizes": ["5m"]}


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    effort = Effort(args.tokens, args.repeats, args.batches, args.threads)
    pythons = {"vllm": args.vllm_python} if args.vllm_python else {}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, _progress(console) as progress:
        contest = Contest(effort, pythons, progress)
        for part in plan(args, Path(folder)):
            contest.run(part)
    write(args, argv, contest, console)
    print_tables(contest.rows, contest.models, contest.skipped)


def write(args: argparse.Namespace, argv: Sequence[str], contest: Contest, console: Console) -> None:
    """Write the JSON; a quick run writes none unless --out is given."""
    bench = f"decode-{args.model.resolve().name}" if args.model else "decode"
    bench += "-float32" if args.fill_float32 else ""
    path = args.out or (None if args.quick else result_path(bench))
    if path is None:
        return
    versions = package_versions(PACKAGES) | contest.versions
    extra = {"note": args.note, "models": contest.models, "settings": contest.settings, "skipped": contest.skipped}
    write_result(path, bench, contest.rows, argv=[sys.argv[0], *argv], versions=versions, **extra)
    console.print(f"written to {path}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a real model; without it, random models are made")
    parser.add_argument("--fill-float32", action="store_true", help="measure a copy whose weights do not fit bfloat16")
    parser.add_argument("--parts", type=_names, help="with --model: plain, speculation or both (default: both)")
    parser.add_argument("--peers", type=_names, help="transformers, vllm (default: both; vllm only with --vllm-python)")
    parser.add_argument("--vllm-python", help="Python interpreter of the environment with vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="run vLLM without compilation, its slower mode")
    parser.add_argument("--tokens", type=int, help="new tokens per prompt (default: 128)")
    parser.add_argument("--repeats", type=int, help="rounds per case (default: 5)")
    parser.add_argument("--batches", type=_numbers, help="batch sizes (default: 1,8,32)")
    parser.add_argument("--sizes", type=_names, help="random models (default: 5m,50m)")
    parser.add_argument("--threads", type=int, default=1, help="threads per contender (default: 1)")
    parser.add_argument("--quick", action="store_true", help="smoke test: few tokens, two rounds, nothing written")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/decode[-MODEL]-<hardware>.json)")
    parser.add_argument("--note", default="", help="a remark for the JSON, such as the source of the model")
    args = parser.parse_args(argv)
    args.parts = args.parts or list(PARTS)
    args.peers = args.peers or list(PEERS if args.vllm_python else PEERS[:1])
    for name in {*args.parts, *args.peers} - {*PARTS, *PEERS}:
        parser.error(f"unknown {name!r}: --parts takes {', '.join(PARTS)}; --peers takes {', '.join(PEERS)}")
    if "vllm" in args.peers and not args.vllm_python:
        parser.error("vLLM lives in a separate environment: name its interpreter with --vllm-python")
    for name, value in (QUICK if args.quick else FULL).items():
        setattr(args, name, getattr(args, name) or value)
    return args


def plan(args: argparse.Namespace, folder: Path) -> Iterator[Part]:
    """The parts to measure; a random model is made (in `folder`) when its turn comes."""
    if not args.model:
        for size in args.sizes:
            model = _prepared(_random_model(folder / f"random-{size}", size), args, folder)
            yield Part("plain", model, plain_contenders(args), [Case("random", random_prompts)])
        return
    model = _prepared(args.model.resolve(), args, folder)
    ordinary, repetitive = (text_prompts(model, name) for name in ("ordinary", "repetitive"))
    if "plain" in args.parts:
        yield Part("plain", model, plain_contenders(args), [Case("ordinary", ordinary)])
    if "speculation" in args.parts:
        cases = [Case("repetitive", repetitive), Case("ordinary", ordinary), Case("ordinary", ordinary, 1.0)]
        yield Part("speculation", model, speculation_contenders(args), cases)


def plain_contenders(args: argparse.Namespace) -> list[Contender]:
    """Speculation off everywhere: the bare engines, and the cost of exactness."""
    peers = [Contender("transformers", "transformers")] if "transformers" in args.peers else []
    if "vllm" in args.peers:
        peers.append(Contender("vllm", "vllm", {"eager": args.vllm_eager}))
    names = tuple(peer.name for peer in peers)
    exact = Contender("paceline exact", "paceline", {"exact": True}, (*names, "paceline fast"))
    return [exact, Contender("paceline fast", "paceline", {"exact": False}, names), *peers]


def speculation_contenders(args: argparse.Namespace) -> list[Contender]:
    """Each engine's speculation against the same engine without it."""
    contenders = [
        Contender("paceline off", "paceline"),
        Contender("paceline suffix", "paceline", {"drafter": "suffix"}, ("paceline off",)),
    ]
    if "vllm" in args.peers:
        eager = {"eager": args.vllm_eager}
        contenders.append(Contender("vllm off", "vllm", eager))
        for drafter in ("ngram", "suffix"):
            contenders.append(Contender(f"vllm {drafter}", "vllm", {**eager, "drafter": drafter}, ("vllm off",)))
    return contenders


def random_prompts(round_index: int, batch: int) -> list[list[int]]:
    """Random bytes: higher ids of a random model's vocabulary are padding, whose embeddings are all zero."""
    draw = random.Random(f"{round_index} {batch}")
    return [[draw.randrange(256) for _ in range(RANDOM_PROMPT_LENGTH)] for _ in range(batch)]


def text_prompts(model: Path, name: str) -> Prompts:
    """The prompts of `bench/prompts/<name>.txt` in turn, each starting with a serial number, in the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = read_prompts(name)

    def prompts(round_index: int, batch: int) -> list[list[int]]:
        serials = range((round_index + 1) * 1000, (round_index + 1) * 1000 + batch)
        offset = round_index * batch
        numbered = [f"No. {serial}: {texts[(offset + i) % len(texts)]}" for i, serial in enumerate(serials)]
        return [chat_ids(tokenizer, text) for text in numbered]

    return prompts


def read_prompts(name: str) -> list[str]:
    """The texts of `bench/prompts/<name>.txt`."""
    return (ROOT / "bench" / "prompts" / f"{name}.txt").read_text().strip().split("\n---\n")


def _random_model(folder: Path, size: Any) -> Path:
    from paceline.model.random_model import make_random_model

    make_random_model(folder, size=size, family="qwen3", seed=0)
    return folder


def _prepared(model: Path, args: argparse.Namespace, folder: Path) -> Path:
    return fill_float32(model, folder / f"{model.name}-float32") if args.fill_float32 else model


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """A user's turn in the chat template; the bare text if there is none."""
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    message = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


if __name__ == "__main__":
    main(sys.argv[1:])
