"""Adapters: gradients against autograd, the engine's bits, resume, and the same numbers from any worker."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_factory import ModelSpec, build
from test_learner import SAMPLING, as_samples, assert_equal_bits, even_share, generate, make_engine
from torch import Tensor

from paceline.model.backward.packed import Text
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.lora.adapter import A, B, find_modules
from paceline.rl.learner import Learner
from paceline.rl.lora import LoraLearner
from paceline.rl.settings import RlSettings

SPECS = {
    "qwen3": ModelSpec(
        family="qwen3",
        vocab_size=61,
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
        max_positions=128,
        is_tied=True,
    ),
    "qwen2": ModelSpec(
        family="qwen2", vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=2, max_positions=128
    ),
}
LORA = {"rank": 4, "alpha": 8.0}
SETTINGS = RlSettings(lr=2e-2, steps=12, pack_tokens=90, max_grad_norm=0.5, lora=LORA)
TEXTS = [Text(np.arange(3, 20, dtype=np.int32), 4), Text(np.array([9, 8, 7, 50, 60, 2], np.int32), 1)]


@functools.cache
def parts_of(family: str) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    """Configuration, weights and the transformers model."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(SPECS[family], Path(folder))
        config = load_config(Path(folder))
        return config, {name: w.clone() for name, w in load_weights(Path(folder), config).items()}, model


def make_decoder(family: str = "qwen3", precision: str = "auto") -> Decoder:
    config, weights, _ = parts_of(family)
    return Decoder(config, weights, precision=precision)


def with_lora(settings: RlSettings = SETTINGS, **updates: Any) -> RlSettings:
    lora = settings.lora.model_dump(exclude_unset=True) | updates.pop("lora", {})
    return RlSettings(**{**settings.model_dump(exclude={"lora"}), **updates}, lora=lora)


def make_learner(family: str = "qwen3", settings: RlSettings = SETTINGS, precision: str = "auto") -> LoraLearner:
    """A learner whose B is no longer zero, as it would be after some steps."""
    learner = LoraLearner(make_decoder(family, precision), settings, SAMPLING)
    learner.take_weights(shaken(learner))
    return learner


def shaken(learner: LoraLearner, size: float = 0.05) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + size * torch.randn(tensor.shape, generator=generator) for name, tensor in learner.weights.items()
    }


# --- gradients --------------------------------------------------------------------------------------------------------


