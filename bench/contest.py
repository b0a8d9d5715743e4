"""Measures and reports a contest between engines: contenders, turns, ratios.

`bench/decode.py` (and any bench that compares whole engines) plans the parts; this file measures them. Every contender
is a separate process; one computes at a time, and the order is reversed every round, so that other load on the machine
falls on all of them. Ratios compare runs of the same round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from checkpoints import share_in_bfloat16
from peer import Peer, PeerError, Run
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

NUM_WARM_UP_TOKENS = 8
MAX_LENGTH = 2048

Prompts = Callable[[int, int], list[list[int]]]
"""(round, batch size) -> token ids. No prompt comes twice in a case, so that no cache or drafter can remember it."""


@dataclass(frozen=True)
class Contender:
    """A participant, how to load it, and the other contenders (by name) to take its ratio against."""

    name: str
    worker: str
    options: dict[str, Any] = field(default_factory=dict)
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One prompt set at one temperature."""

    prompts_name: str
    prompts: Prompts
    temperature: float = 0.0

    def __str__(self) -> str:
        return f"{self.prompts_name}, T={self.temperature:g}"


@dataclass(frozen=True)
class Part:
    """Contenders measured together on the same model and cases."""

    name: str
    model: Path
    contenders: Sequence[Contender]
    cases: Sequence[Case]


@dataclass(frozen=True)
class Effort:
    """How much to measure of every case."""

    num_tokens: int
    num_rounds: int
    batches: Sequence[int]
    num_threads: int


class Contest:
    """Runs parts one after the other and collects their rows."""

    def __init__(self, effort: Effort, pythons: dict[str, str], progress: Progress) -> None:
        self._effort = effort
        self._pythons = pythons
        self._progress = progress
        self.rows: list[dict[str, Any]] = []
        self.versions: dict[str, str] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}
        self.models: dict[str, dict[str, float]] = {}

    def run(self, part: Part) -> None:
        """Load every contender once, then measure case by case."""
        self.models[part.model.name] = {"share_of_weights_that_fit_bfloat16": share_in_bfloat16(part.model)}
        with ExitStack() as stack:
            peers = self._load(part, stack)
            for case in part.cases:
                for batch in self._effort.batches:
                    runs = self._measure(peers, case, batch, f"{part.model.name}, {case}, batch {batch}")
                    self.rows += summarize(part, case, batch, self._effort.num_threads, runs)

    def _load(self, part: Part, stack: ExitStack) -> dict[str, Peer]:
        """The processes by contender's name; a peer that cannot load is skipped and named, Paceline itself never."""
        peers: dict[str, Peer] = {}
        task = self._progress.add_task("", total=len(part.contenders))
        for contender in part.contenders:
            self._progress.update(task, description=f"{part.model.name}: loading {contender.name}")
            python = self._pythons.get(contender.worker, sys.executable)
            peer = stack.enter_context(Peer(contender.worker, python, self._effort.num_threads))
            try:
                self._load_one(peer, part.model, contender)
                peers[contender.name] = peer
            except PeerError as error:
                if contender.worker == "paceline":
                    raise
                self.skipped[contender.name] = str(error).splitlines()[-1]
            self._progress.advance(task)
        self._progress.remove_task(task)
        return peers

    def _load_one(self, peer: Peer, model: Path, contender: Contender) -> None:
        peer.load(model, max_batch=max(self._effort.batches), max_length=MAX_LENGTH, **contender.options)
        self.versions |= peer.versions
        self.settings[contender.name] = peer.settings

    def _measure(self, peers: dict[str, Peer], case: Case, batch: int, title: str) -> dict[str, list[Run]]:
        """Rounds in which every contender generates once, in alternating order, after an untimed warm-up."""
        num_tokens, num_rounds = self._effort.num_tokens, self._effort.num_rounds
        task = self._progress.add_task(title, total=len(peers) * num_rounds)
        for peer in peers.values():
            peer.generate(case.prompts(-1, batch), min(NUM_WARM_UP_TOKENS, num_tokens), case.temperature)
        runs: dict[str, list[Run]] = {name: [] for name in peers}
        for round_index in range(num_rounds):
            prompts = case.prompts(round_index, batch)
            for name in list(peers) if round_index % 2 == 0 else reversed(peers):
                self._progress.update(task, description=f"{title}: {name}")
                runs[name].append(peers[name].generate(prompts, num_tokens, case.temperature, seed=round_index))
                self._progress.advance(task)
        self._progress.remove_task(task)
        return runs


