"""Fuzzes everything that reads files: documents that are nearly right, and what each loader makes of them.

    python bench/fuzz.py --cases 100000                     a campaign; findings go to the folder --findings
    python bench/fuzz.py --replay 7/1234                    one case again, with its traceback
    python bench/fuzz.py --targets report,resume            only what these loaders read
    python bench/fuzz.py --against FOLDER --out FILE        the negative control, on a checkout of commit 0a01706

A case is a function of seed and number alone (`fuzzing/cases.py`), so a finding is two numbers; it is written down with
the changes that are needed for it and the files they made. A campaign that was stopped goes on behind its last case
with --from. Exit code 1: there is a finding, or a class of faults that --against has not found again. The result goes
to bench/results/ only with --record, and with --control what --against wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from fuzzing.cases import Case, make_case
from fuzzing.children import Arena, load_corpus, run_case, run_cases, warm_up
from fuzzing.control import Control
from fuzzing.older import commit_of, use_checkout
from fuzzing.targets import TARGETS
from fuzzing.verdicts import FAULTS, LOADED, REFUSED, Verdict
from record import RESULTS, package_versions, write_result

BATCH = 2000
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "pyyaml", "jinja2")


@dataclass
class Finding:
    """What was found, the first case that found it, and how often it came again."""

    case: Case
    verdict: Verdict
    count: int = 1


@dataclass
class Campaign:
    """The counts of a campaign, and its findings by signature."""

    kinds: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    num_documents: int = 0
    num_parsed: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def num_cases(self) -> int:
        return self.kinds.total()

    def add(self, case: Case, verdict: Verdict) -> bool:
        """Count a case; whether it is the first of its kind."""
        self.kinds[verdict.kind] += 1
        self.targets[case.target] += 1
        self.num_documents += len(case.documents)
        self.num_parsed += verdict.num_parsed
        signature = verdict.signature(case.target)
        if not verdict.is_fault:
            return False
        if signature in self.findings:
            self.findings[signature].count += 1
            return False
        self.findings[signature] = Finding(case, verdict)
        return True

    def line(self, seconds: float) -> str:
        share, rate = 100 * self.num_parsed / max(self.num_documents, 1), self.num_cases / max(seconds, 1e-9)
        return (
            f"{self.num_cases:,} cases, {rate:.0f} per second, {share:.0f} % still parse: "
            f"{self.kinds[LOADED]:,} loaded, {self.kinds[REFUSED]:,} refused, "
            f"{sum(self.kinds[kind] for kind in FAULTS):,} faults of {len(self.findings)} kinds"
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row per target, for the result file."""
        faults = {name: Counter[str]() for name in self.targets}
        for finding in self.findings.values():
            faults[finding.case.target][finding.verdict.kind] += finding.count
        return [
            {"target": name, "cases": count, "faults": dict(faults[name])}
            for name, count in sorted(self.targets.items())
        ]


def run_campaign(
    arena: Arena, seed: int, numbers: range, targets: frozenset[str] | None = None, limit_s: float | None = None
) -> Iterator[tuple[Campaign, Finding | None]]:
    """The campaign after every case, and its finding if it is a new one."""
    campaign = Campaign()
    for case, verdict in run_numbers(arena, seed, numbers, targets, limit_s):
        is_new = campaign.add(case, verdict)
        yield campaign, campaign.findings[verdict.signature(case.target)] if is_new else None


def run_numbers(
    arena: Arena,
    seed: int,
    numbers: range,
    targets: frozenset[str] | None = None,
    limit_s: float | None = None,
    left_out: Collection[str] = (),
) -> Iterator[tuple[Case, Verdict]]:
    """The cases of these numbers, without those for targets that are left out, and their verdicts."""
    begin = time.monotonic()
    for first in range(numbers.start, numbers.stop, BATCH):
        cases = [make_case(seed, index, targets) for index in range(first, min(first + BATCH, numbers.stop))]
        for done in run_cases([case for case in cases if case.target not in left_out], arena):
            yield done
            if limit_s is not None and time.monotonic() - begin > limit_s:
                return


def smallest(finding: Finding, arena: Arena) -> Case:
    """The case with only those changes that its finding needs."""
    wanted = finding.verdict.signature(finding.case.target)
    case = finding.case
    if finding.verdict.kind == "hang" or len(case.places()) == 1:
        return case
    for place in case.places():
        smaller = case.without(place)
        ((_, verdict),) = run_cases([smaller], arena)
        if smaller.places() and verdict.signature(case.target) == wanted:
            case = smaller
    return case


