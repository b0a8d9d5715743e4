"""Report sections on speculation: what it gained, accepted tokens by source, choice and training of drafters, rows.

`writing.py` calls it. Everything comes from metrics, and from the run loop's `budget` and `compare` events. What was
measured is the one figure for the gain; the engine's own estimate may explain it and never stands beside it.
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
from paceline.run.ui.summary import Metrics, number

SPEC = "rollout/spec_"
_SOURCE = re.compile(rf"{SPEC}(.+)_verified")
_DEPTH = re.compile(r"at_([0-9]{1,6})")
OWN = "policy"
OFF = "off"
FEW = 20
FEW_NOTE = f"Steps with fewer than {FEW} draft tokens are left out."
KNEE = 1.1
"""Rows count as nearly free while a forward takes at most this many times as long as one of a single row."""
STEEP = 30
"""A curve that rises by more than this factor gets a logarithmic axis."""
_FAMILIES = {
    "suffix": (ACCENT, "#5b93f0"),
    "ngram": (TEAL, "#3a9a9a"),
    "eagle": (GREEN, "#459b6f", "#5f8a2f"),
    "+": (AMBER, "#c07f2a", "#a0602f"),
}
"""Shades of arms by drafter; + is several drafters together. They stand out from a light page and from a dark one."""


def sources_of(run: RunData) -> list[str]:
    """Drafters with verified tokens, most accepted tokens first."""
    names = {match[1] for row in run.steps for name in row if (match := _SOURCE.fullmatch(name))}
    accepted = {name: sum(number(row, f"{SPEC}{name}_accepted") or 0 for row in run.steps) for name in names}
    verified = {name: sum(number(row, f"{SPEC}{name}_verified") or 0 for row in run.steps) for name in names}
    return sorted((name for name in names if verified[name]), key=lambda name: (-accepted[name], name))


def visits(row: Metrics) -> Value:
    """How often a sequence took part in an engine step: tokens divided by accept length."""
    seconds, rate = number(row, "timing_s/step"), number(row, "perf/throughput")
    tokens = None if seconds is None or rate is None else round(seconds * rate)
    return ratio(tokens, number(row, f"{SPEC}accept_length"))


def acceptance(run: RunData) -> Section:
    section = Section("accept", "Accepted draft tokens", short="Acceptance")
    names = sources_of(run)
    if not names:
        section.left_out.append("No draft was verified: speculation was off, or never worth its rows.")
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
            "Accept length: tokens per engine step, by source",
            column.x,
            layers,
            kind="stack",
            unit="tokens",
            note="The top edge is rollout/spec_accept_length; 1 means decoding without speculation.",
        ),
        "The metrics do not say how many tokens an engine step produced.",
    )
    right = [Series(name, _times(column.of(partial(_right, name)), 100), colours[name]) for name in names]
    section.add(
        Chart(
            "right", "Acceptance rate of verified draft tokens", column.x, right, unit="%", ceiling=100, note=FEW_NOTE
        ),
        "The metrics do not say how many draft tokens were accepted.",
    )
    section.add(_depths(run, names, colours), "No draft was long enough to show acceptance by position.")
    return section


def _per_visit(name: str, row: Metrics) -> Value:
    """Accepted tokens of a source; 0 for a step without any."""
    return ratio(number(row, f"{SPEC}{name}_accepted") or 0.0, visits(row))


def _right(name: str, row: Metrics) -> Value:
    verified = number(row, f"{SPEC}{name}_verified") or 0.0
    return ratio(number(row, f"{SPEC}{name}_accepted"), verified) if verified >= FEW else None


def _depths(run: RunData, names: list[str], colours: dict[str, str]) -> Chart:
    """How far drafts are accepted, over the last quarter of the run."""
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
        "Drafts accepted up to a position",
        [float(depth) for depth in depths],
        series,
        unit="%",
        ceiling=100,
        x_label="position in the draft",
        is_log_x=True,
        note=f"Mean of the last {len(last)} steps, over drafts at least that long."
        if len(last) > 1
        else "In the last step, over drafts at least that long.",
    )


def choices(run: RunData) -> Section:
    section = Section("choices", "Which drafter, by number of live sequences", short="Choices")
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
        "The emptier the batch, the more speculation pays. An arm is a drafter and a shape, depth x width; a plus "
        "joins drafters that draft together."
    )
    section.add(
        Shares("choices", "Engine steps, by live sequences", rows, _arm_tones(order), "steps", is_wide=True),
        "The run did not log its engine's choices: it has no drafter, or predates that log.",
    )
    if not section.charts:
        section.lead = ""
    return section


def _triples(run: RunData) -> Iterator[tuple[int, str, int]]:
    for span in run.spans:
        if span.name == "budget" and isinstance(span.args.get("arms"), list):
            for entry in span.args["arms"]:
                match entry:
                    case [int(size), str(arm), int(count)] if 0 < size < 2**31 and 0 < count < 2**53:
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
    section = Section("drafter", "The trained drafter", short="Drafter")
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
        Series(f"position {n}: agreement in training", _times(column.of(f"drafter/shared_{n}"), 100), tone, "faint")
        for n, tone in zip(range(1, 4), (TEAL, PLUM, AMBER), strict=True)
    ]
    section.add(
        Chart(
            "learned",
            "Acceptance",
            column.x,
            [Series("acceptance rate", _times(eagle, 100), GREEN), *shared],
            unit="%",
            note=FEW_NOTE,
        ),
        "No token of the drafter has been verified yet.",
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
            "Forwards by number of rows, and the cost of a forward",
            [float(rows) for rows in x],
            [
                Series("forwards", [100 * forwards[r] / total if forwards[r] else None for r in x], MIST, "bars"),
                Series("cost of a forward", [times.get(rows) for rows in x], ACCENT, "points", "right"),
            ],
            unit="%",
            right_unit="ms",
            x_label="rows (a bar: up to the next power of two)",
            is_log_x=True,
            is_log_right=bool(shown) and max(shown) > STEEP * min(shown),
            is_wide=True,
            note=_knee(forwards, curve),
        ),
        "The run did not log the rows of its forwards: it predates that log.",
    )
    return section


def _pairs(found: object) -> Iterator[tuple[float, float]]:
    for entry in found if isinstance(found, list) else []:
        match entry:
            case [int(rows), int() | float() as value] if 0 < rows < 2**31 and 0 <= value < 1e15:
                yield rows, float(value)


def _knee(forwards: Counter[int], curve: list[tuple[int, float]]) -> str:
    if not curve or not forwards:
        return "There is no cost curve: without a drafter the engine measures none."
    one = curve[0][1]
    knee = max((rows for rows, ms in curve if ms <= KNEE * one), default=1)
    within = sum(count for rows, count in forwards.items() if rows <= knee) / sum(forwards.values())
    last_rows, last_ms = curve[-1]
    latest = f"The latest curve: {one:.2f} ms for one row, {last_ms:.2f} ms for {last_rows}."
    if knee < 2:
        return f"{latest} Two rows already take more than {KNEE} times as long as one, so draft rows are not free here."
    return (
        f"{latest} Up to {knee} rows a forward takes at most {KNEE} times as long as one row, so draft rows are nearly "
        f"free; {100 * within:.0f} % of the forwards stayed within."
    )


def _compared(run: RunData) -> Metrics:
    """What the run measured at its end, if it did."""
    return next((span.args for span in reversed(run.spans) if span.name == "compare"), {})


def measured_seconds(run: RunData) -> tuple[float, float] | None:
    """Seconds for the same rollouts without and with speculation."""
    compared = _compared(run)
    without, with_it = number(compared, "seconds_without"), number(compared, "seconds_with")
    return (without, with_it) if without and with_it else None


def speedup(run: RunData) -> Section:
    """What speculation gained: measured, if the run compared itself with plain decoding; otherwise an estimate."""
    section = Section("speedup", "What speculation gained", short="Speedup")
    measured = measured_seconds(run)
    if measured is None:
        section.add(
            _estimate(run), "Nothing was measured (run.compare was off or impossible, or the run is not over yet)."
        )
        return section
    without, with_it = measured
    section.lead = _measured(_compared(run), without, with_it)
    rows = [("plain decoding", {"plain decoding": without}), ("with speculation", {"with speculation": with_it})]
    tones_ = {"plain decoding": SLATE, "with speculation": ACCENT}
    work = _compared(run).get("work")
    note = " ".join(filter(None, (f"{work}." if isinstance(work, str) and work else "", _disagreement(run))))
    section.add(
        Shares("measured", "The same rollouts, timed", rows, tones_, "s", note, is_wide=True, is_absolute=True), ""
    )
    return section


def _measured(compared: Metrics, without: float, with_it: float) -> str:
    """What a run measured at its end, in words."""
    ratio = without / with_it
    loss = " (slower: engine.drafter=none is faster here)" if round(ratio, 2) < 1 else ""
    same = "with the same tokens" if compared.get("is_equal") else "and the tokens DIFFER, which is a bug"
    repeats = number(compared, "repeats")
    turns = "" if repeats is None else " in 1 repeat" if repeats == 1 else f" in {repeats:.0f} repeats, in turns"
    plain, drafted = number(compared, "gpu_share_without"), number(compared, "gpu_share_with")
    share = f" The GPU spent {plain:.0%} and {drafted:.0%} of the time in forward passes." if plain and drafted else ""
    return (
        f"Measured at the end of the run: further rollouts took {without:.2f} s without and {with_it:.2f} s with "
        f"speculation{turns}, {ratio:.2f} times as fast{loss}, {same}. They had no run-ahead text.{share}"
    )


NOT_MEASURED = "Not measured: run.compare was off or could not run, or the run is not over yet."
HOW_ESTIMATED = (
    "It credits each accepted token with the share of a step and the row that the cost curve says it would have cost, "
    "and subtracts the rows of all drafts and the host time for drafting, but not the cost of run-ahead."
)


def _disagreement(run: RunData) -> str:
    """Why the engine's own estimate is another number, for a reader who finds it in the metrics."""
    saved, generated = saved_seconds(run), _generated(run)
    if saved is None or generated + saved <= 0:
        return ""
    return (
        f"While it trained, the engine estimated {(generated + saved) / generated:.2f} times as fast, with run-ahead "
        f"text where there was some. {HOW_ESTIMATED} A sum of such credits is no measurement: where the two disagree, "
        "believe the times above."
    )


