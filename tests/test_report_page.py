"""The report as a browser shows it: no complaint, every chart drawn, filters, hostile texts, and how fast it opens.

Needs a Chromium and is left out where there is none. Pictures go to the folder in PACELINE_SCREENSHOTS, if it is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, find
from synthetic_run import HOSTILE, write_run

from paceline.report.writing import write_comparison, write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find() is None, reason="there is no Chromium")]

FAST_MS, PATIENT_MS = 3000, 12_000
"""What a long run must open in on a quiet machine, and what a test on a busy one fails at."""
NUM_CHARTS = 20
BLANK = """(() => [...document.querySelectorAll("[data-chart]")].filter((box) => {
    if (!(Number(box.dataset.points) > 0)) return true;
    const canvas = box.querySelector("canvas");
    if (!canvas) return !box.querySelector(".bar span, .list tbody tr");
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [canvas.width, canvas.height];
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const pixels = context.getImageData(0, 0, copy.width, copy.height).data;
    const seen = new Set();
    for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 120) seen.add(pixels.slice(i, i + 3).join());
    return seen.size < 3;
}).map((box) => box.dataset.chart))()"""
"""Charts in which hardly anything is drawn."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("long") / "long", steps=1000, every=10)


def picture(browser: Chromium, name: str, selector: str | None = None) -> None:
    if folder := os.environ.get("PACELINE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"{name}.png", selector)


def set_filter(browser: Chromium, name: str, value: str) -> None:
    box = f"document.querySelector('[data-filter={name}]')"
    browser.run(f"{box}.value = {json.dumps(value)}; {box}.dispatchEvent(new Event('input'))")


def shown(browser: Chromium) -> list[list[str]]:
    script = "[...document.querySelectorAll('.list tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    found: list[list[str]] = browser.run(script)
    return found


def test_a_long_run_opens_fast(browser: Chromium, long_run: Path) -> None:
    page, trace = write_report(long_run)
    milliseconds = browser.open(page)
    size = page.stat().st_size / 1e6
    print(f"\n1,000 steps: drawn after {milliseconds:.0f} ms, {size:.1f} MB, trace {trace.stat().st_size / 1e6:.1f} MB")
    if milliseconds > FAST_MS:
        print(f"that is more than {FAST_MS} ms: is the machine busy?")
    assert milliseconds < PATIENT_MS
    assert size < 8
    assert not browser.complaints and [url.split(":")[0] for url in browser.requests] == ["file"]
    assert browser.run("document.querySelectorAll('[data-chart]').length") == NUM_CHARTS
    assert browser.run(BLANK) == []
    assert browser.run("document.querySelectorAll('.empty').length") == 0
    picture(browser, "long", "main")


def test_filters(browser: Chromium, long_run: Path) -> None:
    browser.open(write_report(long_run)[0])
    everything = shown(browser)
    assert len(everything) > 100
    set_filter(browser, "step_from", "500")
    set_filter(browser, "reward_to", "0.5")
    rows = shown(browser)
    assert 0 < len(rows) < len(everything)
    assert all(int(row[0]) >= 500 and float(row[1]) <= 0.5 for row in rows)
    set_filter(browser, "tokens_from", "60")
    assert all(int(row[2]) >= 60 for row in shown(browser))
    set_filter(browser, "text", "QUESTION 1000")
    assert {row[0] for row in shown(browser)} == {"1000"}
    assert "step_from=500" in browser.run("location.hash")
    set_filter(browser, "text", "no rollout says this")
    assert shown(browser) == [] and "No sampled rollout" in browser.run("document.querySelector('.reader').textContent")
    assert not browser.complaints


def test_views_of_the_timeline_and_metrics_can_be_chosen(browser: Chromium, long_run: Path) -> None:
    browser.open(write_report(long_run)[0])
    labels = browser.run("[...document.querySelectorAll('.tabs button')].map(b => b.textContent)")
    assert len(labels) == 3 and labels[-1] == "whole run"
    for i in range(3):
        browser.run(f"document.querySelectorAll('.tabs button')[{i}].click()")
        assert browser.run(BLANK) == []
    choice = "document.querySelector('select')"
    browser.run(f"{choice}.value = 'grad_norm'; {choice}.dispatchEvent(new Event('change'))")
    assert "grad_norm" in browser.run("document.querySelector('#metrics .u-legend').textContent")
    assert not browser.complaints


def test_texts_of_a_model_stay_texts(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "<img src=x onerror=window.hacked=7>", steps=3, texts=HOSTILE)
    browser.open(write_report(run, out=tmp_path)[0])
    rows = "document.querySelectorAll('.list tbody tr')"
    for i in range(browser.run(f"{rows}.length")):
        browser.run(f"{rows}[{i}].click()")
    assert browser.run("window.hacked === undefined")
    assert (
        browser.run("document.querySelectorAll('main script, main img, main svg, main style, main iframe').length") == 0
    )
    browser.run(f"{rows}[0].click()")
    assert browser.run("document.querySelector('.response').textContent") == HOSTILE[0]
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "a long line makes the page wide"
    assert not browser.complaints and len(browser.requests) == 1


def test_even_injected_html_runs_nothing(browser: Chromium, tmp_path: Path) -> None:
    """The second lock: the page's policy. It complains, as it should."""
    browser.open(write_report(write_run(tmp_path / "run", steps=2))[0])
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">')")
    browser.run("window.added = document.createElement('script'); added.textContent = 'window.hacked = 2'")
    browser.run("document.body.append(added)")
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("window.hacked === undefined")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


