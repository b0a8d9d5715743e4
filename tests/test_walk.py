"""All sequences of a step verified and written at once, against `verify`, which does it for one, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import EMPTY_DRAFT, Draft, Sampling, Verdict
from paceline.model.ops.base import Sampled
from paceline.model.rows import Rows, SequenceRows, depths
from paceline.rollout.feedback import Settled, verdict_of
from paceline.rollout.proposal import NO_PROPOSAL, Proposal
from paceline.rollout.scheduler import Plan
from paceline.rollout.sequence import PromptGroup, Sequence
from paceline.rollout.step import DraftRows, Step
from paceline.rollout.stop import StopRules
from paceline.rollout.table import LEAST_RECENT, SPANS, SequenceTable
from paceline.rollout.verify import (
    GOES_ON,
    LENGTH,
    NOT_FINITE,
    REASONS,
    STOP,
    NonFiniteLogits,
    Walked,
    cut_at_stops,
    verify,
    walk,
    write,
)

VOCAB, EOS, PROMPT = 6, 5, 5
PAGE = 4
SOURCES = ("suffix", "ahead", "eagle")


class Letters:
    """A tokenizer of one letter per token; one decodes to nothing."""

    def decode(self, ids: list[int]) -> str:
        return "".join("abcd"[token] for token in ids if token < 4)


def rules_of(*stops: str) -> StopRules:
    return StopRules(Sampling(stop=stops), (EOS,), Letters())  # type: ignore[arg-type]


@dataclass
class Twins:
    """The same sequences twice: some in a table, where a whole step is verified at once, and some that are not."""

    limits: list[int]
    rules: StopRules = field(default_factory=rules_of)
    max_rows: int = 512

    def __post_init__(self) -> None:
        self.slow, self.fast = ([self._make(i, limit) for i, limit in enumerate(self.limits)] for _ in range(2))
        self.spans: list[list[tuple[int, int, str]]] = [[] for _ in self.limits]
        """Accepted drafts of the slow ones: start, end and source."""
        self.errors: dict[int, str] = {}
        self.table = SequenceTable(len(self.limits), self.max_rows)
        for sequence in (*self.slow, *self.fast):
            sequence.num_cached = sequence.length - 1
        for sequence in reversed(self.fast):  # slots are not in the order of the sequences
            self.table.enter(sequence)
        self.slots = np.array([sequence.slot for sequence in self.fast])

    def _make(self, number: int, limit: int) -> Sequence:
        prompt = np.arange(PROMPT, dtype=np.int32)
        group = PromptGroup(number, number, number, number, prompt, num_open=1)
        return Sequence(number + 1, group, 0, Sampling(), PROMPT + limit)

    def step(self, proposals: list[Proposal], sampled: Sampled, is_live: list[bool] | None = None) -> None:
        """Verify one step in both ways; those that are not live had finished before."""
        live = np.array([sequence.finish_reason is None for sequence in self.slow])
        if is_live is not None:
            live &= is_live
        step = self._step_of(proposals)
        expected = [self._verify(i, proposals[i], sampled, int(step.starts[i])) if live[i] else None for i in self.all]
        walked = self._walk(step, sampled, live)
        sources = np.array([self.table.source_id(proposal.source) for proposal in proposals])
        write(self.table, self.slots, step.starts, walked, sources, sampled)
        settled = Settled(step, sampled, walked, live, sources)
        for i in self.all:
            if walked.ends[i] == NOT_FINITE:
                assert str(NonFiniteLogits.of(self.fast[i])) == self.errors[i]
                self.slow[i].finish_reason = self.fast[i].finish_reason = "abort"
                continue
            assert verdict_of(settled, i, proposals[i].source) == expected[i] and i not in self.errors
            if live[i]:
                self.fast[i].finish_reason = REASONS.get(int(walked.ends[i]))
                assert self.fast[i].finish_reason == self.slow[i].finish_reason
                assert (walked.ends[i] == GOES_ON) == (self.slow[i].finish_reason is None)
            else:
                assert walked.counts[i] == 0 and walked.ends[i] == GOES_ON
        self.errors.clear()

    @property
    def all(self) -> range:
        return range(len(self.limits))

    def _verify(self, i: int, proposal: Proposal, sampled: Sampled, start: int) -> Verdict | None:
        sequence = self.slow[i]
        before = sequence.length
        try:
            verdict = verify(sequence, proposal, sampled, start, self.rules.find)
        except NonFiniteLogits as error:
            self.errors[i] = str(error)
            verdict = None
        count = sequence.length - before
        sequence.num_cached += count
        if count > 1:
            first = before - sequence.prompt_length
            self.spans[i].append((first, first + count - 1, proposal.source))
        return verdict

    def _walk(self, step: Step, sampled: Sampled, live: np.ndarray) -> Walked:
        is_end, left = self.rules.end_table(VOCAB), self.table.max_lengths[self.slots] - self.table.lengths[self.slots]
        rows = (step.starts, step.row_counts, step.parents, step.inputs, sampled.tokens, sampled.is_finite)
        walked = Walked(*walk(live, *rows, is_end[None], self.table.kinds[self.slots], left))
        if self.rules.sampling.stop:
            cut_at_stops(walked, self.fast, step.starts, sampled, self.rules.after_stop)
        return walked

    def _step_of(self, proposals: list[Proposal]) -> Step:
        counts = np.array([len(proposal.draft) for proposal in proposals])
        starts = np.cumsum([0, *counts + 1])[:-1].astype(np.int32)
        parents = [np.array([-1, *(int(p) + 1 for p in own.draft.parents)], np.int32) for own in proposals]
        inputs = [
            np.array([s.last_token, *p.draft.tokens], np.int32) for s, p in zip(self.slow, proposals, strict=True)
        ]
        return Step(
            plan=Plan(self.fast),
            drafts=DraftRows(counts, proposals),
            ticket=None,
            num_rows=int(counts.sum()) + len(counts),
            num_kv_tokens=0,
            starts=starts,
            row_counts=counts + 1,
            parents=np.concatenate(parents),
            inputs=np.concatenate(inputs),
            owners=np.array([sequence.sequence_id for sequence in self.fast]),
            depths=np.array([own.max() for own in map(depths, map(tuple, parents))], np.int32),
        )

    def check(self) -> None:
        """Everything that is known of the sequences is the same on both sides."""
        self.table.check_integrity()
        for i, (slow, fast) in enumerate(zip(self.slow, self.fast, strict=True)):
            # Before anything is fetched.
            assert (fast.length, fast.num_cached, fast.last_token) == (slow.length, slow.num_cached, slow.last_token)
            assert (fast.num_left, fast.num_pending) == (slow.num_left, 1)
            if i % 2:  # one is fetched as a whole, the other when somebody looks at it
                fast.fetch()
            assert fast.view.token_ids.tolist() == slow.view.token_ids.tolist()
            assert fast.response_ids.tolist() == slow.response_ids.tolist()
            assert (fast.logprobs, fast.truncated_logprobs) == (slow.logprobs, slow.truncated_logprobs)
            assert fast.spans == self.spans[i]


def sampled_rows(count: int, random: np.random.Generator, finite: float = 1.0, vocab: int = VOCAB) -> Sampled:
    tokens = random.integers(0, vocab, count).astype(np.int32)
    logprobs, truncated = (random.random(count, np.float32) for _ in range(2))
    return Sampled(tokens, logprobs, truncated, random.random(count) < finite)


def proposal_of(random: np.random.Generator, num_nodes: int, is_chain: bool, vocab: int = VOCAB) -> Proposal:
    """A random draft, of which random nodes were kept, closed under parents."""
    if num_nodes == 0:
        return NO_PROPOSAL
    tokens = random.integers(0, vocab, num_nodes).astype(np.int32)
    parents = list(range(-1, num_nodes - 1)) if is_chain else [int(random.integers(-1, i)) for i in range(num_nodes)]
    whole = Draft.chain(tokens) if is_chain else Draft(tokens, parents)
    kept: list[int] = []
    for node, parent in enumerate(parents):
        if (parent == -1 or parent in kept) and random.random() < 0.8:
            kept.append(node)
    places = {node: place for place, node in enumerate(kept)}
    part = Draft(tokens[kept], [places.get(parents[node], -1) for node in kept]) if kept else EMPTY_DRAFT
    return Proposal(whole, kept, part, SOURCES[int(random.integers(len(SOURCES)))])


def hint(proposals: list[Proposal], sampled: Sampled, random: np.random.Generator, share: float) -> None:
    """Make some drafts right: what is sampled in a row is one of the row's children."""
    start = 0
    for proposal in proposals:
        for node, (parent, token) in enumerate(zip(proposal.draft.parents, proposal.draft.tokens, strict=True)):
            if random.random() < share:
                sampled.tokens[start + 1 + int(parent)] = token
            assert parent < node
        start += 1 + len(proposal.draft)


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[int, bool]]:
    """Per sequence: its limit, and whether its drafts are chains."""
    return draw(st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=7))


