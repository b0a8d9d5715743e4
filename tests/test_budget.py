"""The row budget: what rows cost, what guesses are worth, which nodes get a row, and that it never loses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.types import EMPTY_DRAFT, Draft
from paceline.rollout.speculation.acceptance import Acceptance, judge
from paceline.rollout.speculation.allocate import CERTAIN, allocate, node_limit, path_probability
from paceline.rollout.speculation.cost import ANCHORS, CostCurve
from paceline.rollout.speculation.forest import Forest
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.rollout.speculation.step_line import StepLine

GPU_ANCHORS = (1, 128, 256, 512)


def gpu_curve() -> CostCurve:
    """Flat to 128 rows (1.07x one row), then time in proportion to rows."""
    return CostCurve(GPU_ANCHORS, (10.0, 10.7, 21.4, 42.8))


def cpu_curve() -> CostCurve:
    """Every row costs: 16 of them as much as the fixed part."""
    return CostCurve.linear(base_ms=16.0, row_ms=1.0)


@cache
def trusted(*rates: tuple[float, float]) -> Acceptance:
    """An Acceptance that has learned, for source "s", at which rate nodes of a score are accepted. Only to be read."""
    acceptance = Acceptance(memory_steps=10**9)
    for score, rate in rates or ((0.9, 0.9),):
        acceptance.observe("s", np.full(10**6, score), np.arange(10**6) < rate * 10**6)
    return acceptance


def kept_of(drafts: list[Draft], curve: CostCurve, acceptance: Acceptance, live: int, **kwargs: Any) -> list[list[int]]:
    options: dict[str, Any] = {"num_rows": live, "num_live": live, "kv_tokens": 0, "max_rows": 512} | kwargs
    return allocate(drafts, ["s"] * len(drafts), curve, acceptance, **options)


def chain(length: int, score: float | None = 0.9) -> Draft:
    return Draft.chain(range(length), None if score is None else [score] * length)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> Draft:
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, max_nodes)))]
    known = draw(st.booleans())
    scores = [draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0, 1.0, 1.7, math.nan])) for _ in parents] if known else None
    return Draft([draw(st.integers(0, 2)) for _ in parents], parents, scores)


# ---- cost curve


def test_curve_interpolates_and_extrapolates() -> None:
    curve = CostCurve((1, 2, 4), (10.0, 11.0, 15.0), kv_ms=0.001)
    assert curve.ms(1) == 10.0 and curve.ms(3) == 13.0 and curve.ms(6) == pytest.approx(19.0)
    assert curve.ms(3, 1000) == pytest.approx(14.0)
    rows = np.arange(1, 20)
    np.testing.assert_allclose(curve.ms_many(rows, 500), [curve.ms(int(r), 500) for r in rows])


def test_measure_recovers_a_known_machine() -> None:
    calls: list[int] = []

    def run(rows: int, kv_tokens: int) -> float:
        calls.append(rows)
        warm_up = 0.05 if calls.count(rows) == 1 else 0.0
        return (4.0 + 0.02 * rows + 1e-4 * kv_tokens) / 1e3 + warm_up

    curve = CostCurve.measure(run, max_rows=200)
    for rows, kv in ((1, 0), (10, 300), (100, 10_000), (200, 0)):
        assert curve.ms(rows, kv) == pytest.approx(4.0 + 0.02 * rows + 1e-4 * kv, rel=1e-6)
    assert curve.anchors == (1, 2, 4, 8, 16, 32, 64, 128, 200)
    assert len(calls) == 4 * 10


def test_measure_stops_early_on_a_slow_machine_and_extrapolates() -> None:
    calls: list[int] = []

    def run(rows: int, kv_tokens: int) -> float:
        calls.append(rows)
        return 0.1 + 0.02 * rows

    curve = CostCurve.measure(run, max_rows=512)
    assert max(calls) == 16 and curve.anchors == ANCHORS
    assert curve.ms(512) == pytest.approx(100 + 20 * 512)


def test_measure_of_noise_is_non_decreasing() -> None:
    rng = np.random.default_rng(0)
    curve = CostCurve.measure(lambda rows, kv: float(rng.uniform(0.01, 0.02)), max_rows=512)
    assert (np.diff(curve.ms_many(np.arange(1, 2000))) >= -1e-12).all()


def test_refine_follows_a_change_of_speed_also_where_nobody_goes() -> None:
    curve, rng = gpu_curve(), np.random.default_rng(1)
    before = curve.anchor_ms
    for _ in range(400):
        rows = int(rng.integers(1, 100))
        curve.refine(rows, 0, 2 * gpu_curve().ms(rows) / 1e3 * rng.normal(1, 0.05))
    np.testing.assert_allclose(curve.anchor_ms, 2 * before, rtol=0.05)
    for _ in range(600):
        curve.refine(8, 0, 0.5 * gpu_curve().ms(8) / 1e3)
    np.testing.assert_allclose(curve.anchor_ms, 0.5 * before, rtol=0.1)


def test_refine_learns_another_shape_and_another_kv_price() -> None:
    curve, rng = CostCurve((*ANCHORS,), [10.0] * len(ANCHORS), kv_ms=1e-3), np.random.default_rng(2)
    for _ in range(3000):
        rows, kv = int(2 ** rng.uniform(0, 9)), int(rng.integers(0, 10_000))
        curve.refine(rows, kv, (5 + 0.1 * rows + 2e-3 * kv) / 1e3)
    for rows, kv in ((1, 0), (8, 5000), (30, 0), (100, 5000), (200, 5000), (300, 0), (500, 5000)):
        assert curve.ms(rows, kv) == pytest.approx(5 + 0.1 * rows + 2e-3 * kv, rel=0.15)


def test_refine_survives_outliers_and_nonsense() -> None:
    curve, rng = gpu_curve(), np.random.default_rng(3)
    before = curve.anchor_ms
    for _ in range(600):
        rows = int(rng.integers(1, 400))
        pause = 50.0 if rng.random() < 0.05 else 1.0
        curve.refine(rows, 0, gpu_curve().ms(rows) / 1e3 * pause)
        curve.refine(rows, 0, float(rng.choice([math.nan, 0.0, -1.0, math.inf])))
    np.testing.assert_allclose(curve.anchor_ms, before, rtol=0.1)
    one = gpu_curve()
    one.refine(64, 0, 1000.0)
    np.testing.assert_allclose(one.anchor_ms, before, rtol=0.05)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 1.0)), max_size=60))
def test_refined_curve_never_falls_with_rows(samples: list[tuple[int, float]]) -> None:
    curve = gpu_curve()
    for rows, seconds in samples:
        curve.refine(rows, 100, seconds)
        assert (np.diff(curve.ms_many(np.arange(1, 700))) >= -1e-9).all() and curve.ms(1) > 0


@pytest.mark.parametrize("anchors, times", [((), ()), ((2, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1, 2), (0.0, 1.0))])
def test_bad_curves_are_refused(anchors: tuple[int, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="CostCurve"):
        CostCurve(anchors, times)


# ---- acceptance


def test_prior_is_mildly_pessimistic() -> None:
    acceptance = Acceptance()
    np.testing.assert_allclose(acceptance.probability("new", [1.0, 0.5, math.nan]), [0.8, 0.4, 0.5])


def test_acceptance_converges_and_follows_a_change() -> None:
    acceptance, rng = Acceptance(memory_steps=100), np.random.default_rng(4)
    true_rates = {0.1: 0.4, 0.5: 0.3, 0.95: 0.99}
    for _ in range(500):
        for source, rates in (("a", true_rates), ("b", {0.95: 0.02})):
            scores = rng.choice(list(rates), 16)
            acceptance.observe(source, scores, rng.random(16) < [rates[s] for s in scores])
    # Estimates rest on the last few hundred nodes, so three standard errors are 0.08.
    np.testing.assert_allclose(acceptance.probability("a", list(true_rates)), list(true_rates.values()), atol=0.08)
    assert acceptance.probability("b", [0.95]) < 0.05
    for _ in range(300):
        acceptance.observe("a", np.full(16, 0.95), rng.random(16) < 0.2)
    assert acceptance.probability("a", [0.95]) == pytest.approx(0.2, abs=0.06)


def test_a_source_that_overstates_is_doubted_at_scores_it_never_showed() -> None:
    acceptance = Acceptance()
    acceptance.observe("liar", np.full(200, 0.9), np.zeros(200, bool))
    assert acceptance.probability("liar", [0.5]) < 0.05 < acceptance.probability("other", [0.5])


def test_observe_many_equals_observe_per_source() -> None:
    rng, one, many = np.random.default_rng(5), Acceptance(), Acceptance()
    for _ in range(20):
        scores, right = rng.random((2, 8)), rng.random((2, 8)) < 0.5
        one.observe("a", scores[0], right[0])
        one.observe("b", scores[1], right[1])
        ids = np.repeat([many.source_id("a"), many.source_id("b")], 8)
        many.observe_many(ids, scores.ravel(), right.ravel())
    grid = np.append(np.linspace(0, 1, 21), math.nan)
    for source in "ab":
        np.testing.assert_array_equal(one.probability(source, grid), many.probability(source, grid))


def judge_slowly(draft: Draft, emitted: list[int]) -> dict[int, bool]:
    """The readable twin: a node is judged once all its ancestors equal the emitted tokens and its own is known."""
    path: dict[int, list[int]] = {}
    judged: dict[int, bool] = {}
    for node, parent in enumerate(draft.parents):
        above = path[parent] if parent >= 0 else []
        path[node] = [*above, draft.tokens[node]]
        depth = len(path[node])
        if above == emitted[: depth - 1] and depth <= len(emitted):
            judged[node] = draft.tokens[node] == emitted[depth - 1]
    return judged


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(trees(), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=6))
def test_judge_matches_its_twin(step: list[tuple[Draft, list[int]]]) -> None:
    forest = Forest.of([draft for draft, _ in step])
    nodes, outcomes = judge(forest, [emitted for _, emitted in step])
    expected = [
        (int(start) + node, right)
        for start, (draft, emitted) in zip(forest.starts, step, strict=True)
        for node, right in judge_slowly(draft, emitted).items()
    ]
    assert list(zip(nodes.tolist(), outcomes.tolist(), strict=True)) == expected


def test_pruned_nodes_are_judged_for_free() -> None:
    acceptance = Acceptance()
    for _ in range(200):  # nothing was verified; only the emitted token is known
        acceptance.observe_drafts([Draft.chain([7, 8], [0.9, 0.2])], ["s"], [[7]])
    assert acceptance.probability("s", [0.9]) > 0.95


# ---- allocation


def test_flat_curve_spends_rows_up_to_the_knee() -> None:
    acceptance = trusted()
    for live in (1, 4, 8, 16):
        kept = kept_of([chain(32)] * live, gpu_curve(), acceptance, live)
        assert live + sum(map(len, kept)) == min(128, live * 33), live
    kept = kept_of([chain(8)] * 64, gpu_curve(), acceptance, 64)
    assert 64 + sum(map(len, kept)) == 128


def test_speculation_is_off_when_the_batch_fills_the_rows() -> None:
    curve = gpu_curve()
    options: dict[str, Any] = {"kv_tokens": 0, "max_nodes_per_sequence": 16}
    assert node_limit(curve, num_rows=128, num_live=128, max_rows=512, **options) == 0
    assert node_limit(curve, num_rows=512, num_live=4, max_rows=512, **options) == 0
    assert node_limit(curve, num_rows=4, num_live=4, max_rows=512, **options) == 16
    assert node_limit(curve, num_rows=120, num_live=120, max_rows=512, **options) == 8
    assert kept_of([chain(8)] * 128, curve, trusted(), 128) == [[]] * 128
    assert kept_of([chain(8)] * 8, curve, trusted(), 8, max_rows=8) == [[]] * 8


def test_linear_curve_keeps_only_likely_nodes() -> None:
    acceptance = trusted((0.95, 0.95), (0.2, 0.1))
    drafts = [chain(8, 0.95), chain(8, 0.2)] * 4
    kept = kept_of(drafts, cpu_curve(), acceptance, 8)
    assert all(kept[0::2]) and not any(kept[1::2])
    assert kept_of([chain(8, 0.2)] * 8, cpu_curve(), acceptance, 8) == [[]] * 8


def test_empty_drafts_and_no_drafts() -> None:
    assert kept_of([EMPTY_DRAFT] * 3, gpu_curve(), Acceptance(), 3) == [[], [], []]
    assert kept_of([], gpu_curve(), Acceptance(), 0) == []
    assert kept_of([EMPTY_DRAFT, chain(2), EMPTY_DRAFT], gpu_curve(), trusted(), 3) == [[], [0, 1], []]


def test_lists_arrays_and_a_ready_forest_give_the_same() -> None:
    rng = np.random.default_rng(6)
    scores = rng.random((8, 6))
    as_lists = [Draft(list(range(6)), [-1, 0, 0, 1, 2, 4], row.tolist()) for row in scores]
    as_arrays = [
        Draft(np.array(d.tokens, np.int32), np.array(d.parents, np.int32), np.array(d.scores)) for d in as_lists
    ]
    kept = kept_of(as_lists, cpu_curve(), trusted(), 8)
    assert any(kept) and kept == kept_of(as_arrays, cpu_curve(), trusted(), 8)
    options: dict[str, Any] = {"num_rows": 8, "num_live": 8, "kv_tokens": 0, "max_rows": 512}
    assert kept == allocate(Forest.of(as_lists), ["s"] * 8, cpu_curve(), trusted(), **options)


def test_weights_favour_the_sequence_that_decides_the_makespan() -> None:
    drafts = [chain(8), chain(8)]
    kept = kept_of(drafts, gpu_curve(), trusted(), 2, max_rows=10, weights=np.array([1.0, 3.0]))
    assert len(kept[0]) == 0 and len(kept[1]) == 8
    assert [len(nodes) for nodes in kept_of(drafts, gpu_curve(), trusted(), 2, max_rows=10)] == [4, 4]


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=6), st.integers(1, 30), st.sampled_from([1e-9, 0.01]))
def test_kept_sets_are_closed_under_parents(drafts: list[Draft], spare: int, min_probability: float) -> None:
    live = len(drafts)
    kept = kept_of(
        drafts, gpu_curve(), trusted((1.0, 1.0)), live, max_rows=live + spare, min_probability=min_probability
    )
    assert sum(map(len, kept)) <= spare
    for draft, nodes in zip(drafts, kept, strict=True):
        assert nodes == sorted(set(nodes))
        assert all(draft.parents[node] < 0 or draft.parents[node] in nodes for node in nodes)


def test_rounding_never_puts_a_child_before_its_parent() -> None:
    rng = np.random.default_rng(7)
    acceptance = trusted((0.99, 1.0), (0.3, 0.37))
    assert acceptance.probability("s", [0.99]) == 1.0  # products in another order then differ in the last bit
    for _ in range(200):
        drafts = [Draft.chain(range(20), rng.choice([0.99, 0.99, 0.3], 20).tolist()) for _ in range(4)]
        kept = kept_of(drafts, gpu_curve(), acceptance, 4, max_rows=4 + int(rng.integers(1, 80)), min_probability=1e-9)
        assert all(nodes == list(range(len(nodes))) for nodes in kept)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(trees(), min_size=1, max_size=4),
    st.sampled_from(["gpu", "cpu"]),
    st.integers(0, 140),
    st.sampled_from([1.0, 1.03, 1.3]),
)
def test_allocation_is_the_best_over_all_counts(
    drafts: list[Draft], machine: str, prefill: int, min_gain: float
) -> None:
    curve, acceptance = (gpu_curve() if machine == "gpu" else cpu_curve()), trusted()
    live, rows = len(drafts), len(drafts) + prefill
    kept = kept_of(drafts, curve, acceptance, live, num_rows=rows, min_gain=min_gain, min_probability=1e-9)
    forest = Forest.of(drafts)
    path = path_probability(forest, ["s"] * live, acceptance)
    best_first = np.sort(path)[::-1]
    prefill_ms = curve.ms(rows) - curve.ms(live)
    rates = [(live + best_first[:k].sum()) / (curve.ms(rows + k) - prefill_ms) for k in range(len(path) + 1)]
    chosen = sum(path[start + node] for start, nodes in zip(forest.starts, kept, strict=True) for node in nodes)
    rate = (live + chosen) / (curve.ms(rows + sum(map(len, kept))) - prefill_ms)
    best = max(rates)
    assert rate == pytest.approx(best if best >= min_gain * rates[0] else rates[0], rel=1e-6)


@given(st.lists(trees(), min_size=1, max_size=5), st.integers(0, 3))
def test_path_probability_is_what_acceptance_says_folded_along_parents(drafts: list[Draft], num_sources: int) -> None:
    acceptance, random = Acceptance(), np.random.default_rng(len(drafts))
    for number in range(num_sources):
        acceptance.observe(f"s{number}", random.random(50), random.random(50) < 0.1 * number)
    sources = [f"s{index % 3}" for index in range(len(drafts))]
    forest = Forest.of(drafts)
    ids = forest.spread([acceptance.source_id(source) for source in sources])
    twin = forest.fold(np.minimum(acceptance.probabilities(ids, forest.scores), CERTAIN), np.multiply, 1.0)
    np.testing.assert_allclose(path_probability(forest, sources, acceptance), twin, rtol=1e-12)


def test_path_probability_is_the_product_along_parents() -> None:
    draft = Draft([1, 2, 3, 4], [-1, 0, 0, 2], [1.0, 0.5, 0.25, 0.5])
    path = path_probability(Forest.of([EMPTY_DRAFT, draft]), ["new", "new"], Acceptance())
    np.testing.assert_allclose(path, [0.8, 0.8 * 0.4, 0.8 * 0.2, 0.8 * 0.2 * 0.4])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 16), st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]))
def test_node_limit_bounds_what_allocate_keeps(live: int, nodes: int, rate: float) -> None:
    limit = node_limit(
        gpu_curve(), num_rows=live, num_live=live, kv_tokens=0, max_rows=512, max_nodes_per_sequence=nodes
    )
    kept = kept_of([chain(nodes)] * live, gpu_curve(), trusted((0.9, rate)), live)
    assert max(map(len, kept)) <= limit


# ---- the whole loop, simulated


def simulate(rate: float, machine: CostCurve, live: int, steps: int, claim: float = 0.9) -> float:
    """Tokens per ms after warm-up, over plain decoding; the budget sees noisy times and a source of unknown quality."""
    rng = np.random.default_rng(8)
    curve = CostCurve(machine.anchors, machine.anchor_ms.tolist())
    acceptance, total_tokens, total_ms = Acceptance(), 0, 0.0
    for step in range(steps):
        limit = node_limit(curve, num_rows=live, num_live=live, kv_tokens=0, max_rows=512, max_nodes_per_sequence=8)
        # The policy always emits 1; a draft is right up to its first 0.
        truth = rng.random((live, limit)) < rate
        drafts = [Draft.chain(row.astype(int).tolist(), [claim] * limit) for row in truth]
        kept = kept_of(drafts, curve, acceptance, live)
        emitted = [int(np.cumprod(row[: len(k)]).sum()) + 1 for row, k in zip(truth, kept, strict=True)]
        rows = live + sum(map(len, kept))
        ms = machine.ms(rows)
        curve.refine(rows, 0, ms / 1e3 * rng.lognormal(0, 0.1))
        acceptance.observe_drafts(drafts, ["s"] * live, [[1] * n for n in emitted])
        if step >= 50:
            total_tokens, total_ms = total_tokens + sum(emitted), total_ms + ms
    return total_tokens / total_ms / (live / machine.ms(live))


@pytest.mark.parametrize("machine", [gpu_curve, cpu_curve])
@pytest.mark.parametrize("live", [1, 8, 64])
def test_a_hopeless_drafter_never_slows_decoding(machine: Callable[[], CostCurve], live: int) -> None:
    assert simulate(0.05, machine(), live, steps=400) >= 0.99


def test_a_good_drafter_gains_on_a_flat_curve() -> None:
    assert simulate(0.85, gpu_curve(), 8, steps=200) > 2


def test_an_underrated_drafter_is_found_out() -> None:
    """Its claims alone would keep speculation off on this machine; free judgement turns it on."""
    assert kept_of([chain(8, 0.1)] * 8, cpu_curve(), Acceptance(), 8) == [[]] * 8
    assert simulate(0.95, cpu_curve(), 8, steps=300, claim=0.1) > 1.2


# ---- settings


def test_settings_are_frozen_and_strict() -> None:
    chosen = BudgetSettings(max_draft_nodes=4)
    assert chosen.min_gain == 1.03 and chosen.calibrate
    with pytest.raises(ValidationError):
        chosen.min_gain = 2.0  # type: ignore[misc]
    for wrong in ({"max_draft_nodez": 1}, {"min_gain": 0.5}, {"min_probability": 0.0}):
        with pytest.raises(ValidationError):
            BudgetSettings(**wrong)
    assert all(field.description for field in BudgetSettings.model_fields.values())


def test_prefill_beside_it_does_not_make_drafting_look_cheap() -> None:
    """A step made long by a prompt is no reason to guess: the prompt's time is spent either way."""
    drafts = [chain(8, 0.2)] * 4
    acceptance = trusted((0.2, 0.1))
    assert kept_of(drafts, cpu_curve(), acceptance, 4) == [[]] * 4
    assert kept_of(drafts, cpu_curve(), acceptance, 4, num_rows=260) == [[]] * 4


# ---- waiting


def test_waiting_is_a_line_and_a_pause_hardly_bends_it() -> None:
    waiting, random = StepLine(), np.random.default_rng(0)
    for step in range(300):
        count = int(random.integers(1, 100))
        waiting.observe(count, 0.5 + 0.02 * count + (500.0 if step == 280 else 0.0))
    assert waiting.step_ms == pytest.approx(0.5, abs=0.2)
    assert waiting.sequence_ms == pytest.approx(0.02, abs=0.005)


def test_waiting_for_one_kind_of_step_is_all_its_own() -> None:
    waiting = StepLine()
    assert waiting.step_ms == waiting.sequence_ms == 0.0
    for _ in range(10):
        waiting.observe(3, 1.2)
    assert (waiting.step_ms, waiting.sequence_ms) == pytest.approx((1.2, 0.0))


def test_where_a_step_is_waited_for_more_rows_pay() -> None:
    drafts, acceptance = [chain(12, 0.9)], trusted((0.9, 0.8))
    kept = [len(kept_of(drafts, cpu_curve(), acceptance, 1, idle_ms=idle)[0]) for idle in (0.0, 100.0)]
    assert kept[0] < kept[1]
