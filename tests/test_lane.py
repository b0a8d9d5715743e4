"""Steps that only decode: each part that advances them without work per sequence equals its slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import Sampling
from paceline.model.rows import Rows, SequenceRows
from paceline.rollout.proposer import NO_PROPOSAL
from paceline.rollout.runner import Lane
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.stop import StopRules
from paceline.rollout.verify import SampledRows, emit, verify

PAGE = 4
EOS = 3


def sequences(lengths: list[int]) -> list[Sequence]:
    made = []
    for number, length in enumerate(lengths):
        group = PromptGroup(number, number, number, number, np.arange(5, dtype=np.int32), num_open=1)
        made.append(Sequence(number, group, 0, Sampling(), 5 + length))
    return made


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_emit_equals_verify_without_drafts(given: list[tuple[int, bool]], seed: int) -> None:
    random = np.random.default_rng(seed)
    sides = sequences([length for length, _ in given]), sequences([length for length, _ in given])
    for side in sides:
        for sequence, (_, is_done) in zip(side, given, strict=True):
            sequence.finish_reason = "abort" if is_done else None
    rules, count = StopRules(Sampling(), (EOS,), None), len(given)
    for _ in range(3):
        tokens = random.integers(0, 6, count).tolist()
        rows = SampledRows(tokens, random.random(count).tolist(), random.random(count).tolist(), [True] * count)
        expected: list[int] = []
        for i, sequence in enumerate(sides[0]):
            if sequence.finish_reason is None:
                verify(sequence, NO_PROPOSAL, rows, i, rules.find)
                expected += [i] if sequence.finish_reason is not None else []
        ended = emit(sides[1], rows, rules.end_tokens)
        assert [sides[1].index(sequence) for sequence in ended] == expected
    for slow, fast in zip(*sides, strict=True):
        assert slow.token_ids.tolist() == fast.token_ids.tolist() and slow.last_token == fast.last_token
        assert (slow.logprobs, slow.truncated_logprobs) == (fast.logprobs, fast.truncated_logprobs)
        assert slow.finish_reason == fast.finish_reason


@pytest.mark.parametrize("contexts", [[3], [0, 6, 7, 11], [2, 2, 14]])
def test_an_advanced_step_equals_one_built_anew(contexts: list[int]) -> None:
    """Also where sequences get another page, and the tables become wider."""
    pages = [[10 * i + page for page in range(context // PAGE + 1)] for i, context in enumerate(contexts)]
    keys, steps = np.arange(len(contexts), dtype=np.uint64), np.array(contexts, np.int64)

    def build(number: int) -> Rows:
        return Rows.build([SequenceRows([0], c + number, p) for c, p in zip(contexts, pages, strict=True)], PAGE)

    lane = Lane(build(0), keys, steps)
    for number in range(1, 12):
        full = lane.full()
        for i in full:
            pages[i] = [*pages[i], 10 * i + len(pages[i])]
        lane = lane.advanced({i: pages[i] for i in full})
        slow = build(number)
        assert lane.steps.tolist() == [context + number for context in contexts]
        for name in ("token_ids", "positions", "parents", "row_starts", "contexts", "num_pages", "slots", "deepest"):
            assert getattr(lane.rows, name).tolist() == getattr(slow, name).tolist(), name
        width = slow.page_tables.shape[1]
        assert lane.rows.page_tables[:, :width].tolist() == slow.page_tables.tolist()
        assert lane.rows.num_kv_tokens == slow.num_kv_tokens
