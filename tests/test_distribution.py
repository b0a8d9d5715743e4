"""What the sampler draws: the softmax, before and after truncation, and draws that know nothing of each other.

Seeds are fixed, so a result never changes by chance. Every check is shown to fail on a sampler that deserves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from paceline.core import noise
from paceline.core.types import Sampling
from paceline.model.ops.native import NativeOps

VOCAB = 12
NUM_DRAWS = 40_000
TEMPERATURES = (0.6, 1.0, 1.3)
LOGITS = np.random.default_rng(3).normal(0, 1.2, VOCAB).astype(np.float32)
LIMIT = 1e-4
"""A p-value below this is a failure."""

Keys = NDArray[np.uint64]
Tokens = NDArray[np.int32]


def keys_of(draws: range | list[int], seed: int = 0, sample: int = 0) -> Keys:
    return np.array([noise.derive_key(seed, "train", draw, sample) for draw in draws], np.uint64)


@pytest.fixture(scope="module")
def keys() -> Keys:
    """One key per use of a prompt."""
    return keys_of(range(NUM_DRAWS))


def draw_tokens(keys: Keys, sampling: Sampling, step: int | NDArray[np.int64] = 0) -> Tokens:
    """One token per key from the same logits."""
    logits = torch.from_numpy(LOGITS).repeat(len(keys), 1)
    steps = np.broadcast_to(np.asarray(step, np.int64), len(keys)).copy()
    return NativeOps().sample(logits, sampling, keys, steps).tokens


def softmax(temperature: float, kept: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    if kept is not None:
        weights = np.where(kept, weights, 0)
    return weights / weights.sum()


def fit(tokens: Tokens, expected: NDArray[np.float64]) -> float:
    """p-value of these tokens under the expected probabilities; 0 when one was drawn that cannot be."""
    counts = np.bincount(tokens, minlength=VOCAB)
    if counts[expected == 0].any():
        return 0.0
    possible = expected > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[possible], expected[possible] * len(tokens)).pvalue)


# --- the softmax ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_draws_follow_the_softmax(keys: Keys, temperature: float) -> None:
    tokens = draw_tokens(keys, Sampling(temperature=temperature))
    assert fit(tokens, softmax(temperature)) > LIMIT
    assert fit(tokens, softmax(temperature * 1.1)) < LIMIT, "the check must see a temperature that is a tenth off"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_tokens_of_one_response_follow_the_softmax(temperature: float) -> None:
    keys = np.full(NUM_DRAWS, noise.derive_key(11, "eval", 4, 2), np.uint64)
    tokens = draw_tokens(keys, Sampling(temperature=temperature), np.arange(NUM_DRAWS))
    assert fit(tokens, softmax(temperature)) > LIMIT


def test_rare_tokens_are_drawn_as_often_as_they_should(keys: Keys) -> None:
    logits = torch.full((NUM_DRAWS, 2000), -4.0)
    logits[:, 1234] = 6.0
    steps = np.zeros(NUM_DRAWS, np.int64)
    tokens = NativeOps().sample(logits, Sampling(), keys, steps).tokens
    share = 1999 / (1999 + np.exp(10))
    num_rare = int((tokens != 1234).sum())
    assert abs(num_rare - NUM_DRAWS * share) < 4 * np.sqrt(NUM_DRAWS * share * (1 - share))
    halves = [(tokens < 1234).sum(), (tokens > 1234).sum()]
    assert stats.chisquare(halves, np.array([1234, 765]) / 1999 * num_rare).pvalue > LIMIT


def biased_by_shared_noise(keys: Keys) -> Tokens:
    """A sampler that uses one number for two neighbouring ids."""
    ids = np.arange(VOCAB) // 2
    return np.array([np.argmax(LOGITS + noise.gumbel(int(key), 0, ids)) for key in keys], np.int32)


def biased_by_temperature(keys: Keys) -> Tokens:
    return draw_tokens(keys, Sampling(temperature=1.1))


def biased_by_uniform_noise(keys: Keys) -> Tokens:
    """A sampler whose noise has the spread of Gumbel but not its shape."""
    uniform = np.random.default_rng(0).uniform(-1, 1, (len(keys), VOCAB)) * np.pi / np.sqrt(2)
    return np.argmax(LOGITS + uniform, axis=1).astype(np.int32)


@pytest.mark.parametrize("biased", [biased_by_shared_noise, biased_by_temperature, biased_by_uniform_noise])
def test_a_biased_sampler_does_not_pass(keys: Keys, biased: Callable[[Keys], Tokens]) -> None:
    assert fit(biased(keys), softmax(1.0)) < LIMIT


# --- truncation -------------------------------------------------------------------------------------------------------


def kept_ids(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.bool_]:
    """Which ids survive, by the definitions: the best k, then the fewest with mass p, then those near the best."""
    kept = np.ones(VOCAB, np.bool_)
    if top_k:
        kept = np.argsort(np.argsort(-LOGITS)) < top_k
    probabilities = softmax(temperature, kept)
    if top_p < 1:
        above = np.array([probabilities[probabilities > p].sum() for p in probabilities])
        kept &= above < top_p
    return kept & (probabilities >= min_p * probabilities.max())


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 4},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"min_p": 0.5},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 8, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncated_draws_follow_the_renormalised_softmax(
    keys: Keys, truncation: dict[str, Any], temperature: float
) -> None:
    kept = kept_ids(temperature, **truncation)
    assert kept.any() and not kept.all()
    tokens = draw_tokens(keys[:20_000], Sampling(temperature=temperature, **truncation))
    assert fit(tokens, softmax(temperature, kept)) > LIMIT
    assert fit(tokens, softmax(temperature)) < LIMIT, "the check must see that tokens are missing"


# --- independence -----------------------------------------------------------------------------------------------------

NEIGHBOURS: dict[str, Callable[[range], tuple[Keys, Keys, int]]] = {
    "samples of a group": lambda draws: (keys_of(draws), keys_of(draws, sample=1), 0),
    "neighbouring prompts": lambda draws: (keys_of(draws), keys_of(range(draws.start + 1, draws.stop + 1)), 0),
    "neighbouring seeds": lambda draws: (keys_of(draws), keys_of(draws, seed=1), 0),
    "neighbouring positions": lambda draws: (keys_of(draws), keys_of(draws), 1),
    "next seed, previous prompt": lambda draws: (
        keys_of(range(draws.start + 1, draws.stop + 1)),
        keys_of(draws, seed=1),
        0,
    ),
    "next sample, previous position": lambda draws: (keys_of(draws, sample=1), keys_of(draws), 1),
}


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """In standard deviations of what independent numbers show."""
    return float(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size))


def association(a: Tokens, b: Tokens) -> float:
    """p-value of the hypothesis that the two tokens of each pair are independent."""
    table = np.zeros((VOCAB, VOCAB))
    np.add.at(table, (a, b), 1)
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_uncorrelated(name: str) -> None:
    first, second, step = NEIGHBOURS[name](range(20_000))
    a, b = draw_tokens(first, Sampling()), draw_tokens(second, Sampling(), step)
    assert correlation(a, b) < 4
    assert association(a, b) > LIMIT


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_noise_of_neighbours_is_uncorrelated(name: str) -> None:
    first, second, step = NEIGHBOURS[name](range(2000))
    ids = np.arange(100)
    a = np.stack([noise.gumbel(int(key), 0, ids) for key in first])
    b = np.stack([noise.gumbel(int(key), step, ids) for key in second])
    assert correlation(a, b) < 4
    assert correlation(a[:, 1:], b[:, :-1]) < 4, "nor is one the other, shifted by an id"


def test_keys_that_are_added_do_not_pass() -> None:
    draws = np.arange(20_000)

    def added(seed: int, draw: NDArray[np.int64]) -> Keys:
        return (seed * 1000 + draw).astype(np.uint64)

    a, b = draw_tokens(added(1, draws), Sampling()), draw_tokens(added(0, draws + 1000), Sampling())
    assert correlation(a, b) > 4 and association(a, b) < LIMIT


def test_a_slight_dependence_does_not_pass() -> None:
    first, second, _ = NEIGHBOURS["samples of a group"](range(20_000))
    second[::10] = first[::10]
    a, b = draw_tokens(first, Sampling()), draw_tokens(second, Sampling())
    assert correlation(a, b) > 4 and association(a, b) < LIMIT


def test_a_group_of_many_samples_covers_the_softmax() -> None:
    keys = np.array([noise.derive_key(0, "train", draw, s) for draw in range(20) for s in range(500)], np.uint64)
    tokens = draw_tokens(keys, Sampling()).reshape(20, 500)
    p_values = [fit(group.astype(np.int32), softmax(1.0)) for group in tokens]
    assert min(p_values) > LIMIT
    assert stats.kstest(p_values, "uniform").pvalue > LIMIT, "groups that fit too well are not independent draws"
