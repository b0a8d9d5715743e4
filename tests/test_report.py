"""What a report says of a run: from real ones, and from folders made by hand, whole, damaged and cut.

How a browser shows it is tested in `test_report_page.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing.targets import check_shown
from hypothesis import given
from hypothesis import strategies as st
from small_run import make_model, make_settings, train, write_task
from synthetic_run import HOSTILE, write_rollouts, write_run

from paceline.cli import main
from paceline.core.trace import LOST, RESUMED
from paceline.model.shipped import shipped_folder
from paceline.model.tokenizer import Tokenizer, load_decoder
from paceline.report import learning, speculation, timeline, writing
from paceline.report.browser import PER_STEP, cut, evenly, find_decoder, rollouts
from paceline.report.charts import (
    DARK,
    GROUND,
    MIST,
    SLATE,
    SOURCES,
    SPARE_TONES,
    Chart,
    Column,
    Section,
    Series,
    Shares,
    tones,
)
from paceline.report.comparing import compare, differing, verdict
from paceline.report.page import asset, render, to_json
from paceline.report.perfetto import trace
from paceline.report.reading import RecordedSpan, RunData, read_lines, read_run
from paceline.report.texts import visible
from paceline.report.writing import PAGE, TRACE, describe, watch, write_comparison, write_report
from paceline.rollout.compare import Comparison
from paceline.run.metrics import compare_event
from paceline.run.store.folder import RunFolder
from paceline.run.ui.summary import Metrics


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "made", steps=12)


@pytest.fixture(scope="module")
def run(made: Path) -> RunData:
    return read_run(made)


def chart(section: Section, name: str) -> dict[str, Any]:
    return next(chart for chart in section.charts if chart["name"] == name)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_whole_run_is_read(run: RunData) -> None:
    assert (run.num_steps, run.num_wanted, run.is_over, run.problems) == (12, 12, True, [])
    assert [row["step"] for row in run.rows] == list(range(13)) and run.steps[0]["step"] == 1
    assert run.rollout_steps() == list(range(1, 13))
    record, spans = next(run.rollouts(3))
    assert record["prompt"] == "question 3" and spans[0] == [0, 3, "suffix"]


def test_damage_is_named_and_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=4)
    (path / "config.yaml").write_text("rl: [unclosed\n")
    metrics = (path / "metrics.jsonl").read_bytes().split(b"\n")
    metrics[2] = b'{"step": 2, "reward": '
    metrics[3:3] = [b'{"step": "three"}', b"[1, 2]", b"\xff\xfe", b'{"step": -1}', b"", b"[" * 100_000]
    (path / "metrics.jsonl").write_bytes(b"\n".join(metrics) + b'{"step": 5, "rew')
    with (path / "events.jsonl").open("a") as events:
        events.write('{"name": "gen"}\n{"name": 3, "step": 1, "start_s": 0, "dur_s": 1}\n{"torn": ')
    (path / "rollouts" / "step-000002.jsonl").write_text('{"draw": 0}\nnot json\n{"text": 5, "token_ids": "x"}\n')
    (path / "rollouts" / "step-000003.spans.jsonl").unlink()
    run = read_run(path)
    assert [row["step"] for row in run.rows] == [0, 1, 3, 4]
    assert len(run.problems) == 3 and run.problems[1].startswith("6 lines of metrics.jsonl")
    assert run.problems[2].startswith("2 lines of events.jsonl")
    files = write_report(path)
    assert all(file.stat().st_size > 1000 for file in files)


def test_any_value_of_a_metric_is_survived(tmp_path: Path) -> None:
    values = (None, "text", True, 1e300, -1e308, 0, [1], {"a": 1}, 10**400, float("nan"), float("inf"))
    path = write_run(tmp_path / "run", steps=len(values))
    rows = lines_of(path / "metrics.jsonl")
    for row, value in zip(rows[1:], values, strict=True):
        row |= {name: value for name in row if name != "step"}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = lines_of(path / "events.jsonl")
    for i, event in enumerate(events):
        event["args"] = values[i % len(values)] if i % 2 else {"arms": values, "forwards": [[1, v] for v in values]}
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write_report(path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_run(tmp_path)
    assert read_lines(tmp_path / "missing.jsonl") == ([], 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_run_cut_anywhere_is_shown(tmp_path: Path, made: Path, share: float) -> None:
    """As a copy that was broken off, or a disk that was full."""
    for file in ("config.yaml", "metrics.jsonl", "events.jsonl"):
        content = (made / file).read_bytes()
        (tmp_path / file).write_bytes(content[: int(share * len(content))])
    data = describe(read_run(tmp_path))
    for section in data["sections"]:
        assert section["charts"] or any(section["left_out"]), section["name"]


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_every_section_has_charts_and_none_is_empty(run: RunData) -> None:
    data = describe(run)
    names = [chart["name"] for section in data["sections"] for chart in section["charts"]]
    assert len(names) == len(set(names)) == 19
    for section in data["sections"]:
        for one in section["charts"]:
            assert all(any(value is not None for value in series["values"]) for series in one.get("series", []))
            assert all(len(series["values"]) == len(one["x"]) for series in one.get("series", []))


def test_an_empty_run_has_sentences_in_place_of_charts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    data = describe(read_run(tmp_path))
    assert not data["tiles"] and not data["browser"]["rollouts"] and data["browser"]["note"]
    for section in data["sections"]:
        assert not section["charts"] and all(len(sentence) > 10 for sentence in section["left_out"] if sentence)
        assert any(section["left_out"])


def test_accept_length_is_divided_by_source(run: RunData) -> None:
    layers = chart(speculation.acceptance(run), "accept")["series"]
    assert [layer["label"] for layer in layers] == [speculation.OWN, "eagle", "suffix"]
    for i, row in enumerate(run.steps):
        total = sum(layer["values"][i] for layer in layers)
        parts = row["rollout/spec_suffix_accepted"] + row["rollout/spec_eagle_accepted"]
        assert total == pytest.approx(1 + parts / speculation.visits(row), rel=1e-3)


def test_lengths_are_shown_as_they_are_distributed(tmp_path: Path) -> None:
    """Those of the first and the last steps, the tail included, with what was cut off marked."""
    path = write_run(tmp_path / "run", steps=6)
    for step in range(1, 7):
        file = path / "rollouts" / f"step-{step:06d}.jsonl"
        short, long = {"draw": 0, "sample": 0, "token_ids": [1] * 10}, {"draw": 0, "sample": 1, "token_ids": [1] * 1000}
        long["finish_reason"] = "length" if step < 3 else "stop"
        file.write_text("".join(json.dumps(record) + "\n" for record in (short, short, short, long)))
    found = chart(learning.lengths(read_run(path)), "distribution")
    rows = found["rows"]
    assert rows[0] == {"label": "10 to 15", "parts": [["steps 1 to 2", 75]]}
    assert rows[1] == {"label": "", "parts": [["steps 5 to 6", 75]]}
    assert rows[-2] == {"label": "631 to 1,000", "parts": [["cut off at the limit", 25]]}
    assert rows[-1] == {"label": "", "parts": [["steps 5 to 6", 25]]}
    assert (
        found["is_absolute"] and "8 responses of steps 1 to 2 and of the 8 responses of steps 5 to 6" in found["note"]
    )
    (path / "rollouts" / "step-000001.jsonl").write_text('{"token_ids": "x"}\nnot json\n{"token_ids": []}\n')
    assert chart(learning.lengths(read_run(path)), "distribution")["rows"][0]["label"].startswith("0")


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=40))
def test_bins_hold_every_length_once(lengths: list[int]) -> None:
    bins = learning.length_bins(lengths)
    assert bins[0][0] == min(lengths) and bins[-1][1] == max(lengths) and len(bins) <= learning.NUM_BINS
    assert all(low <= high for low, high in bins)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(bins))
    assert learning.length_bins([]) == []


def test_held_out_figures_carry_their_standard_errors(tmp_path: Path) -> None:
    rows: list[Metrics] = [
        {"step": step, "eval/accuracy": 0.5 + step / 100, "eval/accuracy_se": 0.022} for step in (0, 8)
    ]
    rows[1] = {**rows[1], "eval/pass@8": 0.75, "eval/pass@8_se": 0.015}
    run = RunData(tmp_path, rows=rows)
    assert ("held out", "58.0 % ± 2.2", "from 50.0 % ± 2.2") in writing._tiles(run)
    solved, best = chart(learning.rewards(run), "eval")["series"]
    assert (solved["label"], solved["errors"]) == ("solved", [2.2, 2.2])
    assert (best["label"], best["values"], best["errors"]) == ("pass@8", [None, 75], [None, 1.5])
    older = RunData(tmp_path, rows=[{"step": 0, "eval/accuracy": 0.5}])
    assert ("held out", "50.0 %", "once") in writing._tiles(older)


def contrast(a: str, b: str) -> float:
    """The ratio of two colours' luminances, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_every_tone_stands_out_on_a_light_and_on_a_dark_page() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    shades = {shade for family in speculation._FAMILIES.values() for shade in family}
    used = {*SOURCES.values(), *SPARE_TONES, *shades, *(tone for _, tone in timeline.WORDS.values())} - {MIST, GROUND}
    for tone in used:
        assert contrast(tone, GROUND) >= 3, tone
        assert contrast(DARK.get(tone, tone), DARK[GROUND]) >= 3, tone
    for scheme in ({}, DARK):  # what recedes still has an outline
        assert contrast(scheme.get(SLATE, SLATE), scheme.get(MIST, MIST)) >= 2.4


