"""What guessing did in a run: accepted tokens by source, the choice of drafters, the drafter that learns, rows, time.

Called by `writing.py`. Everything here comes from metrics, and from the `budget` and `compare` events of the run loop.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial

from paceline.report.charts import (
    ACCENT,
    AMBER,
    GREEN,
    MIST,
    PLUM,
    SLATE,
    TEAL,
    Chart,
    Column,
    Section,
    Series,
    Shares,
    Value,
    ratio,
    tones,
)
from paceline.report.reading import RunData
from paceline.run.ui.summary import Metrics, format_seconds, number

SPEC = "rollout/spec_"
_SOURCE = re.compile(rf"{SPEC}(.+)_verified")
_DEPTH = re.compile(r"at_(\d+)")
OWN = "the policy itself"
OFF = "off"
FEW = 20
FEW_NOTE = f"Steps with fewer than {FEW} guesses are left out."
KNEE = 1.1
"""Rows are nearly free while a forward takes at most so many times as long as one of a single row."""
STEEP = 30
"""A curve that rises by more is drawn with a logarithmic axis."""
_FAMILIES = {
    "suffix": ("#1f6feb", "#5b93f0"),
    "ngram": ("#2a9d9d", "#63bcbc"),
    "eagle": ("#2f855a", "#57ab80", "#86c7a5", "#b5dfc8"),
    "+": ("#b7791f", "#d9a441", "#e9c57e", "#f3deb3"),
}
"""Shades of arms by drafter; + is several drafters asked together."""


def sources_of(run: RunData) -> list[str]:
    """Who had a guess verified, most accepted tokens first."""
    names = {match[1] for row in run.steps for name in row if (match := _SOURCE.fullmatch(name))}
    accepted = {name: sum(number(row, f"{SPEC}{name}_accepted") or 0 for row in run.steps) for name in names}
    verified = {name: sum(number(row, f"{SPEC}{name}_verified") or 0 for row in run.steps) for name in names}
    return sorted((name for name in names if verified[name]), key=lambda name: (-accepted[name], name))


def visits(row: Metrics) -> Value:
    """How often a sequence was stepped: tokens divided by tokens per visit."""
    seconds, rate = number(row, "timing_s/step"), number(row, "perf/throughput")
    tokens = None if seconds is None or rate is None else round(seconds * rate)
    return ratio(tokens, number(row, f"{SPEC}accept_length"))


def acceptance(run: RunData) -> Section:
    section = Section("accept", "Accepted guesses", short="Acceptance")
    names = sources_of(run)
    if not names:
        section.left_out.append("No guess was verified: this run had no speculation, or none that paid for its rows.")
        return section
    colours, column = tones(names), Column(run.steps)

    own = column.of(lambda row: 1.0 if visits(row) else None)
    layers = [
        Series(OWN, own, MIST),
        *(Series(name, column.of(partial(_per_visit, name)), colours[name]) for name in names),
    ]
    section.add(
        Chart(
            "accept",
            "Accept length: tokens per visit, by who they come from",
            column.x,
            layers,
            kind="stack",
            unit="tokens",
            note="The top edge is rollout/spec_accept_length; 1 is decoding without speculation.",
        ),
        "The metrics do not say how many tokens a visit brought.",
    )
    right = [Series(name, _times(column.of(partial(_right, name)), 100), colours[name]) for name in names]
    section.add(
        Chart("right", "Verified guesses that came true", column.x, right, unit="%", note=FEW_NOTE),
        "The metrics do not say how many guesses came true.",
    )
    section.add(_depths(run, names, colours), "No draft was long enough to say how far drafts come true.")
    return section


def _per_visit(name: str, row: Metrics) -> Value:
    """Accepted tokens of a source; a step in which it had none counts as 0."""
    return ratio(number(row, f"{SPEC}{name}_accepted") or 0.0, visits(row))


def _right(name: str, row: Metrics) -> Value:
    verified = number(row, f"{SPEC}{name}_verified") or 0.0
    return ratio(number(row, f"{SPEC}{name}_accepted"), verified) if verified >= FEW else None


def _depths(run: RunData, names: list[str], colours: dict[str, str]) -> Chart:
    """How far drafts come true, over the last quarter of the run."""
    last = run.steps[-max(1, len(run.steps) // 4) :]
    found: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in names}
    for row in last:
        for name in names:
            for key in row:
                match = _DEPTH.fullmatch(key.removeprefix(f"{SPEC}{name}_"))
                value = number(row, key)
                if match and value is not None:
                    found[name][int(match[1])].append(100 * value)
    depths = sorted({depth for one in found.values() for depth in one})
    series = []
    for name in names:
        means: list[Value] = []
        for depth in depths:
            values = found[name].get(depth)
            means.append(sum(values) / len(values) if values else None)
        series.append(Series(name, means, colours[name], "points"))
    return Chart(
        "depths",
        "Drafts that came true up to a position",
        [float(depth) for depth in depths],
        series,
        unit="%",
        x_label="position in the draft",
        is_log_x=True,
        note=f"Mean of the last {len(last)} steps, over drafts at least so long.",
    )


def choices(run: RunData) -> Section:
    section = Section("choices", "Which drafter, at how many sequences", short="Choices")
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for size, arm, count in _triples(run):
        counts[size][arm] += count
    totals: Counter[str] = Counter()
    for counter in counts.values():
        totals.update(counter)
    order = [OFF, *sorted((arm for arm in totals if arm != OFF), key=lambda arm: (arm.split()[0], arm))]
    rows = [
        (_bucket(size), {arm: float(counts[size][arm]) for arm in order if counts[size][arm]})
        for size in sorted(counts)
    ]
    section.lead = (
        "By how many sequences were live: as a batch empties, guessing pays more. An arm is a drafter and a shape, "
        "depth x width; several drafters with a plus are asked together."
    )
    section.add(
        Shares("choices", "Steps of the engine, by live sequences", rows, _arm_tones(order), "steps", is_wide=True),
        "The run did not write what its engine chose: it has no drafter, or is older than that log.",
    )
    if not section.charts:
        section.lead = ""
    return section


def _triples(run: RunData) -> Iterator[tuple[int, str, int]]:
    for span in run.spans:
        if span.name == "budget" and isinstance(span.args.get("arms"), list):
            for entry in span.args["arms"]:
                match entry:
                    case [int(size), str(arm), int(count)] if size > 0 and count > 0:
                        yield size, arm, count


def _bucket(size: int) -> str:
    return "1" if size == 1 else f"{size} to {2 * size - 1}"


def _arm_tones(arms: list[str]) -> dict[str, str]:
    found, used = {OFF: MIST}, Counter[str]()
    for arm in arms:
        drafter = arm.split()[0] if arm.split() else arm
        family = "+" if "+" in drafter else drafter
        shades = _FAMILIES.get(family, (PLUM, SLATE))
        if arm != OFF:
            found[arm] = shades[used[family] % len(shades)]
            used[family] += 1
    return found


def drafter(run: RunData) -> Section:
    section = Section("drafter", "The drafter that learns", short="Drafter")
    if not any(number(row, "drafter/version") is not None for row in run.steps):
        section.left_out.append("No drafter was trained (spot.enabled is off).")
        return section
    column = Column(run.steps)
    eagle = column.of(partial(_right, "eagle"))
    section.add(
        Chart(
            "loss",
            "Loss and version",
            column.x,
            [
                Series("loss", column.of("drafter/loss"), ACCENT),
                Series("version", column.of("drafter/version", max), SLATE, "steps", "right", decimals=0),
            ],
        ),
        "The drafter has not been trained yet.",
    )
    shared = [
        Series(f"position {n}: agrees in training", _times(column.of(f"drafter/shared_{n}"), 100), tone, "faint")
        for n, tone in zip(range(1, 4), (TEAL, PLUM, AMBER), strict=True)
    ]
    section.add(
        Chart(
            "learned",
            "Acceptance",
            column.x,
            [Series("guesses that came true", _times(eagle, 100), GREEN), *shared],
            unit="%",
            note=FEW_NOTE,
        ),
        "No guess of the drafter has been verified yet.",
    )
    return section


def _times(values: list[Value], factor: float) -> list[Value]:
    return [None if value is None else factor * value for value in values]


def rows_used(run: RunData) -> Section:
    section = Section("rows", "Rows against the cost curve", short="Rows")
    forwards: Counter[int] = Counter()
    curve: list[tuple[int, float]] = []
    for span in run.spans:
        if span.name == "budget":
            forwards.update({int(rows): int(count) for rows, count in _pairs(span.args.get("forwards"))})
            curve = [(int(rows), ms) for rows, ms in _pairs(span.args.get("curve"))] or curve
    total = sum(forwards.values())
    x = sorted({*forwards, *(rows for rows, _ in curve if rows <= 2 * max(forwards, default=0))})
    times = dict(curve)
    shown = [times[rows] for rows in x if rows in times]
    section.add(
        Chart(
            "rows",
            "Forwards by their rows, and what a forward costs",
            [float(rows) for rows in x],
            [
                Series("forwards", [100 * forwards[r] / total if forwards[r] else None for r in x], MIST, "bars"),
                Series("a forward, by the curve", [times.get(rows) for rows in x], ACCENT, "points", "right"),
            ],
            unit="%",
            right_unit="ms",
            x_label="rows (a bar: up to the next power of two)",
            is_log_x=True,
            is_log_right=bool(shown) and max(shown) > STEEP * min(shown),
            is_wide=True,
            note=_knee(forwards, curve),
        ),
        "The run did not write how many rows its forwards had: it is older than that log.",
    )
    return section


def _pairs(found: object) -> Iterator[tuple[float, float]]:
    for entry in found if isinstance(found, list) else []:
        match entry:
            case [int(rows), int() | float() as value] if 0 < rows < 2**31 and 0 <= value < 1e15:
                yield rows, float(value)


def _knee(forwards: Counter[int], curve: list[tuple[int, float]]) -> str:
    if not curve or not forwards:
        return "There is no cost curve: the engine had no drafter to spend rows on."
    one = curve[0][1]
    knee = max((rows for rows, ms in curve if ms <= KNEE * one), default=1)
    within = sum(count for rows, count in forwards.items() if rows <= knee) / sum(forwards.values())
    last_rows, last_ms = curve[-1]
    return (
        f"The curve as it was last: {one:.2f} ms for one row, {last_ms:.2f} ms for {last_rows}. Up to {knee} rows a "
        f"forward takes at most {KNEE} times as long as one row, so that guesses are nearly free; {100 * within:.0f} % "
        "of the forwards stayed within."
    )


def _compared(run: RunData) -> Metrics:
    """What the run has measured of itself at its end, if it has."""
    return next((span.args for span in reversed(run.spans) if span.name == "compare"), {})


def measured_seconds(run: RunData) -> tuple[float, float] | None:
    """Of the same rollouts without speculation and with it."""
    compared = _compared(run)
    without, with_it = number(compared, "seconds_without"), number(compared, "seconds_with")
    return (without, with_it) if without and with_it else None


def savings(run: RunData) -> Section:
    section = Section("saved", "Time saved by speculation", short="Saved")
    measured = measured_seconds(run)
    if measured is not None:
        without, with_it = measured
        same = "the same tokens" if _compared(run).get("is_equal") else "and the tokens DIFFER, which is a bug"
        section.lead = (
            f"Measured at the end of the run: rollouts of three further steps took {without:.2f} s without and "
            f"{with_it:.2f} s with speculation, {without / with_it:.2f} times as fast, {same}. "
            "These had no text made ahead."
        )
    column, workers = Column(run.steps), num_workers(run)
    generated, saved = 0.0, 0.0
    totals: list[tuple[float, float]] = []
    for row in run.steps:
        generated += number(row, "timing_s/gen") or 0.0
        saved += (number(row, f"{SPEC}saved_seconds") or 0.0) / workers
        totals.append((generated, generated + saved))
    has_any = any(number(row, f"{SPEC}saved_seconds") is not None for row in run.steps)
    picked = [totals[min(i + column.size, len(totals)) - 1] for i in range(0, len(totals), column.size)]
    section.add(
        Chart(
            "saved",
            "Seconds of generating, added up",
            column.x,
            [
                Series("without speculation (estimate)", [t[1] for t in picked] if has_any else [], SLATE),
                Series("as it was", [t[0] for t in picked] if has_any else [], ACCENT),
            ],
            unit="s",
            is_wide=True,
            note=_how(workers, generated, saved),
        ),
        "There is no estimate: no guess was made, or the run is older than that log.",
    )
    return section


def _how(workers: int, generated: float, saved: float) -> str:
    share = f"{(generated + saved) / generated:.2f} times as fast" if generated > 0 else ""
    spread = f" The sum over {workers} workers is divided by their number." if workers > 1 else ""
    verb = "saved" if saved >= 0 else "lost"
    return (
        f"Estimate: {format_seconds(abs(saved))} {verb}, {share}. The engine's own account: an accepted token is worth "
        "the share of a step and the row that the cost curve says it would have taken; the rows of all guesses and the "
        f"host's time for drafting are taken off; making text ahead is not.{spread} To measure instead, train the same "
        "run with --engine.drafter=none (the tokens are the same) and put both side by side with --compare."
    )


def num_workers(run: RunData) -> int:
    found = number(run.section("fleet"), "workers")
    return max(1, int(found or 1))


def saved_seconds(run: RunData) -> float | None:
    """What the estimate comes to over the run; None where there is none."""
    values = [value for row in run.steps if (value := number(row, f"{SPEC}saved_seconds")) is not None]
    return sum(values) / num_workers(run) if values else None