@settings(max_examples=300)
@given(
    given=shapes(),
    seed=st.integers(0, 2**32 - 1),
    max_nodes=st.sampled_from((0, 1, 4, 9)),
    stops=st.sampled_from(((), (), ("ab",), ("aa", "dcb"), ("bd", "bdc", "cc"))),
    finite=st.sampled_from((1.0, 1.0, 0.9)),
    share=st.sampled_from((0.0, 0.5, 1.0)),
    gone=st.sampled_from((0.0, 0.2)),
)
def test_a_step_is_what_verifying_each_sequence_gives(
    given: list[tuple[int, bool]],
    seed: int,
    max_nodes: int,
    stops: tuple[str, ...],
    finite: float,
    share: float,
    gone: float,
) -> None:
    random = np.random.default_rng(seed)
    twins = Twins([limit for limit, _ in given], rules_of(*stops))
    for number in range(8):
        proposals = [proposal_of(random, int(random.integers(0, max_nodes + 1)), is_chain) for _, is_chain in given]
        sampled = sampled_rows(sum(len(p.draft) + 1 for p in proposals), random, finite)
        hint(proposals, sampled, random, share)
        twins.step(proposals, sampled, (random.random(len(given)) >= gone).tolist())
        if number % 3 == 2:
            twins.check()
    twins.check()