@pytest.mark.parametrize("scheme", [0, 1])
def test_words_can_be_read_on_a_light_and_on_a_dark_page(scheme: int) -> None:
    """Every colour of text, on everything that it stands on."""
    roots = re.findall(r":root \{([^}]*)\}", asset("page.css"))
    assert len(roots) == 2 and "prefers-color-scheme: dark" in asset("page.css")
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", roots[scheme]))
    colours = {
        name: colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
        for name, colour in colours.items()
    }
    for ground in ("ground", "card", "head", "hover", "chosen", "warn"):
        for text in ("ink", "soft"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["edge"], colours["card"]) >= 3, "the edge of an input field"
    body = asset("page.css").rpartition("--warn-line")[2]
    assert not re.search(r"#[0-9a-f]{3,6}\b", body), "a colour outside of the two schemes"


def test_choices_are_added_up_by_sequences(run: RunData) -> None:
    rows = chart(speculation.choices(run), "choices")["rows"]
    assert [row["label"] for row in rows] == ["1", "4 to 7", "16 to 31", "64 to 127"]
    assert rows[1]["parts"] == [["off", 48], ["suffix+eagle 4x1", 360]]


def test_rows_stand_beside_the_curve(run: RunData) -> None:
    found = chart(speculation.rows_used(run), "rows")
    forwards, curve = found["series"]
    assert sum(value or 0 for value in forwards["values"]) == pytest.approx(100, abs=0.1)
    assert curve["values"][0] == 10 and "Up to 128 rows" in found["note"]


