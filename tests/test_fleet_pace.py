"""Measured speeds: long pieces of work count for more than short ones, old ones for less."""

from __future__ import annotations

import pytest

from paceline.fleet.throughput import FIRST_SPEED, PartClock, Throughput
from paceline.rollout.stats import Stats


def test_a_speed_is_what_was_measured() -> None:
    pace = Throughput(num_slots=7)
    assert pace.speed.num_slots == 7 and pace.speed.step_s == FIRST_SPEED.step_s
    expected = 100 * FIRST_SPEED.step_s + 400 * FIRST_SPEED.row_s
    pace.generated(Stats(steps=100, tokens=400, visits=400), 3 * expected)
    assert pace.speed.step_s == pytest.approx(3 * FIRST_SPEED.step_s)
    assert pace.speed.row_s == pytest.approx(3 * FIRST_SPEED.row_s)
    pace.generated(Stats(steps=1, tokens=1, visits=1), 10 * expected / 1000)  # one token that took long says little
    assert pace.speed.step_s == pytest.approx(3 * FIRST_SPEED.step_s, rel=0.02)
    pace.learned(100, 2.0)
    pace.learned(300, 2.0)
    assert pace.speed.learn_s == pytest.approx(0.01)


def test_guesses_that_come_true_count_as_tokens() -> None:
    plain, lucky = Throughput(1), Throughput(1)
    plain.generated(Stats(steps=100, tokens=100, visits=100), 1.0)
    lucky.generated(Stats(steps=25, tokens=100, visits=25), 1.0)
    assert lucky.speed == plain.speed


def test_what_was_measured_long_ago_counts_less() -> None:
    pace = Throughput(1)
    for learn_s in (1.0, 3.0):
        pace.fade()
        pace.learned(10, 10 * learn_s)
    assert pace.speed.learn_s == pytest.approx((0.5 * 1.0 + 3.0) / 1.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_how_far_a_worker_should_be() -> None:
    clock = Clock()
    parts, speed = PartClock(clock), Throughput(1).speed
    parts.begin()
    parts.told(0, (4, 6))
    clock.now = 2.0
    assert parts.progress(0, speed) == (4, pytest.approx(2.0 / speed.learn_s))
    parts.told(0, (8,))
    parts.summed(0, 4)
    assert parts.progress(0, speed) == (6, 0.0) and parts.progress(1, speed) is None
    parts.summed(1, 6)  # of somebody else: this one goes on
    assert parts.progress(0, speed) == (6, 0.0)
    parts.begin()
    assert parts.progress(0, speed) is None
