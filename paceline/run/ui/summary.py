"""The summary of a run: the last lines of `paceline train`, and how phases, shares and durations are written.

The command line prints `summarise` when a run is over; the display uses the same formats. Everything here is a function
of the numbers it is given: no file, no clock, no terminal. A missing metric drops its own line and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from paceline.rollout.compare import Comparison, describe_speedup
from paceline.run.standard_errors import SE

Metrics = Mapping[str, Any]
"""One row of `metrics.jsonl`; only numbers are read."""

LARGEST = 1e100
"""Larger numbers are accidents, and their sums overflow."""
EDGE_SHARE = 0.1
"""The share of a run that counts as its beginning, and as its end."""
MAX_SHOWN_SECONDS = 99.95
"""Longer times are shown in minutes."""
LABEL_WIDTH = 13
BAR_WIDTH = 20
GPU_GAIN = "5.0x (best case) to 0.92x (worst on file), measured on an H200: see docs/performance.md"
"""What speculation gains elsewhere, for a run on a CPU. A test holds it to the measured figures in README.md."""


@dataclass(frozen=True)
class PhaseTime:
    """A timed part of the run: its full name, its short name, and whether it is part of a step."""

    name: str
    short: str
    is_in_step: bool


PHASES: dict[str, PhaseTime] = {
    "gen": PhaseTime("generate", "gen", is_in_step=True),
    "score": PhaseTime("score", "score", is_in_step=True),
    "update": PhaseTime("learn", "learn", is_in_step=True),
    "spot": PhaseTime("drafter", "spot", is_in_step=True),
    "eval": PhaseTime("evaluate", "eval", is_in_step=False),
    "checkpoint": PhaseTime("checkpoint", "save", is_in_step=False),
}
"""By the name of its span, which `timing_s/` carries too. Time outside of all phases is shown as other."""
OTHER = PhaseTime("other", "other", is_in_step=True)
MIN_OTHER = 0.005
"""A smaller rest is noise between clock readings."""


@dataclass(frozen=True)
class Slice:
    """One phase's share of some time."""

    phase: PhaseTime
    seconds: float
    share: float


_SPECULATION = "rollout/spec_"
_SOURCE = re.compile(f"{_SPECULATION}(.+)_proposed")
_KINDS = ("proposed", "verified", "accepted", "milliseconds")
_AHEAD = ("made", "offered", "survived")
_GRADER = "eval/grader_"
"""Failed gradings by kind."""


@dataclass(frozen=True)
class Outcome:
    """What a finished or stopped run knows besides its metrics. The summary skips what is None or empty."""

    num_steps: int | None = None
    """Steps requested."""
    seconds: float | None = None
    """Wall time of the whole run."""
    comparison: Comparison | None = None
    folder: Path | None = None
    checkpoints: Sequence[str | Path] = ()
    """The kept ones, oldest first."""
    next_commands: Sequence[str] = ()
    example: Sequence[tuple[str, str]] = ()
    """Lines on one held-out item: see `example.py`."""
    gain_se: float | None = None
    """Standard error of the gain in held-out accuracy."""
    gpu_gain: str | None = None
    """What speculation gains on a GPU, if this run had none."""


def summarise(rows: Sequence[Metrics], totals: Mapping[str, float], outcome: Outcome | None = None) -> list[str]:
    """The summary in lines of plain text, from `rows` in order of steps and `totals` in seconds by span name.

    What was done comes first, what came of it last: a terminal shows the end.

    The larger sum of each phase counts: totals miss the time before a resume, and rows miss what follows them, such as
    checkpoints.
    """
    outcome = outcome or Outcome()
    added = _added_times(rows)
    times = {name: max(number(totals, name) or 0.0, added.get(name, 0.0)) for name in (*PHASES, "step")}
    return [
        _headline(rows, outcome),
        *_time_lines(times, outcome.seconds),
        *_work_lines(rows, added.get("gen", 0.0)),
        *_place_lines(outcome),
        *_result_lines(rows, outcome.gain_se),
        *(_line(label, text) for label, text in outcome.example),
        *_speculation_lines(outcome),
        *(_line("next" if not i else "", command) for i, command in enumerate(outcome.next_commands)),
    ]


