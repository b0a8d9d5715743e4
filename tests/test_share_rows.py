"""Rows shared among sequences whose drafts the device finds: a slow twin, what nobody may get, and the odds."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.kernels.text_ranks import LONGEST, NUM_RANKS
from paceline.rollout.speculation.share_rows import (
    FIRST_DEPTHS,
    MEMORY,
    NUM_DEPTHS,
    TextOdds,
    first_odds,
    share_rows,
)

GOOD, POOR = NUM_RANKS - 1, 1
"""The rank of long run-ahead text, and that of a match of the least length."""


def odds_of(table: NDArray[np.float64]) -> TextOdds:
    """Odds that are known for sure."""
    odds = TextOdds()
    tried = np.full((NUM_RANKS, NUM_DEPTHS), 100.0)
    odds.restore([tried.tolist(), (tried * table).tolist()])
    assert odds.table == pytest.approx(table)
    return odds


def flat_odds(probability: float) -> TextOdds:
    return odds_of(np.full((NUM_RANKS, NUM_DEPTHS), probability))


def chance(odds: TextOdds, rank: int, depth: int) -> float:
    """How likely the token at this depth of a draft comes true if all before it did."""
    return float(odds.table[rank, sum(depth >= first for first in FIRST_DEPTHS[1:])])


def in_order(
    ranks: NDArray[np.int32], caps: NDArray[np.int64], weights: NDArray[np.float64], odds: TextOdds, least: float
) -> list[tuple[int, float]]:
    """The slow twin: all rows worth anything, the best first: whose, and what the row's token is worth."""
    rows = []
    for i, (rank, cap) in enumerate(zip(ranks.tolist(), caps.tolist(), strict=True)):
        path = 1.0
        for depth in range(cap):
            path *= chance(odds, rank, depth)
            if not weights[i] * path > least * weights.max():
                break
            rows.append((i, float(weights[i] * path), depth))
    # A deeper row of a sequence never comes before one that is less deep: it cannot be likelier.
    return [(i, gain) for i, gain, _ in sorted(rows, key=lambda row: (-row[1], row[0], row[2]))]


def shared_slowly(
    ranks: NDArray[np.int32],
    caps: NDArray[np.int64],
    weights: NDArray[np.float64],
    others_worth: float,
    odds: TextOdds,
    bucket_ms: NDArray[np.float64],
    *,
    num_rows: int,
    more_ms: float = 0.0,
    min_gain: float = 1.03,
    min_probability: float = 0.01,
) -> NDArray[np.int64]:
    """The slow twin: try every number of rows."""
    order = in_order(ranks, caps, weights, odds, min_probability)
    base = others_worth + weights.sum()
    plain = base / (bucket_ms[num_rows] + more_ms)
    best, best_rate = 0, plain
    for count in range(1, min(len(order), len(bucket_ms) - 1 - num_rows) + 1):
        ms = bucket_ms[num_rows + count]
        rate = (base + sum(gain for _, gain in order[:count])) / (ms + more_ms)
        is_free = ms <= bucket_ms[num_rows]
        if rate > best_rate and (is_free or rate >= min_gain * plain):
            best, best_rate = count, rate
    return np.bincount([i for i, _ in order[:best]], minlength=len(ranks)).astype(np.int64)