def test_an_estimate_says_how_it_is_made(run: RunData) -> None:
    section = speculation.speedup(run)
    without, as_it_was = chart(section, "estimate")["series"]
    saved = sum(row["rollout/spec_saved_seconds"] for row in run.steps) / 4
    assert without["values"][-1] - as_it_was["values"][-1] == pytest.approx(saved, abs=0.02)
    assert saved == pytest.approx(speculation.saved_seconds(run))
    note = chart(section, "estimate")["note"]
    assert "cost curve" in note and "4 workers" in note and note.startswith("Not measured")
    assert not [tile for tile in writing._tiles(run) if tile[0] == "speculation"], "an estimate is no headline"


def test_what_was_measured_is_the_one_figure(run: RunData) -> None:
    """Also where the engine's estimate says something else: that is named in small print, with the reason."""
    args = {"seconds_without": 6, "seconds_with": 2}
    run = replace(run, spans=[RecordedSpan("compare", "0", 1, 0, 1, args)])
    section = speculation.speedup(run)
    lead = section.lead
    assert "3.00 times as fast, " in lead and "slower" not in lead and "GPU" not in lead
    assert ("speculation", "3.00x", "as fast as plain decoding, measured at the end") in writing._tiles(run)
    assert [one["name"] for one in section.charts] == ["measured"], "no line of estimates beside it"
    found = section.charts[0]
    assert [row["parts"] for row in found["rows"]] == [[["plain decoding", 6]], [["with speculation", 2]]]
    assert found["is_absolute"] and "the engine estimated" in found["note"] and "run-ahead" in found["note"]
    slower = Comparison(seconds_off=[2, 2], seconds_on=[4, 4], gpu_share_off=0.5, gpu_share_on=0.75)
    lead = speculation.speedup(replace(run, spans=[RecordedSpan("compare", "0", 1, 0, 1, compare_event(slower))])).lead
    assert "8.00 s with speculation in 2 repeats, in turns, 0.50 times as fast (slower: " in lead
    assert "The GPU spent 50% and 75% of the time in forward passes." in lead and "with the same tokens" in lead


