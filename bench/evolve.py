"""How well a drafter tracks a policy that learns: accept length over a run, trained throughout against frozen.

    python bench/evolve.py                           the demo's model, 30 steps, frozen after the tenth
    python bench/evolve.py --recipe smollm2-135m-math --model PATH --device cuda

Both runs start from scratch and draft with the learned drafter alone, verifying every draft token, so their tokens and
weights are equal and only the drafter differs. Accept length includes the policy's own token. Greedy drafting is judged
beside drafting with the policy's noise: for every draft token, it is known what each temperature would have drafted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import package_versions, result_path, write_result

from paceline.core.config import load
from paceline.rollout.drafters.eagle import TAUS, EagleDrafter
from paceline.rollout.drafters.model_drafter import GuessShape
from paceline.run.local import LocalBackend
from paceline.run.open import open_run
from paceline.run.recipes import find_recipe, prepare
from paceline.run.settings import RootSettings
from paceline.run.store.folder import read_metrics
from paceline.run.ui.display import make_display

PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy", "numba")
CASES = ("trained", "frozen")


def settings_of(args: argparse.Namespace) -> RootSettings:
    given = dict(pair.split("=", 1) for pair in args.set)
    fixed = {
        "model.path": args.model,
        "model.device": args.device,
        "rl.steps": str(args.steps),
        "rl.warmup_steps": "0",
        "engine.drafter": "eagle",
        "spot.enabled": "true",
        "spot.open_share": str(args.share),
        "budget.always": "true",
        "eval.items": "0",
        "run.loggers": "none",
        "run.compare": "false",
        "run.checkpoint_every": "0",
    }
    return load(RootSettings, find_recipe(args.recipe), {**fixed, **given})


class Judge:
    """Counts how often each candidate temperature is right at each draft position, given a right chain before it."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self._own = drafter.tau.judge
        self._depth = drafter.shape.depth
        drafter.tau.judge = self.judge  # type: ignore[method-assign]
        self.clear()

    def clear(self) -> None:
        self.right, self.seen = np.zeros((self._depth, len(TAUS))), np.zeros(self._depth)

    def judge(self, sampled: Sequence[Any], truth: Sequence[Sequence[int]]) -> None:
        for own_sampled, came in zip(sampled, truth, strict=True):
            for at, token in enumerate(came):
                self.right[at] += own_sampled[at] == token
                self.seen[at] += 1
        self._own(sampled, truth)


def measure(args: argparse.Namespace, case: str, folder: Path) -> list[dict[str, Any]]:
    """One run, with a row for every step."""
    settings, rows = settings_of(args), []
    with (
        make_display(settings.rl.steps, is_quiet=True) as display,
        open_run(prepare(settings), settings.model.path, folder, display) as run,
    ):
        assert isinstance(run.backend, LocalBackend)
        engine, spot = run.backend.engine, run.backend.spot
        eagle = engine.eagle
        assert isinstance(eagle, EagleDrafter) and spot is not None
        eagle.shape = GuessShape(args.depth, args.width)
        judge = Judge(eagle)
        for step in range(1, args.steps + 1):
            if case == "frozen" and step == args.freeze + 1:
                spot.work = lambda *given: {}  # type: ignore[method-assign]
            judge.clear()
            run.step()
            row = read_metrics(folder)[-1]
            drafts = engine.stats.drafters["eagle"]
            rows.append(
                {
                    "case": case,
                    "step": step,
                    "accept_length": round(row["rollout/spec_accept_length"], 4),
                    "reward": row["reward"],
                    "length": row["completions/mean_length"],
                    "version": eagle.version,
                    "spot_seconds": row.get("timing_s/spot", 0.0),
                    "step_seconds": row["timing_s/step"],
                    "right": (judge.right / np.maximum(judge.seen, 1)[:, None]).round(4).tolist(),
                    "judged": judge.seen.astype(int).tolist(),
                    "tau": TAUS[eagle.chosen],
                    "verified": drafts.verified,
                    "accepted": drafts.accepted,
                }
            )
            print(
                f"{case:>8} step {step:2}: accept length {rows[-1]['accept_length']:.2f}, tau {rows[-1]['tau']}",
                flush=True,
            )
    return rows


def chain_length(right: Sequence[float]) -> float:
    """Accept length of chains with these conditional acceptance rates by position."""
    return 1.0 + float(np.cumprod(right).sum())


def summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        last = own[-max(len(own) // 3, 1) :]
        right = np.average([row["right"] for row in last], axis=0, weights=[row["judged"][0] + 1 for row in last])
        lengths = ", ".join(f"tau {tau:g}: {chain_length(right[:, i].tolist()):.2f}" for i, tau in enumerate(TAUS))
        accept = np.mean([row["accept_length"] for row in last])
        lines.append(f"{case}: accept length {accept:.2f} in the last third; by its own chains {lengths}")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="countdown-cpu", help="a recipe's name or file")
    parser.add_argument("--model", default="shipped:countdown", help="model folder or name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--freeze", type=int, default=10, help="step after which the frozen drafter stops learning")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens in a row")
    parser.add_argument("--width", type=int, default=1, help="candidates per position")
    parser.add_argument("--share", type=float, default=0.5, help="share of a step's time for drafter training")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--name", default="evolve", help="name of the result file, before the hardware")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<hardware>.json)")
    parser.add_argument("--commit", help="commit measured, if there is no git checkout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    gpu = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else None
    rows: list[dict[str, Any]] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(args, case, Path(folder) / "run")
    path = args.out or result_path(args.name, gpu)
    versions = package_versions(PACKAGES)
    write_result(path, "evolve", rows, argv=[sys.argv[0], *argv], versions=versions, gpu=gpu, commit_hash=args.commit)
    print(summary(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
