"""The drafter's network: the reference against transformers' own layer, the unrolled forward against the reference, the
files, and that tapping the learner's forward changes no bit of it."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_factory import ROPES, ModelSpec, build
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.model.backward.packed import Text
from paceline.model.backward.policy import TrainablePolicy, TrainingOptions, master_weights
from paceline.model.backward.states import States
from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig, rope_from_hf, rope_to_hf
from paceline.model.decoder import Decoder
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.eagle.network import FC, HEAD, NORM, Eagle, EagleConfig, frequent_ids, tap_layers
from paceline.model.eagle.unroll import Layout, Unroll, Window
from paceline.model.folder import load_config
from paceline.model.rope import rope_table

SPEC = ModelSpec(family="llama", num_layers=6, initializer_range=0.3, rope="llama3")
VOCAB = SPEC.vocab_size


@functools.cache
def policy(spec: ModelSpec = SPEC) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = build(spec, Path(folder))
        config = load_config(Path(folder))
        return config, {name: w.clone() for name, w in load_weights(Path(folder), config).items()}, model


@functools.cache
def eagle() -> Eagle:
    """A fresh one with everything moved off its start, and every second id."""
    config, weights, _ = policy()
    ids = torch.arange(1, VOCAB, 2)
    made = Eagle.fresh(EagleConfig.for_policy(config, len(ids)), weights, ids, seed=3)
    generator = torch.Generator().manual_seed(1)
    moved = {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in made.weights.items()}
    return replace(made, weights=moved, version=4)


def random_text(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids, and taps for all but the last of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (length,), generator=generator)
    return ids, torch.randn(length - 1, 3 * SPEC.hidden_size, generator=generator)


def embedding() -> Tensor:
    return policy()[1]["model.embed_tokens.weight"].float()


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(8, (2, 4, 5)), (28, (2, 14, 25)), (30, (2, 15, 27)), (2, (2, 1, 0)), (1, (1, 0, 0))]
)
def test_layers_that_are_tapped(num_layers: int, expected: tuple[int, int, int]) -> None:
    assert tap_layers(num_layers) == expected


def llama_logits(made: Eagle, ids: Tensor, taps: Tensor) -> Tensor:
    """The same network from transformers' parts: a Llama layer whose projections read a wider input."""
    # Here, for it imports Triton, and files about a GPU have to come before that.
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    config, weights = made.config, made.weights
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_context,
        rope_parameters=ROPES[SPEC.rope],
    )
    llama._attn_implementation = "eager"
    layer = LlamaDecoderLayer(llama, 0)
    for name in "qkv":
        rows = weights[f"midlayer.self_attn.{name}_proj.weight"].shape[0]
        setattr(layer.self_attn, f"{name}_proj", torch.nn.Linear(2 * config.hidden_size, rows, bias=False))
    own = {name.removeprefix("midlayer."): w for name, w in weights.items() if name.startswith("midlayer.")}
    hidden_norm = own.pop("hidden_norm.weight")
    layer.load_state_dict(own)
    norms = [LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)]
    norms[0].weight.data, norms[1].weight.data = hidden_norm, weights[NORM]
    x = (taps @ weights[FC].mT)[None]
    turns = LlamaRotaryEmbedding(llama)(x, torch.arange(x.shape[1])[None])
    mask = torch.full((1, 1, x.shape[1], x.shape[1]), -torch.inf).triu(1)
    y = torch.cat((layer.input_layernorm(embedding()[ids[1:]])[None], norms[0](x)), dim=-1)
    x = x + layer.self_attn(y, position_embeddings=turns, attention_mask=mask)[0]
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    return norms[1](x)[0] @ weights[HEAD].mT


@torch.no_grad()
def test_the_reference_is_a_llama_layer() -> None:
    ids, taps = random_text(90)
    _, logits = eagle().forward_text(ids, taps, embedding())
    expected = llama_logits(eagle(), ids, taps)
    assert expected.abs().max() > 3
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


def chain_of(made: Eagle, ids: Tensor, taps: Tensor, base: int, num_guesses: int) -> Tensor:
    """States of one chain, written as a drafter would compute it: the text up to the base, then guess after guess.

    Guess j is the last row of a text whose rows behind the base have states of the drafter in place of the policy's.
    """
    config, weights = made.config, made.weights
    # A square fc that changes nothing lets rows be states; the policy's rows pass through the true one first.
    plain = replace(made, config=replace(config, target_hidden_size=config.hidden_size))
    identity = torch.cat([torch.eye(config.hidden_size), torch.zeros(config.hidden_size, 2 * config.hidden_size)], 1)
    plain = replace(plain, weights={**weights, FC: identity})
    rows = taps[: base + 1] @ weights[FC].mT
    found = []
    for number in range(num_guesses):
        padded = torch.cat([rows, torch.zeros(len(rows), 2 * config.hidden_size)], dim=1)
        states, _ = plain.forward_text(ids[: base + 2 + number], padded, embedding())
        found.append(states[-1])
        rows = torch.cat([rows, states[-1:]])
    return torch.stack(found)