WHERE_IT_OVERFLOWS = """(() => [...document.querySelectorAll("main *")].filter((one) => {
    if (one.closest("nav, .scroll, .list, .u-legend, details:not([open])")) return false;
    const box = one.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map((one) => one.className || one.tagName))()"""


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [390, 820])
def test_it_fits_a_narrow_screen_and_follows_the_reader_s_scheme(
    browser: Chromium, tmp_path: Path, width: int, is_dark: bool
) -> None:
    page = write_report(write_run(tmp_path / "a-run-with-quite-a-long-name-for-a-phone", steps=12))[0]
    set_scheme(browser, is_dark)
    browser.resize(width, 844)
    try:
        browser.open(page)
        assert not browser.complaints and browser.run(BLANK) == []
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run(WHERE_IT_OVERFLOWS) == []
        ground = browser.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(13, 17, 23)" if is_dark else "rgb(247, 248, 250)")
        picture(browser, f"{width}-{'dark' if is_dark else 'light'}", "main")
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
        set_scheme(browser, False)


def set_scheme(browser: Chromium, is_dark: bool) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    browser.call("Emulation.setEmulatedMedia", features=[scheme])


def test_a_changed_scheme_redraws_the_page_and_keeps_its_filters(browser: Chromium, tmp_path: Path) -> None:
    browser.open(write_report(write_run(tmp_path / "run", steps=12))[0])
    set_filter(browser, "step_from", "10")
    rows, bar = shown(browser), "getComputedStyle(document.querySelector('.shares .bar span')).backgroundColor"
    before = browser.run(bar)
    try:
        set_scheme(browser, True)
        browser.wait_for(f"{bar} !== {json.dumps(before)}")
        assert browser.run(BLANK) == [] and not browser.complaints
        assert shown(browser) == rows and browser.run("document.querySelectorAll('h1').length") == 1
    finally:
        set_scheme(browser, False)


def test_axes_show_whole_steps_and_no_impossible_values(browser: Chromium, tmp_path: Path) -> None:
    """A single evaluation at 0 %: no -0.2, no step 1.5, no 100 %, which nobody reached."""
    (tmp_path / "config.yaml").write_text("rl: {steps: 3}\n")
    rows: list[dict[str, float]] = [{"step": 0, "eval/accuracy": 0.0, "eval/accuracy_se": 0.0}]
    rows += [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.open(write_report(tmp_path)[0])
    x, y = json.loads(browser.run("document.querySelector('[data-chart=eval]').dataset.ranges"))
    assert x == [-1, 1] and y[0] == 0 and y[1] < 10
    x, y = json.loads(browser.run("document.querySelector('[data-chart=reward]').dataset.ranges"))
    assert 0 <= x[0] <= 1 and 2 <= x[1] <= 3 and y[0] == 0


def test_two_runs_side_by_side(browser: Chromium, long_run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=40)
    (page,), _ = write_comparison(long_run, other, tmp_path)
    milliseconds = browser.open(page)
    print(f"\ntwo runs: drawn after {milliseconds:.0f} ms")
    assert not browser.complaints and browser.run(BLANK) == []
    assert browser.run("[...document.querySelectorAll('h1')].map(h => h.textContent)") == ["long", "other"]
    assert browser.run("document.querySelectorAll('.list').length") == 2
    picture(browser, "compare", "main")


def test_a_run_without_anything(browser: Chromium, tmp_path: Path) -> None:
    """Charts without data are left out with a sentence."""
    (tmp_path / "config.yaml").write_text("rl: {steps: 3}\n")
    browser.open(write_report(tmp_path)[0])
    assert not browser.complaints
    assert browser.run("document.querySelectorAll('[data-chart]').length") == 0
    assert browser.run("document.querySelectorAll('.empty').length") >= 8


def test_a_run_that_goes_on_is_shown_again(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    browser.open(write_report(run, refresh_s=2)[0])
    write_report(write_run(tmp_path / "next" / "run", steps=9), out=run)
    browser.wait_for("document.querySelector('.status').textContent.startsWith('9 of')")
