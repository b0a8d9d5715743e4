"""Report sections on time: a Gantt chart of the workers, time per step by phase, and shares of a fleet's time.

`writing.py` calls it. A fleet logs every moment of a worker's life, idle time included; a single process logs the
phases of a step. No screen can show a hundred thousand spans, so a long run has three views: the latest steps and the
slowest step in full, and the whole run in slices, each divided by activity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from paceline.report.charts import (
    ACCENT,
    AMBER,
    GREEN,
    GROUND,
    INK,
    MIST,
    PINK,
    PLUM,
    SLATE,
    TEAL,
    Chart,
    ChartData,
    Column,
    Drawing,
    Section,
    Series,
    Shares,
    Value,
)
from paceline.report.reading import RecordedSpan, RunData
from paceline.run.ui.summary import Metrics, number

MAX_SPANS = 2500
"""Spans per view."""
NUM_SLICES = 240
MAX_LANES, MAX_MARKS = 16, 40
WAIT = "wait"
IDLE = "idle"
WORDS = {
    "gen": ("generate", ACCENT),
    "generate": ("generate", ACCENT),
    "update": ("learn", INK),
    "learn": ("learn", INK),
    "score": ("score", PLUM),
    "publish": ("load weights", SLATE),
    "run_ahead": ("run ahead", AMBER),
    "spot": ("train the drafter", GREEN),
    "spot_train": ("train the drafter", GREEN),
    "eval": ("evaluate", PINK),
    "checkpoint": ("save", TEAL),
    WAIT: (IDLE, GROUND),
}
"""Label and colour of a span; the two carriers have different names for some."""
HIDDEN = {"step", "budget", "compare"}
"""Spans around, beside or after the others."""
OTHER = "other"
PHASES = (("gen", "gen"), ("score", "score"), ("update", "update"), ("spot", "spot"))
"""Phases of a step: the suffix of the `timing_s/` metric, and the span name."""


def word(name: str) -> str:
    return WORDS.get(name, (name, SLATE))[0]


def tone(name: str) -> str:
    return {shown: colour for shown, colour in WORDS.values()}.get(name, MIST if name == OTHER else SLATE)


def workers(run: RunData) -> Section:
    section = Section("gantt", "What each worker did, and when it was idle", short="Workers")
    spans = [span for span in run.spans if span.name not in HIDDEN and span.seconds > 0]
    names = sorted({span.worker for span in spans}, key=lambda name: (name != "0", len(name), name))
    has_fleet = len(names) > 1
    lanes = names[:MAX_LANES]
    kinds = list(dict.fromkeys(word(span.name) for span in spans if span.name != WAIT))
    section.lead = (
        "Empty is idle time: bubbles. Run-ahead and drafter training fill them."
        if has_fleet
        else "One process: phases follow each other. Empty is time outside any phase."
    )
    begins = [(span.start, span.step) for span in run.spans if span.name == "step"]
    views = _views(spans, lanes, [*kinds, IDLE], begins)
    labels = {name: _lane(name, has_fleet) for name in lanes}
    data: ChartData = {
        "lanes": [labels[name] for name in lanes],
        "kinds": [[kind, tone(kind)] for kind in kinds],
        "views": views,
    }
    note = "Drag to zoom, double-click to reset. The trace file has every span; open it in ui.perfetto.dev."
    if len(spans) > MAX_SPANS:
        note += " The whole run is cut into slices, each divided by activity from the bottom up."
    if len(names) > MAX_LANES:
        note += f" The first {MAX_LANES} of {len(names)} workers are shown."
    section.add(Drawing("gantt", "Timeline", "timeline", data, bool(views), note), "No events have been written yet.")
    section.add(
        Shares(
            "worked",
            "Time by activity",
            [(labels[name], _amounts([span for span in spans if span.worker == name])) for name in lanes],
            {kind: tone(kind) for kind in (*kinds, IDLE)},
            "s",
            is_wide=True,
        ),
        "",
    )
    if not section.charts:
        section.lead = ""
        section.left_out = section.left_out[:1]
    return section


def _lane(name: str, has_fleet: bool) -> str:
    if name == "0":
        return "driver" if has_fleet else "process"
    return f"worker {name[1:]}" if name.startswith("w") and name[1:].isdigit() else name


def _amounts(spans: Sequence[RecordedSpan]) -> dict[str, float]:
    """Seconds by activity, idle last: it includes the time that no span covers."""
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        found[IDLE if span.name == WAIT else word(span.name)] += span.seconds
    whole = max((span.end for span in spans), default=0.0) - min((span.start for span in spans), default=0.0)
    idle = found.pop(IDLE, 0.0)
    return dict(found) | {IDLE: max(idle, whole - sum(found.values()), 0.0)}


def _views(
    spans: Sequence[RecordedSpan], lanes: Sequence[str], kinds: Sequence[str], begins: Sequence[tuple[float, int]]
) -> list[ChartData]:
    spans = [span for span in spans if span.worker in set(lanes)]
    if not spans:
        return []
    by_step: dict[int, list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        by_step[span.step].append(span)
    steps, latest, chosen = sorted(by_step), list[int](), 0
    for step in reversed(steps):
        chosen += len(by_step[step])
        if latest and (chosen > MAX_SPANS or len(latest) >= 4):
            break
        latest.append(step)
    chosen_views = []
    if len(steps) > len(latest):
        label = f"latest steps ({latest[-1]} to {latest[0]})" if len(latest) > 1 else f"latest step ({latest[0]})"
        chosen_views.append((label, [span for step in latest for span in by_step[step]]))
        slowest = max([step for step in steps if step > 0] or steps, key=lambda step: _length(by_step[step]))
        chosen_views.append((f"slowest step ({slowest})", by_step[slowest]))
    views = [_full(label, found, lanes, kinds) for label, found in chosen_views]
    views.append((_full if len(spans) <= MAX_SPANS else _sliced)("whole run", spans, lanes, kinds))
    for view in views:
        view["marks"] = _marks(view["boxes"], begins)
    return views


def _length(spans: Sequence[RecordedSpan]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _full(label: str, spans: Sequence[RecordedSpan], lanes: Sequence[str], kinds: Sequence[str]) -> ChartData:
    """Every span: lane, kind, start, seconds, and its extent in the lane's height, 0 to 1."""
    longest = sorted((span for span in spans if span.name != WAIT), key=lambda span: span.seconds, reverse=True)
    boxes = [
        [lanes.index(span.worker), kinds.index(word(span.name)), round(span.start, 4), round(span.seconds, 4), 0, 1]
        for span in longest[: 2 * MAX_SPANS]
    ]
    return {"label": label, "boxes": sorted(boxes, key=lambda box: box[2])}