def test_the_timeline_shows_waiting_and_what_filled_it() -> None:
    def span(worker: str, name: str, start: float, seconds: float, step: int = 1) -> RecordedSpan:
        return RecordedSpan(name, worker, step, start, seconds, {})

    spans = [span("0", "step", 0, 10), span("0", "gen", 0, 6), span("0", "update", 6, 4), span("w0", "generate", 0, 6)]
    spans += [span("w1", "generate", 0, 2), span("w1", "run_ahead", 2, 1), span("w1", "wait", 3, 7)]
    section = timeline.workers(RunData(Path("run"), spans=spans))
    data = chart(section, "gantt")["data"]
    assert data["lanes"] == ["driver", "worker 0", "worker 1"]
    kinds = [kind for kind, _ in data["kinds"]]
    boxes = {(data["lanes"][box[0]], kinds[box[1]], box[2], box[3]) for box in data["views"][0]["boxes"]}
    assert ("worker 1", "run ahead", 2, 1) in boxes and len(boxes) == 5
    assert data["views"][0]["marks"] == [[0, 1]]
    parts = dict(chart(section, "worked")["rows"][2]["parts"])
    assert parts == {"generate": 2, "run ahead": 1, "idle": 7}


def test_a_long_timeline_is_sliced(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 60)
    run = read_run(made)
    views = chart(timeline.workers(run), "gantt")["data"]["views"]
    assert [view["label"].split(" (")[0] for view in views] == ["latest steps", "slowest step", "whole run"]
    seconds = sum(box[3] * (box[5] - box[4]) for box in views[-1]["boxes"])
    busy = sum(span.seconds for span in run.spans if span.name not in ("step", "budget", "wait"))
    assert seconds == pytest.approx(busy, rel=0.05)


def test_long_runs_are_thinned_out() -> None:
    rows = [{"step": step, "a": float(step % 10)} for step in range(1, 5001)]
    column = Column(rows, max_points=500)
    assert len(column.x) == 500 and column.x[-1] == 5000
    assert set(column.of("a")) == {4.5} and set(column.of("a", max)) == {9.0} and "10 steps" in column.note
    assert column.of("missing") == [None] * 500


def test_charts_without_data_leave_a_sentence() -> None:
    section = Section("a", "A")
    section.add(Chart("x", "X", [1.0], [Series("y", [None])]), "There is none.")
    section.add(Shares("s", "S", [("row", {})], {}, "steps"), "Nor here.")
    assert section.charts == [] and section.left_out == ["There is none.", "Nor here."]
    assert len(set(tones(["suffix", "mine", "yours"]).values())) == 3


# --- rollouts ---------------------------------------------------------------------------------------------------------


def test_a_text_is_cut_where_guesses_begin_and_end() -> None:
    text = "héllo wörld"
    content = text.encode()

    def decode(ids: Any) -> str:  # a token is a byte, so that a letter may take two
        return bytes(ids).decode(errors="replace")

    pieces = cut(text, list(content), [(0, 2, 0), (4, 8, 1)], decode)
    assert pieces is not None and "".join(piece for piece, _ in pieces) == text
    assert [source for _, source in pieces] == [0, -1, 1, -1]
    assert cut("other", list(content), [(0, 2, 0)], decode) is None
    assert cut(text, ["x"], [(0, 1, 0)], decode) is None