def summarize(part: Part, case: Case, batch: int, num_threads: int, runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One row per contender that ran."""
    place = {"part": part.name, "model": part.model.resolve().name, "prompts": case.prompts_name}
    numbers = {"temperature": case.temperature, "batch": batch, "threads": num_threads}
    present = [contender for contender in part.contenders if contender.name in runs]
    return [{**place, **numbers, **row(contender, case, runs)} for contender in present]


def row(contender: Contender, case: Case, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Speed, ratios and equality of one contender in one case."""
    own = runs[contender.name]
    others = {name: runs[name] for name in contender.against if name in runs}
    # A peer samples from a stateful generator: only its greedy tokens can be compared.
    can_compare = case.temperature == 0 or contender.worker == "paceline"
    references = [name for name in runs if name != contender.name and (name in others or name == "transformers")]
    return {
        "contender": contender.name,
        "exact": contender.options.get("exact", True) if contender.worker == "paceline" else None,
        "tokens": len(own[0].token_ids[0]),
        "rounds": len(own),
        **speeds(own),
        "ratios": {name: paired_ratio(own, other) for name, other in others.items()},
        "cpu_ratios": {name: paired_cpu_ratio(own, other) for name, other in others.items()},
        "sequences": sum(len(run.token_ids) for run in own),
        "equal": {name: num_equal(own, runs[name]) for name in references} if can_compare else {},
    }


def speeds(runs: list[Run]) -> dict[str, Any]:
    """`cores` is CPU time over wall time: above 1, several threads worked; below, others used the machine."""
    rates = [run.num_tokens / run.seconds for run in runs]
    accepted = [run.accept_length for run in runs if run.accept_length is not None]
    return {
        "tokens_per_s": round(median(rates), 2),
        "tokens_per_s_min": round(min(rates), 2),
        "tokens_per_s_max": round(max(rates), 2),
        "tokens_per_cpu_s": round(median(run.num_tokens / run.cpu_seconds for run in runs), 2),
        "cores": round(median(run.cpu_seconds / run.seconds for run in runs), 2),
        "accept_length": round(median(accepted), 3) if accepted else None,
    }


def paired_ratio(ours: list[Run], theirs: list[Run]) -> float:
    """The speedup of `ours`: the median over rounds of the ratio within the round."""
    return round(median(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)), 3)


def paired_cpu_ratio(ours: list[Run], theirs: list[Run]) -> float:
    """The same in CPU seconds, which other load on the machine affects less."""
    return round(median(b.cpu_seconds / a.cpu_seconds for a, b in zip(ours, theirs, strict=True)), 3)


def num_equal(ours: list[Run], theirs: list[Run]) -> int:
    """Sequences whose token ids agree from first to last."""
    pairs = zip(ours, theirs, strict=True)
    return sum(a == b for run, other in pairs for a, b in zip(run.token_ids, other.token_ids, strict=True))


def print_tables(rows: Sequence[dict[str, Any]], models: dict[str, dict[str, float]], skipped: dict[str, str]) -> None:
    """Print one table per model and part to standard output; a file or pipe gets wide lines, not folded ones."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    for title in dict.fromkeys(_title(row) for row in rows):
        console.print(_table(title, [row for row in rows if _title(row) == title]))
    for model, facts in models.items():
        share = facts["share_of_weights_that_fit_bfloat16"]
        console.print(
            f"{model}: bfloat16 holds {share:.1%} of the weights exactly (all: Paceline reads half the bytes)"
        )
    for row in rows:
        if row["cores"] > 1.1 * row["threads"]:
            where = f"{_title(row)}, batch {row['batch']}"
            console.print(f"unfair: {row['contender']} used {row['cores']} cores ({where})", markup=False)
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}", markup=False)


def _title(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['part']}: {row['tokens']} tokens, median of {row['rounds']}"


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("prompts", "T", "batch"):
        table.add_column(heading)
    table.add_column("contender", no_wrap=True)
    for heading in ("tokens/s", "min-max", "per CPU s", "cores"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("times as fast as", "accept", "equal sequences"):
        table.add_column(heading)
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous and _place(previous) != _place(row):
            table.add_section()
        table.add_row(*_place(row), *_cells(row))
    return table


def _place(row: dict[str, Any]) -> list[str]:
    return [row["prompts"], f"{row['temperature']:g}", str(row["batch"])]


def _cells(row: dict[str, Any]) -> list[str]:
    """A row as the table shows it; the JSON holds the rest."""
    rate, low, high = (f"{row[name]:.1f}" for name in ("tokens_per_s", "tokens_per_s_min", "tokens_per_s_max"))
    speed = [rate, f"{low}-{high}", f"{row['tokens_per_cpu_s']:.1f}", f"{row['cores']:.2f}"]
    ratios = "\n".join(f"{ratio:.2f} {name}" for name, ratio in row["ratios"].items())
    equal = "\n".join(f"{count}/{row['sequences']} {name}" for name, count in row["equal"].items())
    accept = f"{row['accept_length']:.2f}" if row["accept_length"] else ""
    return [row["contender"], *speed, ratios, accept, equal]
