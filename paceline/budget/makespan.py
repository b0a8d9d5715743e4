"""Who decides when a call ends: how long responses will go on, and how likely each is to be the last of its batch.

A batch takes as long as its slowest sequence, so a token saved shortens it only where it is saved for the one that ends
last. Nobody knows which that is. `Lengths` says how long a sequence is expected to go on, `last_shares` turns that into
the probability that it is the last. The engine weighs draft nodes by it (`engine/urgency.py`), so that rows go to
whoever is likely to keep the others waiting. Estimates steer time only; they never decide a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FIRST_MEAN = 256.0
"""Tokens a response is believed to have before any was seen."""
LEAN = 2.0
"""How many endings the common mean counts for in a prompt's own."""
FADE = 0.7
"""How much of what was seen of a prompt, or of all, is kept when the next call begins."""
MOST_PROMPTS = 2**15
"""Prompts whose lengths are remembered, those that ended last; some 200 bytes each."""
POINTS = 128
"""At how many times the race is looked at."""
LIKELY = np.concatenate((np.arange(0.1, 3.0, 0.1), np.arange(3.0, 9.0, 0.5), np.arange(9.0, 15.0)))
"""Times at which something that takes 1 on average may be over."""
NEVER, SHORTEST = 1e-30, 1e-3


class Lengths:
    """How many tokens responses go on for, by prompt: tokens seen, divided by endings seen.

    That is right for responses that may end with any token, one as likely as the other, and it counts those that have
    not ended yet for what they are: tokens without an end. So a prompt whose siblings all go on is expected to go on.
    """

    def __init__(self) -> None:
        self._tokens, self._endings = FIRST_MEAN, 1.0
        self._prompts: dict[int, tuple[float, float]] = {}

    def begin(self, prompt_ids: set[int]) -> None:
        """A call for these prompts: what was seen of them, and of all, counts less than what will be."""
        self._tokens, self._endings = FADE * self._tokens, FADE * self._endings
        for prompt_id in prompt_ids & self._prompts.keys():
            tokens, endings = self._prompts[prompt_id]
            self._prompts[prompt_id] = (FADE * tokens, FADE * endings)

    def observe(self, prompt_id: int, num_tokens: int, has_ended: bool) -> None:
        """A response is over, by itself or because it was cut."""
        self._tokens += num_tokens
        self._endings += has_ended
        tokens, endings = self._prompts.pop(prompt_id, (0.0, 0.0))
        self._prompts[prompt_id] = (tokens + num_tokens, endings + has_ended)
        if len(self._prompts) > MOST_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def mean_left(self, running: Mapping[int, int]) -> dict[int, float]:
        """Tokens expected to come, of any response of these prompts; given how many have come of unfinished ones."""
        mean = (self._tokens + sum(running.values())) / max(self._endings, FADE)
        found = {}
        for prompt_id, num_tokens in running.items():
            tokens, endings = self._prompts.get(prompt_id, (0.0, 0.0))
            found[prompt_id] = (tokens + num_tokens + LEAN * mean) / (endings + LEAN)
        return found

    def expected(self, prompt_id: int) -> float:
        """Length of a response that has not begun."""
        return self.mean_left({prompt_id: 0})[prompt_id]


def last_shares(known: ArrayLike, mean: ArrayLike, most: ArrayLike) -> Floats:
    """The probability of each sequence to be the last; they add up to 1.

    Sequence i still takes `known[i]`, then as long as chance has it, `mean[i]` on average, `most[i]` at most in all.
    """
    known, mean, most = (np.asarray(values, np.float64)[:, None] for values in (known, mean, most))
    if not len(known):
        return np.zeros(0)
    mean = np.maximum(mean, SHORTEST)
    # Looked at when somebody is likely to end: evenly spaced among the hours at which each of them may.
    hours = np.sort(np.minimum(known + mean * LIKELY, most), axis=None)
    times = np.append(hours[np.linspace(0, len(hours) - 1, POINTS).astype(int)], most.max())[None, :]
    over = np.where(times < known, 0.0, -np.expm1(-np.maximum(times - known, 0.0) / mean))
    over = np.where(times >= most, 1.0, over)
    # It is the last if it ends in an interval by whose end all others are over.
    logs = np.log(np.maximum(over, NEVER))
    others = np.exp(logs.sum(0, keepdims=True) - logs)
    shares = (np.diff(over, axis=1, prepend=0.0) * others).sum(1)
    total = shares.sum()
    return shares / total if total > 0 else np.full(len(shares), 1.0 / len(shares))
