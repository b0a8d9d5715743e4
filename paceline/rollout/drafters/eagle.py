"""The `eagle` drafter: a small network that reads the policy's hidden states and samples with the policy's own noise.

A drafted token is argmax(log q / tau + gumbel(key, position, id)): if q is close to the policy's distribution, the same
noise makes both sample the same token, at any temperature. tau is fitted while drafting: the one of a few candidates
whose samples are accepted most often. A greedy drafter is the limit tau -> 0, and one of the candidates.

A draft is a comb: a chain of first choices and, if the shape is wide, the runners-up under the same noise beside each
of them, as leaves. Those cost rows but no further pass of the network.

The engine attaches it to its decoder and cache; `spot/` may give it new versions (`use`) at any time. Without a version
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
from paceline.rollout.drafters.model_drafter import GuessShape, Hidden, comb_parents

GREEDY = 0.0
TAUS = (GREEDY, 0.5, 0.7, 0.85, 1.0, 1.2)
"""Candidates. Values far above 1 would only suit an overconfident drafter, which soft targets do not produce."""
FIRST_TAU = 1.0
FADE = 0.999
"""Decay of the counts per judged token."""
SHAPE = GuessShape(depth=4, width=1)
"""The default shape."""


class Tau:
    """Decaying counts of how often each candidate sampled the emitted token."""

    def __init__(self) -> None:
        self._right = np.zeros(len(TAUS))
        self._right[TAUS.index(FIRST_TAU)] = 1.0

    @property
    def best(self) -> int:
        """Index of the candidate to sample with."""
        return int(self._right.argmax())

    def judge(self, sampled: Sequence[NDArray[np.int32]], truth: Sequence[Sequence[int]]) -> None:
        """Compare every sequence's `sampled` [positions, candidates] with the emitted tokens."""
        is_right = np.concatenate(sampled) == np.concatenate(truth)[:, None]
        # Tokens of one step have the same weight.
        self._right = self._right * FADE ** len(is_right) + is_right.sum(0)

    def state(self) -> list[float]:
        """The counts."""
        return self._right.tolist()

    def restore(self, state: Sequence[float]) -> None:
        """Continue from saved counts; counts that do not fit are ignored."""
        counts = np.asarray(state, np.float64)
        if counts.shape == self._right.shape and np.isfinite(counts).all():
            self._right = counts


PASS_MS = 0.2
"""One guess takes at least this long on an H200, however small the policy: launches and memory latency."""


class _Asked(NamedTuple):
    """A draft that has not been judged yet."""

    sampled: NDArray[np.int32]
    """[positions, candidates]"""
    taken: list[int]


class _Start(NamedTuple):
    """Where a draft made on the host starts."""

    number: int
    view: SequenceView
    place: Hidden
    state: Tensor
    depth: int


@cache
def _warm_up_jit() -> None:
    """Compile now: in the middle of a call, the drafter would look as if it cost more than it saves."""
    zeros = np.zeros(1, np.int64)
    given = (np.zeros((1, 1), np.float32), zeros, np.zeros(1, np.float32), 0, zeros.astype(np.uint64), zeros)
    room = (np.empty(1, np.float32), np.zeros((1, 1), np.int32), np.zeros((1, MAX_GUESS_WIDTH), np.int32))
    sample_drafts(*given, *room, np.zeros((1, MAX_GUESS_WIDTH), np.float32))


