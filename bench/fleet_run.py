"""Whole runs of a fleet against the same run with one worker: where time goes, what faults cost; one JSON file each.

    python bench/fleet_run.py                          with Ray: pip install -e '.[ray]'
    python bench/fleet_run.py --parts tricks --steps 8

The demo's task and model. Every run is a separate process with its own Ray, so that each starts from scratch; the first
step, which loads kernels, is left out. `dealt` is a fleet without tricks: nothing moves once it is dealt. Faults
(`fleet_faults.py`) are inflicted on shorter runs and timed until the driver knows, and until a replacement has joined;
or, where the run itself ended, from the start of the next one until the interrupted step is done. Metrics, texts and
weights of all runs are compared with those of one worker.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fleet_faults import DISK, DRIVER, FAULTS, compare, planned, what_became_of_it
from record import package_versions, result_path, write_result
from rich.console import Console
from sabotage import enlarge, small_disk

from paceline.core.config import load
from paceline.fleet import driver
from paceline.fleet.ledger import Ledger
from paceline.fleet.view import Prices
from paceline.run.open import open_run
from paceline.run.recipes import find_recipe, prepare
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics
from paceline.run.ui.display import Display

PACKAGES = ("paceline", "torch", "numpy", "ray")
CONTENDERS: dict[str, dict[str, str]] = {
    "one": {},
    "dealt": {"fleet.workers": "2"},
    "moved": {"fleet.workers": "2"},
    "ahead": {"fleet.workers": "2", "engine.run_ahead": "true"},
}
FAULT_STEPS, FAULT_PROMPTS = 3, 8
SMALL_DISK, LARGE_DISK = 64, 1024
"""Megabytes: a checkpoint takes 42."""
SHARES = ("waiting", "useful", "generate", "learn", "publish", "run_ahead", "dealing")
TIMES = ("step", "gen", "update")


# --- in the process of a run ------------------------------------------------------------------------------------------


def run_once(args: argparse.Namespace) -> dict[str, Any]:
    """Do a whole run in this process; returns its seconds and, with a fault, its outcome."""
    overrides = {
        "rl.steps": str(args.steps),
        "rl.prompts_per_step": str(args.prompts),
        "eval.items": "0",
        "run.compare": "false",
        "run.loggers": "none",
        "run.checkpoint_every": str(args.save_every),
        "fleet.answer_timeout_s": "5",
    }
    if args.once == "dealt":
        setattr(driver, "Ledger", functools.partial(Ledger, Prices(max_moves=0)))  # noqa: B010
    with planned(args.fault) as more:
        settings = load(RootSettings, find_recipe("countdown-cpu"), overrides | CONTENDERS[args.once] | more)
        begin = time.perf_counter()
        display = Display(1, Console(quiet=True))
        with open_run(prepare(settings), settings.model.path, args.folder, display, args.resume) as run:
            opened = time.perf_counter() - begin
            run.train()
            seconds = time.perf_counter() - begin - opened
            found = what_became_of_it() if args.fault else {}
    return {"opened_s": round(opened, 2), "run_s": round(seconds, 2)} | found


# --- around it --------------------------------------------------------------------------------------------------------


def start(path: Path, contender: str, steps: int, prompts: int, *more: str) -> subprocess.Popen[str]:
    """Start a run in a new process."""
    command = [sys.executable, __file__, "--once", contender, "--folder", str(path), *more]
    command += ["--steps", str(steps), "--prompts", str(prompts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The output of a finished run."""
    said, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r}: {errors}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def describe(path: Path) -> dict[str, float]:
    rows = read_metrics(path)[1:]
    found = {f"{name}_s": statistics.median(row[f"timing_s/{name}"] for row in rows) for name in TIMES}
    for name in SHARES:
        values = [row[f"perf/fleet_{name}_share"] for row in rows if f"perf/fleet_{name}_share" in row]
        if values:
            found[name] = statistics.mean(values)
    for name in ("offered", "survived"):
        found[name] = sum(row.get(f"rollout/spec_ahead_{name}", 0.0) for row in rows)
    return {name: round(value, 4) for name, value in found.items()}