def chain_step(twins: Twins, tokens: list[int], guesses: list[int], finite: list[bool] | None = None) -> None:
    """One step of a single sequence: what is sampled row by row, and a chain of drafted tokens."""
    sampled = sampled_rows(len(tokens), np.random.default_rng(0))
    sampled.tokens[:] = tokens
    sampled.is_finite[:] = [True] * len(tokens) if finite is None else finite
    draft = Draft.chain(guesses)
    twins.step([Proposal(draft, list(range(len(guesses))), draft, "suffix")], sampled)
    twins.check()


def test_it_ends_at_an_end_token_inside_an_accepted_draft() -> None:
    twins = Twins([20])
    chain_step(twins, [1, 2, EOS, 3, 4], [1, 2, EOS, 3])
    [fast] = twins.fast
    assert fast.response_ids.tolist() == [1, 2, EOS] and fast.finish_reason == "stop"
    assert fast.spans == [(0, 2, "suffix")], "the end token is no accepted draft: nothing after it was looked at"


def test_it_ends_at_the_length_limit_inside_an_accepted_draft() -> None:
    twins = Twins([3])
    chain_step(twins, [1, 2, 3, 4, 0], [1, 2, 3, 4])
    assert twins.fast[0].response_ids.tolist() == [1, 2, 3] and twins.fast[0].finish_reason == "length"


def test_it_ends_at_a_stop_string_inside_an_accepted_draft() -> None:
    """Also where the string begins in an earlier step, and where it is found in the token that reaches the limit."""
    for limit in (20, 5):
        twins = Twins([limit], rules_of("dab"))
        chain_step(twins, [2, 3], [2])
        chain_step(twins, [0, 4, 1, 1], [0, 4, 1])
        assert twins.fast[0].response_ids.tolist() == [2, 3, 0, 4, 1] and twins.fast[0].finish_reason == "stop"