@torch.no_grad()
def test_unrolled_chains_are_those_of_a_drafter() -> None:
    made, num_guesses = eagle(), 4
    texts = [random_text(length, seed) for seed, length in enumerate((40, 23, 40, 9))]
    windows = [Window(0, 5, 36), Window(0, 18, 19), Window(0, 0, 36), Window(0, 2, 5)]
    layout = Layout.of(windows)
    unroll = Unroll(made.config, made.weights, layout, rope_table(made.config.rope, made.config.head_dim, 64))
    taps = torch.cat([taps[: w.stop] for (_, taps), w in zip(texts, windows, strict=True)])
    following = torch.cat([ids[1 : w.stop + 1] for (ids, _), w in zip(texts, windows, strict=True)])
    states = [unroll.begin(taps, embedding()[following])]
    for j in range(1, num_guesses):
        read = torch.cat([ids[w.start + 1 + j : w.stop + 1 + j] for (ids, _), w in zip(texts, windows, strict=True)])
        states.append(unroll.advance(states[-1], embedding()[read]))
    expected = [
        chain_of(made, ids, taps, base, num_guesses)
        for (ids, taps), window in zip(texts, windows, strict=True)
        for base in range(window.start, window.stop)
    ]
    torch.testing.assert_close(torch.stack(states, dim=1), torch.stack(expected), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_window_reads_from_its_first_row_on() -> None:
    made = eagle()
    ids, taps = random_text(30)
    turns = rope_table(made.config.rope, made.config.head_dim, 64)
    cut = Unroll(made.config, made.weights, Layout.of([Window(10, 20, 29)]), turns)
    states = cut.begin(taps[10:], embedding()[ids[11:]])
    expected, _ = made.forward_text(ids[10:], taps[10:], embedding())  # positions are relative
    torch.testing.assert_close(states, expected[10:], rtol=1e-4, atol=1e-4)


# --- where one starts -------------------------------------------------------------------------------------------------


def test_a_fresh_one_has_the_policys_head_and_last_layer() -> None:
    config, weights, _ = policy()
    ids = torch.arange(0, VOCAB, 3)
    made = Eagle.fresh(EagleConfig.for_policy(config, len(ids)), weights, ids)
    assert torch.equal(made.weights[HEAD], weights["lm_head.weight"][ids])
    assert torch.equal(made.weights[NORM], weights["model.norm.weight"])
    last = weights["model.layers.5.self_attn.k_proj.weight"]
    assert torch.equal(made.weights["midlayer.self_attn.k_proj.weight"][:, config.hidden_size :], last)
    again = Eagle.fresh(made.config, weights, ids)
    other = Eagle.fresh(made.config, weights, ids, seed=1)
    assert all(torch.equal(again.weights[name], made.weights[name]) for name in made.weights)
    assert not torch.equal(other.weights[FC], made.weights[FC])


def test_a_fresh_one_of_other_sizes() -> None:
    config, weights, _ = policy()
    other = replace(EagleConfig.for_policy(config), hidden_size=24, num_heads=2, num_kv_heads=1, intermediate_size=30)
    made = Eagle.fresh(other, weights)
    assert all(torch.isfinite(weight).all() for weight in made.weights.values())


def test_ids_that_are_drafted() -> None:
    config = replace(eagle().config, draft_vocab_size=4, eos_token_ids=(90,))
    counts = torch.zeros(VOCAB)
    counts[[50, 60]] = torch.tensor([1.0, 2.0])
    assert frequent_ids(config, counts).tolist() == [0, 50, 60, 90]


@pytest.mark.parametrize(
    "ids", [torch.arange(3), torch.arange(48).float(), torch.arange(48).flip(0), torch.arange(50, 98)]
)
def test_ids_that_cannot_be_drafted(ids: Tensor) -> None:
    config, weights, _ = policy()
    with pytest.raises(ValueError, match="draft ids"):
        Eagle.fresh(EagleConfig.for_policy(config, 48), weights, ids)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
def test_rope_settings_survive_a_file(rope: str) -> None:
    before = rope_from_hf({"rope_parameters": ROPES[rope]}, 512)
    assert rope_from_hf(json.loads(json.dumps(rope_to_hf(before))), 512) == before


def test_files_have_the_layout_others_load(tmp_path: Path) -> None:
    save_eagle(tmp_path / "eagle3", eagle())
    content = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle3"] and content["num_hidden_layers"] == 1
    assert content["draft_vocab_size"] == len(eagle().draft_ids) and content["vocab_size"] == VOCAB
    tensors = load_file(tmp_path / "eagle3" / "model.safetensors")
    assert torch.equal(tensors["d2t"] + torch.arange(len(tensors["d2t"])), eagle().draft_ids)
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].sum() == len(eagle().draft_ids)
    assert tensors["t2d"][eagle().draft_ids].all() and tensors["t2d"].shape == (VOCAB,)
    hidden = eagle().config.hidden_size
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (4 * 16, 2 * hidden)
    assert tensors.keys() - eagle().weights.keys() == {"d2t", "t2d"}


