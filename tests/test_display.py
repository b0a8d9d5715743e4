"""What a run shows and says at its end: exact lines from made-up numbers, on faked terminals and a real one."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from paceline.rollout.compare import Comparison, Difference
from paceline.run.counterfactual import describe_work
from paceline.run.ui.display import (
    BLOCKS,
    NUM_RECENT,
    Agenda,
    Curve,
    Display,
    LiveDisplay,
    PlainDisplay,
    make_display,
    printable,
    sparkline,
)
from paceline.run.ui.summary import (
    GPU_GAIN,
    Outcome,
    counted,
    divide_time,
    evaluation_lines,
    format_duration,
    format_seconds,
    number,
    summarise,
)

ROW = {
    "step": 1,
    "reward": 0.4,
    "reward_std": 0.2,
    "completions/mean_length": 131.4,
    "completions/p95_length": 402.0,
    "completions/max_length": 512.0,
    "completions/clipped_ratio": 0.031,
    "rollout/spec_accept_length": 1.834,
    "timing_s/gen": 1.9,
    "timing_s/score": 0.01,
    "timing_s/update": 1.0,
    "timing_s/step": 3.1,
    "perf/throughput": 3120.0,
}
NAMES = [*ROW, "eval/accuracy", "eval/pass@8", "timing_s/eval", "timing_s/checkpoint"]
ABSURD = [None, float("nan"), float("inf"), -float("inf"), 10**400, -1e308, 1e99, -5, 0, "0.5", "\x1b[2J", True, [1.0]]
any_metrics = st.dictionaries(
    st.sampled_from(NAMES), st.one_of(st.sampled_from(ABSURD), st.floats(), st.integers()), max_size=len(NAMES)
)

DIFFERENCE = Difference(0, 0, 3, (1, 2), (-0.5, -0.5), ("stop", "stop"))


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """A text file that may claim to be a terminal and counts what was written but not flushed."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.num_pending = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.num_pending += len(text)
        return super().write(text)

    def flush(self) -> None:
        self.num_pending = 0


def make_console(stream: Any, width: int = 80, environ: Mapping[str, str] | None = None) -> Console:
    return Console(file=stream, width=width, height=25, _environ={"TERM": "xterm-256color", **(environ or {})})


def make_plain(num_steps: int = 40) -> tuple[Display, Stream, Clock]:
    stream, clock = Stream(), Clock()
    return make_display(num_steps, make_console(stream), clock=clock), stream, clock


def make_live(num_steps: int = 40, width: int = 80) -> tuple[LiveDisplay, Stream, Clock]:
    stream, clock = Stream(is_terminal=True), Clock()
    display = make_display(num_steps, make_console(stream, width), clock=clock)
    assert isinstance(display, LiveDisplay)
    return display, stream, clock


