"""The suffix drafter against a twin that searches its texts naively, its window, and its memory."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters import View, check_draft

from paceline.drafters.suffix import Suffix
from paceline.drafters.suffix_store import SuffixStore
from paceline.drafters.suffix_tree import NOW
from paceline.types import EMPTY_DRAFT, Draft

BIG = 2**31 - 1


@dataclass
class Twin:
    """All texts of one prompt as plain lists. `born` gives each token's time of insertion."""

    max_depth: int
    prompt: list[int]
    responses: list[list[int]] = field(default_factory=list)
    born: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, text: int, token: int) -> None:
        self.born[text, len(self.responses[text])] = len(self.born)
        self.responses[text].append(token)

    def occurrences(self, context: list[int]) -> list[tuple[int, int]]:
        """(text, place) of every token before which `context` stands; text -1 is the prompt."""
        no_text: list[int] = []
        texts = [(-1, no_text, self.prompt)] + [(i, self.prompt, text) for i, text in enumerate(self.responses)]
        return [
            (i, place)
            for i, before, text in texts
            for place in range(len(text))
            if (before + text[:place])[-len(context) :] == context
        ]

    def voters(self, text: int) -> tuple[int, list[tuple[int, int]]]:
        whole = self.prompt + self.responses[text]
        for length in range(min(self.max_depth, len(whole)), 0, -1):
            if voters := self.occurrences(whole[-length:]):
                return length, voters
        return 0, []

    def token(self, voter: tuple[int, int]) -> int:
        text, place = voter
        tokens = self.prompt if text < 0 else self.responses[text]
        return tokens[place] if place < len(tokens) else -1

    def chain(self, text: int, budget: int) -> list[tuple[int, int, int]]:
        """(token, votes, voters) for each node of the chain that the votes lead to."""
        _, voters = self.voters(text)
        nodes: list[tuple[int, int, int]] = []
        while voters and len(nodes) < budget:
            votes = Counter(map(self.token, voters))
            # Between equals the one seen last; prompts are older than any response.
            last = {self.token(voter): self.time(voter) for voter in sorted(voters, key=self.time)}
            winner = max(votes, key=lambda token: (votes[token], last[token]))
            nodes.append((winner, votes[winner], len(voters)))
            voters = [(i, place + 1) for i, place in voters if self.token((i, place)) == winner]
            voters = [voter for voter in voters if self.token(voter) >= 0]
        return nodes

    def time(self, voter: tuple[int, int]) -> int:
        return self.born.get(voter, voter[1] - len(self.prompt))


TOKENS = st.sampled_from([0, 1, 2, 3, BIG])
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(TOKENS, min_size=1, max_size=5)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=40), STEPS, st.sampled_from([1, 2, 3, 8, 32]))
def test_agrees_with_the_naive_twin(prompt: list[int], steps: list[tuple[int, list[int]]], max_depth: int) -> None:
    drafter = Suffix(max_depth=max_depth, max_votes=10_000, min_path=0.0, max_tokens=2**14)
    twin = Twin(max_depth, prompt, [[] for _ in range(4)])
    views = [View(i, prompt) for i in range(4)]
    drafter.propose(views, [0] * 4)
    for text, tokens in steps:
        drafter.observe([views[text].emit(*tokens)])
        for token in tokens:
            twin.add(text, token)
    drafter.check_integrity()
    for text, draft in enumerate(drafter.propose(views, [9] * 4)):
        check_draft(draft, 9)
        nodes = twin.chain(text, 9)
        assert [int(token) for token in draft.tokens] == [token for token, _, _ in nodes]
        match = twin.voters(text)[0]
        scores = [votes / (voters + 12 / (1 + match + i) ** 1.5) for i, (_, votes, voters) in enumerate(nodes)]
        assert np.allclose(np.array(draft.scores if nodes else [], float), scores, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(1, 5), st.integers(1, 4))
