"""Texts kept between requests: no token depends on them, they are bounded, and their pages are accounted for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.types import Request, Rollout, Sampling
from paceline.model.decoder import Decoder
from paceline.rollout.engine import Engine
from paceline.rollout.prefix_cache import PrefixCache
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

SAMPLING = Sampling(max_new_tokens=40, seed=5, ignore_eos=True)
NUM_TALKS, NUM_TURNS = 4, 4


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return Engine.from_pretrained(tiny_model, drafter=None, settings=EngineSettings(kv_tokens=64)).decoder


def make_engine(decoder: Decoder, drafter: str | None = None, kv_tokens: int = 4096) -> Engine:
    settings = EngineSettings(kv_tokens=kv_tokens, max_sequences=6, max_rows=32, prefill_chunk=16)
    return Engine(decoder, None, drafter, settings, BudgetSettings(always=True))


def first_prompts() -> list[list[int]]:
    """Two talks begin alike, so that they share pages while both are open."""
    chance = random.Random(3)
    start = [chance.randrange(3, 300) for _ in range(40)]
    return [[*start, number // 2] for number in range(NUM_TALKS)]


def talks(decoder: Decoder) -> Iterator[list[Rollout]]:
    """Turn by turn, from an engine that keeps nothing."""
    engine, prompts = make_engine(decoder), first_prompts()
    for turn in range(NUM_TURNS):
        rollouts = engine.generate(prompts, SAMPLING, draws=[turn] * NUM_TALKS)
        prompts = [next_prompt(p, r, turn) for p, r in zip(prompts, rollouts, strict=True)]
        yield rollouts


def next_prompt(prompt: list[int], rollout: Rollout, turn: int) -> list[int]:
    return [*prompt, *rollout.token_ids, 7, 8, turn, 9]


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[list[Rollout]]:
    return list(talks(decoder))


@pytest.mark.parametrize("drafter", [None, "ngram", "suffix"])
@pytest.mark.parametrize("kv_tokens", [4096, 512])
def test_a_conversation_is_the_same_with_its_pages_kept(
    decoder: Decoder, expected: list[list[Rollout]], drafter: str | None, kv_tokens: int
) -> None:
    """Bit for bit, also where there is room for two talks at a time and kept texts have to go."""
    engine, prompts = make_engine(decoder, drafter, kv_tokens), first_prompts()
    with engine.serve(SAMPLING, prefix_share=0.5) as serving:
        for turn in range(NUM_TURNS):
            serving.add(
                [Request(prompt, turn, prompt_index=i, request_id=f"{turn}-{i}") for i, prompt in enumerate(prompts)]
            )
            found = []
            while serving.has_work:
                found += serving.step()
                engine.check_integrity()
            found.sort(key=lambda rollout: rollout.prompt_index)
            assert [(r.token_ids, r.logprobs) for r in found] == [(r.token_ids, r.logprobs) for r in expected[turn]]
            prompts = [next_prompt(p, r, turn) for p, r in zip(prompts, found, strict=True)]
        if kv_tokens > 1000:
            assert engine.num_prefix_tokens >= NUM_TALKS * (NUM_TURNS - 1) * 64, "the turns before were found"
        serving.forget_prefixes()
        engine.check_integrity()
    engine.check_integrity()
    assert engine._scheduler._pool.num_free == engine._scheduler._pool.num_pages


def test_other_weights_find_nothing(decoder: Decoder, expected: list[list[Rollout]]) -> None:
    twin, prompts = decoder.copy(), first_prompts()
    engine = make_engine(twin)
    generator = torch.Generator().manual_seed(0)
    other = {name: w + 2e-2 * torch.randn(w.shape, generator=generator) for name, w in decoder.weights().items()}
    with engine.serve(SAMPLING, prefix_share=0.5) as serving:
        for draw in (0, 1):
            serving.add(
                [Request(prompt, draw, prompt_index=i, request_id=f"{draw}-{i}") for i, prompt in enumerate(prompts)]
            )
            found = [rollout for _ in iter(lambda: serving.has_work, False) for rollout in serving.step()]
            if draw == 0:
                serving.change_weights(lambda: twin.load_weights(other))
                kept = engine.num_prefix_tokens
    found.sort(key=lambda rollout: rollout.prompt_index)
    fresh = make_engine(twin).generate(prompts, SAMPLING, draws=[1] * NUM_TALKS)
    assert [rollout.token_ids for rollout in found] == [rollout.token_ids for rollout in fresh]
    assert engine.num_prefix_tokens - kept < NUM_TALKS * 40


def test_a_wrong_hit_would_be_seen(
    decoder: Decoder, expected: list[list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: pages of another text change the answer."""
    names = PrefixCache._names

    def of_length(self: PrefixCache, tokens: np.ndarray, salt: str) -> Iterator[bytes]:
        yield from names(self, np.zeros_like(tokens), salt)

    monkeypatch.setattr(PrefixCache, "_names", of_length)
    engine = make_engine(decoder)
    with engine.serve(SAMPLING, prefix_share=0.5) as serving:
        found = {}
        for prompt in ([9] * 64, first_prompts()[0]):
            serving.add([Request(prompt, 0)])
            while serving.has_work:
                found[prompt[0]] = serving.step()
    assert engine.num_prefix_tokens > 0
    assert found[first_prompts()[0][0]][0].token_ids != expected[0][0].token_ids


def test_another_salt_finds_nothing(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    with engine.serve(SAMPLING, prefix_share=0.5) as serving:
        for number, (salt, hits) in enumerate((("a", 0), ("b", 0), ("a", 32), ("b", 64))):
            serving.add([Request(first_prompts()[0], number, salt=salt)])
            while serving.has_work:
                serving.step()
            assert engine.num_prefix_tokens == hits


def test_what_it_holds_is_bounded_and_never_without_its_beginning() -> None:
    chance, cache, held = random.Random(0), PrefixCache(4, 10), set[int]()
    for page in range(0, 4000, 20):
        tokens = np.array([chance.randrange(2) for _ in range(chance.randrange(40))], np.int32)
        known = cache.find(tokens, "")
        assert set(known) <= held and len(known) <= len(tokens) // 4
        new, evicted = cache.keep(tokens, "", list(range(page, page + 20)))
        assert not held & set(new) and set(evicted) <= held | set(new)
        held = (held | set(new)) - set(evicted)
        assert held == set(cache.pages()) and len(cache) <= 10
        found = len(cache.find(tokens, ""))
        assert found == min(len(tokens) // 4, 10), "what was just kept is there, from its beginning on"
        if chance.random() < 0.2:
            held.discard(cache.evict()) if len(cache) else None
    assert set(cache.clear()) == held and not len(cache)
    assert PrefixCache(4, 0).keep(np.zeros(8, np.int32), "", [1, 2]) == ([], [])