def write_finding(finding: Finding, arena: Arena, folder: Path) -> Path:
    """Write a finding's case: the files that were changed, and what became of them."""
    case = smallest(finding, arena)
    place = folder / f"{case.seed}-{case.index}"
    shutil.rmtree(place, ignore_errors=True)
    (place / "canary").mkdir(parents=True)
    case.write(place / "case", place / "canary")
    changed = {document.path for document in case.documents}
    for file in [file for file in (place / "case").rglob("*") if file.is_file() or file.is_symlink()]:
        if str(file.relative_to(place / "case")) not in changed and file.name not in ("manifest.json",):
            file.unlink()
    verdict = finding.verdict
    note = (
        f"{verdict.kind}: {FAULTS[verdict.kind]}\n{case.describe()}\n"
        f"{verdict.error} in {verdict.frame or case.target}\n"
        f"{verdict.message}\n\npython bench/fuzz.py --replay {case.seed}/{case.index}\n"
    )
    (place / "finding.txt").write_text(note, encoding="utf-8", errors="backslashreplace")
    return place


@contextmanager
def opened_arena() -> Iterator[Arena]:
    """An arena in memory, if the system has a folder there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        yield Arena.make(Path(folder) / "arena")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first case")
    parser.add_argument("--targets", help=f"only these: {', '.join(TARGETS)}")
    parser.add_argument("--limit", type=float, help="seconds after which the campaign stops")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", metavar="SEED/NUMBER")
    parser.add_argument("--record", action="store_true", help="write bench/results/fuzz-cpu.json")
    parser.add_argument(
        "--control",
        type=Path,
        help="JSON about older code, for --record; without it, what is recorded",
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="run on the package of this older checkout")
    parser.add_argument("--out", type=Path, help="where --against writes its JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    targets = frozenset(args.targets.split(",")) if args.targets else None
    if targets and targets - set(TARGETS):
        sys.exit(f"no target {', '.join(sorted(targets - set(TARGETS)))}; there are {', '.join(TARGETS)}")
    if args.against:
        use_checkout(args.against)
    with opened_arena() as arena:
        if args.replay:
            seed, _, index = args.replay.partition("/")
            case = make_case(int(seed), int(index), targets)
            print(ascii(case.describe()))
            print(ascii(run_case(case, arena, traceback.print_exception)))
            return 0
        if args.against:
            return _run_against(args, arena, targets)
        warm_up(arena, targets)
        with opened_arena() as other:  # children are still at work in the first one when a finding is made smaller
            return _run(args, arena, other, targets)


def _run(args: argparse.Namespace, arena: Arena, other: Arena, targets: frozenset[str] | None) -> int:
    begin = told = time.monotonic()
    campaign = Campaign()
    numbers = range(args.first, args.first + args.cases)
    for campaign, finding in run_campaign(arena, args.seed, numbers, targets, args.limit):
        if finding is not None:
            place = write_finding(finding, other, args.findings)
            print(f"{place}: {finding.verdict.signature(finding.case.target)!a}", flush=True)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(campaign.line(told - begin), flush=True)
    seconds = time.monotonic() - begin
    print(campaign.line(seconds))
    for signature, found in sorted(campaign.findings.items(), key=lambda entry: -entry[1].count):
        print(f"{found.count:6} {signature!a}")
    if args.record:
        _record(args, campaign, seconds)
    return 1 if campaign.findings else 0


def _run_against(args: argparse.Namespace, arena: Arena, targets: frozenset[str] | None) -> int:
    """The campaign on older code: which of its classes of faults are found again."""
    unfit = {name: found for name, found in load_corpus(arena, targets).items() if found.kind != LOADED}
    for name, found in unfit.items():
        print(f"left out: {name}, {found.signature(name)!a} {found.message!a}")
    begin = told = time.monotonic()
    campaign, control = Campaign(), Control()
    numbers = range(args.first, args.first + args.cases)
    for case, verdict in run_numbers(arena, args.seed, numbers, targets, args.limit, unfit):
        campaign.add(case, verdict)
        control.add(case, verdict)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(campaign.line(told - begin), flush=True)
    print(campaign.line(time.monotonic() - begin))
    for row in control.rows():
        print(f"{row['cases']:6} {row['class']}: {row.get('case', 'not found')} {row.get('verdict', '')}")
    if args.out:
        outcome = {
            "commit": commit_of(args.against),
            "seed": args.seed,
            "num_cases": campaign.num_cases,
            "left_out": sorted(unfit),
            "kinds": dict(campaign.kinds),
            "classes": control.rows(),
        }
        args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    return 1 if control.missing else 0


def _record(args: argparse.Namespace, campaign: Campaign, seconds: float) -> None:

    place = RESULTS / "fuzz-cpu.json"
    source = args.control or place
    known = json.loads(source.read_text()) if source.is_file() else {}
    control = known if args.control else known.get("control")
    write_result(
        place,
        "fuzz",
        campaign.rows(),
        argv=sys.argv,
        versions=package_versions(PACKAGES),
        seed=args.seed,
        num_cases=campaign.num_cases,
        num_documents=campaign.num_documents,
        num_still_parsed=campaign.num_parsed,
        kinds=dict(campaign.kinds),
        cases_per_second=round(campaign.num_cases / seconds, 1),
        control=control,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