def test_the_sample_is_bounded_and_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=130, per_step=12)
    found = rollouts(read_run(path))
    assert len(found["rollouts"]) == 50 * PER_STEP and "50 of 130 steps" in found["note"]
    assert {found["rollouts"][0]["step"], found["rollouts"][-1]["step"]} == {1, 130}
    rewards = [one["reward"] for one in found["rollouts"] if one["step"] == 1]
    assert {min(rewards), max(rewards)} == {0, 1}
    assert evenly(range(100), 3) == [0, 50, 99]


def test_nothing_in_a_text_is_invisible() -> None:
    assert visible("a\x1b[31m\x00\nb\t") == "a⟨1B⟩[31m⟨00⟩\nb\t"
    assert visible("\u202e\ud800\u2028\x7f\x85") == "⟨202E⟩⟨D800⟩⟨2028⟩⟨7F⟩⟨85⟩"
    for text in HOSTILE:
        visible(text).encode()  # no lone surrogate is left


class Elements(HTMLParser):
    """Tags of a page as a parser sees them, and the text of the data block."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._is_data = ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self._is_data:
            self.data += data


def test_hostile_texts_stay_in_the_data_block(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a&<b>", steps=2, texts=HOSTILE)
    (path / "config.yaml").write_text(f"rl: {{steps: 2}}\nmodel: {{path: {json.dumps(HOSTILE[0])}}}\n")
    page = write_report(path)[0].read_bytes()
    assert page.isascii() or page.decode()  # the charts' library has a few letters of its own
    parser = Elements()
    parser.feed(page.decode())
    assert parser.tags == ["html", "head", *["meta"] * 4, "title", "style", "body", "main", *["script"] * 3]
    data = json.loads(parser.data)
    assert data["runs"][0]["browser"]["rollouts"][0]["pieces"] == [[HOSTILE[0], -1]]
    assert not re.search(r"[<>&\u2028]", parser.data) and parser.data.isascii()
    assert len(page) < 1_000_000, "a long text is cut"


def test_the_page_asks_nobody(made: Path) -> None:
    page = write_report(made)[0].read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    assert not re.search(r"""(src|href)=["'](?!#)""", page.partition('<script type="application/json"')[0])
    assert "innerHTML" not in asset("page.js") and "insertAdjacentHTML" not in asset("page.js")
    assert to_json({"a": "</script>&\u2028\ud800"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u2028\\ud800"}'
    with pytest.raises(ValueError):
        render("title", {"a": float("nan")})


# --- traces, pairs, the command ---------------------------------------------------------------------------------------


def test_the_trace_has_a_track_per_worker(run: RunData) -> None:
    found = json.loads(trace(run))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert sorted(threads.values()) == ["run loop", "w0", "w1", "w2", "w3"]
    spans = [event for event in found if event["ph"] == "X"]
    assert len(spans) == sum(span.name != "budget" for span in run.spans)
    assert all(event["dur"] >= 0 and event["tid"] in threads and "step" in event["args"] for event in spans)
    assert {event["name"] for event in found if event["ph"] == "C"} >= {"reward", "accept length"}


def test_two_runs_are_told_apart(run: RunData, tmp_path: Path) -> None:
    same = read_run(write_run(tmp_path / "same", steps=12))
    for row in same.rows:
        row["timing_s/gen"] = 2 * row.get("timing_s/gen", 0)  # type: ignore[index]
    assert verdict(run, same).startswith("The same run twice: in 12 steps")
    same.rows[5]["reward"] = 9.0  # type: ignore[index]
    assert verdict(run, same) == "Not the same run: the metrics of step 5 differ (reward)."
    same.config["engine"] = {"drafter": "none"}
    assert list(differing(run, same)) == [("engine.drafter", "(missing)", "none")]
    assert "no step in common" in verdict(run, RunData(tmp_path))
    shown = compare(run, same)
    assert len(shown["charts"]) == 6 and shown["table"][0][0] == "mean reward"


def test_only_what_both_runs_have_is_judged(run: RunData, tmp_path: Path) -> None:
    """One that evaluates more often, or is older and has fewer metrics, may still be the same run."""
    more = read_run(write_run(tmp_path / "more", steps=12))
    for step in (4, 8):
        more.rows[step] |= {"eval/accuracy": 0.5, "eval/accuracy_se": 0.02}  # type: ignore[operator]
    for pair in ((run, more), (more, run)):
        said = verdict(*pair)
        assert said.startswith("The same run twice: in 12 steps every metric that both runs have is equal")
        assert "Only more was evaluated after steps 4, 8." in said and "Only made" not in said
    older = read_run(write_run(tmp_path / "older", steps=12))
    for row in older.rows:
        for name in ("loss", "grad_norm"):
            row.pop(name, None)  # type: ignore[attr-defined]
    assert "Only made has grad_norm, loss." in verdict(run, older)
    del older.rows[0]
    assert "Only made was evaluated before training. Only made has" in verdict(run, older)
    more.rows[3]["loss"] = 7.0  # type: ignore[index]
    assert verdict(run, more) == "Not the same run: the metrics of step 3 differ (loss)."
    bare = RunData(tmp_path / "bare", rows=[{"step": 1, "other": 1.0}])
    assert verdict(run, bare) == "The two runs have no metric in common."


def test_what_disturbed_a_run_stands_beside_the_verdict(run: RunData, tmp_path: Path) -> None:
    same = read_run(write_run(tmp_path / "same", steps=12))
    assert "Mind the times" not in verdict(run, same)
    begins = {span.step: span.start for span in same.spans if span.name == "step"}
    same.spans += [RecordedSpan(RESUMED, "0", 0, begins[5] - 0.01, 0, {})] * 2  # killed twice between two checkpoints
    same.spans += [
        RecordedSpan(RESUMED, "0", 0, start, 0, {}) for start in (0.0, begins[12] + 1e6)
    ]  # neither cost anything
    said = verdict(run, same)
    assert (
        said.startswith("The same run twice") and "Mind the times: same was stopped, and resumed before step 5;" in said
    )
    run = RunData(
        run.path, rows=run.rows, spans=[RecordedSpan(LOST, f"w{step}", step, step, 0, {}) for step in (1, 2, 2, 3, 4)]
    )
    assert "made lost 5 workers in steps 1, 2, 3 and 1 more, same was stopped" in verdict(run, same)
    assert compare(run, same)["lead"] == verdict(run, same)


def test_a_run_is_watched_until_it_is_over(tmp_path: Path, made: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_bytes((made / "config.yaml").read_bytes())
    rows = (made / "metrics.jsonl").read_text().splitlines(keepends=True)
    written, said = iter(rows), list[str]()

    def grow(seconds: float) -> None:
        with (path / "metrics.jsonl").open("a") as metrics:
            metrics.write(next(written))

    watch(path, None, 5.0, said.append, grow)
    assert len(said) == len(rows) + 1 and said[-1].startswith("the run is over")
    assert '"refresh_s":null' in (path / PAGE).read_text()


def test_a_run_is_watched_until_it_has_measured_itself(tmp_path: Path, made: Path) -> None:
    """All steps are there, but whoever writes the folder is not done: the figure of run.compare comes last."""
    path = tmp_path / "run"
    path.mkdir()
    writer = RunFolder.create(path, yaml.safe_load((made / "config.yaml").read_text()))
    (path / "metrics.jsonl").write_bytes((made / "metrics.jsonl").read_bytes())
    said, found = list[str](), {"seconds_without": 8.0, "seconds_with": 2.0, "is_equal": True}

    def finish(seconds: float) -> None:
        assert '"refresh_s":5' in (path / PAGE).read_text()
        if len(said) == 1:
            writer.append_events([{"name": "compare", "step": 12, "start_s": 1, "dur_s": 9, "args": found}])
        if len(said) == 2:
            writer.close()

    watch(path, None, 5.0, said.append, finish)
    assert len(said) == 3 and said[-1].startswith("the run is over") and not said[1].startswith("the run is over")
    assert "4.00 times as fast" in (path / PAGE).read_text()


@pytest.mark.parametrize("name", ["report.html", ".report.html.new", "trace.json", ".trace.json.new"])
def test_a_planted_link_is_not_written_through(made: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("somebody's")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "other")
    for file in write_report(made, tmp_path / "out"):
        assert file.is_file() and not file.is_symlink()
    assert (tmp_path / "other").read_text() == "somebody's"


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["report", str(made), "--out", str(tmp_path)], ["report", str(made), "--watch"]):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 0
    assert (tmp_path / PAGE).exists() and (tmp_path / TRACE).exists() and (made / PAGE).exists()
    assert "report.html" in capsys.readouterr().out
    for args in (["report"], ["report", str(made), "--compare", "a", "b"], ["report", str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 2
    (page,), said = write_comparison(made, made, tmp_path)
    assert page.name == "compare-made.html" and said.startswith("The same run twice")


@pytest.mark.slow
def test_a_real_run_is_shown(tmp_path: Path) -> None:
    """Everything that a report reads is written by a run."""
    write_task(tmp_path)
    make_model(tmp_path)
    sections: dict[str, dict[str, Any]] = {
        "engine": {"max_sequences": 16, "kv_tokens": 2048, "drafter": "auto", "run_ahead": True},
        "spot": {"enabled": True, "open_share": 0.5},
        "sampling": {"max_new_tokens": 48, "temperature": 0.3},
        "run": {"compare": True, "checkpoint_every": 1, "loggers": "none"},
    }
    train(make_settings(tmp_path, **sections), tmp_path / "run")
    fleet = {"fleet": {"workers": 2, "in_process": True}}
    train(make_settings(tmp_path, **(sections | fleet)), tmp_path / "fleet")
    run, shared = read_run(tmp_path / "run"), read_run(tmp_path / "fleet")
    assert verdict(run, shared).startswith("The same run twice")
    for found in (run, shared):
        data = describe(found, find_decoder(found))
        charts = {chart["name"]: chart for section in data["sections"] for chart in section["charts"]}
        assert not found.problems
        assert charts.keys() >= {
            "reward",
            "eval",
            "lengths",
            "gantt",
            "time",
            "distribution",
            "accept",
            "choices",
            "rows",
        }
        texts = data["browser"]["rollouts"]
        assert texts and "No tokenizer" not in data["browser"]["note"]
        for one in texts:  # what is coloured is what was guessed
            guessed = sum(end - start for start, end, _ in one["bar"])
            assert bool(guessed) == any(source >= 0 for _, source in one["pieces"]) or not one["pieces"]
    assert "times as fast" in speculation.speedup(run).lead
    assert chart(timeline.workers(shared), "gantt")["data"]["lanes"] == ["driver", "worker 0", "worker 1"]


def test_rollouts_without_a_tokenizer_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: shipped:none-such}\n")
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path, 1, ["some text"])
    run = read_run(tmp_path)
    assert find_decoder(run) is None and "No tokenizer" in rollouts(run)["note"]
    run.config["model"]["path"] = "shipped:countdown"
    assert find_decoder(run) is not None


# --- runs of others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "rollouts/step-000002.jsonl", "config.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "itself"])
def test_what_is_no_file_is_left_out(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe would wait for ever, a device would never end."""
    path = write_run(tmp_path / "run", steps=3)
    file = path / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file.name)
    page, _ = write_report(path)
    assert page.stat().st_size > 1000
    assert name.startswith("rollouts") or len(read_run(path).problems) == 1


def test_lines_of_any_depth_and_length_are_survived(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=2)
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "reward": 1E999, "deep": ' + "[" * 500 + "]" * 500 + "}\n")
        metrics.write('{"step": 4, "reward": 1E999}\n{"step": 5, "reward": ' + "9" * 5000 + "}\n")
        metrics.write('{"step": 6, "reward": 0.5}\n')
    run = read_run(path)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 4, 6] and run.rows[3]["reward"] is None
    assert run.problems == ["2 lines of metrics.jsonl could not be read and were skipped."]
    with (path / "metrics.jsonl").open("r+b") as opened:
        opened.truncate(2**34)  # sparse: a line of 16 GiB
    assert [row["step"] for row in read_run(path).rows] == [0, 1, 2, 4, 6]


def test_nothing_invisible_is_shown(tmp_path: Path) -> None:
    hidden = "\x1b[31m\u202e\ud800\x00"
    path = write_run(tmp_path / f"run{chr(0x202E)}", steps=2)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["task"]["name"] = hidden
    (path / "config.yaml").write_text(json.dumps(config))
    events = lines_of(path / "events.jsonl")
    events.append({"name": hidden, "worker": hidden, "step": 1, "start_s": 0.0, "dur_s": 1.0, "args": {hidden: 1e308}})
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    row = {"step": 3, hidden: 1.0, f"rollout/spec_{hidden}_verified": 5, f"rollout/spec_{hidden}_accepted": 2}
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row) + "\n")
    page, trace_file = write_report(path)
    for file in (page, trace_file):
        check_shown(file)
        assert "\\u27e81B\\u27e9[31m" in file.read_text()


def test_counts_beyond_a_float_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1)
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 2, f"rollout/spec_suffix_at_{10**400}": 0.5}) + "\n")
    args = {"arms": [[1, "off", 10**400], [10**400, "off", 3], [4, "off", 3]], "forwards": [[2, 10**400]]}
    with (path / "events.jsonl").open("a") as events:
        events.write(json.dumps({"name": "budget", "step": 1, "start_s": 0, "dur_s": 0, "args": args}) + "\n")
    write_report(path)


def test_numbers_beyond_json_stay_out_of_the_trace(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1)
    with (path / "events.jsonl").open("a") as events:
        events.write(
            '{"name": "gen", "step": 1, "start_s": 0, "dur_s": 1, "args": {"a": NaN, "b": [Infinity, 1E999]}}\n'
        )
    found = json.loads(write_report(path)[1].read_text(), parse_constant=pytest.fail)
    assert {"step": 1, "a": None, "b": [None, None]} in [event.get("args") for event in found["traceEvents"]]


@pytest.mark.parametrize("name", ["\0", "x" * 5000, "/dev/zero", ".", "shipped:../x"])
def test_a_run_may_name_any_model(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "run", steps=1)
    config = yaml.safe_load((path / "config.yaml").read_text()) | {"model": {"path": name}}
    (path / "config.yaml").write_text(json.dumps(config))
    write_report(path)


def test_a_model_with_a_billion_layers_is_not_loaded(tmp_path: Path, tiny_model: Path) -> None:
    """transformers makes a list of as many entries when it loads a tokenizer; the report reads tokenizer.json alone."""
    path = write_run(tmp_path / "run", steps=1)
    policy = path / "checkpoints" / "step-000001" / "policy"
    shutil.copytree(tiny_model, policy)
    config = json.loads((policy / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (policy / "config.json").write_text(json.dumps(config))
    assert find_decoder(read_run(path)) is not None
    (policy / "tokenizer.json").write_text("{")
    assert find_decoder(read_run(path)) is None, "what cannot be read is left out"


def test_texts_are_decoded_as_the_engine_decodes_them(tiny_model: Path) -> None:
    for folder in (tiny_model, shipped_folder("countdown")):
        decode, tokenizer = load_decoder(folder), Tokenizer.from_folder(folder)
        assert decode is not None and tokenizer is not None
        ids = [*range(0, 300, 3), 10**9, 5, 6, 7]
        assert decode(ids) == tokenizer.decode(ids)


def test_a_report_is_written_without_torch(tmp_path: Path) -> None:
    """It takes seconds to import, and who reads a report may not have it."""
    path = write_run(tmp_path / "run", steps=2)
    config = yaml.safe_load((path / "config.yaml").read_text()) | {"model": {"path": "shipped:countdown"}}
    (path / "config.yaml").write_text(json.dumps(config))
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    for args in (["report", str(path)], ["report", "--compare", str(path), str(path), "--out", str(tmp_path)]):
        code = f"from paceline.cli import main\nmain({args!r})"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(stub), *sys.path])}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert "No tokenizer" not in (path / PAGE).read_text(), "its texts were decoded"
