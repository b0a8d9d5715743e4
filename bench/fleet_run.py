"""Whole runs of a fleet beside the same run with one worker: where the time goes, and what faults cost; one JSON file.

    python bench/fleet_run.py                          with Ray: pip install 'paceline[ray]'
    python bench/fleet_run.py --parts tricks --steps 8

The demo's task and model. Every run is a process of its own with a Ray of its own, so that each starts from nothing;
the first step, in which kernels are loaded, is left out. `dealt` is a fleet without tricks: nothing moves once it is
dealt. A fault is a signal that a worker's process gets right after it was told something; counted until the driver
knows, and until another worker has joined. Rows, texts and weights of all runs are compared with those of one worker.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import package_versions, result_path, write_result
from rich.console import Console
from safetensors.torch import load_file

from paceline.config import load
from paceline.fleet import driver, fleet_opening
from paceline.fleet.display import Display
from paceline.fleet.fleet_view import Command, Learn, Ledger, Prices, Publish, Rollout, RunAhead
from paceline.fleet.folder import compared, read_metrics, step_name
from paceline.fleet.messages import Joined, Lost, Report
from paceline.fleet.opening import find_recipe, open_run
from paceline.fleet.ray_carrier import RayCarrier
from paceline.fleet.settings import RootSettings

PACKAGES = ("paceline", "torch", "numpy", "ray")
CONTENDERS: dict[str, dict[str, str]] = {
    "one": {},
    "dealt": {"fleet.workers": "2"},
    "moved": {"fleet.workers": "2"},
    "ahead": {"fleet.workers": "2", "engine.run_ahead": "true"},
}
FAULTS: dict[str, tuple[type[Any], signal.Signals]] = {
    "killed while it fetches weights": (Publish, signal.SIGKILL),
    "killed while it generates": (Rollout, signal.SIGKILL),
    "killed while it learns": (Learn, signal.SIGKILL),
    "killed while it runs ahead": (RunAhead, signal.SIGKILL),
    "stopped while it generates": (Rollout, signal.SIGSTOP),
}
SHARES = ("waiting", "useful", "generate", "learn", "publish", "run_ahead", "dealing")
TIMES = ("step", "gen", "update")


# --- in the process of a run ------------------------------------------------------------------------------------------


class Sabotage(RayCarrier):
    """Sends one worker a signal after the `at`-th command of a kind, and notes when it was missed and replaced."""

    moment: type[Any] = Rollout
    how = signal.SIGKILL
    at = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._process_ids: dict[int, int] = {}
        self._num_seen = 0
        self.struck: tuple[int, float] | None = None
        self.found: dict[str, Any] = {}
        Sabotage.latest = self

    latest: Sabotage

    def send(self, command: Command, payload: Any) -> None:
        super().send(command, payload)
        if isinstance(command, self.moment):
            self._num_seen += 1
            if self._num_seen == self.at:
                self.struck = command.worker, time.perf_counter()
                os.kill(self._process_ids[command.worker], self.how)

    def collect(self) -> list[tuple[int, Report]]:
        found = super().collect()
        for number, report in found:
            if isinstance(report, Joined):
                self._process_ids[number] = report.process_id
            if self.struck is not None and isinstance(report, Joined | Lost):
                name = "replaced_s" if isinstance(report, Joined) else "noticed_s"
                self.found.setdefault(name, round(time.perf_counter() - self.struck[1], 3))
                if isinstance(report, Lost):
                    self.found.setdefault("reason", report.reason)
        return found


def run_once(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """A whole run in this process; the run's seconds and, with a fault, what became of it."""
    overrides = {
        "rl.steps": str(args.steps),
        "rl.prompts_per_step": str(args.prompts),
        "eval.items": "0",
        "run.compare": "false",
        "run.loggers": "none",
        "run.checkpoint_every": "0",
        "fleet.answer_timeout_s": "5",
    }
    if args.once == "dealt":
        setattr(driver, "Ledger", functools.partial(Ledger, Prices(max_moves=0)))  # noqa: B010
    if args.fault:
        Sabotage.moment, Sabotage.how = FAULTS[args.fault]
        Sabotage.at = args.steps
        setattr(fleet_opening, "RayCarrier", Sabotage)  # noqa: B010
    settings = load(RootSettings, find_recipe("countdown-cpu"), overrides | CONTENDERS[args.once])
    begin = time.perf_counter()
    with open_run(settings, settings.model.path, path, Display(1, Console(quiet=True))) as run:
        opened = time.perf_counter() - begin
        run.train()
    found = {"opened_s": round(opened, 2), "run_s": round(time.perf_counter() - begin - opened, 2)}
    return found | (Sabotage.latest.found if args.fault else {})


# --- around it --------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, folder: Path, contender: str, fault: str = "") -> tuple[dict[str, Any], Path]:
    path = folder / (fault or contender).replace(" ", "-")
    command = [sys.executable, __file__, "--once", contender, "--fault", fault, "--folder", str(path)]
    command += ["--steps", str(args.steps), "--prompts", str(args.prompts)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{fault or contender}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), path


def digest(path: Path, num_steps: int) -> str:
    """Of all that must be equal: compared metrics, texts and weights."""
    found = hashlib.sha256()
    for row in read_metrics(path):
        found.update(json.dumps(compared(row)).encode())
    for step in range(1, num_steps + 1):
        found.update((path / "rollouts" / f"{step_name(step)}.jsonl").read_bytes())
    weights = load_file(path / "checkpoints" / step_name(num_steps) / "policy" / "model.safetensors")
    for name in sorted(weights):
        found.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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


def measure_tricks(args: argparse.Namespace, folder: Path, seen: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for contender in CONTENDERS:
        said, path = run(args, folder, contender)
        seen[contender] = digest(path, args.steps)
        row = {"part": "tricks", "contender": contender, **said, **describe(path)}
        row["is_equal"] = seen[contender] == seen["one"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def measure_faults(args: argparse.Namespace, folder: Path, seen: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for contender in ("one", "ahead"):
        if contender not in seen:
            seen[contender] = digest(run(args, folder, contender)[1], args.steps)
    for fault in FAULTS:
        said, path = run(args, folder, "ahead", fault)
        row = {"part": "faults", "fault": fault, **said, "is_equal": digest(path, args.steps) == seen["one"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


PARTS: dict[str, Callable[[argparse.Namespace, Path, dict[str, str]], list[dict[str, Any]]]] = {
    "tricks": measure_tricks,
    "faults": measure_faults,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step, each answered 8 times")
    parser.add_argument("--once", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/fleet-run-<hardware>.json)")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    if args.once:
        print(json.dumps(run_once(args, args.folder)))
        return
    seen: dict[str, str] = {}
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for part in args.parts.split(",") for row in PARTS[part](args, Path(folder), seen)]
    if not args.dry:
        path, versions = args.out or result_path("fleet-run"), package_versions(PACKAGES)
        # The machine may have other users: figures are to be read with how busy it was before.
        load_before = round(before, 2)
        write_result(path, "fleet-run", rows, argv=[sys.argv[0], *argv], versions=versions, load_before=load_before)


if __name__ == "__main__":
    main(sys.argv[1:])