def test_with_few_votes_every_draft_was_seen_before(
    steps: list[tuple[int, list[int]]], max_votes: int, width: int
) -> None:
    """A sample votes: each path of the tree must then follow some occurrence of the longest match."""
    drafter = Suffix(max_votes=max_votes, width=width, min_path=0.0, max_tokens=2**14)
    twin = Twin(32, [0, 1], [[] for _ in range(4)])
    views = [View(i, [0, 1]) for i in range(4)]
    drafter.propose(views, [0] * 4)
    for text, tokens in steps:
        drafter.observe([views[text].emit(*tokens)])
        for token in tokens:
            twin.add(text, token)
    for text, draft in enumerate(drafter.propose(views, [7] * 4)):
        check_draft(draft, 7)
        assert (len(draft) > 0) == (twin.voters(text)[0] > 0)
        followers = {-1: twin.voters(text)[1]}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            voters = [voter for voter in followers[int(parent)] if twin.token(voter) == token]
            assert voters
            followers[node] = [(i, place + 1) for i, place in voters]
        siblings = Counter(int(parent) for parent in draft.parents)
        assert all(count <= width for count in siblings.values())
        assert len(set(zip(map(int, draft.parents), map(int, draft.tokens), strict=True))) == len(draft)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_store_survives_any_order_of_writing_and_deleting(rng: random.Random) -> None:
    store = SuffixStore(max_tokens=4096, max_depth=rng.choice([1, 2, 4, 16]))
    prompts: dict[int, set[int]] = {}
    alphabet = rng.choice([1, 2, 50])
    for _ in range(60):
        action = rng.random()
        if action < 0.15 or not prompts:
            prompts[store.new_text()] = set()
            text = list(prompts)[-1]
        elif action < 0.4:
            prompt = rng.choice(list(prompts))
            text = store.new_text(prompt)
            prompts[prompt].add(text)
        elif action < 0.6 and any(prompts.values()):
            prompt = rng.choice([prompt for prompt in prompts if prompts[prompt]])
            store.delete_text(prompts[prompt].pop())
            continue
        elif action < 0.65 and not all(prompts.values()):
            prompt = rng.choice([prompt for prompt in prompts if not prompts[prompt]])
            del prompts[prompt]
            store.delete_text(prompt)
            continue
        else:
            responses = [text for texts in prompts.values() for text in texts]
            if not responses:
                continue
            text = rng.choice(responses)
        tokens = np.array([rng.randrange(alphabet) for _ in range(rng.randrange(40))], np.int32)
        assert store.has_room(len(tokens), 1)
        store.append(np.array([text], np.int32), np.array([len(tokens)], np.int32), tokens)
        if rng.random() < 0.3:
            store.check_integrity()
    for prompt, texts in prompts.items():
        for text in texts:
            store.delete_text(text)
        store.delete_text(prompt)
    store.check_integrity()
    assert store.num_tokens == 0


def tokens_of(draft: Draft) -> list[int]:
    return [int(token) for token in draft.tokens]


def test_siblings_see_each_other_at_once_and_strangers_do_not() -> None:
    drafter = Suffix()
    first, second, stranger = View(0, [1, 2]), View(1, [1, 2]), View(2, [1, 2], prompt_id=9)
    views = [first, second, stranger]
    assert drafter.propose(views, [4, 4, 4]) == [EMPTY_DRAFT] * 3
    drafter.observe([first.emit(10, 11, 12, 13)])
    drafts = drafter.propose(views, [4, 4, 4])
    assert [tokens_of(draft) for draft in drafts] == [[], [10, 11, 12], []]
    drafter.observe([second.emit(10)])
    assert tokens_of(drafter.propose(views, [4, 4, 4])[1]) == [11, 12, 13]


def test_the_most_frequent_continuation_wins_and_trees_keep_the_second() -> None:
    chain, tree = Suffix(), Suffix(width=2, min_path=0.0)
    for drafter in (chain, tree):
        views = [View(i, [1, 2]) for i in range(4)]
        drafter.propose(views, [0] * 4)
        drafter.observe([view.emit(3, 4) if i < 2 else view.emit(3, 5) for i, view in enumerate(views[:3])])
        drafter.observe([views[3].emit(3)])
    assert tokens_of(chain.propose(views, [1] * 4)[3]) == [4]
    (draft,) = tree.propose(views[3:], [2])
    assert (tokens_of(draft), [int(parent) for parent in draft.parents]) == ([4, 5], [-1, -1])
    assert draft.scores is not None and draft.scores[0] > draft.scores[1]


def test_a_longer_match_scores_higher() -> None:
    def score(length: int) -> float:
        view = View(0, [*range(100, 100 + length), 5, 50, *range(100, 100 + length)])
        (draft,) = Suffix().propose([view], [1])
        assert tokens_of(draft) == [5] and draft.scores is not None
        return float(draft.scores[0])

    scores = [score(length) for length in (1, 2, 5, 20)]
    assert scores == sorted(scores) and scores[0] < 0.3 and scores[-1] > 0.85


def test_budget_zero_registers_and_unknown_sequences_come_with_their_text() -> None:
    drafter = Suffix()
    early, late = View(0, [1, 2]), View(1, [1, 2])
    assert drafter.propose([early], [0]) == [EMPTY_DRAFT]
    drafter.observe([early.emit(7, 8, 9), late.emit(7)])
    assert drafter.num_tokens == 5
    assert tokens_of(drafter.propose([late], [2])[0]) == [8, 9]
    assert drafter.num_tokens == 6
    drafter.finish(77)
    drafter.check_integrity()


