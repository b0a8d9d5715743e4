"""Drafters that want to break the engine: wrong, half right, too deep, too wide, nonsensical.

Each knows the true continuation (`truth`: rollouts of an undrafted run) and is free to abuse it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from paceline.core.types import EMPTY_DRAFT, Draft, SequenceView, Verdict

Truth = Mapping[tuple[int, int], Sequence[int]]
MakeDraft = Callable[[random.Random, list[int], int, int], Draft]


class Hostile:
    """Applies one way of drafting to every view."""

    def __init__(self, make_draft: MakeDraft, truth: Truth, vocab_size: int, seed: int = 0) -> None:
        self.name = make_draft.__name__
        self._make_draft = make_draft
        self._truth = truth
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for view, budget in zip(views, budgets, strict=True):
            done = len(view.token_ids) - view.prompt_length
            # Run-ahead sequences are shown as well; nobody knows how those go on.
            rest = list(self._truth.get((view.draw, view.sample_index), ())[done:])
            drafts.append(self._make_draft(self._rng, rest, budget, self._vocab_size))
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            assert len(verdict.token_ids) >= 1
            assert len(verdict.path) <= verdict.num_proposed

    def finish(self, sequence_id: int) -> None:
        pass


def random_tokens(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """Tokens out of nowhere."""
    return Draft.chain([rng.randrange(vocab) for _ in range(budget)])


def always_wrong(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """Never the true next token."""
    return Draft.chain([(token + 1) % vocab for token in rest[:budget]])


def true_continuation(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """What will come, to the end of the budget."""
    return Draft.chain(rest[:budget])


def mostly_true(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """The true continuation with 20 % of its tokens changed."""
    return Draft.chain([rng.randrange(vocab) if rng.random() < 0.2 else token for token in rest[:budget]])


def deep_and_wide_tree(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """Random branches, the true continuation scattered among them."""
    parents = [rng.choice((i - 1, rng.randrange(-1, i))) for i in range(budget)]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    tokens = [rest[d] if d < len(rest) and rng.random() < 0.7 else rng.randrange(vocab) for d in depths]
    return Draft(tokens, parents, [rng.random() for _ in tokens])


def flat_fan(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """Many children of the last token, the right one last, twice."""
    tokens = [rng.randrange(vocab) for _ in range(max(budget - 2, 0))] + rest[:1] * min(budget, 2)
    return Draft(tokens, [-1] * len(tokens))


def too_long(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """Far beyond the budget and the end of the response."""
    return Draft.chain(rest + [rng.randrange(vocab) for _ in range(300)])


def nothing(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """No draft at all."""
    return EMPTY_DRAFT


def outside_vocabulary(rng: random.Random, rest: list[int], budget: int, vocab: int) -> Draft:
    """Ids the policy does not have, behind a true one."""
    return Draft.chain([*rest[:1], rng.choice((vocab, -1, 2**31 - 1, 10**12))])


HOSTILE: tuple[MakeDraft, ...] = (
    random_tokens,
    always_wrong,
    true_continuation,
    mostly_true,
    deep_and_wide_tree,
    flat_fan,
    too_long,
    nothing,
    outside_vocabulary,
)
