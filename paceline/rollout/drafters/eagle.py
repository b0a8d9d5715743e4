"""`eagle`: a small network that reads the policy's hidden states and draws with the policy's own noise.

A draft is argmax(log q / tau + gumbel(key, position, id)): where q is close to the policy's distribution, the same
noise makes both draw the same token, at any temperature. tau is fitted while drafting: of a few candidates, the one
whose draws come true most often. A greedy drafter is the limit tau -> 0, and one of the candidates.

A draft is a comb: a chain of first choices, and beside each of them, where `width` asks for it, those that came next
with the same noise, which nothing follows. They cost rows and no further pass of the network.

The engine attaches it to its decoder and cache; `spot/` hands it new versions (`use`), at any time. Without a version
it proposes nothing. A node's score is a function of its margin over the others, which the budget calibrates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.types import EMPTY_DRAFT, Draft, SequenceView, Verdict
from paceline.kernels.cpu.sampling import sample_drafts
from paceline.kernels.limits import MAX_GUESS_WIDTH, MAX_GUESSES
from paceline.model.decoder import Decoder
from paceline.model.eagle.layer import EagleLayer
from paceline.model.eagle.network import Eagle
from paceline.model.executor import Guess, Guessed
from paceline.model.rows import Rows, SequenceRows

GREEDY = 0.0
TAUS = (GREEDY, 0.5, 0.7, 0.85, 1.0, 1.2)
"""Candidates. Far above 1 a drafter would have to be overconfident, which soft targets do not teach."""
FIRST_TAU = 1.0
FADE = 0.999
"""What a drawn token still counts for when the next one is judged."""
DEPTH, WIDTH = 4, 1
"""How far is guessed, and how many tokens for each position, unless somebody chooses."""


class Tau:
    """Counts, fading, how often each candidate's draw was the token that came."""

    def __init__(self) -> None:
        self._right = np.zeros(len(TAUS))
        self._right[TAUS.index(FIRST_TAU)] = 1.0

    @property
    def best(self) -> int:
        """Index of the candidate to draw with."""
        return int(self._right.argmax())

    def judge(self, sampled: Sequence[NDArray[np.int32]], truth: Sequence[Sequence[int]]) -> None:
        """Of every sequence `sampled` [positions, candidates] against the tokens that came there."""
        is_right = np.concatenate(sampled) == np.concatenate(truth)[:, None]
        # Those of one step count the same.
        self._right = self._right * FADE ** len(is_right) + is_right.sum(0)

    def state(self) -> list[float]:
        """What was counted."""
        return self._right.tolist()

    def restore(self, state: Sequence[float]) -> None:
        """Go on counting; what does not fit is left."""
        counts = np.asarray(state, np.float64)
        if counts.shape == self._right.shape and np.isfinite(counts).all():
            self._right = counts


class _Asked(NamedTuple):
    """A draft that has not been judged yet."""

    sampled: NDArray[np.int32]
    """[positions, candidates]"""
    taken: list[int]


@cache
def _warm_up_jit() -> None:
    """Compile now: in the middle of a call that would look like a drafter that costs more than it saves."""
    zeros = np.zeros(1, np.int64)
    given = (np.zeros((1, 1), np.float32), zeros, np.zeros(1, np.float32), 0, zeros.astype(np.uint64), zeros)
    room = (np.empty(1, np.float32), np.zeros((1, 1), np.int32), np.zeros((1, MAX_GUESS_WIDTH), np.int32))
    sample_drafts(*given, *room, np.zeros((1, MAX_GUESS_WIDTH), np.float32))


