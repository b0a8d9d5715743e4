"""The suffix drafter against a slow readable model of it, its ages of text, its window, and its memory."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters import View, check_draft

from paceline.core.types import EMPTY_DRAFT, Draft
from paceline.rollout.drafters.suffix import Suffix
from paceline.rollout.drafters.suffix_store import SuffixStore

BIG = 2**31 - 1


@dataclass
class AheadView(View):
    """A sequence that is made before anybody asked for it."""

    is_run_ahead: bool = True


# --- the oracle: plain lists, every occurrence looked for everywhere --------------------------------------------------

FULL = 1024
"""Votes are whole numbers of so many parts."""
UNBROKEN = 2**30
PROMPT = -1
"""In the place of a text."""


@dataclass
class Text:
    use: int
    identity: tuple[int, int, int]
    is_ahead: bool
    twin: int | None
    tokens: list[int] = field(default_factory=list)
    is_live: bool = True


@dataclass
class Use:
    number: int
    draw: int
    is_waiting: bool = True


Voter = tuple[int, int]
"""Text (its number is its rank) and place."""


@dataclass
class Oracle:
    """All texts of one prompt."""

    prompt: list[int]
    max_depth: int = 32
    window: int = 16
    decay: float = 0.9
    texts: dict[int, Text] = field(default_factory=dict)
    twins: dict[tuple[int, int, int], int] = field(default_factory=dict)
    groups: dict[int, Use] = field(default_factory=dict)
    num_texts: int = 0
    num_uses: int = 0

    # --- which text is kept -------------------------------------------------------------------------------------------

    def begin(self, group_id: int, draw: int = 0, sample: int = 0, key: int = 0, is_ahead: bool = False) -> int:
        if group_id not in self.groups:
            waiting = [use for use in self.groups.values() if use.is_waiting and use.draw == draw]
            self.groups[group_id] = waiting[0] if waiting else self._new_use(draw)
        use = self.groups[group_id]
        use.is_waiting = use.is_waiting and is_ahead
        identity = draw, sample, key
        self.texts[self.num_texts] = Text(use.number, identity, is_ahead, self.twins.get(identity))
        self.num_texts += 1
        return self.num_texts - 1

    def _new_use(self, draw: int) -> Use:
        self.num_uses += 1
        oldest = self.num_uses - self.window
        self.groups = {group_id: use for group_id, use in self.groups.items() if use.number >= oldest}
        for number, text in list(self.texts.items()):
            if text.use < oldest and not text.is_live:
                self._delete(number)
        return Use(self.num_uses - 1, draw)

    def finish(self, number: int) -> None:
        text = self.texts[number]
        text.is_live = False
        if not text.tokens or text.use < self.num_uses - self.window:
            self._delete(number)
            return
        before = self.twins.get(text.identity)
        self.twins[text.identity] = number
        if before is not None and self.texts[before].is_ahead and len(self.texts[before].tokens) <= len(text.tokens):
            self._delete(before)

    def _delete(self, number: int) -> None:
        identity = self.texts.pop(number).identity
        if self.twins.get(identity) == number:
            del self.twins[identity]
        for text in self.texts.values():
            text.twin = None if text.twin == number else text.twin

    # --- votes --------------------------------------------------------------------------------------------------------

    def occurrences(self, context: list[int]) -> list[Voter]:
        """Every token before which `context` stands."""
        no_text: list[int] = []
        texts = [(PROMPT, no_text, self.prompt)] + [(i, self.prompt, text.tokens) for i, text in self.texts.items()]
        return [
            (i, place)
            for i, before, tokens in texts
            for place in range(len(tokens))
            if (before + tokens[:place])[-len(context) :] == context
        ]

    def match(self, number: int) -> tuple[int, list[Voter]]:
        """The length of the longest suffix that occurs anywhere, and where it does."""
        whole = self.prompt + self.texts[number].tokens
        for length in range(min(self.max_depth, len(whole)), 0, -1):
            if voters := self.occurrences(whole[-length:]):
                return length, voters
        return 0, []

    def token(self, voter: Voter) -> int | None:
        text, place = voter
        tokens = self.prompt if text == PROMPT else self.texts[text].tokens
        return tokens[place] if place < len(tokens) else None

    def run(self, number: int) -> int:
        """How many tokens up to its end a text and its twin have in common, place by place; without end if all."""
        text = self.texts[number]
        run = UNBROKEN
        for mine, theirs in zip(
            text.tokens, self.texts[text.twin].tokens if text.twin is not None else (), strict=False
        ):
            run = run + 1 if mine == theirs else 0
        return run

    def weigh(self, number: int, voters: list[Voter]) -> dict[Voter, int]:
        text = self.texts[number]
        ages = {voter: 0 if voter[0] == PROMPT else max(text.use - self.texts[voter[0]].use, 0) for voter in voters}
        weights = {voter: max(1, round(FULL * self.decay ** min(age, self.window - 1))) for voter, age in ages.items()}
        if text.twin is not None and self.token((text.twin, len(text.tokens))) is not None and self.run(number):
            weights[text.twin, len(text.tokens)] = round(FULL * min(self.run(number), 8) ** 2 / 4)
        return weights

    def chain(self, number: int, budget: int, doubt: float = 12.0) -> list[tuple[int, float]]:
        """Token and score of each node of the chain that the votes lead to."""
        match, voters = self.match(number)
        weights = self.weigh(number, voters)
        nodes: list[tuple[int, float]] = []
        while weights and len(nodes) < budget:
            votes: Counter[int | None] = Counter()
            for voter, weight in weights.items():
                votes[self.token(voter)] += weight
            winner = max(votes, key=lambda token: (votes[token], self._newest(number, token, weights)))
            assert winner is not None
            evidence = sum(max(weight, FULL) for weight in weights.values()) / FULL
            trust = evidence / (evidence + doubt / (1 + match + len(nodes)) ** 1.5)
            nodes.append((winner, trust * votes[winner] / sum(votes.values())))
            moved = {
                (i, place + 1): weight for (i, place), weight in weights.items() if self.token((i, place)) == winner
            }
            weights = {voter: weight for voter, weight in moved.items() if self.token(voter) is not None}
        return nodes

    def _newest(self, number: int, token: int | None, weights: dict[Voter, int]) -> tuple[bool, bool, int, int]:
        """Of the voters for a token the newest: of the twin if it has one, else of the text itself."""
        twin = self.texts[number].twin
        return max((i == twin, i == number, i, place) for i, place in weights if self.token((i, place)) == token)


TOKENS = st.sampled_from([0, 1, 2, 3, BIG])
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(TOKENS, min_size=1, max_size=5)), max_size=60)


def check_against(oracle: Oracle, number: int, draft: Draft, budget: int) -> None:
    check_draft(draft, budget)
    nodes = oracle.chain(number, budget)
    assert tokens_of(draft) == [token for token, _ in nodes]
    scores = [] if draft.scores is None else [float(score) for score in draft.scores]
    assert np.allclose(scores, [score for _, score in nodes], rtol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=40), STEPS, st.sampled_from([1, 2, 3, 8, 32]))
def test_agrees_with_the_oracle_on_siblings(
    prompt: list[int], steps: list[tuple[int, list[int]]], max_depth: int
) -> None:
    drafter = Suffix(max_depth=max_depth, max_votes=10_000, min_path=0.0, max_tokens=2**14)
    oracle = Oracle(prompt, max_depth)
    views = [View(oracle.begin(group_id=0), prompt) for _ in range(4)]
    drafter.propose(views, [0] * 4)
    for text, tokens in steps:
        drafter.observe([views[text].emit(*tokens)])
        oracle.texts[text].tokens += tokens
    drafter.check_integrity()
    for text, draft in enumerate(drafter.propose(views, [9] * 4)):
        check_against(oracle, text, draft, 9)


@dataclass
class Play:
    """A drafter and the oracle, told the same."""

    drafter: Suffix
    oracle: Oracle
    live: dict[int, View] = field(default_factory=dict)

    def begin(self, group_id: int, draw: int, sample: int, is_ahead: bool = False) -> View:
        number = self.oracle.begin(group_id, draw, sample, is_ahead=is_ahead)
        make = AheadView if is_ahead else View
        view = make(number, self.oracle.prompt, group_id=group_id, draw=draw, sample_index=sample)
        self.drafter.propose([view], [0])
        self.live[number] = view
        return view

    def emit(self, number: int, tokens: list[int]) -> None:
        self.drafter.observe([self.live[number].emit(*tokens)])
        self.oracle.texts[number].tokens += tokens

    def finish(self, number: int) -> None:
        self.drafter.finish(number)
        self.oracle.finish(number)
        del self.live[number]


def variation(rng: random.Random, text: list[int], alphabet: int) -> list[int]:
    """A text with a few tokens changed, left out and put in."""
    changed = list(text)
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(changed) + 1)
        new = [rng.randrange(alphabet) for _ in range(rng.randrange(3))]
        changed[place : place + rng.randrange(3)] = new
    return changed


def play_uses(play: Play, rng: random.Random, num_uses: int) -> None:
    """Uses of a prompt, each with a few samples written in turns; some were generated ahead, some break off."""
    alphabet = rng.choice([2, 4, 9])
    theme = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 25))]
    group_ids = itertools.count(10 * play.oracle.num_texts)
    for _ in range(num_uses):
        draw = rng.randrange(5)
        for is_ahead in (True, False)[rng.randrange(2) :]:
            group_id = next(group_ids)
            texts: dict[int, list[int]] = {}
            for sample in range(rng.randrange(1, 4)):
                text = variation(rng, theme, alphabet)
                if is_ahead:
                    del text[rng.randrange(len(text) + 1) :]
                texts[play.begin(group_id, draw, sample, is_ahead).sequence_id] = text
            while texts:
                number = rng.choice(list(texts))
                size = rng.randrange(1, 6)
                play.emit(number, texts[number][:size])
                del texts[number][:size]
                if not texts[number]:
                    del texts[number]
                    if rng.random() < 0.9:
                        play.finish(number)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1.0, 0.85, 0.5]), st.sampled_from([1, 3, 16]))
def test_agrees_with_the_oracle_on_ages_and_twins(rng: random.Random, decay: float, window: int) -> None:
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    oracle = Oracle(prompt, rng.choice([2, 32]), window, decay)
    drafter = Suffix(
        window=window, decay=decay, max_depth=oracle.max_depth, max_votes=10_000, min_path=0.0, max_tokens=2**14
    )
    play = Play(drafter, oracle)
    for _ in range(4):
        play_uses(play, rng, num_uses=rng.randrange(4))
        drafter.check_integrity()
        if rng.random() < 0.3:
            drafter.release()
            drafter.check_integrity()
        play.begin(10**6 + oracle.num_texts, rng.randrange(5), rng.randrange(3))
        views = list(play.live.items())
        for (number, _), draft in zip(
            views, drafter.propose([view for _, view in views], [7] * len(views)), strict=True
        ):
            check_against(oracle, number, draft, 7)
    assert drafter.num_tokens == len(prompt) + sum(len(text.tokens) for text in oracle.texts.values())


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(1, 5), st.integers(1, 4))
def test_with_few_votes_every_draft_was_seen_before(
    steps: list[tuple[int, list[int]]], max_votes: int, width: int
) -> None:
    """A sample votes: each path of the tree must then follow some occurrence of the longest match."""
    drafter = Suffix(max_votes=max_votes, width=width, min_path=0.0, max_tokens=2**14)
    oracle = Oracle([0, 1])
    views = [View(oracle.begin(group_id=0), [0, 1]) for _ in range(4)]
    drafter.propose(views, [0] * 4)
    for text, tokens in steps:
        drafter.observe([views[text].emit(*tokens)])
        oracle.texts[text].tokens += tokens
    for text, draft in enumerate(drafter.propose(views, [7] * 4)):
        check_draft(draft, 7)
        match, voters = oracle.match(text)
        assert (len(draft) > 0) == (match > 0)
        followers = {-1: voters}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            voters = [voter for voter in followers[int(parent)] if oracle.token(voter) == token]
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
    ranks = itertools.count(1)
    for _ in range(60):
        action = rng.random()
        if action < 0.15 or not prompts:
            prompts[store.new_text()] = set()
            text = list(prompts)[-1]
        elif action < 0.4:
            prompt = rng.choice(list(prompts))
            text = store.new_text(prompt, rank=next(ranks))
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


# --- three ages of text -----------------------------------------------------------------------------------------------


def propose_one(drafter: Suffix, view: View, budget: int = 8) -> list[int]:
    return tokens_of(drafter.propose([view], [budget])[0])


def write(drafter: Suffix, view: View, response: list[int]) -> None:
    """A whole response at once."""
    drafter.propose([view], [0])
    drafter.observe([view.emit(*response)])
    drafter.finish(view.sequence_id)


def follow(drafter: Suffix, view: View, response: list[int]) -> list[list[int]]:
    """Plain decoding of a response: what was drafted before each token."""
    drafts = []
    for token in response:
        drafts.append(propose_one(drafter, view))
        drafter.observe([view.emit(token)])
    return drafts


AHEAD = list(range(100, 130))


def test_a_sequence_is_drafted_from_what_it_wrote_ahead() -> None:
    drafter = Suffix()
    # Others that went the same way for long, and then another way.
    for sample in (1, 2, 3):
        write(drafter, View(sample, [1, 2], group_id=5, draw=3, sample_index=sample), [*AHEAD[:20], *range(200, 210)])
    write(drafter, AheadView(3, [1, 2], group_id=6, draw=4), AHEAD)
    view = View(4, [1, 2], group_id=7, draw=4)
    drafts = follow(drafter, view, AHEAD[:-1])
    assert drafts[0] == AHEAD[:8] and drafts[20] == AHEAD[20:28] and drafts[28] == AHEAD[28:]
    other = View(5, [1, 2], AHEAD[:20], group_id=7, draw=4, sample_index=1)
    assert propose_one(drafter, other)[0] == 200, "the majority, where no text is its own"


def test_after_a_mismatch_it_finds_back_to_its_place() -> None:
    """Three tokens differ, then all is as it was written ahead; siblings went another way after the same words."""
    drafter = Suffix()
    for sample in (1, 2):
        write(drafter, View(sample, [1, 2], group_id=5, draw=3, sample_index=sample), [*AHEAD[13:20], *range(200, 210)])
    write(drafter, AheadView(3, [1, 2], group_id=6, draw=4), AHEAD)
    response = [*AHEAD[:10], 7, 8, 9, *AHEAD[13:]]
    view = View(4, [1, 2], group_id=7, draw=4)
    drafts = follow(drafter, view, response)
    assert all(not draft or draft[0] != response[i] for i, draft in enumerate(drafts[10:14], 10)), "a control"
    assert all(draft[0] == response[i] for i, draft in enumerate(drafts[17:], 17))
    assert drafts[20] == response[20:28]


def test_after_an_insertion_it_goes_on_in_what_it_wrote_ahead() -> None:
    drafter = Suffix()
    write(drafter, AheadView(3, [1, 2], group_id=6, draw=4), AHEAD)
    response = [*AHEAD[:10], 7, 8, 9, *AHEAD[10:]]
    drafts = follow(drafter, View(4, [1, 2], group_id=7, draw=4), response)
    assert all(draft[0] == response[i] for i, draft in enumerate(drafts[14:], 14))
    assert drafts[20] == response[20:28]


def test_between_equals_its_own_run_ahead_text_wins() -> None:
    """Shifted by one, so that its place says nothing; the sibling is newer."""
    drafter = Suffix()
    write(drafter, AheadView(3, [1, 2], group_id=6, draw=4), [50, 60, 61])
    write(drafter, View(4, [1, 2], group_id=7, draw=4, sample_index=1), [50, 70, 71])
    assert propose_one(drafter, View(5, [1, 2], [9, 50], group_id=7, draw=4))[0] == 60
    assert propose_one(drafter, View(6, [1, 2], [9, 50], group_id=7, draw=4, sample_index=2))[0] == 70


@pytest.mark.parametrize("change", [{}, {"draw": 5}, {"sample_index": 1}, {"key": 1}, {"prompt_id": 1}])
def test_a_twin_outvotes_siblings_from_a_few_equal_tokens_on_and_text_of_other_noise_never(
    change: dict[str, Any],
) -> None:
    def first_drafted(num_equal: int) -> list[int]:
        drafter = Suffix()
        equal = AHEAD[1 : 1 + num_equal]
        write(drafter, AheadView(3, [1, 2], group_id=6, draw=4), AHEAD)
        for i in (10, 11):
            write(drafter, View(i, [1, 2], group_id=7, draw=9, sample_index=i), [*equal, 80])
        return propose_one(drafter, View(4, [1, 2], [7, *equal], **{"group_id": 7, "draw": 4} | change))[:1]

    drafted = [first_drafted(num_equal) for num_equal in (1, 2, 3, 4, 8)]
    if not change:
        assert drafted == [[80], [80], [AHEAD[4]], [AHEAD[5]], [AHEAD[9]]]
    else:
        assert drafted == [[] if "prompt_id" in change else [80]] * 5


def test_run_ahead_shares_the_use_it_was_made_for_and_makes_way_for_it() -> None:
    drafter = Suffix(window=2)
    play(drafter, 0, 0, [10, 20])
    ahead = AheadView(1, [1, 2, 3], group_id=1, draw=7)
    write(drafter, ahead, [11, 21])
    assert drafter.num_tokens == 3 + 2 + 2
    real = View(2, [1, 2, 3], group_id=2, draw=7)
    drafter.propose([real], [0])
    drafter.check_integrity()
    assert propose_one(drafter, View(9, [1, 2, 3], [10], group_id=2, draw=7, sample_index=9)) == [20], "both uses kept"
    drafter.observe([real.emit(11, 22, 23)])
    drafter.finish(2)
    assert drafter.num_tokens == 3 + 2 + 3 + 1, "of run-ahead and what came true only the latter is kept"
    # A text that broke off sooner leaves the longer one in place.
    write(drafter, AheadView(3, [1, 2, 3], group_id=3, draw=8), [12, 13, 14, 15])
    write(drafter, View(4, [1, 2, 3], group_id=4, draw=8), [12])
    drafter.check_integrity()
    assert propose_one(drafter, View(5, [1, 2, 3], group_id=4, draw=8, sample_index=1))[:2] == [12, 13]


def test_a_twin_that_goes_is_followed_no_more() -> None:
    drafter = Suffix(max_tokens=1024)
    write(drafter, AheadView(0, [1, 2], group_id=0, draw=1), AHEAD)
    view = View(1, [1, 2], group_id=1, draw=1)
    assert propose_one(drafter, view, 4) == AHEAD[:4]
    filler = View(2, [5], prompt_id=5)
    drafter.propose([filler], [0])
    drafter.observe([filler.emit(*range(1000, 1928))])
    drafter.check_integrity()
    assert drafter.propose([view], [4]) == [EMPTY_DRAFT]


def test_votes_fade_with_the_uses_that_have_gone_by() -> None:
    """Two old votes against one new: the older they are the sooner the new one wins."""

    def winner(age: int, decay: float) -> int:
        drafter = Suffix(decay=decay)
        for sample in range(2):
            play(drafter, sample, 0, [7, 8])
        for use in range(1, age):
            play(drafter, 10 + use, use, [9])
        play(drafter, 100, age, [7, 6])
        return propose_one(drafter, View(101, [1, 2, 3], [5, 7], group_id=age, sample_index=1))[0]

    assert [winner(age, 0.8) for age in (1, 2, 3, 4, 8)] == [8, 8, 8, 6, 6]
    assert [winner(age, 1.0) for age in (1, 4, 8)] == [8, 8, 8]
    assert [winner(age, 0.4) for age in (1, 4, 8)] == [6, 6, 6]


def test_old_text_alone_is_trusted_like_new() -> None:
    def score(age: int) -> float:
        drafter = Suffix()
        play(drafter, 0, 0, [7, 8])
        for use in range(1, age + 1):
            play(drafter, 10 + use, use, [9])
        (draft,) = drafter.propose([View(101, [1, 2, 3], [5, 7], group_id=max(age, 0), sample_index=1)], [1])
        assert draft.scores is not None
        return float(draft.scores[0])

    assert score(0) == score(9) > 0


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


def test_the_latest_of_equals_wins() -> None:
    drafter = Suffix()
    view = View(0, [1, 2])
    drafter.propose([view], [0])
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


@pytest.mark.parametrize("setting", ["width", "window", "max_votes", "min_match", "max_depth", "max_tokens", "decay"])
def test_bad_settings_are_named(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        Suffix(**{setting: 0})
