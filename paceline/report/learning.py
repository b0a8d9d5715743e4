"""Report sections on learning: reward and evaluation, lengths and their tail, any metric. Called by `writing.py`.

Lengths are shown as they are distributed, from the rollouts themselves: a mean hides the responses that a step waits
for. Of a long run only the first and the last steps are read.
"""

from __future__ import annotations

from paceline.report.charts import (
    ACCENT,
    AMBER,
    GREEN,
    INK,
    PLUM,
    ROSE,
    SLATE,
    Chart,
    ChartData,
    Column,
    Drawing,
    Section,
    Series,
    Shares,
    smoothed,
)
from paceline.report.reading import Response, RunData
from paceline.run.standard_errors import SE
from paceline.run.ui.summary import Metrics, counted, number

SMOOTH_SHARE, LEAST_SMOOTH = 20, 5
"""A smoothed line averages one part in 20 of a run, but at least 5 points."""
MAX_METRIC_POINTS = 200
MAX_METRICS = 200
MAX_EDGE_STEPS, EDGE_SHARE = 5, 3
"""Of the first and the last steps: at most so many, and one part in three of a short run."""
NUM_BINS = 10
WIDE = 4
"""Lengths that differ by more than this factor get bins that grow with the length."""
CUT = "cut off at the limit"


def rewards(run: RunData) -> Section:
    section = Section("reward", "Reward and evaluation", short="Reward")
    column = Column(run.steps)
    values = column.of("reward")
    span = max(LEAST_SMOOTH, len(values) // SMOOTH_SHARE)
    chart = Chart(
        "reward",
        "Reward per step",
        column.x,
        [
            Series("reward", values, ACCENT, "faint" if len(values) > SMOOTH_SHARE else "line"),
            Series("std within the step", column.of("reward_std"), SLATE, "faint"),
        ],
    )
    if len(values) > SMOOTH_SHARE:
        chart.series.insert(0, Series(f"mean of {span * column.size} steps", smoothed(values, span), ACCENT))
    section.add(chart, "No step has a reward yet.")
    evaluated = Column([row for row in run.rows if number(row, "eval/accuracy") is not None])
    found = {name for row in evaluated.rows for name in row if name.startswith("eval/pass@") and not name.endswith(SE)}
    names = ["eval/accuracy", *sorted(found, key=lambda name: (len(name), name))]
    series = [
        Series(
            "solved" if name == "eval/accuracy" else name.removeprefix("eval/"),
            _percent(evaluated, name),
            tone,
            "points",
            errors=_percent(evaluated, f"{name}{SE}"),
        )
        for name, tone in zip(names, (ACCENT, GREEN, AMBER, PLUM, ROSE), strict=False)
    ]
    has_errors = any(error is not None for one in series for error in one.errors)
    note = "Bars are standard errors over items." if has_errors else ""
    section.add(
        Chart("eval", "Held-out items solved", evaluated.x, series, unit="%", floor=None, ceiling=100, note=note),
        "Nothing was evaluated: eval.items is 0, or no evaluation has finished yet.",
    )
    return section


def _percent(column: Column, name: str) -> list[float | None]:
    return [None if value is None else 100 * value for value in column.of(name)]


def lengths(run: RunData) -> Section:
    section = Section("lengths", "Lengths, and the tail everyone waits for", short="Lengths")
    column = Column(run.steps)
    section.add(
        Chart(
            "lengths",
            "Tokens per response",
            column.x,
            [
                Series("longest", column.of("completions/max_length", max), ROSE),
                Series("95th percentile", column.of("completions/p95_length"), AMBER),
                Series("mean", column.of("completions/mean_length"), ACCENT),
            ],
            unit="tokens",
        ),
        "No step has lengths yet.",
    )

    def tail(row: Metrics) -> float | None:
        longest, mean = number(row, "completions/max_length"), number(row, "completions/mean_length")
        return longest / mean if longest is not None and mean else None

    section.add(
        Chart(
            "tail",
            "The tail: longest over mean, and the share cut off",
            column.x,
            [
                Series("longest / mean", column.of(tail), INK),
                Series(CUT, _percent(column, "completions/clipped_ratio"), ROSE, "faint", "right"),
            ],
            unit="x",
            right_unit="%",
        ),
        "",
    )
    section.add(_distribution(run), "How lengths are distributed is not known: no rollouts (run.rollouts is off).")
    return section


def _distribution(run: RunData) -> Shares:
    """Lengths of the first and the last steps' responses, in common bins, with those that hit the limit marked."""
    steps = run.rollout_steps()
    size = max(1, min(MAX_EDGE_STEPS, len(steps) // EDGE_SHARE))
    edges = [steps[:size], steps[-size:]] if len(steps) > 1 else [steps]
    read = {_named(part): [one for step in part for one in run.responses(step)] for part in edges if part}
    found = {name: responses for name, responses in read.items() if responses}
    bins = length_bins([one.num_tokens for responses in found.values() for one in responses])
    rows = [
        (_bin_label(low, high) if not i else "", _bar(name, responses, low, high))
        for low, high in bins
        for i, (name, responses) in enumerate(found.items())
    ]
    tones = {name: ACCENT if name == list(found)[-1] else SLATE for name in found} | {CUT: ROSE}
    counts = " and of the ".join(f"{counted(len(made), 'response')} of {name}" for name, made in found.items())
    note = f"Shares of the {counts}. A row is a range of lengths in tokens; the last rows are what everyone waits for."
    return Shares("distribution", "How long responses are", rows, tones, "%", note, is_wide=True, is_absolute=True)


def _named(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _bar(name: str, responses: list[Response], low: int, high: int) -> dict[str, float]:
    inside = [one for one in responses if low <= one.num_tokens <= high]
    num_cut = sum(one.is_cut for one in inside)
    shares = {name: len(inside) - num_cut, CUT: num_cut}
    return {part: round(100 * count / len(responses), 1) for part, count in shares.items()}


def _bin_label(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def length_bins(lengths: list[int]) -> list[tuple[int, int]]:
    """Ranges that hold all lengths, first and last included: equally wide, or growing if there is a long tail."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    start = max(low, 1)
    is_wide = high > WIDE * start
    shares = [i / NUM_BINS for i in range(1, NUM_BINS + 1)]
    ends = [start * (high / start) ** share if is_wide else low + share * (high - low) for share in shares]
    tops = sorted({*(min(int(end), high) for end in ends[:-1]), high})
    return list(zip([low, *(top + 1 for top in tops[:-1])], tops, strict=True))


def metrics(run: RunData) -> Section:
    """Every metric, one at a time."""
    section = Section("metrics", "Any metric", short="Metrics")
    column = Column(run.rows, MAX_METRIC_POINTS)
    names = sorted({name for row in run.rows for name in row if name != "step"})
    found: ChartData = {}
    for name in names:
        series = Series(name, column.of(name))
        if series.has_data and len(found) < MAX_METRICS:
            found[name] = Chart("", "", [], [series]).to_json()["series"][0]["values"]
    note = column.note
    if len(names) > MAX_METRICS:
        note += f" The first {MAX_METRICS} of {len(names)} names are shown."
    x = Chart("", "", column.x, []).to_json()["x"]
    drawing = Drawing("metric", "", "metrics", {"x": x, "metrics": found}, bool(found), note)
    section.add(drawing, "No metrics have been written yet.")
    return section
