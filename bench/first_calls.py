"""The first calls of a fresh process, timed by the process itself; `never_slower.py` starts it for each contender.

    python bench/first_calls.py --contender default --model shipped:countdown --device cuda

It prints one line of JSON: the seconds of opening the engine (weights, construction, self-test, probes) and of every
call (compilation and captures where they fall due), and a digest of all tokens and log-probabilities.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from contest import Prompts
from decode import chat_ids, read_prompts
from lineup import CONTENDERS, Row, engine_settings, shares, timed_call

from paceline.core.types import Rollout, Sampling
from paceline.model.folder import resolve
from paceline.model.shipped import SHIPPED
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.engine import Engine
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

PROMPT_ROOM = 512
"""Tokens of KV cache that every sequence gets for its prompt; more than any prompt here has."""
OPENINGS = ("", "Hello!", "I have a request.")
ENDINGS = (
    "",
    "Keep it short.",
    "Use simple words.",
    "Give an example.",
    "Be precise, please.",
    "Answer as if you were talking to a friend.",
    "Go into detail.",
    "Number the most important points.",
)
"""Every round has another pair."""
CACHES = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
"""Environment variables of folders where processes keep what they compiled or learned."""


def task_prompts(tokenizer: Tokenizer, count: int, start: int = 0, level: int = 0) -> list[list[int]]:
    """Prompts of the task that the shipped model knows."""
    task = make_task(TaskSettings(name="countdown", level=level))
    return [tokenizer.encode(task.item(1, index).prompt) for index in range(start, start + count)]


def everyday_prompts(model: Path) -> Prompts:
    """Everyday requests in the chat template: all different within a round, worded differently in every round.

    A serial number would do as well to tell them apart, but a small model answers with the number.
    """
    from transformers import AutoTokenizer

    tokenizer, texts = AutoTokenizer.from_pretrained(model), read_prompts("everyday")

    def prompts(index: int, count: int) -> list[list[int]]:
        opening, ending = OPENINGS[index // len(ENDINGS) % len(OPENINGS)], ENDINGS[index % len(ENDINGS)]
        own = (texts[i % len(texts)] for i in range(index * count, (index + 1) * count))
        return [chat_ids(tokenizer, " ".join(filter(None, (opening, text, ending)))) for text in own]

    return prompts


def digest(rollouts: Iterable[Rollout]) -> str:
    """Equal for equal tokens, log-probabilities and reasons to end."""
    found = hashlib.sha256()
    for rollout in rollouts:
        numbers = struct.pack(f"<{len(rollout.logprobs)}d", *rollout.logprobs)
        found.update(repr((rollout.token_ids, rollout.finish_reason)).encode() + numbers)
    return found.hexdigest()


def measure(args: argparse.Namespace) -> Row:
    start = time.perf_counter()
    kv_tokens = 2 * args.sequences * (args.tokens + PROMPT_ROOM)
    settings = engine_settings(args.contender, args.sequences, kv_tokens)
    engine = Engine.from_pretrained(
        args.model, args.device, drafter=CONTENDERS[args.contender].drafter, settings=settings
    )
    opened = time.perf_counter()
    assert engine.tokenizer is not None
    prompts = [_prompts(args, engine.tokenizer, call) for call in range(args.calls)]
    encoding = time.perf_counter() - opened
    sampling = Sampling(temperature=args.temperature, max_new_tokens=args.tokens)
    calls = [
        timed_call(engine, own, sampling, range(call * args.sequences, (call + 1) * args.sequences))
        for call, own in enumerate(prompts)
    ]
    seconds = time.perf_counter() - start - encoding
    return {
        "seconds": round(seconds, 4),
        "open_seconds": round(opened - start, 4),
        "calls": [round(call.row["seconds"], 4) for call in calls],
        "digest": digest(rollout for call in calls for rollout in call.rollouts),
        **shares([call.row for call in calls]),
        "tokens_per_s": round(sum(call.row["tokens"] for call in calls) / seconds, 1),
    }


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer, call: int) -> list[list[int]]:
    """Other prompts in every call."""
    if args.model.startswith(SHIPPED):
        return task_prompts(tokenizer, args.sequences, call * args.sequences)
    return everyday_prompts(resolve(args.model))(call, args.sequences)


def run_process(options: Sequence[str], caches: Path | None, limit: float) -> Row:
    """Measure in a process of its own, with caches in this folder; None: where they always are."""
    environment = dict(os.environ)
    if caches is not None:
        for variable in CACHES:
            folder = caches / variable.lower()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            environment[variable] = str(folder)
    start = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_seconds": round(time.perf_counter() - start, 3)}


def fresh_caches() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="caches-")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--contender", default="default", choices=list(CONTENDERS))
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=32, help="per call")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens of each")
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    print(json.dumps(measure(parse(argv))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