def oracle(learner: LoraLearner, family: str, texts: Sequence[Text]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and the gradients of their sum, by transformers and autograd in float64."""
    config, weights, model = parts_of(family)
    tensors = {name: tensor.double().requires_grad_() for name, tensor in learner.weights.items()}
    merged = {name: weight.double() for name, weight in weights.items()}
    for module in learner.adapter.modules:
        update = tensors[f"{module}.{B}"] @ tensors[f"{module}.{A}"]
        merged[f"{module}.weight"] = merged[f"{module}.weight"] + learner.adapter.scale * update
    if config.tie_embeddings:
        merged["lm_head.weight"] = merged["model.embed_tokens.weight"]
    found = []
    for text in texts:
        ids = torch.from_numpy(text.token_ids).long()
        logits = torch.func.functional_call(model.double(), merged, (ids[None],)).logits[0]
        scores = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])
        found.append(scores[text.prompt_length - 1 :, 0])
    logprobs = torch.cat(found)
    gradients = torch.autograd.grad(logprobs.sum(), list(tensors.values()))
    return logprobs.detach(), dict(zip(tensors, gradients, strict=True))


@pytest.mark.parametrize(
    "family, targets", [("qwen3", ("all-linear",)), ("qwen2", ("q_proj", "v_proj", "mlp.down_proj"))]
)
@pytest.mark.parametrize("exact", [True, False])
def test_gradients_are_those_of_autograd(family: str, targets: tuple[str, ...], exact: bool) -> None:
    learner = make_learner(family, with_lora(exact=exact, lora={"targets": targets}))
    assert set(learner.adapter.modules) == set(find_modules(targets, learner.decoder.config))
    logprobs, expected = oracle(learner, family, TEXTS)
    found = learner._policy.log_probs(TEXTS)
    found.sum().backward()
    assert found.detach().double().numpy() == pytest.approx(logprobs.numpy(), abs=1e-4)
    for name, parameter in learner._parameters.items():
        assert parameter.grad is not None
        error = (parameter.grad.double() - expected[name]).norm() / expected[name].norm()
        assert error < 1e-4, name


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_checkpointing_and_precision_change_no_bit(precision: str) -> None:
    """Recomputed layers give the same gradients; and in bfloat16 the forward runs on the rounded W'."""
    kept = make_learner(precision=precision)
    again = make_learner(settings=with_lora(checkpoint_activations=True), precision=precision)
    for learner in (kept, again):
        learner._policy.log_probs(TEXTS).sum().backward()
    found, expected = (learner._take_gradients() for learner in (again, kept))
    assert found is not None and expected is not None and len(found) == len(kept.weights)
    assert_equal_bits(found, expected)


# --- the engine's bits ------------------------------------------------------------------------------------------------


def train(drafter: str | None, precision: str = "auto", num_steps: int = 3, **updates: Any) -> Any:
    """Rewards and metrics of every step, and the final adapter."""
    decoder = make_decoder(precision=precision)
    settings = with_lora(**updates)
    engine, learner = make_engine(decoder, drafter), LoraLearner(decoder, settings, SAMPLING)
    rewards, metrics = [], []
    for step in range(num_steps):
        rollouts = generate(engine, step)
        rewards.append(np.mean([even_share(r) for r in rollouts]))
        metrics.append(learner.step(as_samples(rollouts, settings)))
    return rewards, metrics, {name: tensor.clone() for name, tensor in learner.weights.items()}


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_speculation_changes_no_bit_and_log_probabilities_are_the_engines(precision: str) -> None:
    rewards, metrics, weights = train(None, precision)
    assert {row["rollout/logp_abs_diff"] for row in metrics} == {0.0} and {row["ratio"] for row in metrics} == {1.0}
    assert metrics[0]["lora/moved_share"] > 0 and 0.8 < metrics[-1]["lora/kept_share"] < 1.2
    drafted_rewards, drafted_metrics, drafted_weights = train("suffix", precision)
    assert drafted_rewards == rewards and drafted_metrics == metrics
    assert_equal_bits(drafted_weights, weights)


def test_an_adapter_learns() -> None:
    rewards, _, _ = train(None, num_steps=12)
    assert max(rewards[:2]) < 0.65 and min(rewards[-2:]) > 0.9


def test_it_begins_as_the_model_and_moves_nothing_else() -> None:
    learner = LoraLearner(make_decoder(), with_lora(lora={"targets": ["q_proj", "up_proj"]}), SAMPLING)
    _, weights, _ = parts_of("qwen3")
    assert_equal_bits(learner.decoder.weights(), weights)
    learner.take_weights(shaken(learner))
    changed = {name for name, w in learner.decoder.weights().items() if not torch.equal(w, weights[name])}
    assert changed == {f"{module}.weight" for module in learner.adapter.modules} and len(changed) == 4


def test_merged_weights_depend_on_a_and_b_alone() -> None:
    """Not on what the decoder held before, the number of loads, or the worker."""
    straight = make_learner(precision="mixed")
    moved = LoraLearner(make_decoder(precision="mixed"), SETTINGS, SAMPLING)
    moved.take_weights(shaken(moved, size=0.5))
    moved.take_weights({name: tensor.clone() for name, tensor in straight.weights.items()})
    assert_equal_bits(moved.decoder.weights(), straight.decoder.weights())


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_resumed_learner_takes_the_same_step() -> None:
    """After a state that went through memory, weights, optimizer and merged weights continue bit for bit."""
    straight, engine_samples = LoraLearner(make_decoder(precision="mixed"), SETTINGS, SAMPLING), []
    engine = make_engine(straight.decoder)
    for step in range(3):
        engine_samples.append(as_samples(generate(engine, step), SETTINGS))
        if step == 2:
            state = {key: clone(value) for key, value in straight.state_dict().items()}
        straight.step(engine_samples[-1])
    resumed = LoraLearner(make_decoder(precision="mixed"), SETTINGS, SAMPLING)
    resumed.load_state_dict(state)
    resumed.step(engine_samples[-1])
    assert_equal_bits(resumed.weights, straight.weights)
    assert_equal_bits(resumed.decoder.weights(), straight.decoder.weights())


def clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    return [clone(item) for item in value] if isinstance(value, list) else value


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora, reason",
    [
        ({"rank": 0, "alpha": 8.0}, "with rank 0 there is no adapter, and alpha has no effect"),
        ({"rank": -1}, "greater than or equal to 0"),
        ({"rank": 4, "targets": ["q_porj"]}, "did you mean q_proj"),
        ({"rank": 4, "targets": ["lm_head"]}, "matches no linear layer"),
        ({"rank": 4, "targets": []}, "nothing to adapt"),
    ],
)
def test_settings_without_effect_are_refused(lora: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LoraLearner(make_decoder(), RlSettings(lora=lora), SAMPLING)


def test_a_learner_of_weights_refuses_an_adapter() -> None:
    with pytest.raises(ValueError, match="use LoraLearner"):
        Learner(make_decoder(), SETTINGS, SAMPLING)


def test_another_adapters_state_changes_nothing() -> None:
    learner = make_learner()
    before, merged = clone(learner.weights), clone(learner.decoder.weights())
    others = {
        "model": make_learner("qwen2").state_dict(),
        "rank": LoraLearner(make_decoder(), with_lora(lora={"rank": 2}), SAMPLING).state_dict(),
        "weights": Learner(make_decoder(), RlSettings(), SAMPLING).state_dict(),
        "targets": LoraLearner(make_decoder(), with_lora(lora={"targets": ["q_proj"]}), SAMPLING).state_dict(),
    }
    for state in others.values():
        with pytest.raises(ValueError, match=r"the checkpoint does not fit: .*resume with the run's own settings"):
            learner.load_state_dict(state)
        with pytest.raises(ValueError, match="adapter"):
            learner.take_weights(state["weights"])
    assert_equal_bits(learner.weights, before)
    assert_equal_bits(dict(learner.decoder.weights()), merged)
