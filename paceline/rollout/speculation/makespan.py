"""Makespan estimates: how long each response will continue, and how likely it is to finish last in its batch.

A batch takes as long as its slowest sequence, so a saved token shortens it only if the sequence that finishes last
saves it. Nobody knows which one that is. `Lengths` estimates how long a sequence will continue; `last_shares` turns
that into the probability that it finishes last. The engine weighs draft nodes by it (`rollout/token_value.py`), so that
rows go to the sequences likely to keep the others waiting. Estimates affect time only; they never decide a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.types import Float64Array

FIRST_MEAN = 256.0
"""The assumed length of a response before any was observed."""
LEAN = 2.0
"""The weight of a prior, in endings: all prompts are the prior of one prompt, younger ages that of an age."""
FADE = 0.7
"""The share of observations, of a prompt or of all, that survives the start of the next call."""
MOST_PROMPTS = 2**15
"""How many prompts' lengths are remembered, the latest to end; some 200 bytes each."""
AGE_STARTS = np.concatenate(([0], 16 << np.arange(16)))
"""Where the age classes of a response begin, in tokens: each is as long as all before it."""
POINTS = 128
"""The number of times at which the race is evaluated."""
LIKELY = np.concatenate((np.arange(0.0, 3.0, 0.1), np.arange(3.0, 9.0, 0.5), np.arange(9.0, 15.0)))
"""Times by which something that takes 1 on average may have finished."""
NEVER, SHORTEST = 1e-30, 1e-3


class _Seen(NamedTuple):
    """Of one prompt: tokens, endings, and the endings expected had it been like all prompts."""

    tokens: float = 0.0
    endings: float = 0.0
    foreseen: float = 0.0

    def faded(self) -> _Seen:
        return _Seen(*(FADE * value for value in self))


class Lengths:
    """Estimates how many more tokens a response will have, by its age and prompt: tokens seen over endings seen.

    The hazard of ending with the next token is counted by age, because what has gone on for long often goes on for
    longer, and multiplied by a factor of the prompt. Unfinished responses count as tokens without an ending, so a
    prompt whose samples all go on is expected to go on.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(len(AGE_STARTS))
        self._endings = np.zeros(len(AGE_STARTS))
        self._tokens[0], self._endings[0] = FIRST_MEAN, 1.0
        self._prompts: dict[int, _Seen] = {}

    def begin(self) -> None:
        """Start a call: past observations of all prompts count less than those to come."""
        self._tokens *= FADE
        self._endings *= FADE

    def ask(self, prompt_ids: Collection[int]) -> None:
        """Note the prompts of the call: past observations of each of them count less."""
        for prompt_id in self._prompts.keys() & prompt_ids:
            self._prompts[prompt_id] = self._prompts[prompt_id].faded()

    def observe(self, prompt_id: int, num_tokens: int, has_ended: bool) -> None:
        """Record a finished response, which ended by itself or was cut off."""
        spent = _spent(np.array([num_tokens]))[0]
        foreseen = float(spent @ self._risks(self._tokens))
        self._tokens += spent
        self._endings[_age(max(num_tokens - 1, 0))] += has_ended
        tokens, endings, before = self._prompts.pop(prompt_id, _Seen())
        self._prompts[prompt_id] = _Seen(tokens + num_tokens, endings + has_ended, before + foreseen)
        if len(self._prompts) > MOST_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def mean_left(self, prompt_ids: Sequence[int], num_made: Sequence[int]) -> Float64Array:
        """Expected remaining tokens of unfinished responses, at the hazard of their ages."""
        made = np.asarray(num_made, np.int64)
        spent = _spent(made)
        risks = self._risks(self._tokens + spent.sum(0))
        foreseen: dict[int, float] = {}
        for prompt_id, own in zip(prompt_ids, (spent @ risks).tolist(), strict=True):
            foreseen[prompt_id] = foreseen.get(prompt_id, 0.0) + own
        factors = {prompt_id: self._factor(prompt_id, running) for prompt_id, running in foreseen.items()}
        return 1 / (risks[_age(made)] * np.array([factors[prompt_id] for prompt_id in prompt_ids]))

    def expected(self, prompt_id: int) -> float:
        """Expected length of a response that has not started."""
        mean = self._tokens.sum() / max(self._endings.sum(), FADE)
        seen = self._prompts.get(prompt_id, _Seen())
        return float((seen.tokens + LEAN * mean) / (seen.endings + LEAN))

    def _factor(self, prompt_id: int, running: float) -> float:
        """How much likelier to end a prompt's responses are than others."""
        seen = self._prompts.get(prompt_id, _Seen())
        return (seen.endings + LEAN) / (seen.foreseen + running + LEAN)

    def _risks(self, tokens: Float64Array) -> Float64Array:
        """By age, the probability that the next token is the last; with few observations, as in the age before."""
        risk = max(self._endings.sum(), FADE) / max(tokens.sum(), 1.0)
        risks = np.empty(len(tokens))
        for age, (num_tokens, num_endings) in enumerate(zip(tokens.tolist(), self._endings.tolist(), strict=True)):
            risk = (num_endings + LEAN) / (num_tokens + LEAN / risk)
            risks[age] = risk
        return risks


def _age(num_tokens: Any) -> Any:
    return np.searchsorted(AGE_STARTS, num_tokens, side="right") - 1


def _spent(num_tokens: NDArray[np.int64]) -> Float64Array:
    """The number of tokens each response has in each age class."""
    ends = np.append(AGE_STARTS[1:], np.iinfo(np.int64).max)
    return (np.clip(num_tokens[:, None], AGE_STARTS, ends) - AGE_STARTS).astype(np.float64)


def last_shares(known: ArrayLike, mean: ArrayLike, most: ArrayLike, chance: ArrayLike = 1.0) -> Float64Array:
    """The probability of each sequence to finish last; they sum to 1.

    Sequence i still takes `known[i]`, then, with probability `chance[i]`, an exponentially distributed time with mean
    `mean[i]`, and at most `most[i]` in all.
    """
    chance = np.broadcast_to(np.asarray(chance, np.float64), np.shape(known))
    known, mean, most, chance = (np.asarray(values, np.float64)[:, None] for values in (known, mean, most, chance))
    if not len(known):
        return np.zeros(0)
    mean = np.maximum(mean, SHORTEST)
    # Evaluate the race when a finish is likely: evenly spaced among the times at which each sequence may finish.
    hours = np.sort(np.minimum(known + mean * LIKELY, most), axis=None)
    times = np.append(hours[np.linspace(0, len(hours) - 1, POINTS).astype(int)], most.max())[None, :]
    over = np.where(times < known, 0.0, 1 - chance * np.exp(-np.maximum(times - known, 0.0) / mean))
    over = np.where(times >= most, 1.0, over)
    # A sequence is last if it finishes in an interval by whose end all others have finished.
    logs = np.log(np.maximum(over, NEVER))
    others = np.exp(logs.sum(0, keepdims=True) - logs)
    shares = (np.diff(over, axis=1, prepend=0.0) * others).sum(1)
    total = shares.sum()
    return shares / total if total > 0 else np.full(len(shares), 1.0 / len(shares))
