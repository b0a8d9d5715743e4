"""Compares two runs: whether they are the same run, which settings differ, and their main metrics in shared charts.

`writing.py` calls it. Speculation changes no token, so a run with it and one without must agree in every metric that
both have, apart from times and drafts. If they do, the difference in time is measured, not estimated. What only one of
them has, such as a further evaluation, says nothing about the other: it is named, not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from paceline.core.trace import LOST, RESUMED
from paceline.report.charts import ACCENT, AMBER, Chart, ChartData, Column, Section, Series
from paceline.report.reading import RunData
from paceline.run.store.folder import compared
from paceline.run.ui.summary import Metrics, counted, number

MAX_NAMED = 3
"""How many steps or metrics a sentence names."""
MAX_NAME_CHARS = 60
EVALUATED = "eval/accuracy"
"""Every evaluation has it."""
LINES = (
    ("reward", "Reward per step", "reward", ""),
    ("length", "Mean tokens per response", "completions/mean_length", "tokens"),
    ("gen", "Generation time per step", "timing_s/gen", "s"),
    ("step", "Seconds per step", "timing_s/step", "s"),
    ("accept", "Accept length", "rollout/spec_accept_length", "tokens per engine step"),
    ("throughput", "Tokens per second of the step", "perf/throughput", "tokens/s"),
)


def compare(first: RunData, second: RunData) -> ChartData:
    """The section above the two columns."""
    section = Section("compare", "Both runs", short="Both", lead=verdict(first, second))
    for name, title, metric, unit in LINES:
        section.add(_both(first, second, name, title, metric, unit), f"{title}: not in both runs.")
    return section.to_json() | {
        "table": [list(row) for row in _table(first, second)],
        "settings": [list(row) for row in differing(first, second)],
    }


def _both(first: RunData, second: RunData, name: str, title: str, metric: str, unit: str) -> Chart:
    columns = [Column(run.steps) for run in (first, second)]
    x = sorted({*columns[0].x, *columns[1].x})
    series = []
    for run, column, tone in zip((first, second), columns, (ACCENT, AMBER), strict=True):
        found = dict(zip(column.x, column.of(metric), strict=True))
        series.append(Series(run.name, [found.get(step) for step in x], tone))
    return Chart(f"both-{name}", title, x, series, unit=unit)


def verdict(first: RunData, second: RunData) -> str:
    """Whether the runs are the same but for drafter or workers, and what else may explain a difference in time."""
    disturbed = [sentence for run in (first, second) for sentence in _disturbances(run)]
    caution = f" Mind the times: {', '.join(disturbed)}; that alone makes steps longer." if disturbed else ""
    return _sameness(first, second) + caution


def _disturbances(run: RunData) -> Iterator[str]:
    """What happened to a run besides training, according to its events."""
    begins = [(span.start, span.step) for span in run.spans if span.name == "step"]
    resumed = [span.start for span in run.spans if span.name == RESUMED]
    goes_on = {min((step for start, step in begins if start >= moment), default=0) for moment in resumed}
    steps = sorted(step for step in goes_on if step > 1)  # a run that starts over at step 1 was not interrupted
    if steps:
        yield f"{run.name} was stopped, and resumed before {_named(steps)}"
    lost = [span.step for span in run.spans if span.name == LOST]
    if lost:
        who = "a worker" if len(lost) == 1 else f"{len(lost)} workers"
        yield f"{run.name} lost {who} in {_named(sorted(set(lost)))}"


def _named(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - MAX_NAMED} more" if len(steps) > MAX_NAMED else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:MAX_NAMED]))}{more}"


def _sameness(first: RunData, second: RunData) -> str:
    rows, others = ({row["step"]: compared(row) for row in run.rows} for run in (first, second))
    shared = sorted(rows.keys() & others.keys())
    if not any(shared):
        return "The two runs have no step in common."
    for step in shared:
        both = rows[step].keys() & others[step].keys()
        differing = sorted(name for name in both if rows[step][name] != others[step][name])
        if differing:
            return f"Not the same run: the metrics of step {step} differ ({_some(differing)})."
    if not any(rows[step].keys() & others[step].keys() - {"step"} for step in shared):
        return "The two runs have no metric in common."
    trained = [step for step in shared if step]
    a, b = (_seconds(run, trained) for run in (first, second))
    times = f" {first.name} took {a:.1f} s to generate them, {second.name} {b:.1f} s." if a and b else ""
    return (
        f"The same run twice: in {counted(len(trained), 'step')} every metric that both runs have is equal, to the "
        f"last bit.{_only_in(first, rows, others)}{_only_in(second, others, rows)}{times} Only time differs, and it is "
        "measured, not estimated, if the machine was equally busy for both."
    )


def _only_in(run: RunData, own: Mapping[int, Metrics], other: Mapping[int, Metrics]) -> str:
    """What only one of two runs has, so that the verdict cannot judge it."""
    shared = sorted(own.keys() & other.keys())
    evaluated = [step for step in shared if EVALUATED in own[step] and EVALUATED not in other[step]]
    names = {name for step in shared if step not in evaluated for name in own[step].keys() - other[step].keys()}
    before = ["before training"] if 0 in evaluated or (0 in own and 0 not in other) else []
    after = [f"after {_named(steps)}"] if (steps := [step for step in evaluated if step]) else []
    said = f" Only {run.name} was evaluated {' and '.join(before + after)}." if before or after else ""
    return said + (f" Only {run.name} has {_some(sorted(names))}." if names else "")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(name[:MAX_NAME_CHARS] for name in names[:MAX_NAMED]) + more


def _seconds(run: RunData, steps: list[int]) -> float:
    wanted = set(steps)
    return math.fsum(number(row, "timing_s/gen") or 0.0 for row in run.steps if row["step"] in wanted)


def _table(first: RunData, second: RunData) -> Iterator[tuple[str, str, str]]:
    for label, metric in (
        ("mean reward", "reward"),
        ("mean length, tokens", "completions/mean_length"),
        ("seconds per step", "timing_s/step"),
        ("generation seconds per step", "timing_s/gen"),
        ("learning seconds per step", "timing_s/update"),
        ("accept length", "rollout/spec_accept_length"),
        ("rows per token", "rollout/spec_rows_per_token"),
        ("idle share of worker time", "perf/fleet_waiting_share"),
    ):
        shown = [_mean(run, metric) for run in (first, second)]
        if shown != ["", ""]:
            yield label, shown[0], shown[1]
    yield "steps", str(first.num_steps), str(second.num_steps)


def _mean(run: RunData, metric: str) -> str:
    values = [value for row in run.steps if (value := number(row, metric)) is not None]
    return f"{math.fsum(values) / len(values):.4g}" if values else ""


def differing(first: RunData, second: RunData) -> Iterator[tuple[str, str, str]]:
    """Settings that differ, apart from the folder itself."""
    sides = [
        {
            f"{section}.{key}": str(value)
            for section, keys in run.config.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
        for run in (first, second)
    ]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        if key != "run.dir" and sides[0].get(key) != sides[1].get(key):
            yield key, sides[0].get(key, "(missing)")[:200], sides[1].get(key, "(missing)")[:200]