def worth_of(counts: NDArray[np.int64], given: dict[str, Any]) -> float:
    """Expected worth per millisecond of a step with these draft rows."""
    odds, gains = given["odds"], given["others_worth"] + given["weights"].sum()
    for i, count in enumerate(counts.tolist()):
        path = 1.0
        for depth in range(count):
            path *= chance(odds, int(given["ranks"][i]), depth)
            gains += given["weights"][i] * path
    return float(gains / (given["bucket_ms"][given["num_rows"] + int(counts.sum())] + given["more_ms"]))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width, first = draw(st.sampled_from((1, 4, 8))), draw(st.floats(0.5, 20))
    max_rows = draw(st.integers(count, 60))
    # A staircase, as graphs make it, with steps of any height, some of which cost nothing.
    heights = np.where(random.random(max_rows + 1) < 0.2, 0.0, random.random(max_rows + 1) * draw(st.floats(0, 2)))
    steps = np.where(np.arange(max_rows + 1) % width == 1 % width, heights, 0.0)
    return {
        "ranks": random.integers(0, NUM_RANKS, count).astype(np.int32),
        "caps": random.integers(0, 12, count),
        "weights": random.random(count) * draw(st.sampled_from((0.01, 1.0, 30.0))) + 1e-3,
        "others_worth": draw(st.sampled_from((0.0, 1.0, 100.0))),
        "odds": odds_of(random.random((NUM_RANKS, NUM_DEPTHS)) * draw(st.sampled_from((0.05, 0.5, 0.98)))),
        "bucket_ms": first + np.cumsum(steps),
        "num_rows": draw(st.integers(count, max_rows)),
        "more_ms": draw(st.sampled_from((0.0, 0.5, 10.0))),
        "min_gain": draw(st.sampled_from((1.0, 1.03, 1.5))),
        "min_probability": draw(st.sampled_from((0.0, 0.01, 0.3))),
    }


@settings(max_examples=400)
@given(given=cases())
def test_it_shares_as_its_slow_twin(given: dict[str, Any]) -> None:
    found, expected = share_rows(**given), shared_slowly(**given)
    if found.tolist() != expected.tolist():  # sums in another order may decide between equals
        assert worth_of(found, given) == pytest.approx(worth_of(expected, given))


@settings(max_examples=200)
@given(given=cases())
def test_nobody_gets_what_is_not_there(given: dict[str, Any]) -> None:
    found = share_rows(**given)
    assert found.dtype == np.int64 and found.shape == given["ranks"].shape
    assert (found >= 0).all() and (found <= given["caps"]).all()
    assert given["num_rows"] + found.sum() <= len(given["bucket_ms"]) - 1
    nothing = np.zeros_like(found)
    assert worth_of(found, given) >= worth_of(nothing, given)
    if found.any() and given["bucket_ms"][given["num_rows"] + found.sum()] > given["bucket_ms"][given["num_rows"]]:
        assert worth_of(found, given) >= given["min_gain"] * worth_of(nothing, given) * (1 - 1e-9)
    odds, most = given["odds"], given["weights"].max()
    for i, count in enumerate(found.tolist()):
        path = math.prod(chance(odds, int(given["ranks"][i]), depth) for depth in range(count))
        assert count == 0 or given["weights"][i] * path > given["min_probability"] * most


def staircase(width: int, max_rows: int, step_ms: float = 1.0) -> NDArray[np.float64]:
    """Buckets of so many rows, each of which costs more than the one before."""
    return 10.0 + step_ms * np.ceil(np.arange(max_rows + 1) / width)


def share(num: int, odds: TextOdds, bucket_ms: NDArray[np.float64], cap: int = 20, **given: Any) -> NDArray[np.int64]:
    """For sequences that are all alike."""
    ranks, caps = np.full(num, GOOD, np.int32), np.full(num, cap, np.int64)
    return share_rows(ranks, caps, np.ones(num), 0.0, odds, bucket_ms, **{"num_rows": num, **given})


@pytest.mark.parametrize("probability", [0.011, 0.03, 0.2])
def test_rows_that_fill_a_bucket_are_free(probability: float) -> None:
    """Five rows run as eight: the three others are worth a guess that mostly fails, but not one that always does."""
    assert share(5, flat_odds(probability), staircase(8, 64, step_ms=50)).tolist() == [1, 1, 1, 0, 0]
    assert share(8, flat_odds(probability), staircase(8, 64, step_ms=50)).sum() == 0
    assert share(5, flat_odds(0.009), staircase(8, 64, step_ms=50)).sum() == 0
    assert share(5, flat_odds(0.009), staircase(8, 64, step_ms=50), min_probability=0.0).sum() == 3