def test_a_stop_before_logits_that_are_not_finite_counts() -> None:
    for stops, last in (((), EOS), (("ab",), 1)):
        twins = Twins([20], rules_of(*stops))
        chain_step(twins, [0, last, 3, 3], [0, last, 3], [True, True, False, True])
        assert twins.fast[0].finish_reason == "stop" and twins.fast[0].response_ids.tolist() == [0, last]


def test_tokens_before_logits_that_are_not_finite_are_kept() -> None:
    twins = Twins([20])
    chain_step(twins, [0, 1, 3, 3], [0, 1, 3], [True, True, False, True])
    assert twins.fast[0].finish_reason == "abort" and twins.fast[0].response_ids.tolist() == [0, 1]


def test_the_first_of_equal_siblings_counts() -> None:
    twins = Twins([20])
    draft = Draft(np.array([1, 1, 2, 3], np.int32), [-1, -1, 0, 1])
    sampled = sampled_rows(5, np.random.default_rng(0))
    sampled.tokens[:] = [1, 3, 3, 0, 0]  # below the second of them, the draft would be right
    twins.step([Proposal(draft, [0, 1, 2, 3], draft, "eagle")], sampled)
    twins.check()
    assert twins.fast[0].response_ids.tolist() == [1, 3]


def test_two_guesses_of_one_step_are_two_drafts() -> None:
    """Siblings on the path of a draft: the walk may go down a later one, past rows of others."""
    twins = Twins([20, 20])
    comb = Draft(np.array([1, 2, 3, 4], np.int32), [-1, -1, 1, 1])
    sampled = sampled_rows(10, np.random.default_rng(0))
    sampled.tokens[:] = [2, 0, 4, 0, 1, 1, 0, 0, 0, 0]
    twins.step([Proposal(comb, [0, 1, 2, 3], comb, "eagle")] * 2, sampled)
    twins.check()
    assert [fast.response_ids.tolist() for fast in twins.fast] == [[2, 4, 1], [1, 0]]
    assert [fast.spans for fast in twins.fast] == [[(0, 2, "eagle")], [(0, 1, "eagle")]]


@pytest.mark.parametrize("max_rows", [12, 512])
@pytest.mark.parametrize("num_guesses", [0, 1, 5])
def test_more_tokens_and_drafts_than_the_table_keeps(num_guesses: int, max_rows: int) -> None:
    """Nobody looks at the sequences meanwhile, so the table has them fetch before it is full.

    With few rows it is tokens there is no room for, with many the drafts.
    """
    random = np.random.default_rng(num_guesses)
    num_steps = LEAST_RECENT + 2 * SPANS + 50
    twins = Twins([num_steps * (num_guesses + 1) + 9, 3 * SPANS], max_rows=max_rows)
    for _ in range(num_steps):
        tokens = random.integers(0, 4, (2, num_guesses + 1)).astype(np.int32)
        drafts = [Draft.chain(own[:-1]) if num_guesses else EMPTY_DRAFT for own in tokens]
        proposals = [Proposal(draft, list(range(num_guesses)), draft, SOURCES[i]) for i, draft in enumerate(drafts)]
        sampled = sampled_rows(tokens.size, random)
        sampled.tokens[:] = tokens.ravel()
        twins.step(proposals, sampled)
    assert twins.fast[0].length - PROMPT == num_steps * (num_guesses + 1) > LEAST_RECENT
    assert twins.table.num_recent.max() <= twins.table.tokens.shape[1]
    twins.check()
    assert twins.fast[1].finish_reason == "length"


