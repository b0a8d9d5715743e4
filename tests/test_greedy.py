"""Greedy decoding against `transformers.generate`, every family: the same token ids, with and without speculation.

transformers runs one prompt at a time, so no padding of its own enters the comparison.
"""

from __future__ import annotations

import functools
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from model_factory import FAMILIES, ModelSpec, build

from paceline.core.types import Rollout, Sampling
from paceline.model.checkpoint import load_weights
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

MAX_NEW_TOKENS = 48
LOGPROB_TOLERANCE = 1e-4
TIE = 1e-5
"""Two top logits nearer than this may change places between two correct float32 computations."""
DRAFTERS = (None, "ngram", "suffix")
SPECS = {
    family: ModelSpec(family=family, vocab_size=97, hidden_size=48, rope=rope, is_tied=is_tied, seed=seed)
    for family, rope, is_tied, seed in zip(
        FAMILIES, ("llama3", "default", "theta", "yarn"), (False, True, False, False), (3, 1, 4, 2), strict=True
    )
}


@dataclass(frozen=True)
class Reference:
    """One response of transformers."""

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    """Distance between the two largest logits, per token."""


@functools.cache
def ragged_prompts(vocab_size: int) -> list[list[int]]:
    """From one token to more than two pages of them."""
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (1, 2, 9, 33, 70)]


@functools.cache
def decoder_and_references(family: str) -> tuple[Decoder, list[Reference]]:
    spec = SPECS[family]
    with tempfile.TemporaryDirectory() as name:
        model = build(spec, Path(name))
        config = load_config(Path(name))
        decoder = Decoder(config, {key: weight.clone() for key, weight in load_weights(Path(name), config).items()})
    return decoder, [reference_of(model, prompt) for prompt in ragged_prompts(spec.vocab_size)]


@torch.no_grad()
def reference_of(model: torch.nn.Module, prompt: list[int]) -> Reference:
    made = model.generate(  # type: ignore[operator]  # transformers adds it to the module
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = made.sequences[0, len(prompt) :].tolist()
    logits = torch.cat(made.logits).float()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    best = logits.topk(2).values
    return Reference(token_ids, logprobs.tolist(), (best[:, 0] - best[:, 1]).tolist())


@functools.cache
def rollouts_of(family: str, drafter: str | None) -> tuple[list[Rollout], float]:
    """What the engine makes of the ragged prompts in one batch, and its accept length."""
    decoder, _ = decoder_and_references(family)
    budget = BudgetSettings(always=True)
    engine = Engine(decoder, None, drafter, EngineSettings(kv_tokens=2048, prefill_chunk=32), budget)
    rollouts = engine.generate(
        ragged_prompts(SPECS[family].vocab_size), Sampling(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS)
    )
    return rollouts, engine.stats.accept_length


def agreed_length(rollout: Rollout, reference: Reference) -> int:
    """Tokens up to the first difference, which must be a tie; all of them where there is none."""
    for position, (own, other) in enumerate(zip(rollout.token_ids, reference.token_ids, strict=False)):
        if own != other:
            assert reference.gaps[position] < TIE, f"prompt {rollout.prompt_index}, position {position}"
            return position
    assert len(rollout.token_ids) == len(reference.token_ids)
    return len(rollout.token_ids)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, drafter: str | None) -> None:
    _, references = decoder_and_references(family)
    rollouts, _ = rollouts_of(family, drafter)
    for rollout, reference in zip(rollouts, references, strict=True):
        agreed = agreed_length(rollout, reference)
        assert rollout.logprobs[:agreed] == pytest.approx(reference.logprobs[:agreed], rel=0, abs=LOGPROB_TOLERANCE)


def test_greedy_reaches_the_length_limit_and_end_tokens() -> None:
    """The comparison above sees responses of both kinds, and hardly ever stops at a tie."""
    lengths = [len(r.token_ids) for family in FAMILIES for r in decoder_and_references(family)[1]]
    ended = [r.finish_reason for family in FAMILIES for r in rollouts_of(family, None)[0]]
    agreed = sum(
        agreed_length(rollout, reference)
        for family in FAMILIES
        for rollout, reference in zip(rollouts_of(family, None)[0], decoder_and_references(family)[1], strict=True)
    )
    assert max(lengths) == MAX_NEW_TOKENS and set(ended) == {"stop", "length"}
    assert agreed >= 0.95 * sum(lengths)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_greedy_with_a_drafter_accepts_drafts(drafter: str) -> None:
    """The equality is not that of an idle drafter."""
    assert max(rollouts_of(family, drafter)[1] for family in FAMILIES) > 1.1