@pytest.mark.parametrize("num", [1, 3, 8, 13])
def test_hopeless_odds_get_no_more_than_the_free_rows(num: int) -> None:
    for probability in (0.02, 0.05):
        found = share(num, flat_odds(probability), staircase(8, 64))
        assert found.sum() == min(-num % 8, num), "one each: two that come true are not to be expected at all"


def test_good_odds_are_worth_further_buckets() -> None:
    found = share(4, flat_odds(0.95), staircase(8, 64, step_ms=0.5))
    assert found.sum() > 12 and max(found) - min(found) <= 1, "all alike get the same"
    steep = share(4, flat_odds(0.95), staircase(1, 64, step_ms=1000))
    assert steep.sum() == 0, "where a row costs more than a step, even they are not"


def test_rows_go_where_they_count_most() -> None:
    ranks, caps, odds = np.full(3, GOOD, np.int32), np.full(3, 20, np.int64), flat_odds(0.8)
    bucket_ms = staircase(16, 64, step_ms=100)
    found = share_rows(ranks, caps, np.array([1.0, 8.0, 2.0]), 0.0, odds, bucket_ms, num_rows=3)
    assert found.sum() == 13 and found[1] > found[2] > found[0]
    found = share_rows(ranks, caps, np.array([1.0, 1000.0, 1.0]), 0.0, odds, bucket_ms, num_rows=3)
    assert found.tolist() == [0, 13, 0], "the last one decides when the batch ends"
    better = odds_of(np.where(np.arange(NUM_RANKS)[:, None] == GOOD, 0.9, np.full((NUM_RANKS, NUM_DEPTHS), 0.3)))
    ranks[1] = POOR
    found = share_rows(ranks, caps, np.ones(3), 0.0, better, bucket_ms, num_rows=3)
    assert found[0] > found[1] < found[2] and found.sum() == 13


def test_what_others_are_worth_makes_a_longer_step_dearer() -> None:
    def total(others_worth: float, more_ms: float = 0.0) -> int:
        ranks, caps = np.full(2, GOOD, np.int32), np.full(2, 30, np.int64)
        bucket_ms = staircase(4, 128, step_ms=0.5)
        weights = np.ones(2)
        odds = flat_odds(0.9)
        return int(share_rows(ranks, caps, weights, others_worth, odds, bucket_ms, num_rows=2, more_ms=more_ms).sum())

    assert total(0.0) > total(4.0) > total(1000.0) == 2, "only what is free"
    assert total(0.0, more_ms=50.0) > total(0.0), "a step that takes long anyway has room"


def test_without_room_or_anything_to_draft_there_are_none() -> None:
    bucket_ms = staircase(8, 16)
    assert share(16, flat_odds(0.9), bucket_ms).sum() == 0, "all rows are taken"
    assert share(20, flat_odds(0.9), bucket_ms).sum() == 0, "and more than all"
    assert share(3, flat_odds(0.9), bucket_ms, cap=0).sum() == 0
    assert share(15, flat_odds(0.9), bucket_ms).sum() == 1
    found = share_rows(
        np.array([GOOD], np.int32), np.array([4]), np.zeros(1), 0.0, flat_odds(0.9), bucket_ms, num_rows=1
    )
    assert found.sum() == 0, "a token that is worth nothing"


# --- odds -------------------------------------------------------------------------------------------------------------


def test_the_first_odds_are_sane() -> None:
    odds = first_odds()
    assert odds.shape == (NUM_RANKS, NUM_DEPTHS) and (odds > 0).all() and (odds < 1).all()
    assert (np.diff(odds[1 : LONGEST + 1], axis=0) >= 0).all(), "a longer match is better"
    assert (np.diff(odds[LONGEST + 1 :], axis=0) >= 0).all() and (np.diff(odds[1:], axis=1) >= 0).all()
    assert TextOdds().table == pytest.approx(odds)