class EagleDrafter:
    """See `types.Drafter`."""

    name = "eagle"

    def __init__(self, eagle: Eagle | None = None, depth: int = DEPTH, width: int = WIDTH) -> None:
        self.depth, self.width = depth, width
        self.tau = Tau()
        self.is_awake = True
        """Asleep it drafts nothing and costs nothing; what passes by in the meantime it never sees."""
        self._layer: EagleLayer | None = None
        self._eagle = eagle
        self._decoder: Decoder | None = None
        self._cache: Any = None
        self._asked: dict[int, _Asked] = {}

    def attach(self, decoder: Decoder, cache: Any) -> None:
        """The engine that drafts are made for: `cache` has one layer more than the policy."""
        self._decoder, self._cache = decoder, cache
        if self._eagle is not None:
            self.use(self._eagle)

    def use(self, eagle: Eagle) -> None:
        """Draft with this version from now on. What older ones have cached stays, and is no worse than theirs."""
        self._eagle = eagle
        if self._decoder is None or (self._layer is not None and self._layer.take(eagle)):
            return
        self._layer = EagleLayer(eagle, self._decoder)
        self._ids = eagle.draft_ids.cpu().numpy()
        self._noise = np.empty(eagle.config.vocab_size, np.float32)
        _warm_up_jit()

    @property
    def network(self) -> Eagle | None:
        """The version in use."""
        return self._eagle

    @property
    def version(self) -> int | None:
        """Of the network in use."""
        return None if self._eagle is None else self._eagle.version

    @property
    def layer(self) -> EagleLayer | None:
        """The network beside the policy; None while there is none, or it sleeps."""
        return self._layer if self.is_awake else None

    @property
    def chosen(self) -> int:
        """Which of the candidates for tau drafts go on from."""
        return self.tau.best

    def divisors(self, temperature: float) -> list[float]:
        """What logits are divided by, for every candidate."""
        return [tau * temperature for tau in TAUS]

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        if any(view.hidden is not None and not isinstance(view.hidden.states, Tensor) for view in views):
            return [self._guess(view, budget) for view, budget in zip(views, budgets, strict=True)]
        drafts = [EMPTY_DRAFT] * len(views)
        depths = [self._room(view, budget) for view, budget in zip(views, budgets, strict=True)]
        order = sorted((i for i, depth in enumerate(depths) if depth > 0), key=lambda i: -depths[i])
        if order:
            chosen = [views[i] for i in order]
            given = ([depths[i] for i in order], [budgets[i] for i in order])
            for i, draft in zip(order, self._combs(chosen, *given), strict=True):
                drafts[i] = draft
        return drafts

    def _guess(self, view: SequenceView, budget: int) -> Draft:
        """What the machine has guessed by itself."""
        hidden = view.hidden
        if hidden is None or budget <= 0 or hidden.num_cached != len(view.token_ids) - 1:
            return EMPTY_DRAFT
        guessed: Guessed = hidden.states
        if hidden.entry >= guessed.num_entries:
            return EMPTY_DRAFT
        return self._comb(view.sequence_id, guessed.of(hidden.entry), budget)

    def recall(self, sequence_id: int, guessed: Guessed, entry: int, depth: int, width: int) -> Draft:
        """Guesses behind a sequence that are verified already, to be judged when it is known what came."""
        sampled, ranked, scores = guessed.of(entry)
        return self._comb(sequence_id, Guess(sampled[:depth], ranked[:depth], scores[:depth]), depth * width, width)

    def _room(self, view: SequenceView, budget: int) -> int:
        """How deep a draft may go: the last row is nobody's context and needs no slot of its own."""
        hidden = view.hidden
        if self.layer is None or hidden is None or budget <= 0 or hidden.num_cached != len(view.token_ids) - 1:
            return 0
        return min(budget, self.depth, MAX_GUESSES, len(hidden.pages) * self._cache.page_size - hidden.num_cached + 1)

    @torch.no_grad()
    def _combs(self, views: Sequence[SequenceView], depths: Sequence[int], budgets: Sequence[int]) -> list[Draft]:
        """One comb for each view; the deepest come first, so that those who are done drop off the end."""
        layer = self.layer
        assert layer is not None
        places = [view.hidden for view in views if view.hidden is not None]
        x = torch.stack([place.states[place.row] for place in places])
        tokens = np.array([view.token_ids[-1] for view in views], np.int64)
        keys = np.array([view.key for view in views], np.uint64)
        steps = np.array([len(view.token_ids) - view.prompt_length for view in views], np.int64)
        divisors, best = np.array(self.divisors(views[0].sampling.temperature), np.float32), self.chosen
        first = Rows.build(
            [SequenceRows([0], place.num_cached - 1, place.pages) for place in places], self._cache.page_size
        )
        sampled = np.zeros((max(depths), len(views), len(TAUS)), np.int32)
        ranked = np.zeros((max(depths), len(views), MAX_GUESS_WIDTH), np.int32)
        scores = np.zeros(ranked.shape, np.float32)
        for at in range(max(depths)):
            count = sum(depth > at for depth in depths)
            rows = _rows_behind(first, at, count)
            x, logits = layer.advance(x[:count], torch.from_numpy(tokens[:count]), rows, self._cache)
            found = (sampled[at], ranked[at], scores[at])
            sample_drafts(logits.numpy(), self._ids, divisors, best, keys, steps + at, self._noise, *found)
            tokens = ranked[at, :count, 0].astype(np.int64)
        guesses = [Guess(sampled[:depth, i], ranked[:depth, i], scores[:depth, i]) for i, depth in enumerate(depths)]
        return [
            self._comb(view.sequence_id, guess, budget)
            for view, guess, budget in zip(views, guesses, budgets, strict=True)
        ]

    def _comb(self, sequence_id: int, guess: Guess, budget: int, width: int | None = None) -> Draft:
        """The chain first, then what stands beside it from the first position on, as far as the budget goes."""
        depth = min(len(guess.ranked), budget)
        chain = guess.ranked[:depth, 0]
        self._asked[sequence_id] = _Asked(guess.sampled[:depth, : len(TAUS)], chain.tolist())
        beside = slice(1, min(self.width if width is None else width, MAX_GUESS_WIDTH))
        room = budget - depth
        if beside.stop <= 1 or room <= 0:
            return Draft(chain, range(-1, depth - 1), guess.scores[:depth, 0])
        tokens = np.concatenate([chain, guess.ranked[:depth, beside].ravel()[:room]])
        scores = np.concatenate([guess.scores[:depth, 0], guess.scores[:depth, beside].ravel()[:room]])
        return Draft(tokens, comb_parents(depth, beside.stop)[: len(tokens)], scores)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        sampled, came = [], []
        for verdict in verdicts:
            asked = self._asked.pop(verdict.sequence_id, None)
            if asked is not None:
                truth = list(verdict.token_ids[: len(asked.taken)])
                # A position is judged as long as all before it came true.
                num_right = next((i for i, token in enumerate(truth) if token != asked.taken[i]), len(truth) - 1)
                sampled.append(asked.sampled[: num_right + 1])
                came.append(truth[: num_right + 1])
        if sampled:
            self.tau.judge(sampled, came)

    def finish(self, sequence_id: int) -> None:
        self._asked.pop(sequence_id, None)

    def state(self) -> dict[str, Any]:
        """What it has found out by drafting. Its weights are kept by who trains them."""
        return {"tau": self.tau.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with that."""
        self.tau.restore(state["tau"])


@cache
def comb_parents(depth: int, width: int) -> tuple[int, ...]:
    """Of a chain of `depth` nodes, and then of `width` - 1 nodes beside each of them."""
    beside = (node - 1 for node in range(depth) for _ in range(width - 1))
    return (*range(-1, depth - 1), *beside)


def _rows_behind(first: Rows, at: int, count: int) -> Rows:
    """A row for each of the first sequences, `at` tokens behind the row it has in `first`."""
    if at == 0:
        return first
    contexts = first.contexts[:count] + np.int32(at)
    return Rows(
        first.token_ids[:count],
        contexts,
        first.parents[:count],
        first.row_starts[: count + 1],
        contexts,
        first.is_tree[:count],
        first.page_tables[:count],
        first.page_size,
        first.num_pages[:count],
    )
