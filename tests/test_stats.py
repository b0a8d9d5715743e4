"""Counters of several calls added up: no field is forgotten, and a step's metrics come from the sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

from paceline.rollout.stats import DrafterStats, Stats
from paceline.run.metrics import engine_metrics, row_budget


def made(size: int) -> Stats:
    """Every counter is a multiple of `size`."""
    drafter = DrafterStats(5 * size, 4 * size, 3 * size, 2 * size, 0.5 * size, Counter({(2, 1): size}))
    return Stats(
        steps=size,
        rows=2 * size,
        tokens=3 * size,
        visits=4 * size,
        preemptions=5 * size,
        ahead_made=6 * size,
        ahead_offered=7 * size,
        ahead_survived=8 * size,
        machine_seconds=0.5 * size,
        wall_seconds=0.75 * size,
        capture_seconds=0.125 * size,
        seconds={"draft": 0.25 * size},
        drafters={"suffix": drafter},
        saved_ms=1.5 * size,
        forwards=Counter({8: size}),
        arms=Counter({(4, "suffix"): size}),
    )


def test_every_counter_is_added() -> None:
    total = Stats()
    for size in (1, 2, 4):
        total.add(made(size))
    assert total == made(7)
    missing = [each.name for each in fields(Stats) if not getattr(total, each.name)]
    assert missing == ["curve"], "a new field must be added up, and set in `made`"
    assert all(getattr(total.drafters["suffix"], each.name) for each in fields(DrafterStats))


def test_the_last_known_curve_stays() -> None:
    total = Stats()
    for curve in ((), ((1, 0.5),), ((1, 0.25), (2, 0.5)), ()):
        total.add(Stats(curve=curve))
    assert total.curve == ((1, 0.25), (2, 0.5))


def test_a_sum_shares_nothing_with_its_parts() -> None:
    part, total = made(1), Stats()
    total.add(part)
    total.add(part)
    assert part == made(1)


def test_metrics_of_a_step_come_from_the_sum() -> None:
    total = Stats()
    for size in (1, 3):
        total.add(made(size))
    assert engine_metrics(total) == {
        "rollout/spec_accept_length": 12 / 16,
        "rollout/spec_rows_per_token": 8 / 12,
        "perf/preemptions": 20.0,
        "perf/forward_seconds": 2.0,
        "rollout/spec_saved_seconds": 1e-3 * (6.0 - 2.0) - 1.0,
        "rollout/spec_ahead_made": 24.0,
        "rollout/spec_ahead_offered": 28.0,
        "rollout/spec_ahead_survived": 32.0,
        "rollout/spec_suffix_accepted": 12.0,
        "rollout/spec_suffix_milliseconds": 2.0,
        "rollout/spec_suffix_proposed": 20.0,
        "rollout/spec_suffix_verified": 16.0,
        "rollout/spec_suffix_at_1": 1.0,
        "rollout/spec_suffix_at_2": 0.0,
    }
    assert row_budget(total) == {"forwards": [[8, 4]], "arms": [[4, "suffix", 4]], "curve": []}


def test_a_step_without_drafts_has_no_metrics_of_drafts() -> None:
    assert list(engine_metrics(Stats(steps=1, rows=4, tokens=2, visits=2))) == [
        "rollout/spec_accept_length",
        "rollout/spec_rows_per_token",
        "perf/preemptions",
        "perf/forward_seconds",
    ]