def evaluation_lines(found: Metrics) -> list[str]:
    """An evaluation's figures in lines of text, with standard errors; counters of failures only if there were some."""

    def figure(name: str, form: Callable[[float], str]) -> str:
        value, error = number(found, f"eval/{name}") or 0.0, number(found, f"eval/{name}{SE}")
        return form(value) if error is None else f"{form(value)} ± {form(error).removesuffix(' %')}"

    chances = [name for name in found if name.startswith("eval/pass@") and not name.endswith(SE)]
    meaning = "  (± is the standard error over items)" if f"eval/accuracy{SE}" in found else ""
    failures = {name: value for name, value in found.items() if name.startswith(_GRADER) and value}
    return [
        _line("accuracy", figure("accuracy", lambda value: percent(value, 1)) + meaning),
        *(_line(name[5:], figure(name[5:], lambda value: percent(value, 1))) for name in chances),
        _line("reward", figure("reward", lambda value: f"{value:.3f}")),
        _line("length", f"mean {found['eval/mean_length']:,.0f}, longest {found['eval/max_length']:,.0f} tokens"),
        _line("cut off", f"{percent(found['eval/clipped_ratio'], 1)} of the answers, at sampling.max_new_tokens"),
        *(
            _line("  grader", f"{name[len(_GRADER) :].replace('_', ' ')}: {value:,.0f}")
            for name, value in failures.items()
        ),
    ]


def number(metrics: Metrics, name: str) -> float | None:
    """A metric as a float that can be summed and shown; None if it is missing or not such a number."""
    value = metrics.get(name)
    if not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= LARGEST else None


def divide_time(seconds: Mapping[str, float], whole: float | None = None) -> list[Slice]:
    """The share of the time that each phase took, in the order of `PHASES`; the rest is `OTHER`.

    `seconds` are by span name. `step` is the step alone, without evaluation and checkpoints. `whole` is the total time,
    if known.
    """
    spent = {phase: max(0.0, number(seconds, name) or 0.0) for name, phase in PHASES.items()}
    inside = sum(value for phase, value in spent.items() if phase.is_in_step)
    outside = sum(value for phase, value in spent.items() if not phase.is_in_step)
    total = max(whole or 0.0, outside + max(inside, number(seconds, "step") or 0.0))
    if total <= 0:
        return []
    rest = total - inside - outside
    if rest > MIN_OTHER * total:
        spent[OTHER] = rest
    return [Slice(phase, value, value / total) for phase, value in spent.items() if value > 0]


def timings(metrics: Metrics) -> dict[str, float]:
    """The times of one row by span name."""
    found = ((name, number(metrics, f"timing_s/{name}")) for name in (*PHASES, "step"))
    return {name: value for name, value in found if value is not None}


def percent(share: float, num_digits: int = 0) -> str:
    """61 %"""
    return f"{100 * share:.{num_digits}f} %"


def with_error(share: float, error: float | None) -> str:
    """61.0 % ± 2.2: a share with its standard error, if there is one."""
    return percent(share, 1) if error is None else f"{percent(share, 1)} ± {100 * error:.1f}"