def frame_lines(display: LiveDisplay, width: int = 80) -> list[str]:
    """The live area as a terminal of this width shows it."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, _environ={}).print(display.frame())
    return [line.rstrip() for line in stream.getvalue().splitlines()]


# --- which display ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_terminal", "environ", "kind"),
    [
        (True, {}, LiveDisplay),
        (True, {"TERM": "dumb"}, PlainDisplay),
        (True, {"TTY_COMPATIBLE": "0"}, PlainDisplay),
        (False, {}, PlainDisplay),
        (False, {"FORCE_COLOR": "1"}, PlainDisplay),
        (False, {"TTY_COMPATIBLE": "1"}, PlainDisplay),
    ],
)
def test_only_a_real_terminal_is_redrawn(is_terminal: bool, environ: dict[str, str], kind: type[Display]) -> None:
    console = make_console(Stream(is_terminal), environ=environ)
    assert type(make_display(10, console)) is kind
    assert type(make_display(10, console, is_quiet=True)) is Display


def test_a_terminal_that_lacks_the_characters_gets_plain_lines() -> None:
    class Old(Stream):
        encoding = "latin-1"

    display = make_display(10, make_console(Old(is_terminal=True)))
    assert type(display) is PlainDisplay


def test_quiet_is_quiet_but_for_notes_and_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with make_display(2, is_quiet=True) as display:
        display.begin("title", ["line"])
        display.phase(1, "generate")
        display.progress(1, 2, 3)
        display.step(1, ROW)
        display.note("disk nearly full")
        display.finish(["done"])
    out, err = capsys.readouterr()
    assert (out, err) == ("note: disk nearly full\ndone\n", "")


# --- plain lines ------------------------------------------------------------------------------------------------------


def test_plain_lines_to_the_letter() -> None:
    display, stream, clock = make_plain()
    display.begin("GRPO on countdown", ["folder  runs/countdown-1"])
    clock.now += 100  # loading and evaluating are no step
    display.phase(0, "evaluate")
    display.step(0, {"step": 0, "eval/accuracy": 0.412, "eval/accuracy_se": 0.022})
    clock.now += 50
    display.phase(1, "generate")
    clock.now += 3
    display.step(1, ROW)
    display.phase(2, "generate")
    clock.now += 4
    display.note("2 graders failed")
    display.step(2, ROW | {"reward": 0.37, "timing_s/eval": 6.2, "eval/accuracy": 0.475})
    display.finish(["Done."])
    assert stream.getvalue().splitlines() == [
        "GRPO on countdown",
        "folder  runs/countdown-1",
        "step  0/40  held out 41.2 % ± 2.2",
        "step  1/40  reward  0.400           length mean  131 p95  402 max  512  accept  1.83     3.1 s  eta    1:57"
        "  (gen 61 %, learn 32 %, other 6 %)",
        "note: 2 graders failed",
        "step  2/40  reward  0.370 (-0.030)  length mean  131 p95  402 max  512  accept  1.83     9.3 s  eta    2:13"
        "  (gen 20 %, learn 11 %, eval 67 %, other 2 %)  held out 47.5 %",
        "Done.",
    ]


def test_plain_lines_stay_in_columns() -> None:
    display, stream, clock = make_plain(1000)
    display.begin("title")
    for step in (1, 9, 10, 100, 999, 1000):
        clock.now += 5
        display.step(step, ROW | {"reward": -0.5 if step == 9 else 0.5, "completions/mean_length": step * 1.0})
    lines = stream.getvalue().splitlines()[1:]
    for word in ("reward", "length", "p95", "max", "accept", " s ", "eta", "(gen"):
        assert len({line.index(word) for line in lines}) == 1, word


def test_every_line_is_out_at_once_and_without_control_codes() -> None:
    display, stream, _ = make_plain()
    display.begin("title", ["line"])
    for step in range(1, 4):
        display.phase(step, "generate")
        display.progress(1, 2, 3)
        before = stream.getvalue()
        display.step(step, ROW)
        assert stream.num_pending == 0
        assert stream.getvalue().removeprefix(before).count("\n") == 1
    assert re.fullmatch(r"[ -~\n]*", stream.getvalue())


def test_a_long_note_is_one_line_in_a_pipe() -> None:
    display, stream, _ = make_plain()
    display.note("x" * 500)
    assert stream.getvalue() == f"note: {'x' * 500}\n"


# --- notes quote models -----------------------------------------------------------------------------------------------

HOSTILE = "[red]\x1b[2J\x1b]0;owned\x07\u202e\r\x00 ok \ud800"
SHOWN = r"[red]\x1b[2J\x1b]0;owned\x07\u202e\r\x00 ok \ud800"


def test_notes_cannot_steer_a_terminal() -> None:
    display, stream, _ = make_plain()
    display.note(HOSTILE)
    assert stream.getvalue() == f"note: {SHOWN}\n"


def test_notes_on_a_terminal_are_shown_in_full_above_the_area() -> None:
    display, stream, _ = make_live(width=40)
    with display:
        display.note("early")
        display.begin("title")
        display.note(HOSTILE + "y" * 200)
        display.finish()
        display.note("late")
    text = stream.getvalue()
    assert SHOWN + "y" * 200 in text
    assert text.index("early") < text.index("title") < text.index("owned") < text.index("late")
    assert not set("\x07\u202e\x00") & set(text)
    assert "\x1b[2J" not in text


def test_what_an_encoding_lacks_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    make_display(1, make_console(stream)).note("25 € → 3")
    assert raw.getvalue() == b"note: 25 \\u20ac \\u2192 3\n"
    assert printable("50 % ± 2", "ascii") == "50 % +/- 2" and printable("50 % ± 2", "utf-8") == "50 % ± 2"


# --- time left --------------------------------------------------------------------------------------------------------


def etas(durations: Sequence[float], num_steps: int, first_step: int = 1) -> list[float | None]:
    display, _, clock = make_plain(num_steps)
    display.begin("title")
    clock.now += 1000
    found = []
    for step, duration in enumerate(durations, first_step):
        display.phase(step, "generate")
        clock.now += duration / 2
        display.phase(step, "learn")
        clock.now += duration / 2
        display.step(step, {})
        found.append(display.history.eta_s)
    return found


def test_time_left_is_that_of_recent_steps() -> None:
    assert etas([2, 4, 3], num_steps=10) == [18, 24, 21]
    assert etas([100] + [1] * NUM_RECENT, num_steps=20)[-1] == 20 - NUM_RECENT - 1
    assert etas([2, 2], num_steps=2)[-1] == 0


def test_a_resumed_run_counts_what_is_left() -> None:
    assert etas([2, 4], num_steps=40, first_step=31) == [18, 24]


def test_a_resumed_run_begins_where_it_was() -> None:
    display, _, _ = make_live(40)
    display.phase(31, "generate")
    assert "step 30/40" in frame_lines(display)[0]


def test_a_checkpoint_between_steps_counts() -> None:
    display, _, clock = make_plain(3)
    display.begin("title")
    display.phase(1, "generate")
    clock.now += 1
    display.step(1, {})
    display.phase(1, "checkpoint")
    clock.now += 5
    display.phase(2, "generate")
    clock.now += 1
    display.step(2, {})
    assert display.history.eta_s == pytest.approx((1 + 6) / 2)


AGENDA = Agenda(evaluates=True, eval_every=4, comparison_share=0.1)


def test_the_time_left_counts_evaluations_and_the_comparison() -> None:
    """Ten steps of 2 s, evaluations of 7 s after steps 4, 8 and 10, and a comparison of a tenth of all steps."""
    display, _, clock = make_plain(10)
    display.begin("title")
    display.expect(AGENDA)
    left = {}
    for step in range(11):
        if step:
            display.phase(step, "generate")
            clock.now += 2
        if step in (0, 4, 8, 10):
            display.phase(step, "evaluate")
            clock.now += 7
        display.step(step, {})
        left[step] = display.history.eta_s
    assert left[0] is None
    assert left[1] == 9 * 2 + 3 * 7 + 2 and left[3] == 7 * 2 + 3 * 7 + 2 and left[4] == 6 * 2 + 2 * 7 + 2
    assert left[9] == 2 + 7 + 2 and left[10] == 2, "the comparison is still to come"


def test_a_resumed_run_knows_what_an_evaluation_takes() -> None:
    display, _, clock = make_plain(40)
    display.begin("title")
    display.expect(Agenda(evaluates=True, evaluation_s=50.0))
    display.phase(31, "generate")
    clock.now += 2
    display.step(31, {})
    assert display.history.eta_s == 9 * 2 + 50


def test_what_is_still_to_come_is_counted() -> None:
    def count(every: int) -> list[int]:
        return [Agenda(True, every).num_evaluations(step, 6) for step in range(7)]

    assert count(0) == [1, 1, 1, 1, 1, 1, 0]
    assert count(2) == [3, 3, 2, 2, 1, 1, 0]
    assert count(4) == [2, 2, 2, 2, 1, 1, 0]
    assert count(6) == count(9) == count(0)
    assert Agenda().num_evaluations(0, 6) == 0


def test_no_time_left_is_not_shown_for_minutes() -> None:
    display, _, clock = make_live(2)
    display.history.begin(clock.now)
    for step in (1, 2):
        display.phase(step, "generate")
        clock.now += 3
        display.step(step, {})
    display.phase(2, "compare")
    display.detail("round 1 of up to 3, plain")
    display.progress(5, 64, 1000)
    clock.now += 60
    bar, activity = frame_lines(display)
    assert "eta" not in bar and bar.endswith("longer than estimated")
    assert activity == "compare: round 1 of up to 3, plain  60.0 s  5/64 responses  1,000 tokens (17/s)"
    assert all(cell_len(line) <= 40 for line in frame_lines(display, 40))


def test_passes_have_their_own_clock_and_unit() -> None:
    display, _, clock = make_live(2)
    display.phase(0, "evaluate")
    display.detail("before training", "items")
    clock.now += 10
    display.progress(3, 512, 900)
    assert frame_lines(display)[1] == "evaluate: before training  10.0 s  3/512 items  900 tokens (90/s)"
    display.phase(1, "generate")
    assert frame_lines(display)[1] == "generate 0.0 s"


def test_a_pipe_hears_of_a_long_phase_twice_a_minute() -> None:
    display, stream, clock = make_plain(2)
    display.begin("title")
    clock.now += 100  # loading has no progress
    display.phase(0, "evaluate")
    display.detail("before training", "items")
    for second in range(1, 71):
        clock.now += 1
        display.progress(second, 512, 100 * second)
    assert stream.getvalue().splitlines()[1:] == [
        "  evaluate: before training  30.0 s  30/512 items  3,000 tokens (100/s)",
        "  evaluate: before training  60.0 s  60/512 items  6,000 tokens (100/s)",
    ]


# --- the live area ----------------------------------------------------------------------------------------------------


def shown_after_two_steps(width: int) -> list[str]:
    display, _, clock = make_live()
    display.history.begin(clock.now)
    display.phase(0, "evaluate")
    display.step(0, {"eval/accuracy": 0.40})
    for step, reward in ((1, 0.2), (2, 0.4)):
        display.phase(step, "generate")
        clock.now += 3
        display.step(step, ROW | {"reward": reward, "eval/accuracy": 0.40 + step / 50, "eval/accuracy_se": 0.02})
    display.phase(3, "generate")
    display.progress(16, 64, 5000)
    clock.now += 2
    return frame_lines(display, width)


def test_the_live_area_to_the_letter() -> None:
    lines = shown_after_two_steps(80)
    assert re.fullmatch(r"step 2/40 ━+[╸╺]? +eta 1:52", lines[0])  # 38 steps of 3 s, 2 s ago
    assert lines[1:] == [
        "generate 2.0 s  16/64 responses  5,000 tokens (2,500/s)",
        "reward    0.400  mean 0.300  ▁█",
        "held out  44.0 % ± 2.0 at step 2  +4.0 points",
        "length    mean 131  p95 402  max 512  clipped 3 %",
        "accept    1.83 tokens per forward pass",
        "speed     3,120 tokens/s",
        "time      3.1 s  gen 61 %  learn 32 %  other 6 %",
    ]


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60])
def test_the_live_area_fits_narrow_terminals(width: int) -> None:
    lines = shown_after_two_steps(width)
    assert all(cell_len(line) <= width for line in lines)
    if width >= 40:
        assert len(lines) == len(shown_after_two_steps(80))
        for telling in ("step 2/40", "eta", "reward    0.400  mean 0.300", "held out  44.0 %", "p95 402", "gen 61 %"):
            assert any(telling in line for line in lines), telling
    if width == 40:
        assert "length    mean 131  p95 402  max 512  c…" in lines, "what is cut off is marked"


def test_before_anything_is_known_there_is_one_line() -> None:
    display, _, _ = make_live(num_steps=0)
    assert len(frame_lines(display)) == 1
    assert re.fullmatch(r"step 0/0 +eta \?", frame_lines(display)[0])


def run_live(body: Callable[[LiveDisplay], None]) -> tuple[str, BaseException | None]:
    """What a terminal gets from a display in whose block `body` runs, and what came out of the block."""
    display, stream, _ = make_live()
    streams = sys.stdout, sys.stderr
    raised: BaseException | None = None
    try:
        with display:
            display.begin("title", ["line"])
            body(display)
    except BaseException as error:
        raised = error
    assert (sys.stdout, sys.stderr) == streams
    return stream.getvalue(), raised


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad"), SystemExit(3)])
def test_the_terminal_is_restored_whatever_happens(error: BaseException) -> None:
    def body(display: LiveDisplay) -> None:
        display.step(1, ROW)
        print("from elsewhere")
        raise error

    text, raised = run_live(body)
    assert raised is error
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index("from elsewhere") < text.rindex("reward") < text.index(SHOW)


def test_finish_leaves_the_last_step_and_the_summary() -> None:
    def body(display: LiveDisplay) -> None:
        display.phase(1, "generate")
        display.step(1, ROW)
        display.finish(["reward went up"])

    text, raised = run_live(body)
    assert raised is None
    last = text[text.rindex("step 1/40") :]
    assert last.index("0.400") < last.index("reward went up")
    assert "generate" not in last and "eta" not in last
    assert text.count(SHOW) == 1


CHILD = """
import time
from paceline.run.ui.display import LiveDisplay, make_display
display = make_display(10)
assert isinstance(display, LiveDisplay)
with display:
    display.begin("title")
    display.phase(1, "generate")
    display.step(1, {"reward": 0.5})
    display.command("paceline train --resume --run.dir=runs/a-name-that-is-longer-than-the-terminal")
    display.note("ready")
    time.sleep(60)
