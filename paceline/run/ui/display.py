"""What `paceline train` shows while it runs: a live area on a terminal, one plain line per step anywhere else.

The command line makes one with `make_display` and holds it in a `with` block; `loop.py` tells it what happens. It only
shows: nothing may depend on it, not even on whether anybody is left to read it, and a metric it expects may be missing.
It escapes control characters, because notes quote what models wrote. Its memory and its height stay bounded, however
long the run is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.terminal_text import escaped
from paceline.run.standard_errors import SE
from paceline.run.ui.summary import (
    Metrics,
    Slice,
    divide_time,
    format_duration,
    format_seconds,
    number,
    percent,
    timings,
    with_error,
)

NUM_RECENT = 10
"""Steps behind the running means and the remaining time."""
REFRESHES_PER_SECOND = 2
MIN_SHARE = 0.005
"""Phases below this share of a step are left out."""
LABEL_WIDTH = 8
SILENCE_S = 30.0
"""Where nothing can be redrawn, a long phase says how far it is after this many seconds without a line."""
EVALUATE = "evaluate"
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Agenda:
    """What a run does besides its steps, for the remaining time."""

    evaluates: bool = False
    """Whether it evaluates after the last step."""
    eval_every: int = 0
    """Steps from one evaluation to the next; 0: none in between."""
    comparison_share: float = 0.0
    """The time of the comparison at the end, as a share of that of all steps."""
    evaluation_s: float = 0.0
    """Seconds that an earlier process of this run took for an evaluation."""

    def num_evaluations(self, step: int, num_steps: int) -> int:
        """Evaluations that are still to come after a step."""
        if not self.evaluates or step >= num_steps:
            return 0
        return 1 + ((num_steps - 1) // self.eval_every - step // self.eval_every if self.eval_every else 0)


def make_display(
    num_steps: int,
    console: Console | None = None,
    is_quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Display:
    """A live display for a terminal, a plain one for anything else; if quiet, notes and the summary only."""
    console = console or Console()
    if is_quiet:
        return Display(num_steps, console, clock)
    return (LiveDisplay if can_redraw(console) else PlainDisplay)(num_steps, console, clock)


def can_redraw(console: Console) -> bool:
    """Whether it is a real terminal. Rich alone would believe FORCE_COLOR, which CI sets."""
    return console.file.isatty() and console.is_interactive and console.encoding.startswith("utf")


class Display:
    """Shows notes and the summary only. Its subclasses show more through the same methods."""

    def __init__(self, num_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.history = History(num_steps)
        self._clock = clock
        self._activity: Activity | None = None

    def begin(self, title: str, lines: Sequence[str] = ()) -> None:
        """Announce the run: model, task, algorithm, device, folder."""

    def expect(self, agenda: Agenda) -> None:
        """What the run is going to do besides its steps."""
        self.history.agenda = agenda

    def phase(self, step: int, name: str) -> None:
        """A phase begins: generate, score, learn, evaluate, checkpoint or the like."""
        now = self._clock()
        self.history.enter(step, name, now)
        self._activity = Activity(name, now)

    def detail(self, text: str, unit: str = "responses") -> None:
        """Which pass of the phase this is, if it has several, and what `progress` counts."""
        if self._activity is not None:
            self._activity = Activity(self._activity.name, self._clock(), text, unit)

    def progress(self, done: int, total: int, tokens: int) -> None:
        """While a phase generates: responses finished and requested, and tokens so far. May be called very often."""
        if self._activity is not None:
            self._activity = replace(self._activity, done=done, total=total, tokens=tokens)

    def step(self, step: int, metrics: Metrics) -> None:
        """A step is over. Steps count from 1; step 0 is the evaluation before the first."""

    def note(self, text: str) -> None:
        """Something the user must see: a warning, a failed grader."""
        self._write(f"note: {text}")

    def command(self, text: str) -> None:
        """A command for the user to copy: alone on its line and never wrapped."""
        self._write(text)

    def finish(self, lines: Sequence[str] = ()) -> None:
        """The run is over; `lines` sum it up."""
        for line in lines:
            self._write(line)

    def close(self) -> None:
        """Restore the terminal. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, text: str) -> None:
        """Write a line as it is, neither wrapped nor coloured, and flush it."""
        with suppress(OSError):  # the terminal was closed, or the reader of a pipe has ended
            print(printable(text, self.console.encoding), file=self.console.file, flush=True)