def _estimate(run: RunData) -> Chart:
    """Generation time as it was, and as the engine estimates it without speculation."""
    column, workers = Column(run.steps), num_workers(run)
    generated, saved = 0.0, 0.0
    totals: list[tuple[float, float]] = []
    for row in run.steps:
        generated += number(row, "timing_s/gen") or 0.0
        saved += (number(row, f"{SPEC}saved_seconds") or 0.0) / workers
        totals.append((generated, generated + saved))
    has_any = saved_seconds(run) is not None
    picked = [totals[min(i + column.size, len(totals)) - 1] for i in range(0, len(totals), column.size)]
    spread = f" The sum over {workers} workers is divided by their number." if workers > 1 else ""
    note = (
        f"{NOT_MEASURED} {HOW_ESTIMATED}{spread} To measure, train the same run with --engine.drafter=none (the tokens "
        "are the same) and compare the two with --compare."
    )
    return Chart(
        "estimate",
        "The engine's own estimate of generation time, cumulative",
        column.x,
        [
            Series("without speculation, estimated", [t[1] for t in picked] if has_any else [], SLATE, "faint"),
            Series("actual", [t[0] for t in picked] if has_any else [], ACCENT),
        ],
        unit="s",
        is_wide=True,
        note=note,
    )


def _generated(run: RunData) -> float:
    return sum(number(row, "timing_s/gen") or 0.0 for row in run.steps)


def num_workers(run: RunData) -> int:
    found = number(run.section("fleet"), "workers")
    return max(1, int(found or 1))


def saved_seconds(run: RunData) -> float | None:
    """The estimate over the whole run; None if there is none."""
    values = [value for row in run.steps if (value := number(row, f"{SPEC}saved_seconds")) is not None]
    return sum(values) / num_workers(run) if values else None
