"""Advantages against numbers worked out by hand, the table of algorithms, and what is trained on."""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import Settings, SettingsError, dump, load, validate
from paceline.core.types import Float64Array
from paceline.rl.advantage import (
    ADVANTAGES,
    group_centred,
    group_standardised,
    leave_one_out,
    raw_reward,
    subtract_cost_to_go,
    whiten,
)
from paceline.rl.algorithms import ALGORITHMS, Algorithm, assign_advantages, find_algorithm
from paceline.rl.filters import ScoredGroup, Selection, overlong_penalty, select, shape_rewards, trained_mask
from paceline.rl.settings import DIALS, RlSettings

GROUP_ADVANTAGES = [name for name in ADVANTAGES if name != "raw_reward"]

rewards_of_groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -0.5]), min_size=1, max_size=6), min_size=1, max_size=5
)


def floats(*values: float) -> Float64Array:
    return np.array(values, dtype=np.float64)


def flatten(groups: Sequence[Sequence[float]]) -> tuple[Float64Array, np.ndarray]:
    rewards = floats(*(reward for group in groups for reward in group))
    return rewards, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


# ---- one number per response


def test_standardised_by_hand() -> None:
    """[1, 0, 0, 0]: mean 1/4, sum of squares 9/16 + 3/16 = 3/4, deviation sqrt(3/4 / 3) = 1/2."""
    draws = np.array([7, 7, 7, 7, 3, 3])
    result = group_standardised(floats(1, 0, 0, 0, 2, 4), draws)
    np.testing.assert_allclose(result[:4], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(result[4:], [-1 / math.sqrt(2), 1 / math.sqrt(2)], rtol=1e-5)
    assert 0 < 1.5 - result[0] < 1e-5, "the epsilon is added to the deviation, and is small"


def test_centred_by_hand() -> None:
    assert group_centred(floats(1, 0, 0, 0, 2, 4), np.array([7, 7, 7, 7, 3, 3])).tolist() == [
        *(0.75, -0.25, -0.25, -0.25),
        *(-1, 1),
    ]


def test_leave_one_out_by_hand() -> None:
    """Others of the first response: (0 + 0 + 2) / 3; of the last one: (1 + 0 + 0) / 3."""
    result = leave_one_out(floats(1, 0, 0, 2), np.zeros(4, dtype=int))
    np.testing.assert_allclose(result, [1 - 2 / 3, -1, -1, 2 - 1 / 3], rtol=1e-15)


def test_raw_reward_is_a_copy() -> None:
    rewards = floats(1, 0, 0.5)
    result = raw_reward(rewards, np.array([0, 0, 1]))
    assert result.tolist() == [1, 0, 0.5] and result is not rewards


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
@pytest.mark.parametrize("group", [[0.1] * 3, [0.7] * 7, [1.0], [1 / 3] * 6])
def test_equal_rewards_are_worth_exactly_nothing(name: str, group: list[float]) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3, and what rounding leaves over must not be divided by an epsilon."""
    assert ADVANTAGES[name](*flatten([group])).tolist() == [0.0] * len(group)


def test_equal_rewards_would_leave_a_rest_without_care() -> None:
    group = floats(0.1, 0.1, 0.1)
    assert (group - group.mean()).any()


@given(rewards_of_groups, st.randoms(use_true_random=False))
def test_groups_do_not_touch_each_other(groups: list[list[float]], rng: random.Random) -> None:
    """A group's advantages have the same bits alone and in any company, wherever its members stand."""
    rewards, draws = flatten(groups)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    for name in GROUP_ADVANTAGES:
        together = ADVANTAGES[name](rewards, draws)
        for draw, group in enumerate(groups):
            alone = ADVANTAGES[name](*flatten([group]))
            assert together[draws == draw].tolist() == alone.tolist()
        shuffled = ADVANTAGES[name](rewards[order], draws[order])
        np.testing.assert_allclose(shuffled, together[order], rtol=1e-12, atol=1e-12)


@given(rewards_of_groups)
def test_leave_one_out_is_the_centred_reward_scaled(groups: list[list[float]]) -> None:
    """r - mean of others = (r - mean) n / (n - 1): RLOO and Dr.GRPO differ by that factor only."""
    rewards, draws = flatten(groups)
    sizes = np.array([len(group) for group in groups])[draws]
    scaled = group_centred(rewards, draws) * sizes / np.maximum(sizes - 1, 1)
    np.testing.assert_allclose(leave_one_out(rewards, draws), scaled, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_names_its_draw(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=r"draw 12 is not a finite number.*float"):
        ADVANTAGES[name](floats(0, bad), np.array([11, 12]))


# ---- one number per token


def test_cost_to_go_by_hand() -> None:
    (result,) = subtract_cost_to_go([floats(1, 1, 1)], [floats(0.1, 0.2, 0.4)])
    np.testing.assert_allclose(result, [0.3, 0.4, 0.6])


def test_whiten_by_hand() -> None:
    """Trained tokens 1, 1, 1, -1 (the masked 9 counts for nothing): mean 1/2, variance 3 / 3 = 1."""
    masks = [np.array([True, True, True]), np.array([True, False])]
    first, second = whiten([floats(1, 1, 1), floats(-1, 9)], masks)
    np.testing.assert_allclose(first, [0.5, 0.5, 0.5], rtol=1e-7)
    np.testing.assert_allclose(second, [-1.5, 0.0], rtol=1e-7)


def test_whiten_of_equal_or_no_advantages_is_nothing() -> None:
    assert [
        part.tolist() for part in whiten([floats(0.1, 0.1), floats(0.1)], [np.ones(2, bool), np.ones(1, bool)])
    ] == [
        [0, 0],
        [0],
    ]
    assert whiten([floats(3, 4)], [np.zeros(2, bool)])[0].tolist() == [0, 0]
    assert whiten([], []) == []


def test_reinforce_plus_plus_by_hand() -> None:
    """Rewards 1 and 0 over 1 and 3 tokens. Per token 1, 0, 0, 0: mean 1/4, deviation 1/2; groups play no part."""
    masks = [np.ones(1, bool), np.ones(3, bool)]
    for draws in ([0, 0], [0, 1]):
        first, second = assign_advantages(ALGORITHMS["reinforce++"], floats(1, 0), np.array(draws), masks)
        np.testing.assert_allclose(first, [1.5], rtol=1e-7)
        np.testing.assert_allclose(second, [-0.5, -0.5, -0.5], rtol=1e-7)


def test_reinforce_plus_plus_with_kl_in_the_reward() -> None:
    """Coefficient 0.5: tokens are worth 1 - 0.5 (0.2 + 0.6), 1 - 0.5 x 0.6 and 0; then the batch is whitened."""
    algorithm = dataclasses.replace(ALGORITHMS["reinforce++"], kl_coef=0.5)
    masks = [np.ones(2, bool), np.ones(1, bool)]
    first, second = assign_advantages(algorithm, floats(1, 0), np.array([0, 1]), masks, [floats(0.2, 0.6), floats(0)])
    values = floats(0.6, 0.7, 0.0)
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose([*first, *second], expected, rtol=1e-6)


def test_kl_in_the_loss_leaves_advantages_alone() -> None:
    algorithm = dataclasses.replace(ALGORITHMS["grpo"], kl_coef=0.5)
    masks = [np.ones(2, bool), np.ones(1, bool)]
    kl = [floats(9, 9), floats(9)]
    first, second = assign_advantages(algorithm, floats(1, 0), np.array([0, 0]), masks, kl)
    np.testing.assert_allclose([*first, *second], np.array([1, 1, -1]) / math.sqrt(2), rtol=1e-5)


def test_a_masked_response_still_counts_in_its_groups_mean() -> None:
    masks = [np.zeros(2, bool), np.ones(1, bool)]
    result = assign_advantages(ALGORITHMS["dr_grpo"], floats(0, 1), np.array([0, 0]), masks)
    assert [part.tolist() for part in result] == [[-0.5, -0.5], [0.5]]


# ---- the table


def test_rows_are_what_the_papers_say() -> None:
    rows = (
        Algorithm("grpo", "group_standardised", "sequence", clip_low=0.2, clip_high=0.2, filter="none"),
        Algorithm("dr_grpo", "group_centred", "constant", clip_low=0.2, clip_high=0.2),
        Algorithm("dapo", "group_standardised", "token", 0.2, 0.28, filter="spread", overlong_share=0.2),
        Algorithm("rloo", "leave_one_out", "constant"),
        Algorithm("reinforce++", "raw_reward", "token", whiten=True, kl_estimator="k1", kl_in="reward"),
        Algorithm("reinforce++-baseline", "group_centred", "token", whiten=True, kl_estimator="k2"),
        Algorithm("gspo", "group_standardised", "sequence", 3e-4, 4e-4, ratio="sequence"),
    )
    assert list(ALGORITHMS.values()) == list(rows)


def test_every_row_refers_to_things_there_are() -> None:
    description = RlSettings.model_fields["algorithm"].description or ""
    for name, row in ALGORITHMS.items():
        assert row.name == name and row.advantage in ADVANTAGES and name in description


def test_every_field_of_a_row_has_a_dial() -> None:
    assert {field.name for field in dataclasses.fields(Algorithm)} == {"name", *DIALS}
    assert set(DIALS) <= set(RlSettings.model_fields)


class Root(Settings):
    rl: RlSettings = RlSettings()


def test_dials_override_the_row_and_nothing_else() -> None:
    settings = load(Root, None, {"rl.algorithm": "dapo", "rl.clip_high": "0.3", "rl.kl_coef": "0.01"}).rl
    assert settings.build() == dataclasses.replace(ALGORITHMS["dapo"], clip_high=0.3, kl_coef=0.01)
    assert RlSettings().build() == ALGORITHMS["grpo"]
    off = load(Root, None, {"rl.algorithm": "dapo", "rl.filter": "none", "rl.overlong_share": "0"}).rl.build()
    assert (off.filter, off.overlong_share) == ("none", 0)


def test_settings_survive_a_file() -> None:
    root = validate(
        Root,
        {
            "rl": {
                "clip_high": math.inf,
                "betas": [0.9, 0.95],
                "optimizer_options": {"eps": 1e-6},
                "max_grad_norm": None,
            }
        },
    )
    assert validate(Root, yaml.safe_load(dump(root))) == root


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"algorithm": "grop"}, r"rl.algorithm: unknown algorithm 'grop': did you mean 'grpo'\?"),
        ({"advantage": "group_centered"}, r"rl.advantage: .*did you mean 'group_centred'\?"),
        ({"optimizer": "adam"}, r"rl.optimizer: .*did you mean 'adamw'\?"),
        ({"group_size": 1}, r"rl: grpo compares .*group_size is 1: make it 2 or more"),
        ({"betas": [0.9, 1.0]}, r"rl.betas: both must be at least 0 and below 1"),
        ({"dual_clip": 1.0}, r"rl.dual_clip: .*greater than 1"),
        ({"kl_coef": -1}, r"rl.kl_coef"),
        ({"truncated": "drop"}, r"rl.truncated: .*'score' or 'mask'"),
    ],
)
def test_bad_settings_name_the_fix(tree: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        validate(Root, {"rl": tree})


def test_a_group_of_one_suits_who_needs_no_group() -> None:
    assert RlSettings(algorithm="reinforce++", group_size=1).build().advantage == "raw_reward"
    with pytest.raises(ValueError, match="group_size"):
        RlSettings(algorithm="reinforce++", advantage="leave_one_out", group_size=1)


def test_every_setting_says_what_it_does() -> None:
    assert all(field.description for field in RlSettings.model_fields.values())


def test_unknown_algorithm_lists_all() -> None:
    with pytest.raises(ValueError, match=r"'zzz': \(use grpo, dr_grpo, dapo"):
        find_algorithm("zzz")


def test_settings_and_filters_need_no_torch() -> None:
    """`--help` lists algorithms before torch is imported, which takes seconds."""
    code = "import sys, paceline.rl.settings, paceline.rl.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- dynamic sampling


def group(draw: int, *scores: float) -> ScoredGroup[str]:
    return ScoredGroup(draw, scores, tuple(f"{draw}.{i}" for i in range(len(scores))))


def good(draw: int) -> ScoredGroup[str]:
    return group(draw, 0.0, 1.0)


def dull(draw: int) -> ScoredGroup[str]:
    return group(draw, 0.1, 0.1)


def choose(groups: Sequence[ScoredGroup[str]], wanted: int = 2, max_draws: int = 6) -> Selection[str]:
    return select(groups, first_draw=10, num_wanted=wanted, max_draws=max_draws, filter="spread")


def draws(groups: Sequence[ScoredGroup[str]]) -> list[int]:
    return [g.draw for g in groups]


def test_the_first_that_pass_in_draw_order() -> None:
    """Draw 14 finished first and passes, but 11 and 12 come before it."""
    chosen = choose([good(14), good(12), dull(10), good(11), dull(13)])
    assert (draws(chosen.kept), draws(chosen.dropped), draws(chosen.surplus)) == ([11, 12], [10], [13, 14])
    assert chosen.next_draw == 13 and not chosen.missing and not chosen.is_short
    assert chosen.num_uniform == 1


def test_a_gap_stops_the_walk_though_enough_have_passed() -> None:
    chosen = choose([good(11), good(12), good(13)])
    assert chosen.missing == (10,) and not chosen.kept and chosen.next_draw == 10 and not chosen.is_short
    assert draws(choose([good(11), good(12), good(13), dull(10)]).kept) == [11, 12]


@pytest.mark.parametrize(
    ("groups", "missing"),
    [
        ([], (10, 11)),
        ([good(10)], (11,)),
        ([dull(10)], (11, 12)),
        ([dull(10), dull(12)], (11, 13)),
        ([dull(11), good(12)], (10,)),
        ([dull(d) for d in range(10, 15)], (15,)),
    ],
)
def test_missing_are_the_draws_needed_in_the_best_case(
    groups: list[ScoredGroup[str]], missing: tuple[int, ...]
) -> None:
    assert choose(groups).missing == missing


def test_the_bound_on_draws_ends_the_search() -> None:
    chosen = choose([dull(10), dull(11), good(12), dull(13), dull(14), dull(15), good(16)])
    assert chosen.is_short and not chosen.missing and chosen.next_draw == 16
    assert (draws(chosen.kept), draws(chosen.surplus), chosen.num_uniform) == ([12], [16], 5)


def test_without_a_filter_dull_groups_are_kept_and_counted() -> None:
    chosen = select([good(11), dull(10), good(12)], first_draw=10, num_wanted=2, max_draws=2, filter="none")
    assert (draws(chosen.kept), draws(chosen.surplus), chosen.num_uniform) == ([10, 11], [12], 1)


@given(st.lists(st.booleans(), min_size=12, max_size=12), st.permutations(range(12)), st.integers(1, 5))
def test_completion_order_changes_nothing(passes: list[bool], order: list[int], wanted: int) -> None:
    """Groups arrive one by one in any order; the decision is that of the list in draw order, never taken back."""
    groups = [good(10 + i) if is_good else dull(10 + i) for i, is_good in enumerate(passes)]
    final = choose(groups, wanted, 12)
    expected = [g.draw for g in groups if not g.is_uniform][:wanted]
    assert draws(final.kept) == expected and final.is_short == (len(expected) < wanted)
    arrived: list[ScoredGroup[str]] = []
    before = choose(arrived, wanted, 12)
    for i in order:
        arrived.append(groups[i])
        now = choose(arrived, wanted, 12)
        assert now.kept[: len(before.kept)] == before.kept
        if not before.missing:
            assert (now.kept, now.dropped, now.next_draw) == (before.kept, before.dropped, before.next_draw)
        before = now
    assert before.kept == final.kept and not before.missing
    used = draws(final.kept) + draws(final.dropped) + draws(final.surplus)
    assert sorted(used) == list(range(10, 22)), "every group is kept, dropped or handed back"


def test_asking_only_for_what_is_missing_ends() -> None:
    scores = [dull, dull, good, dull, good, good]
    arrived: list[ScoredGroup[str]] = []
    while missing := choose(arrived).missing:
        arrived += [scores[draw - 10](draw) for draw in missing]
    assert draws(choose(arrived).kept) == [12, 14] and len(arrived) == 5


# ---- lengths


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)])
def test_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(penalty)


def test_shaped_rewards() -> None:
    shaped = shape_rewards([1, 1, 0], [50, 90, 100], limit=100, share=0.2, penalty=0.5)
    assert shaped.tolist() == [1, 0.75, -0.5]
    assert shape_rewards([1, 0], [100, 100], limit=100, share=0.0, penalty=0.5).tolist() == [1, 0]


def test_shaping_does_not_make_a_dull_group_interesting() -> None:
    """The filter looks at scores; only the surviving groups' rewards are shaped."""
    assert group(0, 1.0, 1.0).is_uniform
    shaped = shape_rewards([1.0, 1.0], [50, 100], limit=100, share=0.2, penalty=1.0)
    assert shaped[0] != shaped[1]


def test_truncated_responses_are_scored_or_masked() -> None:
    assert trained_mask(3, "length", "score").all() and not trained_mask(3, "length", "mask").any()
    assert trained_mask(3, "stop", "mask").all() and len(trained_mask(3, "stop", "mask")) == 3
    with pytest.raises(AssertionError, match="generate it again"):
        trained_mask(3, "abort", "score")
