"""The defaults against plain decoding, as a user meets them: the same run by `paceline train`, step by step.

    python bench/defaults.py --recipe countdown-gpu --steps 30 --repeats 3
    python bench/defaults.py --recipe countdown-gpu --steps 10 --contenders plain,default,suffix

Every run is a process of its own, so that compilation, captures and probes count. Tokens are equal, so step i of one
run pairs with step i of another; a run whose metrics differ fails the bench. Contenders take turns, in reverse order
every other repeat. The summary tells the ratio of sums from the third step on, the worst step, and the time of the
first ten steps with everything in it. One JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import package_versions, result_path, write_result

from paceline.run.store.folder import compared, read_metrics

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
CONTENDERS: dict[str, dict[str, str]] = {
    "plain": {"engine.drafter": "none", "engine.run_ahead": "false", "spot.enabled": "false"},
    "default": {},
    "suffix": {"engine.drafter": "suffix", "engine.run_ahead": "false", "spot.enabled": "false"},
    "suffix+run-ahead": {"engine.drafter": "suffix", "engine.run_ahead": "true", "spot.enabled": "false"},
}
TIMES = ("timing_s/gen", "timing_s/update", "timing_s/step", "perf/forward_seconds")
ARMS = "arms"
KEPT = (
    *TIMES,
    ARMS,
    "rollout/spec_ahead_made",
    "rollout/spec_ahead_offered",
    "rollout/spec_ahead_survived",
    "completions/mean_length",
    "completions/max_length",
    "rollout/spec_accept_length",
)
FROM_STEP = 3
"""Sums begin here: the first steps compile and capture, and have their own line."""


def train(args: argparse.Namespace, case: str, folder: Path) -> dict[str, Any]:
    """One run in its own process."""
    given = {
        **{"rl.steps": str(args.steps + 1), "run.dir": str(folder), "run.loggers": "none"},
        **{"eval.items": "0", "run.compare": "false", "run.checkpoint_every": "0", "run.rollouts": "false"},
        **CONTENDERS[case],
        **dict(pair.split("=", 1) for pair in args.set),
    }
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        args.recipe,
        *(f"--{key}={text}" for key, text in given.items()),
    ]
    start = time.perf_counter()
    log = folder.with_suffix(".log")
    with log.open("w") as opened:
        try:
            code = subprocess.run(command, stdout=opened, stderr=opened, timeout=args.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 0  # the steps that it took do count
    if code:
        raise SystemExit(f"{case} failed with exit code {code}:\n{log.read_text()[-2000:]}")
    rows = [row for row in read_metrics(folder) if row["step"]][: args.steps]
    for row, arms in zip(rows, read_arms(folder), strict=False):
        row[ARMS] = arms
    seconds = round(time.perf_counter() - start, 2)
    for name in ("gen", "step"):
        print(f"{case}: {seconds} s; {name} {[round(row[f'timing_s/{name}'], 2) for row in rows]}", flush=True)
    return {"seconds": seconds, "rows": rows}


def read_arms(folder: Path) -> list[dict[str, int]]:
    """By step, in how many forwards each arm was used."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    found = []
    for event in events:
        if event["name"] == "budget":
            counts: Counter[str] = Counter()
            for _, arm, count in event["args"]["arms"]:
                counts[arm] += count
            found.append(dict(counts))
    return found


def even(runs: Mapping[str, Sequence[dict[str, Any]]]) -> int:
    """Leave as many steps in all runs as the shortest has, since a limit may have ended some early; return that."""
    count = min(len(run["rows"]) for made in runs.values() for run in made)
    for run in (run for made in runs.values() for run in made):
        del run["rows"][count:]
    return count


def numbers(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What equal runs have in common."""
    return [{key: value for key, value in compared(row).items() if key != ARMS} for row in run["rows"]]


def describe(case: str, runs: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A contender's ratios to plain decoding, paired by step."""
    found: dict[str, Any] = {"case": case}
    for name in ("gen", "step"):
        pairs = [
            [(a[f"timing_s/{name}"], b[f"timing_s/{name}"]) for a, b in zip(ours["rows"], theirs["rows"], strict=True)]
            for ours, theirs in zip(runs, plain, strict=True)
        ]
        late = [pair[FROM_STEP - 1 :] for pair in pairs]
        found[f"{name}_ratio"] = statistics.median(sum(b for _, b in run) / sum(a for a, _ in run) for run in late)
        steps = zip(*late, strict=True)  # one slow step of one repeat is noise
        found[f"{name}_worst"] = min(statistics.median(b / a for a, b in step) for step in steps)
        ten = [(sum(a for a, _ in run[:10]), sum(b for _, b in run[:10])) for run in pairs]
        found[f"{name}_first_ten"] = statistics.median(a / b for a, b in ten)
    rows = [row for run in runs for row in run["rows"][FROM_STEP - 1 :]]
    found["gpu_share"] = sum(r["perf/forward_seconds"] for r in rows) / sum(r["timing_s/gen"] for r in rows)
    tokens = sum(row["perf/throughput"] * row["timing_s/step"] for row in rows)
    found["tokens_per_s"] = tokens / sum(row["timing_s/gen"] for row in rows)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="countdown-gpu", help="a recipe's name or file")
    parser.add_argument("--contenders", default="plain,default", help="of " + "; ".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1200, help="seconds after which a run is ended; its steps count")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--gpu", help="the GPU's name, for the result")
    parser.add_argument("--name", default="defaults", help="name of the result file, before the hardware")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    cases = args.contenders.split(",")
    if "plain" not in cases:
        raise SystemExit("name plain among the contenders: it is what the others are held against")
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for case in cases if repeat % 2 == 0 else reversed(cases):
                runs[case].append(train(args, case, Path(folder) / f"{case}-{repeat}"))
    if even(runs) < FROM_STEP:
        raise SystemExit(f"fewer than {FROM_STEP} steps were done in time; raise --limit")
    true = numbers(runs["plain"][0])
    rows: list[dict[str, Any]] = []
    for case, made in runs.items():
        verdict = describe(case, made, runs["plain"])
        verdict["equal_metrics"] = all(numbers(run) == true for run in made)
        print(case, {key: round(v, 3) if isinstance(v, float) else v for key, v in verdict.items() if key != "case"})
        kept = [[{key: row[key] for key in KEPT if key in row} for row in run["rows"]] for run in made]
        rows.append(verdict | {"process_seconds": [run["seconds"] for run in made], "runs": kept})
    write_result(
        args.out or result_path(args.name, args.gpu),
        "defaults",
        rows,
        argv=[sys.argv[0], *argv],
        versions=package_versions(PACKAGES),
        commit_hash=args.commit,
        **({"gpu": args.gpu} if args.gpu else {}),
    )
    if not all(row["equal_metrics"] for row in rows):
        raise SystemExit("metrics differ between runs: speculation changed a token")


if __name__ == "__main__":
    main(sys.argv[1:])
