"""The compiled loops of a step against slow twins: limits, weights, progress, who is due, and what drafts became of.

No token depends on them, so equality of rollouts would not notice a mistake: drafts would only cost more.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paceline.kernels.text_ranks import NUM_RANKS
from paceline.rollout import draft_rows, scheduler, text_sources, token_value
from paceline.rollout.draft_counts import DraftCounts
from paceline.rollout.stats import Stats

SEEDS = pytest.mark.parametrize("seed", range(20))
SLOTS = 12


def some_slots(rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]


@SEEDS
def test_limits_bound_each_sequence_on_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, draftable = some_slots(rng), int(rng.integers(0, SLOTS + 1))
    lengths, in_flight = rng.integers(1, 50, SLOTS), rng.integers(0, 4, SLOTS)
    longest, entries = lengths + rng.integers(1, 12, SLOTS), rng.integers(-1, 4, SLOTS)
    ranks, ends = rng.integers(0, NUM_RANKS, SLOTS).astype(np.int32), rng.integers(0, 60, SLOTS)
    found = draft_rows.TextLimits(
        *draft_rows._limits(slots, longest, lengths, in_flight, entries, ranks, ends, draftable, 3, 5, 7, 40, 6)
    )
    assert found.known_ranks.tolist() == ranks[slots].tolist() and found.num_tokens == lengths[slots].sum()
    for i, slot in enumerate(slots.tolist()):
        left = max(int(longest[slot] - lengths[slot] - in_flight[slot]) - 1, 0)
        left = left if i < draftable and entries[slot] >= 0 else 0
        text = int(ends[slot] - lengths[slot])
        most = min(7, text) if ranks[slot] >= 40 and text > 0 else 5
        expected = (left, 3 if left else 0, min(left, most, 6) if left else 0)
        assert (found.num_left[i], found.least_ranks[i], found.caps[i]) == expected


@SEEDS
def test_weights_are_what_tokens_are_worth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = some_slots(rng)
    draftable = int(rng.integers(0, len(slots) + 1))
    shares, is_ahead = rng.random(SLOTS) * rng.integers(0, 2, SLOTS), rng.random(SLOTS) < 0.4
    lengths = rng.integers(1, 1000, SLOTS)
    if seed % 3 == 0:
        shares[rng.integers(SLOTS)] = np.nan
    weights, others, is_known = token_value._weigh(
        shares, slots, draftable, is_ahead, lengths, 1e-6, 0.7, 5.0, 0.1, 1e-3
    )
    own, rest = slots[:draftable], slots[draftable:]
    least = np.fmax(shares, 1e-6)
    lasting = np.where(is_ahead[own], 0.7, 1.0)
    assert weights == pytest.approx(lasting * (least[own] * 5.0 + 0.1 + 1e-3 * lengths[own]))
    lead = least[own][is_ahead[own]].sum()
    expected = 5.0 * max(1 - lead, 0.0) + 0.1 * len(rest) + 1e-3 * lengths[rest].sum() if len(rest) else 0.0
    assert others == pytest.approx(0.7 * expected) and is_known == (not np.isnan(shares[own]).any())


@SEEDS
def test_progress_is_the_lesser_mean_and_speeds_follow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = some_slots(rng)
    shares, speeds = rng.random(SLOTS), np.where(rng.random(SLOTS) < 0.5, np.nan, 1 + 3 * rng.random(SLOTS))
    emitted, before = rng.integers(0, 9, len(slots)), speeds.copy()
    found = token_value._progress(shares, speeds, slots, emitted, 1e-6, 0.9, 2.0)
    weighted = float(emitted @ shares[slots] / shares[slots].sum())
    assert found == pytest.approx(min(weighted, float(emitted.mean())))
    for slot, count in zip(slots.tolist(), emitted.tolist(), strict=True):
        old = 2.0 if np.isnan(before[slot]) else before[slot]
        expected = 0.9 * old + 0.1 * count if count else before[slot]
        assert speeds[slot] == pytest.approx(expected, nan_ok=True)
    others = np.setdiff1d(np.arange(SLOTS), slots)
    assert np.array_equal(speeds[others], before[others], equal_nan=True)


@SEEDS
def test_who_is_due_and_who_lacks_a_page(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = some_slots(rng)
    cached = rng.integers(0, 40, SLOTS)
    lengths, in_flight = cached + rng.integers(1, 3, SLOTS), rng.integers(0, 4, SLOTS)
    longest, pages = lengths + rng.integers(0, 4, SLOTS), rng.integers(1, 6, SLOTS)
    is_due, is_full, num_due, num_full = scheduler._due(slots, lengths, cached, in_flight, longest, pages, 8)
    due = (lengths - cached == 1) & (longest - lengths > (in_flight > 0))
    full = due & (cached + in_flight >= 8 * pages)
    assert is_due.tolist() == due[slots].tolist() and is_full.tolist() == full[slots].tolist()
    assert (num_due, num_full) == (due[slots].sum(), full[slots].sum())


@SEEDS
def test_matches_are_judged_by_their_rows_or_by_the_next_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = some_slots(rng)
    count = len(slots)
    is_live, rows = rng.random(count) < 0.7, rng.integers(0, 4, count)
    known = rng.integers(0, NUM_RANKS, count).astype(np.int32)
    counts, starts = 1 + rng.integers(0, 4, count), np.cumsum(rows + 1).astype(np.int32) - 1
    predicted = rng.integers(0, 3, SLOTS).astype(np.int32)
    sampled = rng.integers(0, 3, int(starts[-1]) + 1).astype(np.int32)
    ranks, drafted, right = text_sources._judge(slots, is_live, known, rows, counts, predicted, sampled, starts)
    hits = predicted[slots] == sampled[starts]
    assert ranks.tolist() == known[is_live].tolist()
    assert drafted.tolist() == np.where(rows > 0, rows, 1)[is_live].tolist()
    assert right.tolist() == np.where(rows > 0, counts - 1, hits)[is_live].tolist()


@SEEDS
def test_drafts_are_counted_as_one_by_one(seed: int) -> None:
    rng, counts, stats = np.random.default_rng(seed), DraftCounts(8), Stats()
    pieces: dict[str, Counter[tuple[int, int]]] = {"a": Counter(), "b": Counter()}
    firsts, proposed = Counter[str](), Counter[str]()
    for _ in range(5):
        rows, is_counted = rng.integers(0, 4, 8), rng.random(8) < 0.8
        emitted, sources = 1 + np.minimum(rng.integers(0, 4, 8), rows), rng.integers(0, 2, 8)
        starts = (np.cumsum(rows + 1) - rows - 1).astype(np.int32)
        path, is_hosted = rng.integers(0, 3, int((rows + 1).sum())), bool(rng.random() < 0.5)
        counts.note(sources, rows, emitted, is_counted, starts, path, is_hosted)
        for i in np.flatnonzero(is_counted & (rows > 0)).tolist():
            name = "ab"[sources[i]]
            pieces[name][int(rows[i]), int(emitted[i]) - 1] += 1
            firsts[name] += bool(emitted[i] > 1 and path[starts[i] + 1] == 1)
            proposed[name] += 0 if is_hosted else int(rows[i])
    counts.count(["a", "b"], stats)
    for name, expected in pieces.items():
        found = stats.drafters[name]
        assert found.pieces == expected and found.firsts == firsts[name] and found.proposed == proposed[name]
        assert found.verified == sum(rows * count for (rows, _), count in expected.items())
        assert found.accepted == sum(right * count for (_, right), count in expected.items())
