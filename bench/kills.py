"""1,000 kills at random moments of short runs: each resumes to the end it would have had, and leaves nothing behind.

    python bench/kills.py                       all of them: bench/results/kills-cpu.json
    python bench/kills.py --continue            the rest, after this script itself was stopped
    python bench/kills.py --kills 20 --cold 1   fewer
    python bench/kills.py --jobs 4              four at a time, each with a seed of its own: a run mostly waits

A case is a run of one kind that is struck once or several times, each time at a random moment, and resumed. A moment is
a time since the start, or since the run wrote a random number of rows. Most attacks are SIGKILL; the others ask the run
to end: SIGTERM, SIGHUP, Ctrl-C, or a burst of them. At the end, compared metrics, rollouts and weights must be those of
a run that nobody struck, byte for byte; after each attack no process and no temporary file may be left. Runs fork from
this process; one in nine starts cold. `--fault` breaks something on purpose and must be found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from record import RESULTS, ROOT, package_versions, write_result
from struck_run import (
    MEMORY,
    SOFT,
    Attack,
    Hook,
    TrainProcess,
    fork_children,
    hidden_files,
    hide_memory,
    temporary_files,
    wait_until_gone,
)

sys.path.insert(0, str(ROOT / "tests"))
from small_run import compared_rows, make_model, make_settings, same_weights, train, weights, write_task

from paceline.core.linux import adopt_orphans
from paceline.run.settings import RootSettings
from paceline.run.state import RunState
from paceline.run.store.checkpoints import Checkpoints
from paceline.run.store.sealed import FoundCheckpoint

PACKAGES = ("paceline", "torch", "numpy", "numba")
STEPS = 4
RUN = {"checkpoint_every": 1, "keep": 2, "loggers": "none"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "single": {"run": RUN},
    "ahead": {
        "engine": {"run_ahead": True, "max_sequences": 16, "kv_tokens": 2048},
        "run": {**RUN, "ahead_worker": True},
    },
    "spot": {"spot": {"enabled": True, "open_share": 0.5}, "run": {**RUN, "checkpoint_every": 2}},
    "fleet": {"fleet": {"workers": 2, "in_process": True}, "run": RUN},
}
WEIGHTS = {"single": 4, "ahead": 2, "spot": 2, "fleet": 2}
COLD_EVERY = 9
NUM_ATTACKS = (1, 1, 1, 2, 2, 3)
FAULTS = ("draws", "orphan", "file")


@dataclass(frozen=True)
class Case:
    """A run and what befalls it: a pure function of seed and number."""

    number: int
    kind: str
    is_cold: bool
    attacks: tuple[Attack, ...]

    @classmethod
    def draw(cls, seed: int, number: int, soft: float) -> Case:
        rng = random.Random(f"{seed}/{number}")
        [kind] = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        attacks = tuple(Attack.draw(rng, soft) for _ in range(rng.choice(NUM_ATTACKS)))
        return cls(number, kind, number % COLD_EVERY == 0, attacks)


@dataclass(frozen=True)
class Kill:
    """One attack that met a run, and what came of it."""

    case: int
    kind: str
    start: str
    attack: str
    steps: int
    """How many the run had finished, as far as its metrics say; -1 before it had a folder."""
    code: int
    end_s: float
    """How long it took the run and all its processes to end."""
    problems: tuple[str, ...]


class Arena:
    """A folder for runs, the runs that nobody strikes, and how long a run takes."""

    def __init__(self, folder: Path, kinds: Sequence[str], fault: str | None, is_private: bool) -> None:
        self.folder, self._is_private = folder, is_private
        self._fault: str | None = None
        home = folder / "home"
        home.mkdir()
        make_model(home)
        write_task(home)
        for kind in kinds:
            tree = _settings(kind, home).model_dump(mode="json")
            (folder / f"{kind}.yaml").write_text(yaml.safe_dump(tree))
        self._seconds: dict[tuple[str, bool], float] = {}
        for kind in kinds:
            _load_kernels(kind, home, folder / "first")
            ended = self._start(self.reference(kind), kind, is_cold=False).run(None)
            assert ended.code == 0, self._log.read_text()
            self._seconds[kind, False] = ended.seconds
        for kind in kinds:
            found = differences(self.reference(kind), self.reference(kinds[0]), "reference")
            assert not found, found
        self._fault = fault

    def reference(self, kind: str) -> Path:
        return self.folder / f"reference-{kind}"

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def play(self, case: Case) -> list[Kill]:
        """Strike a run as the case says, resume it, and compare its end."""
        path = self.folder / f"case-{case.number}"
        kills: list[Kill] = []
        for number, attack in enumerate(case.attacks):
            is_cold = case.is_cold and number == 0
            found = self._strike(path, case, attack, is_cold)
            if found is None:
                break
            kills.append(found)
        if kills:
            problems = self._finish(path, case.kind)
            # Nobody knows which attack it was.
            kills = [Kill(**{**asdict(kill), "problems": (*kill.problems, *problems)}) for kill in kills]
        if not any(kill.problems for kill in kills):
            shutil.rmtree(path, ignore_errors=True)
        return kills

    def _strike(self, path: Path, case: Case, attack: Attack, is_cold: bool) -> Kill | None:
        """None if the run was over first."""
        self._log.write_bytes(b"")
        before, is_begun = temporary_files(self._is_private), (path / "config.yaml").is_file()
        written, hidden = _content(path / "metrics.jsonl"), set(hidden_files(path, self.reference(case.kind)))
        seconds = self._duration(case.kind, is_cold)
        if attack.num_rows is None:
            is_due, delay_s = (lambda: True), attack.share * seconds * (0.5 if is_begun else 1.0)
        else:
            wanted = num_rows(path) + attack.num_rows
            is_due, delay_s = (lambda: has_rows(path, wanted)), attack.share * self._seconds[case.kind, False] / STEPS
        ended = self._start(path, case.kind, is_cold).run(attack, is_due, delay_s)
        outlived, begun = wait_until_gone(), time.monotonic()
        if ended.struck_s is None:
            assert ended.code == 0, self._log.read_text()
            self._seconds[case.kind, is_cold] = ended.seconds
            return None
        problems = [f"left {what}" for what in outlived]
        problems += [f"left {name}" for name in sorted(temporary_files(self._is_private) - before)]
        if attack.is_soft:
            problems += self._ended_badly(path, attack, ended.code)
            left = set(hidden_files(path, self.reference(case.kind)))
            if written.startswith(_content(path / "metrics.jsonl")):  # it wrote no row: see what an earlier kill left
                left -= hidden
            else:
                problems += _unsaved(path)
            problems += [f"left {name}" for name in sorted(left)]
        problems += ["hung"] if ended.hung else []
        seconds = ended.seconds - ended.struck_s + time.monotonic() - begun
        start = "cold" if is_cold else "forked"
        steps = num_rows(path) - 1
        return Kill(case.number, case.kind, start, attack.name, steps, ended.code, round(seconds, 3), tuple(problems))

    def _ended_badly(self, path: Path, attack: Attack, code: int) -> list[str]:
        """What is wrong about how a run ended that was asked to."""
        said, problems = self._log.read_text(errors="replace"), []
        is_running = "paceline/cli" in said or (path / "config.yaml").exists()
        if code not in attack.exit_codes and (is_running or -code not in {number for _, number in attack.signals}):
            problems.append(f"ended with exit code {code}: {' '.join(said.split())[-1500:]}")
        if "Traceback" in said and is_running:
            problems.append(f"printed {' '.join(said.split())[-1500:]}")
        return problems

    def _finish(self, path: Path, kind: str) -> list[str]:
        """Resume a run to its end, and say what differs from the one that nobody struck."""
        self._log.write_bytes(b"")
        ended = self._start(path, kind, is_cold=False).run(None)
        left = [f"left {what}" for what in wait_until_gone()]
        if ended.code:
            return [*left, f"resumed, it ended with exit code {ended.code}: {self._log.read_text()[-300:]}"]
        whole = self.reference(kind)
        return left + differences(path, whole) + [f"left {name}" for name in hidden_files(path, whole)]

    def _start(self, path: Path, kind: str, is_cold: bool) -> TrainProcess:
        is_begun = (path / "config.yaml").is_file()
        arguments = ["--resume"] if is_begun else [str(self.folder / f"{kind}.yaml")]
        return TrainProcess([*arguments, f"--run.dir={path}", "--quiet"], self._log, is_cold, _FAULTY.get(self._fault))

    def _duration(self, kind: str, is_cold: bool) -> float:
        if (kind, is_cold) not in self._seconds:
            path = self.folder / "cold"
            self._seconds[kind, True] = self._start(path, kind, is_cold=True).run(None).seconds
            shutil.rmtree(path)
        return self._seconds[kind, is_cold]


def _settings(kind: str, home: Path) -> RootSettings:
    return make_settings(home, **{**KINDS[kind], "rl": {"steps": STEPS}, "eval": {"items": 2}})


def _load_kernels(kind: str, home: Path, path: Path) -> None:
    """Make a run in this process: those forked from it find all modules and kernels loaded."""
    train(_settings(kind, home), path)
    shutil.rmtree(path)
    assert threading.active_count() == 1, "a forked process would miss a thread, and may wait for its lock"


def differences(path: Path, other: Path, last: str = "run") -> list[str]:
    """What differs between two runs."""
    found = []
    if compared_rows(path) != compared_rows(other):
        found.append(f"the {last}'s metrics differ")
    if not same_weights(weights(path, STEPS), weights(other, STEPS)):
        found.append(f"the {last}'s weights differ")
    names = [file.name for file in (other / "rollouts").glob("step-??????.jsonl")]
    if any((path / "rollouts" / name).read_bytes() != (other / "rollouts" / name).read_bytes() for name in names):
        found.append(f"the {last}'s rollouts differ")
    return found


def has_rows(path: Path, wanted: int) -> bool:
    """Whether a run has begun, and written so many rows."""
    return (path / "config.yaml").exists() and num_rows(path) >= wanted


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _unsaved(path: Path) -> list[str]:
    finished, saved = num_rows(path) - 1, max(Checkpoints(path / "checkpoints", keep=1).steps(), default=0)
    return [f"finished {finished} steps and saved {saved}"] if saved < finished else []


def num_rows(path: Path) -> int:
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


# --- in a forked run --------------------------------------------------------------------------------------------------


def _miscount_draws() -> None:
    resume = RunState.resume

    def miscounting(state: RunState, checkpoint: FoundCheckpoint | None) -> int:
        step = resume(state, checkpoint)
        state.next_draw = abs(state.next_draw - 1)
        return step

    setattr(RunState, "resume", miscounting)  # noqa: B010


def _leave_orphan() -> None:
    if not os.fork():
        os.setsid()
        time.sleep(1000)
        os._exit(0)


def _leave_file() -> None:
    tempfile.mkstemp(prefix="paceline-")


_FAULTY: dict[str | None, Hook] = {"draws": _miscount_draws, "orphan": _leave_orphan, "file": _leave_file}


# --- the script -------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="attacks that must meet a run")
    parser.add_argument("--cold", type=int, default=100, help="how many of them on a cold process, at least")
    parser.add_argument("--soft", type=float, default=0.3, help="share of attacks that ask the run to end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of runs, comma-separated")
    parser.add_argument("--fault", choices=FAULTS, help="break this on purpose: the script must find it")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="keep what an earlier call has done")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the attacks, with seeds of their own")
    parser.add_argument("--out", type=Path, default=RESULTS / "kills-cpu.json", help="JSON file")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error("--jobs: give 1 or more")
    args.kinds = [kind for kind in args.kinds.split(",") if kind]
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds: there is no {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    return args


def remaining(args: argparse.Namespace, kills: list[Kill], first: int) -> Iterator[Case]:
    """Cases until there are enough kills."""
    number = first
    while len(kills) < args.kills or sum(kill.start == "cold" for kill in kills) < args.cold:
        case = Case.draw(args.seed, number, args.soft)
        number += 1
        if case.kind in args.kinds and (args.cold or not case.is_cold):
            yield case


def table(kills: Sequence[Kill]) -> list[dict[str, Any]]:
    """A row per kind, start and attack."""
    groups: dict[tuple[str, str, str], list[Kill]] = defaultdict(list)
    for kill in kills:
        groups[kill.kind, kill.start, kill.attack].append(kill)
    return [
        {
            "kind": kind,
            "start": start,
            "attack": attack,
            "kills": len(own),
            "faultless": sum(not kill.problems for kill in own),
            "slowest_end_s": max(kill.end_s for kill in own),
            "by_finished_steps": dict(sorted(Counter(kill.steps for kill in own).items())),
        }
        for (kind, start, attack), own in sorted(groups.items())
    ]


def merged(tables: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One table of those of several processes."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in (row for rows in tables for row in rows):
        key = row["kind"], row["start"], row["attack"]
        steps = Counter({int(step): count for step, count in row["by_finished_steps"].items()})
        if key in found:
            own = found[key]
            steps += Counter(own["by_finished_steps"])
            own |= {name: own[name] + row[name] for name in ("kills", "faultless")}
            own["slowest_end_s"] = max(own["slowest_end_s"], row["slowest_end_s"])
            own["by_finished_steps"] = dict(sorted(steps.items()))
        else:
            found[key] = row | {"by_finished_steps": dict(sorted(steps.items()))}
    return [row for _, row in sorted(found.items())]


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'kind':8}{'start':8}{'attack':9}{'kills':>6}{'faultless':>11}{'slowest end':>13}")
    for row in rows:
        print(
            f"{row['kind']:8}{row['start']:8}{row['attack']:9}{row['kills']:6}{row['faultless']:11}"
            f"{row['slowest_end_s']:11.2f} s"
        )
    total, faultless = (sum(row[key] for row in rows) for key in ("kills", "faultless"))
    print(f"{total} kills, {faultless} of them without a fault", flush=True)


def share_out(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Have several processes attack, and write one result of theirs."""
    kills, cold = (-(-number // args.jobs) for number in (args.kills, args.cold))
    outs = {
        seed: args.out.with_name(f"{args.out.stem}-seed-{seed}.json")
        for seed in range(args.seed, args.seed + args.jobs)
    }
    command = [sys.executable, __file__, *argv, "--jobs=1", f"--kills={kills}", f"--cold={cold}"]
    children = []
    for seed, out in outs.items():
        if not args.goes_on:
            out.unlink(missing_ok=True)
        if not out.is_file():
            children.append(subprocess.Popen([*command, f"--seed={seed}", f"--out={out}"]))
    codes = [child.wait() for child in children]
    if args.fault:
        return max(codes)
    if not all(out.is_file() for out in outs.values()):
        print("a process did not end by itself; --continue keeps what was done", flush=True)
        return 2
    found = [json.loads(out.read_text()) for out in outs.values()]
    rows = merged([each["rows"] for each in found])
    counts = {name: sum(each["summary"][name] for each in found) for name in ("kills", "with_faults")}
    counts |= {"seeds": [each["summary"]["seed"] for each in found]}
    counts |= {"folders_are_private": all(each["summary"]["folders_are_private"] for each in found)}
    show(rows)
    write_result(args.out, "kills", rows, argv=sys.argv, versions=package_versions(PACKAGES), summary=counts)
    for out in outs.values():
        out.unlink()
    return int(counts["with_faults"] > 0)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.jobs > 1:
        return share_out(args, argv)
    for number in SOFT:  # runs inherit it, until they handle it; `nohup` and a shell's background jobs ignore some
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    is_private = hide_memory() and adopt_orphans()
    done = args.out.with_suffix(".progress.jsonl")
    if not args.goes_on:
        done.unlink(missing_ok=True)
    lines = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
    kills = [Kill(**kill) for line in lines for kill in line["kills"]]
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=MEMORY if is_private else None))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    (folder / "tmp").mkdir()
    begun = time.monotonic()
    fork_children()
    arena = Arena(folder, args.kinds, args.fault, is_private)
    for case in remaining(args, kills, lines[-1]["case"] + 1 if lines else 0):
        found = arena.play(case)
        kills += found
        for kill in found:
            for problem in kill.problems:
                print(f"case {case.number}, {kill.kind}, {kill.attack} after step {kill.steps}: {problem}", flush=True)
        with done.open("a") as file:
            file.write(json.dumps({"case": case.number, "kills": [asdict(kill) for kill in found]}) + "\n")
        if case.number % 25 == 0:
            print(f"{len(kills)} kills in {time.monotonic() - begun:.0f} s", flush=True)
    rows, num_faults = table(kills), sum(bool(kill.problems) for kill in kills)
    show(rows)
    counts = {"kills": len(kills), "with_faults": num_faults, "seed": args.seed, "folders_are_private": is_private}
    if not args.fault:
        write_result(args.out, "kills", rows, argv=sys.argv, versions=package_versions(PACKAGES), summary=counts)
    done.unlink()
    if not num_faults:
        shutil.rmtree(folder)
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