class PlainDisplay(Display):
    """For pipes, files and CI: one aligned line per step, without control codes."""

    def __init__(self, num_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_steps, console, clock)
        self._last_line = clock()

    def begin(self, title: str, lines: Sequence[str] = ()) -> None:
        self.history.begin(self._clock())
        for line in (title, *lines):
            self._write(line)

    def progress(self, done: int, total: int, tokens: int) -> None:
        super().progress(done, total, tokens)
        now = self._clock()
        if self._activity is not None and now - max(self._last_line, self._activity.since) >= SILENCE_S:
            self._write(f"  {self._activity.describe(now)}")

    def step(self, step: int, metrics: Metrics) -> None:
        gain = self.history.gain(metrics)
        self.history.add(step, metrics, self._clock())
        self._write("  ".join(self._parts(step, metrics, gain)))

    def _write(self, text: str) -> None:
        self._last_line = self._clock()
        super()._write(text)

    def _parts(self, step: int, metrics: Metrics, gain: float | None) -> Iterator[str]:
        """Parts of variable width come last, so that the rest stays in columns."""
        width = len(str(self.history.num_steps))
        yield f"step {step:>{width}}/{self.history.num_steps}"
        reward = number(metrics, "reward")
        if reward is not None:
            change = f"({gain:+.3f})" if gain is not None else ""
            yield f"reward {reward:6.3f} {change:8}"
        lengths = _lengths(metrics)
        if lengths:
            yield "length " + " ".join(f"{name} {value:4.0f}" for name, value in lengths)
        accept = number(metrics, "rollout/spec_accept_length")
        if accept is not None:
            yield f"accept {accept:5.2f}"
        slices = divide_time(timings(metrics))
        if slices:
            yield f"{format_seconds(sum(part.seconds for part in slices)):>8}"
        if self.history.eta_s is not None:
            yield f"eta {format_duration(self.history.eta_s):>7}"
        if slices:
            yield f"({', '.join(_shares(slices))})"
        accuracy = number(metrics, "eval/accuracy")
        if accuracy is not None:
            yield f"held out {with_error(accuracy, number(metrics, f'eval/accuracy{SE}'))}"


@dataclass(frozen=True)
class Activity:
    """The phase in progress, or the pass of it, and when that began."""

    name: str
    since: float
    detail: str = ""
    unit: str = "responses"
    """What is counted."""
    done: int = 0
    total: int = 0
    tokens: int = 0

    def describe(self, now: float) -> str:
        elapsed = max(0.0, now - self.since)
        what = f"{self.name}: {self.detail} " if self.detail else self.name
        parts = [f"{what} {format_seconds(elapsed)}"]
        if self.total:
            parts.append(f"{self.done}/{self.total} {self.unit}")
        if self.tokens:
            rate = f" ({self.tokens / elapsed:,.0f}/s)" if elapsed > 0 else ""
            parts.append(f"{self.tokens:,} tokens{rate}")
        return "  ".join(parts)