def play(drafter: Suffix, sequence_id: int, group_id: int, response: list[int], prompt_id: int = 0) -> None:
    view = View(sequence_id, [1, 2, 3], group_id=group_id, prompt_id=prompt_id)
    drafter.propose([view], [0])
    drafter.observe([view.emit(*response)])
    drafter.finish(sequence_id)


def test_window_keeps_the_last_uses() -> None:
    drafter = Suffix(window=2)
    for use in range(3):
        play(drafter, use, use, [10 + use, 20 + use, 30 + use])
        drafter.check_integrity()
    assert drafter.num_tokens == 3 + 2 * 3
    view = View(100, [1, 2, 3], [10], group_id=2)
    assert drafter.propose([view], [2]) == [EMPTY_DRAFT]
    view = View(101, [1, 2, 3], [11], group_id=2)
    assert tokens_of(drafter.propose([view], [2])[0]) == [21, 31]


def test_a_live_sequence_outlives_its_window() -> None:
    drafter = Suffix(window=1)
    slow = View(0, [1, 2, 3], group_id=0)
    drafter.propose([slow], [0])
    play(drafter, 1, 1, [5, 6])
    drafter.observe([slow.emit(5)])
    assert tokens_of(drafter.propose([slow], [2])[0]) == [6]
    drafter.finish(0)
    drafter.check_integrity()
    assert drafter.num_tokens == 3 + 2


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    drafter = Suffix(max_tokens=4096)
    limit = 4096 * drafter.bytes_per_token + 2**15
    for i in range(300):
        play(drafter, i, i, [1000 + i] * 50, prompt_id=i)
        assert drafter.memory_bytes <= limit and drafter.num_tokens <= 4096
    drafter.check_integrity()
    assert 20 < len(drafter._prompts) < 300 and 299 in drafter._prompts and 0 not in drafter._prompts
    assert drafter.bytes_per_token < 40


def test_a_sequence_too_long_for_the_store_is_dropped_and_the_rest_goes_on() -> None:
    drafter = Suffix(max_tokens=1024)
    long, short = View(0, [1, 2, 3]), View(1, [1, 2, 3], [4, 5, 6, 4])
    drafter.propose([long, short], [0, 0])
    for i in range(100):
        drafter.observe([long.emit(*range(i, i + 20)), short.emit(5, 6, 4)])
        drafter.check_integrity()
    assert drafter.propose([long], [4]) == [EMPTY_DRAFT]
    assert tokens_of(drafter.propose([short], [2])[0]) == [5, 6]
    huge = View(2, list(range(5000)), prompt_id=3)
    assert drafter.propose([huge], [4]) == [EMPTY_DRAFT]
    drafter.observe([huge.emit(1)])
    for sequence_id in (0, 1, 2):
        drafter.finish(sequence_id)
    drafter.check_integrity()


def test_everything_leaves_when_the_last_text_goes() -> None:
    drafter = Suffix()
    views = [View(i, [1, 2, 3], prompt_id=i % 2) for i in range(4)]
    drafter.propose(views, [1] * 4)
    for view in views:
        drafter.finish(view.sequence_id)
    drafter.check_integrity()
    assert drafter.num_tokens == 0 and not drafter._prompts and not drafter._owners


def test_the_clock_may_wrap() -> None:
    drafter = Suffix()
    view = View(0, [1, 2])
    drafter.propose([view], [0])
    drafter._store._arrays.heads[NOW] = BIG - 1
    drafter.observe([view.emit(8, 5, 8, 6, 8)])
    assert tokens_of(drafter.propose([view], [1])[0]) == [6]


def test_long_random_play_with_few_blocks() -> None:
    rng = random.Random(3)
    drafter = Suffix(max_tokens=2048, window=3, width=2)
    live: dict[int, View] = {}
    for step in range(400):
        if len(live) < 8:
            live[step] = View(
                step, [rng.randrange(9) for _ in range(5)], prompt_id=rng.randrange(4), group_id=step // 9
            )
        views = [view for view in live.values() if rng.random() < 0.8]
        budgets = [rng.randrange(6) for _ in views]
        for draft, budget in zip(drafter.propose(views, budgets), budgets, strict=True):
            check_draft(draft, budget)
        drafter.observe([view.emit(*(rng.randrange(3) for _ in range(rng.randrange(1, 6)))) for view in live.values()])
        if rng.random() < 0.3:
            gone = rng.choice(list(live))
            drafter.finish(gone)
            del live[gone]
        if step % 10 == 0:
            drafter.check_integrity()
    drafter.check_integrity()


@pytest.mark.parametrize("setting", ["width", "window", "max_votes", "min_match", "max_depth", "max_tokens"])
def test_bad_settings_are_named(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        Suffix(**{setting: 0})