def test_what_walks_counts_what_it_says() -> None:
    """The numbers that come back, in a small example: one goes on, one stops, one is at its limit, one breaks."""
    starts, counts = np.array([0, 3, 5, 6, 8], np.int32), np.array([3, 2, 1, 2, 1])
    parents = np.array([-1, 0, 1, -1, 0, -1, -1, 0, -1], np.int32)
    inputs = np.array([9, 1, 2, 9, 1, 9, 9, 1, 9], np.int32)
    sampled = np.array([1, 3, 0, 1, EOS, 2, 1, 1, 1], np.int32)
    finite = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1], np.bool_)
    is_live = np.array([True, True, True, True, False])
    left = np.array([9, 9, 1, 9, 9])
    is_end = np.stack([rules_of().end_table(VOCAB), np.zeros(VOCAB, np.bool_)])
    rows = (is_live, starts, counts, parents, inputs, sampled, finite, is_end)
    walked = Walked(*walk(*rows, np.zeros(5, np.int64), left))
    assert walked.counts.tolist() == [2, 2, 1, 1, 0]
    assert walked.ends.tolist() == [GOES_ON, STOP, LENGTH, NOT_FINITE, GOES_ON]
    assert walked.path_of(0, 0) == [0] and walked.path_of(3, 1) == [0] and walked.path_of(5, 2) == []
    # With other settings, the second one's token does not end its response.
    walked = Walked(*walk(*rows, np.array([0, 1, 0, 1, 0]), left))
    assert walked.ends.tolist() == [GOES_ON, GOES_ON, LENGTH, NOT_FINITE, GOES_ON]


# --- laying out rows --------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    given=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=8),
    is_plain=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_laid_out_at_once_are_those_built_one_by_one(
    given: list[tuple[int, int, bool]], is_plain: bool, seed: int
) -> None:
    """The tables may be wider than needed, with anything in entries that nobody uses."""
    random = np.random.default_rng(seed)
    contexts, counts = (np.array(column, np.int64) for column in list(zip(*given, strict=True))[:2])
    if is_plain:
        counts[:] = 1
    num_pages = -(-(contexts + counts) // PAGE) + random.integers(0, 2, len(given))
    tables = random.integers(0, 99, (len(given), int(num_pages.max()) + 2)).astype(np.int32)
    tokens = random.integers(0, 50, int(counts.sum())).astype(np.int32)
    trees = [
        [-1, *(int(random.integers(0, row)) for row in range(1, count))] if is_tree else []
        for count, (_, _, is_tree) in zip(counts.tolist(), given, strict=True)
    ]
    starts = np.cumsum([0, *counts])
    slow = Rows.build(
        [
            SequenceRows(tokens[starts[i] : starts[i + 1]], int(contexts[i]), tables[i, : num_pages[i]].tolist(), tree)
            for i, tree in enumerate(trees)
        ],
        PAGE,
    )
    fast = Rows.lay_out(contexts, counts, tables, num_pages, PAGE)
    fast.token_ids[:] = tokens
    for i, tree in enumerate(trees):
        # A tree of one row is no tree where all rows are single, which the slow twin does not look at.
        if tree and not (counts == 1).all():
            fast.set_tree(i, tree)
    for name in ("token_ids", "positions", "parents", "row_starts", "contexts", "is_tree", "num_pages"):
        one, other = getattr(fast, name), getattr(slow, name)
        assert one.tolist() == other.tolist(), name
        assert one.dtype == other.dtype, name
    for name in ("slots", "deepest", "sequence_of_row", "row_in_sequence"):
        assert getattr(fast, name).tolist() == getattr(slow, name).tolist(), name
    assert (len(fast), fast.num_kv_tokens, fast.page_size) == (len(slow), slow.num_kv_tokens, slow.page_size)
    for i, count in enumerate(num_pages.tolist()):
        assert fast.page_tables[i, :count].tolist() == slow.page_tables[i, :count].tolist()


def test_rows_without_a_place_in_the_cache_are_refused() -> None:
    with pytest.raises(AssertionError, match="every row needs a slot"):
        Rows.lay_out(np.array([3, 7]), np.array([1, 2]), np.zeros((2, 2), np.int32), np.array([1, 2]), PAGE)