def counted(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_duration(seconds: float) -> str:
    """1:24 or 2:05:09."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_seconds(seconds: float) -> str:
    """3.1 s; from a hundred seconds on, a duration."""
    return f"{seconds:.1f} s" if seconds < MAX_SHOWN_SECONDS else format_duration(seconds)


# --- the parts of the summary -----------------------------------------------------------------------------------------


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}} {text}"


def _headline(rows: Sequence[Metrics], outcome: Outcome) -> str:
    done = int(max((number(row, "step") or 0 for row in rows), default=0))
    if not done:
        return "No step finished."
    is_short = outcome.num_steps is not None and done < outcome.num_steps
    steps = f"{done} of {counted(outcome.num_steps or 0, 'step')}" if is_short else counted(done, "step")
    duration = f" in {format_duration(outcome.seconds)}" if outcome.seconds is not None else ""
    return f"{'Stopped after' if is_short else 'Done:'} {steps}{duration}."


def _result_lines(rows: Sequence[Metrics], gain_se: float | None) -> Iterator[str]:
    """What was learned: rewards and lengths at both ends of the run, accuracy of its first and last evaluation."""
    rewards = _known(rows, "reward")
    if rewards:
        before, after, size = _edges(rewards)
        basis = f"mean of the first and last {size} steps" if size > 1 else "first and last step"
        change = f"{before:.3f} -> {after:.3f}  ({after - before:+.3f}; {basis})"
        yield _line("reward", change if len(rewards) > 1 else f"{after:.3f}")
    names = {name for row in rows for name in row if name.startswith("eval/pass@") and not name.endswith(SE)}
    for name in ("eval/accuracy", *sorted(names, key=lambda name: (len(name), name))):
        found = [row for row in rows if number(row, name) is not None]
        if found:
            is_main = name == "eval/accuracy"
            label = "held out" if is_main else name.removeprefix("eval/")
            yield _line(label, _percent_change(found, name, gain_se if is_main else None))
    rewards = _known(rows, "eval/reward")
    if rewards and rewards != _known(rows, "eval/accuracy"):  # the reward says more than right or wrong
        yield _line("  reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}  (accuracy counts only full marks)")


def _percent_change(rows: Sequence[Metrics], name: str, gain_se: float | None) -> str:
    """A share in the first and the last of the rows, which all have it, with standard errors where they are known."""
    before, after = (number(row, name) or 0.0 for row in (rows[0], rows[-1]))
    errors = [number(row, f"{name}{SE}") for row in (rows[0], rows[-1])]
    shown = [with_error(before, errors[0]), with_error(after, errors[1])]
    meaning = "± is the standard error" if errors[1] is not None else ""
    if len(rows) == 1:
        return f"{shown[1]}{f'  ({meaning})' if meaning else ''}"
    gain = f"{100 * (after - before):+.1f}{'' if gain_se is None else f' ± {100 * gain_se:.1f}'} points"
    return f"{' -> '.join(shown)}  ({'; '.join(filter(None, (gain, meaning)))})"


def _time_lines(times: Mapping[str, float], whole: float | None) -> Iterator[str]:
    slices = divide_time(times, whole)
    if not slices:
        return
    total = sum(part.seconds for part in slices)
    show = format_seconds if total < MAX_SHOWN_SECONDS else format_duration  # one unit for the whole table
    yield _line("time", f"{show(total)} total")
    for part in slices:
        name, bar = f"  {part.phase.name}", "#" * round(BAR_WIDTH * part.share)
        yield _line(name, f"{show(part.seconds):>7} {percent(part.share):>6}  {bar}").rstrip()


def _work_lines(rows: Sequence[Metrics], generation_s: float) -> Iterator[str]:
    weighted = [(_num_tokens(row), number(row, "rollout/spec_accept_length")) for row in rows]
    tokens = sum(count for count, _ in weighted)
    if tokens:
        rate = f" at {tokens / generation_s:,.0f} tokens/s" if generation_s > 0 else ""
        yield _line("tokens", f"{tokens:,.0f} generated{rate}")
    # All tokens over all sequence forwards, so that a step counts by its work.
    counted = [(count or 1.0, accept) for count, accept in weighted if accept is not None and accept > 0]
    if counted:
        mean = sum(count for count, _ in counted) / sum(count / accept for count, accept in counted)
        yield _line("accept length", f"{mean:.2f} tokens per sequence per forward pass")
    yield from _source_lines(rows, tokens)
    lengths = _known(rows, "completions/mean_length")
    if lengths:
        before, after, _ = _edges(lengths)
        yield _line("length", f"{before:,.0f} -> {after:,.0f} tokens" if len(lengths) > 1 else f"{after:,.0f} tokens")


def _source_lines(rows: Sequence[Metrics], tokens: float) -> Iterator[str]:
    """What each source of drafts cost and gained, and what became of run-ahead text."""
    sources = {found[1] for row in rows for name in row if (found := _SOURCE.fullmatch(name))}
    for source in sorted(sources):
        sums = {kind: sum(_known(rows, f"{_SPECULATION}{source}_{kind}")) for kind in _KINDS}
        if not sums["verified"]:
            continue
        accepted = f"{percent(sums['accepted'] / sums['verified'])} accepted"
        share = f", {percent(sums['accepted'] / tokens)} of all tokens" if tokens else ""
        seconds = format_seconds(sums["milliseconds"] / 1e3)
        drafted = f"{sums['verified']:,.0f} of {sums['proposed']:,.0f} draft tokens verified"
        yield _line(f"  {source}", f"{drafted} in {seconds}, {accepted}{share}")
    made, offered, survived = (sum(_known(rows, f"{_SPECULATION}ahead_{kind}")) for kind in _AHEAD)
    if made:
        fate = f"; of {offered:,.0f} used as drafts, {percent(survived / offered)} accepted" if offered else ""
        yield _line("run-ahead", f"{made:,.0f} tokens{fate}")


def _place_lines(outcome: Outcome) -> Iterator[str]:
    if outcome.checkpoints:
        yield _line("checkpoints", f"{len(outcome.checkpoints)} kept, newest: {outcome.checkpoints[-1]}")
    if outcome.folder is not None:
        yield _line("folder", str(outcome.folder))


def _speculation_lines(outcome: Outcome) -> Iterator[str]:
    if outcome.comparison is not None:
        yield from _comparison_lines(outcome.comparison)
        if outcome.gpu_gain is not None:
            yield _line("  on a GPU", outcome.gpu_gain)


def _comparison_lines(comparison: Comparison) -> Iterator[str]:
    """The same rollouts without and with speculation: how much faster, whether equal, and what was done."""
    without, with_it = sum(comparison.seconds_off), sum(comparison.seconds_on)
    verdict = (
        "the same tokens"
        if comparison.difference is None
        else "but the tokens DIFFER, which is a bug: please report it"
    )
    if with_it > 0:
        yield _line("speculation", describe_speedup(without / with_it, comparison.ratios))
    yield _line("  measured", f"{without:.2f} s plain, {with_it:.2f} s with speculation, {verdict}")
    ratios = comparison.ratios
    spread = f" in turns ({min(ratios):.2f}x to {max(ratios):.2f}x)" if len(ratios) > 1 else ""
    work = f": {comparison.work}" if comparison.work else ""
    yield _line("  how", f"{counted(len(comparison.seconds_on), 'repeat')}{spread}{work}")
    plain, drafted = comparison.gpu_share_off, comparison.gpu_share_on
    if plain is not None and drafted is not None:
        shares = f"{percent(plain)} of the time plain, {percent(drafted)} with speculation"
        yield _line("  GPU", f"in forward passes {shares}")


# --- sums over rows ---------------------------------------------------------------------------------------------------


def _known(rows: Sequence[Metrics], name: str) -> list[float]:
    return [value for row in rows if (value := number(row, name)) is not None]


def _edges(values: Sequence[float]) -> tuple[float, float, int]:
    """Means of the beginning and the end, and how many values each covers."""
    size = max(1, round(EDGE_SHARE * len(values)))
    return sum(values[:size]) / size, sum(values[-size:]) / size, size


def _num_tokens(row: Metrics) -> float:
    """Tokens generated in a step; throughput counts them per second of the whole step."""
    return round((number(row, "perf/throughput") or 0.0) * (number(row, "timing_s/step") or 0.0))


def _added_times(rows: Sequence[Metrics]) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in rows:
        for name, value in timings(row).items():
            total[name] = total.get(name, 0.0) + value
    return total
