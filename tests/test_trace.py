"""Spans: nested ones, failing ones, and what they add up to, on a clock that the tests set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import trace as trace_module
from paceline.core.trace import RESUMED, Trace


class Clock:
    """A clock that stands still until it is told how much time has passed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(trace_module, "time", clock)
    yield clock


def test_a_span_becomes_an_event_of_its_step(clock: Clock) -> None:
    trace = Trace(worker="3")
    clock.now += 2
    trace.step = 7
    with trace.span("gen", draws=8) as args:
        clock.now += 0.5
        trace.step = 8  # a span belongs to the step it began in
        args["tokens"] = 99
    expected = {"name": "gen", "worker": "3", "step": 7, "start_s": 2.0, "dur_s": 0.5}
    assert trace.drain() == [expected | {"args": {"draws": 8, "tokens": 99}}]
    assert trace.drain() == []
    assert trace.seconds(7) == {"gen": 0.5} and trace.seconds(8) == {}


def test_nested_spans_come_in_the_order_they_began(clock: Clock) -> None:
    trace = Trace()
    with trace.span("step"):
        with trace.span("gen"):
            clock.now += 1
        with trace.span("score"):
            clock.now += 2
        assert [event["name"] for event in trace.drain()] == ["gen", "score"]  # "step" is still open
    with trace.span("outer"), trace.span("inner"):
        clock.now += 1
    assert [event["name"] for event in trace.drain()] == ["step", "outer", "inner"]
    assert trace.seconds(0) == {"gen": 1.0, "score": 2.0, "step": 3.0, "inner": 1.0, "outer": 1.0}


def test_the_same_phase_twice_adds_up_and_inside_itself_counts_once(clock: Clock) -> None:
    trace = Trace()
    for step in (1, 1, 2):
        trace.step = step
        with trace.span("gen"):
            clock.now += 1
            with trace.span("gen"):
                clock.now += 10
    assert trace.seconds(1) == {"gen": 22.0} and trace.seconds(2) == {"gen": 11.0}
    assert trace.totals == {"gen": 33.0}
    assert len(trace.drain()) == 6
    assert trace.totals == {"gen": 33.0}  # draining forgets events, not sums


def test_an_exception_passes_and_closes_every_span_on_its_way(clock: Clock) -> None:
    trace = Trace()
    with pytest.raises(ZeroDivisionError), trace.span("outer"), trace.span("inner"):
        clock.now += 1
        raise ZeroDivisionError
    assert [event["args"] for event in trace.drain()] == [{"error": "ZeroDivisionError"}] * 2
    with trace.span("outer"):
        clock.now += 1
    assert trace.seconds(0) == {"outer": 2.0, "inner": 1.0}


def test_a_resumed_run_goes_on_where_its_events_ended(clock: Clock) -> None:
    trace = Trace(begin_s=60.0)
    clock.now += 5
    with trace.span("gen"):
        clock.now += 1
    resumed, gen = trace.drain()
    assert gen["start_s"] == 65.0
    assert (resumed["name"], resumed["step"], resumed["start_s"], resumed["dur_s"]) == (RESUMED, 0, 60.0, 0.0)
    assert trace.seconds(0) == {"gen": 1.0}  # a moment is no phase


def test_seconds_are_a_copy(clock: Clock) -> None:
    trace = Trace()
    with trace.span("gen"):
        clock.now += 1
    trace.seconds(0)["gen"] = -1.0
    trace.totals["gen"] = -1.0
    assert trace.seconds(0) == trace.totals == {"gen": 1.0}


Tree = list[tuple[str, int, Any]]
TREES: st.SearchStrategy[Any] = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), inner), max_size=3),
    max_leaves=10,
)


@given(tree=TREES)
def test_what_is_inside_lies_inside(tree: Tree) -> None:
    """Whatever the nesting: as many events as spans, JSON throughout, and a parent lasts as long as its own work."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(trace_module, "time", clock)
        trace = Trace()

        def walk(spans: Tree) -> int:
            total = 0
            for name, length, inner in spans:
                with trace.span(name, total=-1) as args:
                    clock.now += length
                    args["total"] = length + walk(inner)
                total += args["total"]
            return total

        walk(tree)
    events = trace.drain()
    assert all(event["dur_s"] == event["args"]["total"] for event in events)
    assert [event["start_s"] for event in events] == sorted(event["start_s"] for event in events)
    assert json.loads(json.dumps(events)) == events
    assert sum(trace.totals.values()) <= sum(event["dur_s"] for event in events)