def test_a_drafter_survives_its_files(tmp_path: Path) -> None:
    save_eagle(tmp_path / "eagle3", eagle())
    save_eagle(tmp_path / "eagle3", eagle())  # in place of the first
    found = load_eagle(tmp_path / "eagle3")
    assert found.config == eagle().config and found.version == 4
    assert torch.equal(found.draft_ids, eagle().draft_ids)
    assert all(torch.equal(found.weights[name], weight) for name, weight in eagle().weights.items())
    assert list(tmp_path.iterdir()) == [tmp_path / "eagle3"]


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _reconfigure(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (_cut, "truncated or damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "a weight is missing": (lambda folder: _rewrite(folder, lambda t: t.pop("fc.weight")), "fc.weight"),
    "a weight too many": (lambda folder: _rewrite(folder, lambda t: t.update(x=torch.ones(1))), "'x' is not a"),
    "not finite": (lambda folder: _rewrite(folder, lambda t: t["norm.weight"].fill_(torch.nan)), "not finite"),
    "ids disagree": (lambda folder: _rewrite(folder, lambda t: t["t2d"].fill_(True)), "do not name the same ids"),
    "no ids": (lambda folder: _rewrite(folder, lambda t: t.pop("d2t")), "d2t is missing"),
    "ids out of order": (lambda folder: _rewrite(folder, lambda t: (t.pop("t2d"), t["d2t"].mul_(-1))), "must ascend"),
    "two layers": (_reconfigure(num_hidden_layers=2), "num_hidden_layers must be 1"),
    "biases": (_reconfigure(attention_bias=True), "attention_bias"),
    "another model": (_reconfigure(architectures=["LlamaForCausalLM"]), "LlamaForCausalLMEagle3"),
    "no size": (_reconfigure(head_dim=None), "head_dim as a positive integer"),
    "other sizes": (_reconfigure(hidden_size=44), "must have shape"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    save_eagle(tmp_path / "eagle3", eagle())
    damage, message = DAMAGE[name]
    damage(tmp_path / "eagle3")
    with pytest.raises(ValueError, match=message):
        load_eagle(tmp_path / "eagle3")


def test_weights_are_plain_safetensors(tmp_path: Path) -> None:
    save_eagle(tmp_path / "eagle3", eagle(), torch.bfloat16)
    with safe_open(tmp_path / "eagle3" / "model.safetensors", framework="pt") as opened:
        assert opened.get_tensor("fc.weight").dtype == torch.bfloat16
    assert load_eagle(tmp_path / "eagle3").weights["fc.weight"].dtype == torch.float32


# --- taps of the learner's forward ------------------------------------------------------------------------------------


def observed(options: TrainingOptions, texts: list[Text], is_tapped: bool) -> tuple[Tensor, list[Tensor], list[States]]:
    """Log-probabilities, gradients and what was seen."""
    config, weights, _ = policy()
    decoder = Decoder(config, weights)
    parameters = master_weights(decoder)
    seen: list[States] = []
    found = TrainablePolicy(decoder, parameters, options).log_probs(texts, 1.0, seen.append if is_tapped else None)
    (found * torch.linspace(-1, 1, len(found))).sum().backward()
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    return found.detach(), gradients, seen


@pytest.mark.parametrize(
    "options",
    [TrainingOptions(), TrainingOptions(checkpointing=True), TrainingOptions(exact=False)],
    ids=["exact", "checkpointing", "plain"],
)
def test_taps_are_the_policys_states_and_change_nothing(options: TrainingOptions) -> None:
    config, _, model = policy()
    lengths = (30, 7, 51)
    ids = [random_text(length, seed)[0].numpy().astype(np.int32) for seed, length in enumerate(lengths)]
    texts = [Text(own, 4) for own in ids]
    plain, plain_gradients, nothing = observed(options, texts, is_tapped=False)
    found, gradients, (states,) = observed(options, texts, is_tapped=True)
    assert torch.equal(found, plain) and nothing == []
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))
    assert states.row_starts == (0, 29, 35, 85) and len(states.taps) == len(states.final) == 85
    assert not states.taps.requires_grad and not states.final.requires_grad
    low, mid, high = tap_layers(config.num_layers)
    for own, start, stop in zip(ids, states.row_starts, states.row_starts[1:], strict=False):
        assert states.token_ids[start:stop].tolist() == own[:-1].tolist()
        with torch.no_grad():
            expected = model(torch.from_numpy(own[:-1].astype(np.int64))[None], output_hidden_states=True)
        hidden = [expected.hidden_states[i][0] for i in (low, mid, high)]
        torch.testing.assert_close(states.taps[start:stop], torch.cat(hidden, 1), rtol=1e-4, atol=1e-4)
        logits = Decoder(config, policy()[1]).logits(states.final[start:stop])
        torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-3)
