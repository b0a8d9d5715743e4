"""The chart types of the page: lines, stacked areas, shares, drawings; and thinning of long series.

The modules that interpret a run fill them; `assets/page.js`, which knows nothing about runs, draws them. A chart is
plain data and contains no HTML. An empty chart is never made: `Section.add` shows a sentence instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.run.ui.summary import Metrics, number

MAX_POINTS = 1000
"""The most points a line can have: a chart is no wider."""
DIGITS = 5
"""Significant digits."""

Value = float | None
ChartData = dict[str, Any]

ACCENT, INK, SLATE, MIST = "#1f6feb", "#334155", "#64748b", "#c3ccd7"
AMBER, GREEN, PLUM, TEAL, ROSE, PINK = "#b7700f", "#2f855a", "#8a63b0", "#1f8a8a", "#c2485b", "#a8558f"
GROUND = "#ffffff"
"""What charts are drawn on."""
DARK = {
    ACCENT: "#5aa2ff",
    INK: "#c3cedb",
    SLATE: "#8b98a9",
    MIST: "#465261",
    AMBER: "#e0a13c",
    GREEN: "#4fb783",
    PLUM: "#b48ede",
    TEAL: "#41b8b8",
    ROSE: "#ec7a8a",
    PINK: "#d986bd",
    GROUND: "#161b22",
}
"""Every tone for readers who prefer a dark page. A tone stands out from its ground by 3 to 1 at least; MIST is meant to
recede, and is drawn with an outline."""
SOURCES = {"policy": MIST, "suffix": ACCENT, "ngram": TEAL, "ahead": AMBER, "replay": AMBER, "eagle": GREEN}
"""The sources of tokens."""
SPARE_TONES = (PLUM, ROSE, INK, SLATE)


def tones(names: Iterable[str], known: Mapping[str, str] = SOURCES) -> dict[str, str]:
    """A colour for each name: its own if it has one, else a spare."""
    found: dict[str, str] = {}
    for name in names:
        spare = SPARE_TONES[sum(other not in known for other in found) % len(SPARE_TONES)]
        found[name] = known.get(name, spare)
    return found


@dataclass
class Series:
    """One line, area or set of bars."""

    label: str
    values: Sequence[Value]
    tone: str = ACCENT
    style: Literal["line", "faint", "points", "bars", "steps"] = "line"
    axis: Literal["left", "right"] = "left"
    decimals: int | None = None
    """None: three significant digits."""
    errors: Sequence[Value] = ()
    """Standard errors of the values, drawn as bars."""

    @property
    def has_data(self) -> bool:
        return any(value is not None for value in self.values)


@dataclass
class Chart:
    """Series over a common x."""

    name: str
    title: str
    x: Sequence[float]
    series: list[Series]
    kind: Literal["lines", "stack"] = "lines"
    unit: str = ""
    right_unit: str = ""
    x_label: str = "step"
    note: str = ""
    is_log_x: bool = False
    is_log_right: bool = False
    floor: float | None = 0.0
    """The highest value the axis may start at; None: start at the data. Values above 0 never start below it."""
    ceiling: float | None = None
    """The highest value there can be."""
    is_wide: bool = False

    @property
    def has_data(self) -> bool:
        return any(series.has_data for series in self.series)

    def to_json(self) -> ChartData:
        series = [
            vars(one) | {name: [_rounded(value) for value in vars(one)[name]] for name in ("values", "errors")}
            for one in self.series
            if one.has_data
        ]
        return vars(self) | {"x": [_rounded(value) for value in self.x], "series": series}


@dataclass
class Shares:
    """Divided bars: a label, then name and amount of every part. A row without a label belongs to the one above."""

    name: str
    title: str
    rows: list[tuple[str, dict[str, float]]]
    tones: Mapping[str, str]
    unit: str
    note: str = ""
    is_wide: bool = False
    is_absolute: bool = False
    """Whether lengths compare across rows; otherwise all bars are equally long."""

    @property
    def has_data(self) -> bool:
        return any(sum(parts.values()) > 0 for _, parts in self.rows)

    def to_json(self) -> ChartData:
        rows = [
            {"label": label, "parts": [[name, _rounded(amount)] for name, amount in parts.items() if amount > 0]}
            for label, parts in self.rows
        ]
        return vars(self) | {"kind": "shares", "rows": rows, "tones": dict(self.tones)}


@dataclass
class Drawing:
    """Anything with a drawing function of its own, as plain data."""

    name: str
    title: str
    kind: str
    data: ChartData
    has_data: bool
    note: str = ""
    is_wide: bool = True

    def to_json(self) -> ChartData:
        return vars(self)


@dataclass
class Section:
    """Charts under one heading, with sentences in place of empty ones."""

    name: str
    title: str
    lead: str = ""
    short: str = ""
    """A shorter title for the navigation bar."""
    charts: list[ChartData] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, chart: Chart | Shares | Drawing, otherwise: str) -> None:
        """`otherwise` says why there is no chart, and how to get one."""
        if chart.has_data:
            self.charts.append(chart.to_json())
        else:
            self.left_out.append(otherwise)

    def to_json(self) -> ChartData:
        return vars(self)


# --- rows to columns --------------------------------------------------------------------------------------------------


@dataclass
class Column:
    """Rows of metrics, thinned: every `size` consecutive rows become one point."""

    rows: Sequence[Metrics]
    max_points: int = MAX_POINTS

    @property
    def size(self) -> int:
        return max(1, math.ceil(len(self.rows) / self.max_points))

    @property
    def x(self) -> list[float]:
        """The last step of each point."""
        return [float(part[-1]["step"]) for part in self._parts()]

    def of(
        self, find: str | Callable[[Metrics], Value], join: Callable[[list[float]], float] | None = None
    ) -> list[Value]:
        """Values of a metric, or of a function of a row; several rows become their mean."""
        get = find if callable(find) else (lambda row: number(row, find))
        return [joined([value for row in part if (value := get(row)) is not None], join) for part in self._parts()]

    @property
    def note(self) -> str:
        return "" if self.size == 1 else f"Each point of a line stands for {self.size} steps."

    def _parts(self) -> list[Sequence[Metrics]]:
        return [self.rows[first : first + self.size] for first in range(0, len(self.rows), self.size)]


def joined(values: list[float], join: Callable[[list[float]], float] | None = None) -> Value:
    if not values:
        return None
    return join(values) if join else math.fsum(values) / len(values)


def smoothed(values: Sequence[Value], span: int) -> list[Value]:
    """Means over the latest `span` values, skipping missing ones."""
    return [
        joined([value for value in values[max(0, i + 1 - span) : i + 1] if value is not None])
        for i in range(len(values))
    ]


def ratio(above: Value, below: Value) -> Value:
    return above / below if above is not None and below else None


def _rounded(value: Value) -> Value:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