class LiveDisplay(Display):
    """For terminals: an area at the bottom, redrawn twice a second; notes scroll away above it.

    Rich draws from its own thread. It reads `_rows`, `_activity` and `_deadline`, which are replaced and never mutated,
    so the two threads need no lock.
    """

    def __init__(self, num_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_steps, console, clock)
        self._rows: tuple[tuple[str, str], ...] = ()
        self._deadline: float | None = None
        self._live: Live | None = None
        self._is_closed = False

    def begin(self, title: str, lines: Sequence[str] = ()) -> None:
        assert self._live is None, "a display begins once"
        self.history.begin(self._clock())
        self._print(title, "bold")
        for line in lines:
            self._print(line, "dim")
        self._live = Live(get_renderable=self.frame, console=self.console, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start(refresh=True)

    def step(self, step: int, metrics: Metrics) -> None:
        now = self._clock()
        self.history.add(step, metrics, now)
        self._rows = tuple(table_rows(self.history, metrics))
        self._deadline = now + self.history.eta_s if self.history.eta_s is not None else None

    def note(self, text: str) -> None:
        self._print(f"note: {text}", "yellow")

    def command(self, text: str) -> None:
        self._print(text)

    def finish(self, lines: Sequence[str] = ()) -> None:
        self.close()
        for line in ("", *lines) if lines else ():
            self._print(line)

    def close(self) -> None:
        self._activity, self._is_closed = None, True
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def frame(self) -> RenderableType:
        """The live area as of now, nine lines at most."""
        now = self._clock()
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for label, value in self._rows:
            table.add_row(label, Text(value))
        activity, parts = self._activity, [self._bar(now)]
        if activity is not None:
            parts.append(Text(activity.describe(now), style="cyan", no_wrap=True, overflow="ellipsis"))
        return Group(*parts, table) if self._rows else Group(*parts)

    def _bar(self, now: float) -> RenderableType:
        done, total = self.history.step, self.history.num_steps
        grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1, min_width=4)
        grid.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, total), completed=min(done, total))
        grid.add_row(f"step {done}/{total}", bar, "" if self._is_closed else self._time_left(now))
        return grid

    def _time_left(self, now: float) -> str:
        if self._deadline is None:
            return "eta ?"
        left = round(self._deadline - now)
        return f"eta {format_duration(left)}" if left > 0 else "longer than estimated"

    def _print(self, text: str, style: str = "") -> None:
        """Print a line above the live area, unwrapped so that it copies whole."""
        line = Text(printable(text, self.console.encoding), style=style)
        with suppress(OSError):
            self.console.print(line, soft_wrap=True)