def outcomes(
    truth: NDArray[np.float64], random: np.random.Generator, count: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Drafts of random ranks and lengths, and how many of their tokens came true."""
    ranks = random.integers(0, NUM_RANKS, count).astype(np.int32)
    num_drafted, num_right = random.integers(0, 14, count), np.zeros(count, np.int64)
    for i in range(count):
        depth = 0
        while depth < num_drafted[i]:
            kind = sum(depth >= first for first in FIRST_DEPTHS[1:])
            if random.random() >= truth[ranks[i], kind]:
                break
            depth += 1
        num_right[i] = depth
    return ranks, num_drafted, num_right


def test_odds_become_what_is_true_whatever_was_believed() -> None:
    random = np.random.default_rng(0)
    truth = 0.2 + 0.75 * random.random((NUM_RANKS, NUM_DEPTHS))
    odds = TextOdds()
    for _ in range(300):
        odds.observe(*outcomes(truth, random, 100))
    # Few drafts get to the deepest classes, so what is true there takes longer.
    assert np.abs(odds.table - truth)[:, :3].max() < 0.08
    # When the truth changes, so do the odds.
    other = 1 - truth
    for _ in range(300):
        odds.observe(*outcomes(other, random, 100))
    assert np.abs(odds.table - other)[:, 0].max() < 0.08


def test_odds_forget() -> None:
    odds, one = TextOdds(), np.array([7], np.int32)
    for _ in range(10 * int(MEMORY)):
        odds.observe(one, np.array([1]), np.array([1]))
    assert odds.table[7, 0] > 0.99 and max(map(max, odds.state()[0])) <= MEMORY
    for _ in range(int(MEMORY)):
        odds.observe(one, np.array([1]), np.array([0]))
    assert odds.table[7, 0] < 0.5


def test_only_what_was_reached_is_judged() -> None:
    odds, before = TextOdds(), TextOdds().table
    odds.observe(np.array([7], np.int32), np.array([6]), np.array([2]))
    changed = np.argwhere(odds.table != before).tolist()
    assert changed == [[7, 0], [7, 1], [7, 2]], "depths 0 and 1 came true, depth 2 did not, nothing is known of 3"
    assert odds.table[7, 0] > before[7, 0] and odds.table[7, 1] > before[7, 1] and odds.table[7, 2] < before[7, 2]
    odds.observe(np.array([9], np.int32), np.array([3]), np.array([3]))
    assert (odds.table[9, :3] > before[9, :3]).all() and (odds.table[9, 3:] == before[9, 3:]).all()
    again = odds.table
    odds.observe(np.array([11], np.int32), np.array([0]), np.array([0]))
    assert (odds.table == again).all()


def test_the_state_holds_everything_and_is_plain() -> None:
    odds, again = TextOdds(), TextOdds()
    odds.observe(*outcomes(np.full((NUM_RANKS, NUM_DEPTHS), 0.5), np.random.default_rng(1), 300))
    again.restore(json.loads(json.dumps(odds.state())))
    assert (again.table == odds.table).all() and again.state() == odds.state()
    for each in (odds, again):
        each.observe(np.array([3], np.int32), np.array([2]), np.array([1]))
    assert (again.table == odds.table).all()


def damaged(part: int, value: float) -> list[list[list[float]]]:
    state = TextOdds().state()
    state[part][2][1] = value
    return state


@pytest.mark.parametrize(
    "state",
    [
        None,
        7,
        "state",
        [],
        [[1.0]],
        [[[0.5]], [[0.2]]],
        {"tried": 1},
        [TextOdds().state()[0]],
        [*TextOdds().state(), []],
        [TextOdds().state()[0][:-1], TextOdds().state()[1][:-1]],
        [TextOdds().state()[0], [["x"]]],
        damaged(0, 0.0),
        damaged(0, -1.0),
        damaged(0, math.nan),
        damaged(0, math.inf),
        damaged(1, -0.1),
        damaged(1, 1e6),
        damaged(1, math.nan),
        damaged(1, math.inf),
    ],
    ids=lambda state: str(state)[:20],
)
def test_nonsense_is_not_restored(state: Any) -> None:
    odds = TextOdds()
    odds.observe(np.array([3], np.int32), np.array([2]), np.array([1]))
    before = odds.table
    odds.restore(state)
    assert (odds.table == before).all()
