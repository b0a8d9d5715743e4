"""A long run that nobody trained: a folder with as many steps as asked for, written in the form the run loop writes.

For tests of what shows runs. Numbers are made up, and the same every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

WORKERS = 4
WORDS = [
    "so",
    "we",
    "try",
    "the",
    "sum",
    "of",
    "both",
    "and",
    "get",
    "a",
    "number",
    "that",
    "is",
    "close",
    "to",
    "what",
    "we",
    "want",
    "but",
    "not",
    "quite",
    "there",
]
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    '"><svg onload=window.hacked=3><!--',
    "\x1b[31mred\x1b[0m \x07 \x00 \u202eright to left\u202c",
    "lone \ud800 surrogate \udfff and \u2028 an end of line",
    "{{constructor.constructor('window.hacked=4')()}} ${window.hacked=5} javascript:window.hacked=6",
    "&lt;b&gt; &amp; <style>*{display:none}</style> ]]> */",
    "long " + "x" * 200_000,
)
"""Texts that try to become something else."""


def write_run(folder: Path, steps: int = 1000, texts: Sequence[str] = (), per_step: int = 8, every: int = 1) -> Path:
    """A run of so many steps; `texts` are the first step's, the rest is made up, every so many steps."""
    (folder / "rollouts").mkdir(parents=True)
    config = {
        "rl": {"steps": steps},
        "model": {"path": "made-up"},
        "task": {"name": "none"},
        "fleet": {"workers": WORKERS},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    chance = random.Random(0)
    clock = 0.0
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "events.jsonl").open("w") as events:
        metrics.write(json.dumps({"step": 0, "eval/accuracy": 0.31, "timing_s/eval": 3.0}) + "\n")
        for step in range(1, steps + 1):
            row = _row(step, steps, chance)
            metrics.write(json.dumps(row) + "\n")
            for event in _events(step, clock, row, chance):
                events.write(json.dumps(event) + "\n")
            clock += row["timing_s/step"]
            if (step - 1) % every == 0 or step == steps:
                write_rollouts(folder, step, texts if step == 1 and texts else _texts(chance, per_step))
    return folder


def write_rollouts(folder: Path, step: int, texts: Sequence[str]) -> None:
    base = folder / "rollouts" / f"step-{step:06d}"
    records, spans = [], []
    for sample, text in enumerate(texts):
        size = max(len(text.split()), 1)
        known = {"draw": step, "sample": sample}
        records.append(
            known
            | {
                "prompt": f"question {step}",
                "text": text,
                "token_ids": list(range(size)),
                "logprobs": [0.0] * size,
                "reward": sample % 3 / 2,
                "finish_reason": "stop",
                "version": step - 1,
            }
        )
        spans.append(known | {"spans": [[0, min(3, size), "suffix"], [min(5, size), min(9, size) + 1, "eagle"]]})
    _write(base.with_name(f"{base.name}.spans.jsonl"), spans)
    _write(base.with_name(f"{base.name}.jsonl"), records)


def _write(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def _texts(chance: random.Random, count: int) -> list[str]:
    return [" ".join(chance.choices(WORDS, k=chance.randint(20, 120))) for _ in range(count)]


def _row(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    done = step / steps
    mean = 300 + 400 * done + chance.gauss(0, 20)
    gen, learn = 6 - 2 * done + chance.random(), 2 + 0.2 * chance.random()
    tokens = 64 * mean
    visits = tokens / (1.6 + done)
    row = {
        "step": step,
        "reward": 0.3 + 0.5 * done + chance.gauss(0, 0.06),
        "reward_std": 0.4,
        "completions/mean_length": mean,
        "completions/p95_length": 2.1 * mean,
        "completions/max_length": 3 * mean + 100 * chance.random(),
        "completions/clipped_ratio": 0.02,
        "loss": chance.gauss(0, 1e-3),
        "grad_norm": 0.2 + 0.1 * chance.random(),
        "timing_s/gen": gen,
        "timing_s/score": 0.1,
        "timing_s/update": learn,
        "timing_s/step": gen + learn + 0.2,
        "perf/throughput": round(tokens) / (gen + learn + 0.2),
        "rollout/spec_accept_length": round(tokens) / visits,
        "rollout/spec_saved_seconds": WORKERS * gen * 0.6 * done,
        "drafter/version": float(step // 4),
        "drafter/loss": 4 - 2 * done + 0.1 * chance.random(),
        "drafter/shared_1": 0.4 + 0.3 * done,
    }
    for name, share in (("suffix", 0.2), ("eagle", 0.2 + done)):
        accepted = visits * share
        row |= {f"rollout/spec_{name}_accepted": accepted, f"rollout/spec_{name}_verified": 1.8 * accepted}
        row |= {f"rollout/spec_{name}_at_{depth}": 0.8 ** (depth / 2) for depth in (1, 2, 4, 8)}
    shares = {"generate": 0.55, "learn": 0.2, "publish": 0.02, "run_ahead": 0.1, "spot_train": 0.05, "waiting": 0.08}
    row |= {f"perf/fleet_{name}_share": share for name, share in shares.items()}
    row |= {f"extra/number_{i}": chance.random() for i in range(40)}
    if step % 50 == 0:
        row["eval/accuracy"] = 0.31 + 0.4 * done
    return row


def _events(step: int, begin: float, row: dict[str, Any], chance: random.Random) -> list[dict[str, Any]]:
    def event(worker: str, name: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
        return {"name": name, "worker": worker, "step": step, "start_s": start, "dur_s": seconds, "args": args}

    gen, learn, whole = row["timing_s/gen"], row["timing_s/update"], row["timing_s/step"]
    found = [event("0", "step", begin, whole), event("0", "gen", begin, gen)]
    found.append(event("0", "update", begin + gen, learn))
    for worker in range(WORKERS):
        name, at, busy = f"w{worker}", begin, gen * (0.5 + 0.5 * chance.random())
        parts = (
            ("publish", 0.1),
            ("generate", busy),
            ("run_ahead", (gen - busy) * 0.6),
            ("spot_train", (gen - busy) * 0.2),
        )
        for what, seconds in (*parts, ("wait", (gen - busy) * 0.1), ("learn", learn * 0.9)):
            found.append(event(name, what, at, seconds))
            at += seconds
    arms = [
        [1, "off", 2],
        [1, "eagle 8x4", 9],
        [4, "suffix+eagle 4x1", 30],
        [4, "off", 4],
        [16, "suffix", 20],
        [64, "off", 50],
    ]
    curve = [[1, 10.0], [16, 10.1], [64, 10.4], [128, 10.8], [256, 14.0], [512, 26.0]]
    budget = {"forwards": [[1, 2], [4, 9], [16, 30], [64, 44], [128, 20]], "arms": arms, "curve": curve}
    return [*found, event("0", "budget", begin + whole, 0.0, **budget)]