"""


def test_an_interrupt_on_a_real_terminal() -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "TTY_COMPATIBLE")}
    environ |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parent.parent)}
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    text = b""
    try:
        while chunk := read_terminal(ours):
            if b"ready" in chunk and b"ready" not in text:
                child.send_signal(signal.SIGINT)
            text += chunk
        assert child.wait(10) == -signal.SIGINT
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    shown = text.decode()
    assert shown.count(HIDE) == shown.count(SHOW) == 1
    assert shown.rindex("KeyboardInterrupt") > shown.index(SHOW) > shown.rindex("step 1/10")
    command = "paceline train --resume --run.dir=runs/a-name-that-is-longer-than-the-terminal"
    assert f"{command}\r\n" in shown, "a command to copy is not wrapped"


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that nobody is left at the other end
        return b""


# --- anything goes in -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(any_metrics, max_size=4))
def test_no_metrics_stop_a_display(rows: list[dict[str, Any]]) -> None:
    plain, stream, clock = make_plain()
    live, _, _ = make_live()
    plain.begin("title")
    for step, row in enumerate(rows):
        clock.now += 1
        plain.step(step, row)
        live.step(step, row)
        frame_lines(live, 40)
    assert stream.getvalue().count("\n") == 1 + len(rows)
    assert "\x1b" not in stream.getvalue()


@settings(deadline=None)
@given(st.lists(any_metrics, max_size=30), st.dictionaries(st.sampled_from(["gen", "step", "eval", "x"]), st.floats()))
def test_no_metrics_stop_a_summary(rows: list[dict[str, Any]], totals: dict[str, float]) -> None:
    lines = summarise(rows, totals, Outcome(40, 1.0, Comparison(seconds_off=[0.0], seconds_on=[0.0])))
    assert all(line.isprintable() for line in lines)


def test_a_very_long_run_stays_small() -> None:
    display, _, clock = make_live(num_steps=100_000)
    for step in range(1, 5001):
        clock.now += 1
        display.step(step, ROW | {"reward": step / 5000})
    assert len(frame_lines(display, 80)) == 6
    assert len(display.history.rewards.points) <= 24
    sizes = [len(value) for value in vars(display.history).values() if hasattr(value, "__len__")]
    assert sizes and max(sizes) <= NUM_RECENT
    assert all(not hasattr(value, "__len__") or len(value) <= 24 for value in vars(display.history.rewards).values())


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=300))
def test_a_curve_keeps_the_shape(values: list[float]) -> None:
    curve = Curve(max_points=8)
    for value in values:
        curve.add(value)
    points = curve.points
    assert 1 <= len(points) <= 8
    weight = 1
    while -(-len(values) // weight) > 8 or len(values) // weight == 8:
        weight *= 2
    expected = [statistics.fmean(values[first : first + weight]) for first in range(0, len(values), weight)]
    assert points == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(-1e90, 1e90), max_size=50))
def test_a_sparkline_has_one_block_per_value(values: list[float]) -> None:
    line = sparkline(values)
    assert len(line) == len(values)
    if len(set(values)) > 1:
        assert line[values.index(min(values))] == BLOCKS[0]
        assert line[values.index(max(values))] == BLOCKS[-1]


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline(range(8)) == BLOCKS
    assert sparkline([0.3, 0.3]) == "▅▅"


# --- the words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "duration", "short"),
    [
        (0, "0:00", "0.0 s"),
        (59.6, "1:00", "59.6 s"),
        (84, "1:24", "84.0 s"),
        (99.96, "1:40", "1:40"),
        (3599.7, "1:00:00", "1:00:00"),
        (7509, "2:05:09", "2:05:09"),
        (360_000, "100:00:00", "100:00:00"),
        (-1, "0:00", "-1.0 s"),
    ],
)
def test_durations(seconds: float, duration: str, short: str) -> None:
    assert format_duration(seconds) == duration
    assert format_seconds(seconds) == short


def shares(seconds: Mapping[str, float], whole: float | None = None) -> dict[str, float]:
    return {part.phase.name: round(part.share, 6) for part in divide_time(seconds, whole)}


def test_time_is_divided_with_evaluation_on_top_of_the_step() -> None:
    spent = {"gen": 6.0, "update": 3.0, "step": 10.0, "eval": 10.0}
    assert shares(spent) == {"generate": 0.3, "learn": 0.15, "evaluate": 0.5, "other": 0.05}
    assert shares(spent, whole=40.0) == {"generate": 0.15, "learn": 0.075, "evaluate": 0.25, "other": 0.525}
    assert shares(spent, whole=1.0) == shares(spent), "phases cannot take longer than everything"


def test_time_without_the_step_is_the_sum_of_its_phases() -> None:
    assert shares({"gen": 6.0, "score": 2.0, "something": 5.0}) == {"generate": 0.75, "score": 0.25}
    assert shares({}) == shares({"gen": 0.0}) == {}


def test_numbers() -> None:
    assert number({"a": 1}, "a") == 1.0
    assert number({"a": 0.0}, "a") == 0.0
    assert [number({"a": value}, "a") for value in ("1", None, float("nan"), float("inf"), 10**400, 1e101)] == [
        None
    ] * 6
    assert number({}, "a") is None


# --- the summary ------------------------------------------------------------------------------------------------------


def training_rows(num_steps: int = 40) -> list[dict[str, Any]]:
    """Reward rises from 0.01 to 0.40, 100 tokens in each step of two seconds."""
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.40, "eval/pass@8": 0.7, "eval/pass@16": 0.8}]
    for step in range(1, num_steps + 1):
        rows.append(
            {
                "step": step,
                "reward": step / 100,
                "completions/mean_length": 100.0 + step,
                "perf/throughput": 50.0,
                "timing_s/gen": 1.2,
                "timing_s/update": 0.6,
                "timing_s/step": 2.0,
                "rollout/spec_accept_length": 1.0 if step % 2 else 3.0,
            }
        )
    rows[0]["eval/accuracy_se"] = 0.022
    rows[-1] |= {"eval/accuracy": 0.475, "eval/pass@8": 0.75, "eval/pass@16": 0.8, "timing_s/eval": 20.0}
    rows[-1] |= {"eval/accuracy_se": 0.023, "eval/pass@8_se": 0.015}
    return rows


def test_a_reward_that_says_more_than_accuracy_is_shown() -> None:
    graded = [
        {"step": 0, "eval/accuracy": 0.0, "eval/reward": 0.25},
        {"step": 1, "eval/accuracy": 0.0, "eval/reward": 0.75},
    ]
    assert any("0.250 -> 0.750" in line for line in summarise(graded, {}))
    strict = [row | {"eval/reward": row["eval/accuracy"]} for row in graded]
    assert not any("full marks" in line for line in summarise(strict, {}))


def test_what_each_source_brought_is_shown() -> None:
    spec = "rollout/spec_"
    counts = {"proposed": 500.0, "verified": 200.0, "accepted": 100.0, "milliseconds": 1500.0}
    row = {"step": 1, "perf/throughput": 400.0, "timing_s/step": 1.0}
    row |= {f"{spec}suffix_{kind}": value for kind, value in counts.items()}
    row |= {f"{spec}ahead_made": 90.0, f"{spec}ahead_offered": 80.0, f"{spec}ahead_survived": 60.0}
    lines = summarise([row], {})
    assert "  suffix      200 of 500 draft tokens verified in 1.5 s, 50 % accepted, 25 % of all tokens" in lines
    assert "run-ahead     90 tokens; of 80 used as drafts, 75 % accepted" in lines


def test_the_summary_to_the_letter() -> None:
    outcome = Outcome(
        num_steps=40,
        seconds=112.0,
        comparison=Comparison(
            seconds_off=[10.3, 2.0],
            seconds_on=[6.0, 0.15],
            gpu_share_off=0.62,
            gpu_share_on=0.88,
            work=describe_work(16, 16, 8, has_run_ahead=True),
        ),
        folder=Path("runs/countdown-1"),
        checkpoints=["runs/countdown-1/checkpoints/step-000030", "runs/countdown-1/checkpoints/step-000040"],
        next_commands=["paceline report runs/countdown-1", "paceline eval runs/countdown-1"],
        example=[("example", "3 4 12 > 84"), ("  after", "answer (4+3)*12  (right)")],
        gain_se=0.021,
        gpu_gain="5.0x at best",
    )
    totals = {"gen": 48.0, "update": 24.0, "step": 80.0, "eval": 20.0, "checkpoint": 4.0}
    assert summarise(training_rows(), totals, outcome) == [
        "Done: 40 steps in 1:52.",
        "time          1:52 total",
        "  generate       0:48   43 %  #########",
        "  learn          0:24   21 %  ####",
        "  evaluate       0:20   18 %  ####",
        "  checkpoint     0:04    4 %  #",
        "  other          0:16   14 %  ###",
        "tokens        4,000 generated at 83 tokens/s",
        "accept length 1.50 tokens per sequence per forward pass",
        "length        102 -> 138 tokens",
        "checkpoints   2 kept, newest: runs/countdown-1/checkpoints/step-000040",
        "folder        runs/countdown-1",
        "reward        0.025 -> 0.385  (+0.360; mean of the first and last 4 steps)",
        "held out      40.0 % ± 2.2 -> 47.5 % ± 2.3  (+7.5 ± 2.1 points; ± is the standard error)",
        "pass@8        70.0 % -> 75.0 % ± 1.5  (+5.0 points; ± is the standard error)",
        "pass@16       80.0 % -> 80.0 %  (+0.0 points)",
        "example       3 4 12 > 84",
        "  after       answer (4+3)*12  (right)",
        "speculation   2.00x as fast as plain decoding",
        "  measured    12.30 s plain, 6.15 s with speculation, the same tokens",
        "  how         2 repeats in turns (1.72x to 13.33x): 16 new prompts x 8 responses, without run-ahead text",
        "  GPU         in forward passes 62 % of the time plain, 88 % with speculation",
        "  on a GPU    5.0x at best",
        "next          paceline report runs/countdown-1",
        "              paceline eval runs/countdown-1",
    ]


def test_what_a_gpu_gains_is_what_the_readme_measured() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    table = readme.partition("<!-- table first_screen -->")[2].partition("<!-- end -->")[0]
    rows = [line.split("|") for line in table.splitlines() if "H200" in line]
    measured = {row[1].partition(":")[0].strip(): row[3].strip(" *") for row in rows}
    best, worst = measured["best for speculation"], measured["worst for speculation, on file"]
    assert f"{best} (best case) to {worst} (worst on file)" in GPU_GAIN


def test_counts_and_their_nouns() -> None:
    assert [counted(count, "step") for count in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]
    lines = summarise([{"step": 1}], {}, Outcome(num_steps=2))
    assert lines[0] == "Stopped after 1 of 2 steps."


def test_an_evaluation_in_words() -> None:
    found = {"eval/accuracy": 0.5, "eval/reward": 0.75, "eval/mean_length": 80.4, "eval/max_length": 1256.0}
    found |= {"eval/clipped_ratio": 0.125, "eval/grader_timeout": 0.0, "eval/grader_out_of_memory": 2.0}
    assert evaluation_lines(found) == [
        "accuracy      50.0 %",
        "reward        0.750",
        "length        mean 80, longest 1,256 tokens",
        "cut off       12.5 % of the answers, at sampling.max_new_tokens",
        "  grader      out of memory: 2",
    ]
    found |= {"eval/accuracy_se": 0.022, "eval/reward_se": 0.0125, "eval/pass@4": 0.8, "eval/pass@4_se": 0.016}
    assert evaluation_lines(found)[:3] == [
        "accuracy      50.0 % ± 2.2  (± is the standard error over items)",
        "pass@4        80.0 % ± 1.6",
        "reward        0.750 ± 0.013",
    ]


def test_without_totals_the_rows_are_added_up() -> None:
    lines = summarise(training_rows(), {})
    assert "time          1:40 total" in lines
    assert "  generate       0:48   48 %  ##########" in lines
    assert "  evaluate       0:20   20 %  ####" in lines


def test_the_larger_sum_of_a_phase_counts() -> None:
    """After a resume totals lack the steps before it; rows never have their checkpoints."""
    lines = summarise(training_rows(), {"gen": 1.0, "step": 2.0, "eval": 30.0, "checkpoint": 10.0})
    assert "time          2:00 total" in lines
    assert "  generate       0:48   40 %  ########" in lines
    assert "  evaluate       0:30   25 %  #####" in lines
    assert "  checkpoint     0:10    8 %  ##" in lines
    assert "tokens        4,000 generated at 83 tokens/s" in lines


def test_a_short_table_is_in_seconds() -> None:
    assert "  generate     12.0 s   60 %  ############" in summarise(
        training_rows(10)[1:-1], {"gen": 12.0, "step": 20.0}
    )


def test_a_run_that_was_stopped_says_so() -> None:
    rows = training_rows()[:3]
    lines = summarise(rows, {}, Outcome(num_steps=40, folder=Path("runs/x")))
    assert lines[0] == "Stopped after 2 of 40 steps."
    assert "reward        0.010 -> 0.020  (+0.010; first and last step)" in lines
    assert "held out      40.0 % ± 2.2  (± is the standard error)" in lines


def test_one_step_and_none() -> None:
    assert summarise([{"step": 1, "reward": 0.5}], {}) == ["Done: 1 step.", "reward        0.500"]
    assert summarise([], {}, Outcome(next_commands=["paceline train --resume"])) == [
        "No step finished.",
        "next          paceline train --resume",
    ]


def test_different_tokens_are_a_bug_and_called_one() -> None:
    _, line, _ = summarise(
        [], {}, Outcome(comparison=Comparison(seconds_off=[2.0], seconds_on=[4.0], difference=DIFFERENCE))
    )[1:]
    assert "DIFFER" in line and "same tokens" not in line


@pytest.mark.parametrize(
    "seconds, said",
    [
        (1.88, "1.06x as fast as plain decoding"),
        (2.005, "1.00x: no faster than plain decoding"),
        (2.13, "0.94x: slower than plain decoding; engine.drafter=none is faster here"),
    ],
)
def test_a_slower_run_says_so(seconds: float, said: str) -> None:
    """On a CPU, nothing about the GPU."""
    work = describe_work(1, 4, 8, has_run_ahead=False)
    found = Comparison(seconds_off=[2.0], seconds_on=[seconds], work=work)
    assert summarise([], {}, Outcome(comparison=found))[1:] == [
        f"speculation   {said}",
        f"  measured    2.00 s plain, {seconds:.2f} s with speculation, the same tokens",
        "  how         1 repeat: 1 new prompt x 8 responses (a step has 4 prompts)",
    ]


def test_repeats_that_disagree_show_no_difference() -> None:
    found = Comparison(seconds_off=[4.0, 1.0], seconds_on=[1.0, 1.1])
    assert "2.38x of plain" in (line := summarise([], {}, Outcome(comparison=found))[1])
    assert line.endswith("repeats lie on both sides of 1x, so there is no clear difference")


def test_mixed_steps_count_by_their_work() -> None:
    rows = [
        {"rollout/spec_accept_length": 4.0, "perf/throughput": 900.0, "timing_s/step": 1.0},
        {"rollout/spec_accept_length": 1.0, "perf/throughput": 100.0, "timing_s/step": 1.0},
    ]
    accept = next(line for line in summarise(rows, {}) if line.startswith("accept"))
    assert accept.split()[2] == f"{1000 / (900 / 4 + 100):.2f}"