def table_rows(history: History, metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Label and value of each line of the live area. What matters most comes first: narrow terminals truncate."""
    reward = number(metrics, "reward")
    if reward is not None:
        yield "reward", f"{reward:.3f}  mean {history.mean_reward:.3f}  {sparkline(history.rewards.points)}"
    if history.held_out is not None:
        step, accuracy, first, error = history.held_out
        since = f"  {100 * (accuracy - first):+.1f} points" if accuracy != first else ""
        yield "held out", f"{with_error(accuracy, error)} at step {step}{since}"
    lengths = _lengths(metrics)
    if lengths:
        clipped = number(metrics, "completions/clipped_ratio")
        shown = [f"{name} {value:,.0f}" for name, value in lengths]
        yield "length", "  ".join(shown + ([f"clipped {percent(clipped)}"] if clipped else []))
    accept = number(metrics, "rollout/spec_accept_length")
    if accept is not None:
        yield "accept", f"{accept:.2f} tokens per forward pass"
    throughput = number(metrics, "perf/throughput")
    if throughput is not None:
        yield "speed", f"{throughput:,.0f} tokens/s"
    slices = divide_time(timings(metrics))
    if slices:
        yield "time", f"{format_seconds(sum(part.seconds for part in slices))}  {'  '.join(_shares(slices))}"


def _shares(slices: Sequence[Slice]) -> list[str]:
    return [f"{part.phase.short} {percent(part.share)}" for part in slices if part.share >= MIN_SHARE]


def _lengths(metrics: Metrics) -> list[tuple[str, float]]:
    """Mean, 95th percentile and longest response, as far as known."""
    found = ((name, number(metrics, f"completions/{name}_length")) for name in ("mean", "p95", "max"))
    return [(name, value) for name, value in found if value is not None]


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled between the lowest and the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if not low < high:
        return BLOCKS[len(BLOCKS) // 2] * len(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)


def printable(text: str, encoding: str) -> str:
    """The text with control characters, and whatever the encoding lacks, escaped."""
    try:
        "±".encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("±", "+/-")
    return escaped(text).encode(encoding, "backslashreplace").decode(encoding)


class History:
    """What a display remembers of the steps so far."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step = 0
        """Finished steps, including those before a resume."""
        self.rewards = Curve()
        self.held_out: tuple[int, float, float, float | None] | None = None
        """Of the last evaluation step and accuracy, the first one's accuracy, and the standard error of the last."""
        self.agenda = Agenda()
        self._recent_rewards: deque[float] = deque(maxlen=NUM_RECENT)
        self._durations: deque[float] = deque(maxlen=NUM_RECENT)
        self._entered: int | None = None
        self._last_end = 0.0
        self._evaluating_since: float | None = None
        self._evaluation_s: float | None = None
        """Of the last evaluation."""
        self._evaluated_s = 0.0
        """Seconds of evaluation since the last step."""

    def begin(self, now: float) -> None:
        self._last_end = now

    def enter(self, step: int, name: str, now: float) -> None:
        """A phase of a step begins. The first step starts with its first phase, so that loading does not count."""
        self._end_evaluation(now)
        if not self._durations and step != self._entered:
            self._last_end = now
            # A resumed run shows the step it had reached.
            self.step = max(self.step, step - 1)
        self._entered = step
        if name == EVALUATE:
            self._evaluating_since = now

    def _end_evaluation(self, now: float) -> None:
        if self._evaluating_since is not None:
            self._evaluation_s = now - self._evaluating_since
            self._evaluated_s += self._evaluation_s
            self._evaluating_since = None

    def add(self, step: int, metrics: Metrics, now: float) -> None:
        """A step is over. Its time runs from the end of the step before, with checkpoints and without evaluations."""
        self._end_evaluation(now)
        if step > 0:
            self._durations.append(max(0.0, now - self._last_end - self._evaluated_s))
        self._last_end, self.step, self._evaluated_s = now, step, 0.0
        reward, accuracy = number(metrics, "reward"), number(metrics, "eval/accuracy")
        if reward is not None:
            self._recent_rewards.append(reward)
            self.rewards.add(reward)
        if accuracy is not None:
            first = accuracy if self.held_out is None else self.held_out[2]
            self.held_out = (step, accuracy, first, number(metrics, f"eval/accuracy{SE}"))

    def gain(self, metrics: Metrics) -> float | None:
        """How far a reward lies above the mean of the recent ones."""
        reward = number(metrics, "reward")
        return reward - fmean(self._recent_rewards) if reward is not None and self._recent_rewards else None

    @property
    def mean_reward(self) -> float:
        """Mean over recent steps, including the last."""
        return fmean(self._recent_rewards)

    @property
    def eta_s(self) -> float | None:
        """Seconds left if steps keep the recent pace; evaluations take as long as the last one did."""
        if not self._durations:
            return None
        pace, agenda = fmean(self._durations), self.agenda
        evaluation_s = agenda.evaluation_s if self._evaluation_s is None else self._evaluation_s
        return (
            pace * max(0, self.num_steps - self.step)
            + evaluation_s * agenda.num_evaluations(self.step, self.num_steps)
            + agenda.comparison_share * pace * self.num_steps
        )


class Curve:
    """A series of any length in a bounded number of points: when it is full, neighbours merge into their mean."""

    def __init__(self, max_points: int = 24) -> None:
        assert max_points >= 2 and max_points % 2 == 0, "points merge in pairs"
        self._max_points = max_points
        self._means: list[float] = []
        self._values_per_point = 1
        self._pending_sum, self._num_pending = 0.0, 0

    def add(self, value: float) -> None:
        self._pending_sum, self._num_pending = self._pending_sum + value, self._num_pending + 1
        if self._num_pending < self._values_per_point:
            return
        self._means.append(self._pending_sum / self._num_pending)
        self._pending_sum, self._num_pending = 0.0, 0
        if len(self._means) == self._max_points:
            self._means = [fmean(pair) for pair in zip(self._means[::2], self._means[1::2], strict=True)]
            self._values_per_point *= 2

    @property
    def points(self) -> list[float]:
        """Means of equally many values each, except the last."""
        return [*self._means, self._pending_sum / self._num_pending] if self._num_pending else list(self._means)
