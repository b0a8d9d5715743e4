"""Report sections on learning: reward and evaluation, lengths and their tail, any metric. Called by `writing.py`."""

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
    smoothed,
)
from paceline.report.reading import RunData
from paceline.run.ui.summary import Metrics, number

SMOOTH_SHARE, LEAST_SMOOTH = 20, 5
"""A smoothed line averages one part in 20 of a run, but at least 5 points."""
MAX_METRIC_POINTS = 200
MAX_METRICS = 200


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
    names = sorted({name for row in evaluated.rows for name in row if name.startswith("eval/pass@")})
    series = [Series("solved", _percent(evaluated, "eval/accuracy"), ACCENT, "points")]
    series += [
        Series(name.removeprefix("eval/"), _percent(evaluated, name), tone, "points")
        for name, tone in zip(names, (GREEN, AMBER, PLUM, ROSE), strict=False)
    ]
    section.add(
        Chart("eval", "Held-out items solved", evaluated.x, series, unit="%", floor=None),
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
                Series("cut off at the limit", _percent(column, "completions/clipped_ratio"), ROSE, "faint", "right"),
            ],
            unit="times",
            right_unit="%",
        ),
        "",
    )
    return section


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