def _sliced(label: str, spans: Sequence[RecordedSpan], lanes: Sequence[str], kinds: Sequence[str]) -> ChartData:
    """Slices of equal length, each lane's height divided by activity; what stays empty is idle time."""
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    width = max(end - begin, 1e-9) / NUM_SLICES
    amounts: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.name == WAIT:
            continue
        lane, kind = lanes.index(span.worker), kinds.index(word(span.name))
        first = int((span.start - begin) / width)
        for number_ in range(first, min(int((span.end - begin) / width), NUM_SLICES - 1) + 1):
            low, high = begin + number_ * width, begin + (number_ + 1) * width
            amounts[lane, number_][kind] += max(min(span.end, high) - max(span.start, low), 0.0)
    boxes = []
    for (lane, number_), parts in sorted(amounts.items()):
        low = 0.0
        for kind, seconds in sorted(parts.items()):
            high = min(low + seconds / width, 1.0)
            boxes.append(
                [lane, kind, round(begin + number_ * width, 3), round(width, 3), round(low, 2), round(high, 2)]
            )
            low = high
    return {"label": label, "boxes": boxes}


def _marks(boxes: Sequence[Sequence[float]], begins: Sequence[tuple[float, int]]) -> list[list[float]]:
    """The starts of steps within a view."""
    low, high = min((box[2] for box in boxes), default=0.0), max((box[2] + box[3] for box in boxes), default=0.0)
    found = [[round(start, 4), step] for start, step in begins if low - 0.1 <= start < high]
    return found if len(found) <= MAX_MARKS else []


def steps(run: RunData) -> Section:
    section = Section("time", "Where each step's time went", short="Time")
    saves: dict[int, float] = defaultdict(float)
    for span in run.spans:
        if span.name == "checkpoint":
            saves[span.step] += span.seconds
    column = Column(run.steps)
    layers = [Series(word(span), column.of(f"timing_s/{name}"), tone(word(span))) for name, span in PHASES]
    layers += [
        Series(OTHER, column.of(_rest), MIST),
        Series(word("eval"), column.of("timing_s/eval"), tone(word("eval"))),
        Series(word("checkpoint"), column.of(lambda row: saves.get(row["step"])), tone(word("checkpoint"))),
    ]
    section.add(
        Chart("time", "Seconds per step, by phase", column.x, layers, "stack", unit="s"),
        "No step has finished yet.",
    )
    shares = ("generate", "learn", "publish", "run_ahead", "spot_train", "waiting")
    fleet = [
        Series(
            word(name) if name != "waiting" else IDLE, _hundred(column, f"perf/fleet_{name}_share"), _share_tone(name)
        )
        for name in shares
    ]
    section.add(
        Chart("fleet", "Worker time by activity", column.x, fleet, "stack", unit="%", ceiling=100),
        "",
    )
    tokens = [Series("tokens per second of the step", column.of("perf/throughput"), ACCENT)]
    section.add(Chart("throughput", "Throughput", column.x, tokens, unit="tokens/s"), "")
    section.left_out = [sentence for sentence in section.left_out if sentence]
    return section


def _share_tone(name: str) -> str:
    return MIST if name == "waiting" else tone(word(name))


def _hundred(column: Column, name: str) -> list[Value]:
    return [None if value is None else 100 * value for value in column.of(name)]


def _rest(row: Metrics) -> Value:
    """The time of a step that no phase accounts for."""
    whole = number(row, "timing_s/step")
    return (
        None if whole is None else max(whole - sum(number(row, f"timing_s/{name}") or 0.0 for name, _ in PHASES), 0.0)
    )