class EagleDrafter:
    """See `model_drafter.ModelDrafter`."""

    name = "eagle"

    def __init__(self, eagle: Eagle | None = None, shape: GuessShape = SHAPE) -> None:
        self.shape = shape
        self.pass_ms = 0.0
        self.tau = Tau()
        self._is_awake = True
        self._layer: EagleLayer | None = None
        self._eagle = eagle
        self._decoder: Decoder | None = None
        self._cache: Any = None
        self._asked: dict[int, _Asked] = {}

    def attach(self, decoder: Decoder, cache: Any) -> None:
        self._decoder, self._cache = decoder, cache
        self.pass_ms = PASS_MS if decoder.ops.device.startswith("cuda") else 0.0
        if self._eagle is not None:
            self.use(self._eagle)

    def use(self, eagle: Eagle) -> None:
        """See `ModelDrafter.use`. Entries cached by older versions stay; they are no worse than before."""
        self._eagle = eagle
        if self._decoder is None or (self._layer is not None and self._layer.take(eagle)):
            return
        self._layer = EagleLayer(eagle, self._decoder)
        self._ids = eagle.draft_ids.cpu().numpy()
        self._noise = np.empty(eagle.config.vocab_size, np.float32)
        _warm_up_jit()

    @property
    def network(self) -> Eagle | None:
        return self._eagle

    @property
    def version(self) -> int | None:
        return None if self._eagle is None else self._eagle.version

    @property
    def is_awake(self) -> bool:
        return self._is_awake

    def wake(self) -> None:
        self._is_awake = True

    def sleep(self) -> None:
        self._is_awake = False

    @property
    def layer(self) -> EagleLayer | None:
        return self._layer if self._is_awake else None

    @property
    def chosen(self) -> int:
        return self.tau.best

    def divisors(self, temperature: float) -> list[float]:
        return [tau * temperature for tau in TAUS]

    def guess(
        self,
        views: Sequence[SequenceView],
        hidden: Sequence[Hidden | None],
        budgets: Sequence[int],
        shape: GuessShape,
    ) -> list[Draft]:
        drafts, layer = [EMPTY_DRAFT] * len(views), self.layer
        starts: list[_Start] = []
        for i, (view, place, budget) in enumerate(zip(views, hidden, budgets, strict=True)):
            if place is None or budget <= 0:
                continue
            if place.guessed is not None:
                if place.entry < place.guessed.num_entries:
                    drafts[i] = self._comb(view.sequence_id, place.guessed.of(place.entry), budget, shape.width)
            elif place.states is not None and layer is not None:
                # No other row attends to the last one, so it needs no cache slot.
                room = len(place.pages) * self._cache.page_size - place.num_cached + 1
                depth = min(budget, shape.depth, MAX_GUESSES, room)
                if depth > 0:
                    starts.append(_Start(i, view, place, place.states[place.row], depth))
        if layer is not None and starts:
            starts.sort(key=lambda start: -start.depth)
            for start, guess in zip(starts, self._advance(layer, starts), strict=True):
                drafts[start.number] = self._comb(start.view.sequence_id, guess, budgets[start.number], shape.width)
        return drafts

    def recall(self, sequence_id: int, guessed: Guessed, entry: int, shape: GuessShape) -> Draft:
        sampled, ranked, scores = guessed.of(entry)
        depth, width = shape
        return self._comb(sequence_id, Guess(sampled[:depth], ranked[:depth], scores[:depth]), depth * width, width)

    @torch.no_grad()
    def _advance(self, layer: EagleLayer, starts: Sequence[_Start]) -> list[Guess]:
        """Make guesses on the host; the deepest come first, so that finished ones drop off the end."""
        views, depths = [start.view for start in starts], [start.depth for start in starts]
        x = torch.stack([start.state for start in starts])
        tokens = np.array([view.token_ids[-1] for view in views], np.int64)
        keys = np.array([view.key for view in views], np.uint64)
        steps = np.array([len(view.token_ids) - view.prompt_length for view in views], np.int64)
        divisors, best = np.array(self.divisors(views[0].sampling.temperature), np.float32), self.chosen
        first = Rows.build(
            [SequenceRows([0], start.place.num_cached - 1, start.place.pages) for start in starts],
            self._cache.page_size,
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
        return [Guess(sampled[:depth, i], ranked[:depth, i], scores[:depth, i]) for i, depth in enumerate(depths)]

    def _comb(self, sequence_id: int, guess: Guess, budget: int, width: int) -> Draft:
        """The chain first, then the runners-up from the first position on, as far as the budget goes."""
        depth = min(len(guess.ranked), budget)
        chain = guess.ranked[:depth, 0]
        self._asked[sequence_id] = _Asked(guess.sampled[:depth, : len(TAUS)], chain.tolist())
        beside = slice(1, min(width, MAX_GUESS_WIDTH))
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
                # A position is judged only if all before it were right.
                num_right = next((i for i, token in enumerate(truth) if token != asked.taken[i]), len(truth) - 1)
                sampled.append(asked.sampled[: num_right + 1])
                came.append(truth[: num_right + 1])
        if sampled:
            self.tau.judge(sampled, came)

    def finish(self, sequence_id: int) -> None:
        self._asked.pop(sequence_id, None)

    def state(self) -> dict[str, Any]:
        """What it has learned by drafting. Its trainer keeps the weights."""
        return {"tau": self.tau.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tau.restore(state["tau"])

    def release(self) -> None:
        """Do nothing: the next call needs the weights, and the cache is the policy's."""


def _rows_behind(first: Rows, at: int, count: int) -> Rows:
    """One row for each of the first `count` sequences, `at` tokens after its row in `first`."""
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