def measure_tricks(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for contender in CONTENDERS:
        said = end(start(folder / contender, contender, args.steps, args.prompts))
        row = {"part": "tricks", "contender": contender, **said, **describe(folder / contender)}
        row["is_equal"] = not compare(folder / contender, folder / "one", args.steps)["differences"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


# --- faults -----------------------------------------------------------------------------------------------------------


def measure_faults(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    one = folder / "one-for-faults"
    end(start_small(one, "one"))
    rows = []
    for name in args.faults.split(";") if args.faults else [*FAULTS, *ENDS]:
        path = folder / name.replace(" ", "-").replace(",", "") / "run"
        found = ENDS[name](path) if name in ENDS else end(start_small(path, "ahead", "--fault", name))
        if found is not None:
            row = {"part": "faults", "fault": name, **found, **compare(path, one, FAULT_STEPS)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def start_small(path: Path, contender: str, *more: str) -> subprocess.Popen[str]:
    return start(path, contender, FAULT_STEPS, FAULT_PROMPTS, *more)


def kill_driver(path: Path) -> dict[str, float]:
    """Kill it in the second step, when nothing is on disk yet."""
    process = start_small(path, "ahead", "--save-every", "1")
    wait_for_rows(process, path, 1)
    process.kill()
    process.communicate()
    return resume(path, 2)


def fill_disk(path: Path) -> dict[str, float] | None:
    """The first checkpoint fits, the second does not; None if a disk cannot be mounted here."""
    disk = path.with_name("disk")
    with small_disk(disk, SMALL_DISK) as can_mount:
        if not can_mount:
            print("cannot mount a small disk here: skipping that fault", file=sys.stderr)
            return None
        process = start_small(disk / "run", "ahead", "--save-every", "1")
        errors = process.communicate()[1]
        assert process.returncode and "no space left" in errors.lower(), errors
        enlarge(disk, LARGE_DISK)
        found = resume(disk / "run", len(read_metrics(disk / "run")))
        shutil.copytree(disk / "run", path)
    return found


def resume(path: Path, num_rows: int) -> dict[str, float]:
    """Resume a run that has ended; wait until it has `num_rows` rows, then until its end."""
    begin, begin_s = time.time(), time.perf_counter()
    process = start_small(path, "ahead", "--save-every", "1", "--resume")
    wait_for_rows(process, path, num_rows, begin)
    recovered_s = time.perf_counter() - begin_s
    end(process)
    return {"recovered_s": round(recovered_s, 3)}


def wait_for_rows(process: subprocess.Popen[str], path: Path, count: int, begin: float = 0.0) -> None:
    """Wait until a process has written `count` rows since `begin`; first it drops rows that are in no checkpoint."""
    file = path / "metrics.jsonl"
    while not file.is_file() or file.stat().st_mtime < begin or len(read_metrics(path)) < count:
        if process.poll():
            raise RuntimeError(process.communicate()[1])
        time.sleep(0.02)


ENDS: dict[str, Callable[[Path], dict[str, float] | None]] = {DRIVER: kill_driver, DISK: fill_disk}
"""Faults that end the run itself."""


PARTS: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
    "tricks": measure_tricks,
    "faults": measure_faults,
}
RESULTS = {"tricks": "fleet-run", "faults": "fleet-run-faults"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step, with 8 responses each")
    parser.add_argument("--faults", help="which faults to measure, separated by semicolons (default: all)")
    parser.add_argument("--once", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save-every", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder of the JSON files (default: bench/results)")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    if args.once:
        print(json.dumps(run_once(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            # The machine may have other users: read the results with its earlier load in mind.
            load_before = round(os.getloadavg()[0], 2)
            rows = PARTS[part](args, Path(folder))
            if not args.dry:
                path, versions = result_path(RESULTS[part]), package_versions(PACKAGES)
                path = path if args.out is None else args.out / path.name
                given = [sys.argv[0], *argv]
                write_result(path, RESULTS[part], rows, argv=given, versions=versions, load_before=load_before)


if __name__ == "__main__":
    main(sys.argv[1:])
