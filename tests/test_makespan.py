"""Who decides when a call ends: expected lengths, the race to be the last, and the weights made of both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import Sampling
from paceline.rollout.drafters.replay import Replay
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.rollout.scheduler import Plan
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.speculation.cost import CostCurve
from paceline.rollout.speculation.makespan import FIRST_MEAN, Lengths, last_shares
from paceline.rollout.table import SequenceTable
from paceline.rollout.token_value import LOOK_EVERY, TokenValues

# --- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_are_tokens_per_ending() -> None:
    lengths = Lengths()
    assert lengths.expected(1) == pytest.approx(FIRST_MEAN)
    for _ in range(200):
        lengths.observe(1, 1000, has_ended=True)
        lengths.observe(2, 50, has_ended=True)
    assert lengths.expected(1) == pytest.approx(1000, rel=0.02)
    assert lengths.expected(2) == pytest.approx(50, rel=0.1)
    # A prompt never seen is expected to be like all.
    assert lengths.expected(3) == pytest.approx(525, rel=0.02)


def test_what_was_cut_and_what_runs_counts_without_an_end() -> None:
    cut, ended = Lengths(), Lengths()
    for _ in range(50):
        ended.observe(1, 100, has_ended=True)
        cut.observe(1, 100, has_ended=False)
        cut.observe(1, 100, has_ended=True)
    assert cut.expected(1) == pytest.approx(2 * ended.expected(1), rel=0.1)
    alone, among_siblings = ended.mean_left([1], [10])[0], ended.mean_left([1] * 51, [10, *[90] * 50])[0]
    assert among_siblings > 1.5 * alone


def test_an_exponential_length_is_recovered_through_a_limit() -> None:
    random = np.random.default_rng(0)
    lengths, limit, mean = Lengths(), 400, 300
    for length in random.exponential(mean, 4000):
        lengths.observe(1, int(min(length, limit)), has_ended=length < limit)
    assert lengths.expected(1) == pytest.approx(mean, rel=0.06)


def test_what_has_gone_on_for_long_goes_on_where_that_is_how_it_was() -> None:
    random = np.random.default_rng(0)
    lengths = Lengths()
    # Nine in ten end early, the tenth goes on.
    for mean in np.where(random.random(3000) < 0.9, 60, 2000):
        lengths.observe(int(random.integers(300)), int(random.exponential(mean)), has_ended=True)
    young, old = lengths.mean_left([1000, 1001], [10, 1500])
    assert young == pytest.approx(66, rel=0.15) and old > 1500


def test_a_prompt_seen_to_end_later_than_others_of_its_age_goes_on_longer() -> None:
    random = np.random.default_rng(0)
    lengths = Lengths()
    for _ in range(100):
        for prompt_id, mean in ((1, 400), (2, 100)):
            lengths.observe(prompt_id, int(random.exponential(mean)), has_ended=True)
    longer, shorter = lengths.mean_left([1, 2], [50, 50])
    assert longer > 2 * shorter


def test_old_calls_fade() -> None:
    lengths = Lengths()
    for _ in range(40):
        lengths.observe(1, 1000, has_ended=True)
    for _ in range(12):
        lengths.begin()
        lengths.ask({1})
        for _ in range(40):
            lengths.observe(1, 100, has_ended=True)
    assert lengths.expected(1) == pytest.approx(100, rel=0.1)


# --- the race ---------------------------------------------------------------------------------------------------------


def simulated(known: list[float], mean: list[float], most: list[float], chance: list[float]) -> np.ndarray:
    """The slow twin: run the race many times; who shares the last place shares the win."""
    random = np.random.default_rng(1)
    more = random.exponential(1, (40_000, len(known))) * mean * (random.random((40_000, len(known))) < chance)
    ends = np.minimum(np.array(known) + more, most)
    is_last = ends >= ends.max(1, keepdims=True) - 1e-9
    return (is_last / is_last.sum(1, keepdims=True)).mean(0)


@pytest.mark.parametrize(
    "racers",
    [
        [(0, 100, 1e4, 1)] * 4,
        [(0, 100, 1e4, 1), (0, 300, 1e4, 1)],
        [(50, 10, 1e4, 1), (0, 10, 1e4, 1)],
        [(0, 500, 400, 1), (0, 500, 100, 1)],
        [(0, 50, 1000, 1), (3, 200, 800, 1), (10, 5, 300, 1), (0, 400, 420, 1)],
        [(5, 100, 1e4, 0.1), (0, 100, 1e4, 1), (8, 300, 1e4, 0.4)],
    ],
)
def test_shares_are_those_of_many_races(racers: list[tuple[float, float, float, float]]) -> None:
    race = [list(column) for column in zip(*racers, strict=True)]
    assert last_shares(*race) == pytest.approx(simulated(*race), abs=0.04)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1)), min_size=1, max_size=40
    )
)
def test_shares_are_probabilities(racers: list[tuple[float, float, float, float]]) -> None:
    known, mean, more, chance = (np.array(column) for column in zip(*racers, strict=True))
    shares = last_shares(known, mean, known + more, chance)
    assert (shares >= 0).all() and shares.sum() == pytest.approx(1)


def test_nobody_races() -> None:
    assert len(last_shares([], [], [])) == 0


# --- weights ----------------------------------------------------------------------------------------------------------

FLAT = CostCurve([1, 512], [10.0, 10.5])


def make_sequences(count: int, num_made: int = 10, limit: int = 1000, is_ahead: bool = False) -> list[Sequence]:
    """Sequences of one prompt each."""
    made = []
    for number in range(count):
        group = PromptGroup(
            number, number, prompt_id=number, draw=number, prompt=np.array([1, 2], np.int32), num_open=1
        )
        group.is_ahead = is_ahead
        sequence = Sequence(1 + number + 1000 * is_ahead, group, 0, Sampling(), limit)
        for _ in range(num_made):
            sequence.append(3, 0.0, 0.0)
        made.append(sequence)
    return made


def tabled(*sequences: Sequence) -> SequenceTable:
    """A table in which they run."""
    table = SequenceTable(len(sequences), 8)
    for sequence in sequences:
        table.enter(sequence)
    return table


def weights_of(token_values: TokenValues, asked: list[Sequence]) -> np.ndarray:
    weights, _ = token_values.weigh(Plan(decoding=asked), FLAT)
    return weights


def test_equal_sequences_weigh_the_same_and_all_together_the_step() -> None:
    asked = make_sequences(5)
    weights = weights_of(TokenValues(tabled(*asked)), asked)
    assert weights == pytest.approx(np.full(5, weights[0])) and weights.sum() == pytest.approx(FLAT.ms(5))


def test_where_only_rows_cost_all_weigh_the_same() -> None:
    asked = make_sequences(3)
    token_values = TokenValues(tabled(*asked))
    token_values.lengths.observe(0, 9000, has_ended=True)
    weights, _ = token_values.weigh(Plan(decoding=asked), CostCurve.linear(base_ms=0.0, row_ms=1.0))
    assert weights == pytest.approx(np.ones(3))


def test_a_prompt_known_to_be_long_weighs_more() -> None:
    asked = make_sequences(2)
    token_values = TokenValues(tabled(*asked))
    for _ in range(20):
        token_values.lengths.observe(0, 900, has_ended=True)
        token_values.lengths.observe(1, 30, has_ended=True)
    weights = weights_of(token_values, asked)
    assert weights[0] > 5 * weights[1]


def test_who_has_little_room_left_weighs_less() -> None:
    asked = [*make_sequences(1, num_made=900), *make_sequences(2, num_made=10)[1:]]
    token_values = TokenValues(tabled(*asked))
    for _ in range(20):
        token_values.lengths.observe(9, 5000, has_ended=True)
    weights = weights_of(token_values, asked)
    assert weights[1] > 5 * weights[0]


def test_a_whole_text_made_ahead_weighs_little_and_an_unfinished_one_much() -> None:
    ahead = RunAheadStore(10_000)
    ahead._survived, ahead._offered, ahead._broken = 95_000.0, 100_000.0, 5.0
    replay, asked = Replay({(draw, 0): [3] * 400 for draw in (0, 1)}), make_sequences(2)

    def text_left(sequence: Sequence) -> int:
        return replay.num_left(sequence.sequence_id, (sequence.draw, sequence.sample_index))

    token_values = TokenValues(tabled(*asked), ahead, text_left)
    token_values.ask((), whole={(0, 0)})
    weights = weights_of(token_values, asked)
    assert weights[1] > 5 * weights[0]


def test_those_made_ahead_weigh_together_what_survives() -> None:
    ahead = RunAheadStore(10_000)
    asked, others = make_sequences(2), make_sequences(3, is_ahead=True)
    token_values = TokenValues(tabled(*asked, *others), ahead)
    assert token_values.weigh(Plan(decoding=asked), FLAT)[1] == 0
    others_worth = token_values.weigh(Plan(decoding=[*asked, *others]), FLAT)[1]
    assert others_worth == pytest.approx(ahead.survival * FLAT.ms(3))


def test_a_straggler_among_those_made_ahead_weighs_its_share_of_what_survives() -> None:
    """Then the others together weigh that much less."""
    ahead = RunAheadStore(10_000)
    asked, others = make_sequences(2), make_sequences(3, is_ahead=True)
    token_values = TokenValues(tabled(*asked, *others), ahead)
    for _ in range(200):
        for prompt_id, length in ((0, 3000), (1, 30), (2, 30)):
            token_values.lengths.observe(prompt_id, length, has_ended=True)
    weights, others_worth = token_values.weigh(Plan(decoding=[*asked, *others], num_stragglers=1), FLAT)
    assert len(weights) == 3 and others[0].sequence_id in token_values.stragglers
    assert weights[2] + others_worth == pytest.approx(ahead.survival * FLAT.ms(3))
    assert weights[2] > 0.5 * others_worth, "more than a third"


def test_shares_last_until_the_next_look_and_new_sequences_are_looked_at_at_once() -> None:
    asked = make_sequences(3)
    table = SequenceTable(3, 8)
    for sequence in asked[:2]:
        table.enter(sequence)
    token_values, plan = TokenValues(table), Plan(decoding=asked[:2])
    weights = token_values.weigh(plan, FLAT)[0]
    for _ in range(40):
        token_values.lengths.observe(0, 3000, has_ended=True)
        token_values.lengths.observe(1, 30, has_ended=True)
    for _ in range(LOOK_EVERY - 1):
        token_values.look(plan)
    assert token_values.weigh(plan, FLAT)[0].tolist() == weights.tolist()
    token_values.look(plan)
    later = token_values.weigh(plan, FLAT)[0]
    assert later[0] > weights[0]
    table.enter(asked[2])
    assert np.isnan(table.shares[asked[2].slot])
    three = token_values.weigh(Plan(decoding=asked), FLAT)[0]
    assert not np.isnan(table.shares).any() and three.sum() == pytest.approx(FLAT.ms(3), rel=0.01)


def test_nobody_drafts_for_stragglers_where_nothing_can() -> None:
    for can_draft, expected in ((True, 3), (False, 0)):
        others = make_sequences(3, is_ahead=True)
        token_values = TokenValues(tabled(*others), RunAheadStore(100), None, can_draft)
        token_values.weigh(Plan(decoding=others), FLAT)
        for _ in range(LOOK_EVERY):
            token_values.look(Plan(decoding=others))
        assert len(token_values.stragglers) == expected


def test_reading_a_long_past_is_worth_a_draft() -> None:
    curve = CostCurve([1, 512], [10.0, 10.5], kv_ms=1e-3)
    asked = make_sequences(2, num_made=5, limit=100_000)
    for _ in range(20_000):
        asked[1].append(3, 0.0, 0.0)
    weights, _ = TokenValues(tabled(*asked)).weigh(Plan(decoding=asked), curve)
    assert weights[1] > weights[0] + 1
