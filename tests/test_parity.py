"""The decoder, its config and its rotary tables against transformers, over random configurations of every family."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import FAMILIES, ROPES, ModelSpec, build, reference_logits, reference_model, specs

from paceline.model.checkpoint import load_weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.folder import load_config
from paceline.model.rope import rope_frequencies, rope_table

TOLERANCE = 1e-4


def decoder_of(model: Any, exact: bool) -> Decoder:
    """The decoder with the weights of a transformers model, passed through files as a user's are."""
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        config = load_config(Path(name))
        weights = {key: tensor.clone() for key, tensor in load_weights(Path(name), config).items()}
    return Decoder(config, weights, exact=exact)


def assert_same_logits(spec: ModelSpec, token_ids: list[int], exact: bool) -> None:
    model = reference_model(spec)
    logits = decoder_of(model, exact).score(token_ids)
    expected = reference_logits(model, token_ids)
    assert logits.shape == expected.shape and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(data=st.data())
def test_logits_match_transformers(family: str, exact: bool, data: st.DataObject) -> None:
    spec = data.draw(specs(family))
    ids = st.integers(0, spec.vocab_size - 1)
    token_ids = data.draw(st.lists(ids, min_size=1, max_size=40) | st.lists(ids, min_size=129, max_size=140))
    assert_same_logits(spec, token_ids, exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rope", ROPES)
def test_logits_match_over_the_whole_context(rope: str, exact: bool) -> None:
    """Long enough that scaled rotary positions differ from plain ones in every pair."""
    spec = ModelSpec(family="llama", rope=rope, hidden_size=64, head_dim=32, max_positions=512)
    token_ids = torch.randint(spec.vocab_size, (512,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_same_logits(spec, token_ids, exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_as_small_as_that_of_transformers(family: str, exact: bool) -> None:
    """Against float64, on a model steep enough that the two float32 results are far from it by chance of rounding."""
    spec = ModelSpec(family=family, hidden_size=88, num_layers=3, head_dim=64, initializer_range=0.3)
    model = reference_model(spec)
    token_ids = torch.randint(spec.vocab_size, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    logits, theirs = decoder_of(model, exact).score(token_ids), reference_logits(model, token_ids)
    truth = reference_logits(model.double(), token_ids)
    assert (logits - truth).square().mean() < 1.5**2 * (theirs - truth).square().mean()


@pytest.mark.parametrize("window_settings", [("mistral", {}), ("qwen3", {"use_sliding_window": True})])
def test_a_context_up_to_the_sliding_window_matches(window_settings: tuple[str, dict[str, Any]]) -> None:
    """Up to the window dense attention is the same function; one token further it is not, so the context ends there."""
    family, extra = window_settings
    spec = ModelSpec(family=family, hidden_size=64)
    hf_config = spec.hf_config()
    windowed = type(hf_config)(
        **{**hf_config.to_dict(), "sliding_window": 24, "max_window_layers": 1, "layer_types": None, **extra}
    )
    plain, reference = reference_model(spec), reference_model(spec, windowed)
    token_ids = torch.randint(spec.vocab_size, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    decoder = decoder_of(reference, exact=True)
    assert ModelConfig.from_hf(windowed.to_dict()).max_context == 24
    expected = reference_logits(reference, token_ids)
    torch.testing.assert_close(decoder.score(token_ids[:24]), expected[:24], rtol=0, atol=TOLERANCE)
    assert (reference_logits(plain, token_ids)[24:] - expected[24:]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [8, 14, 64, 128])
def test_rope_tables_are_those_of_transformers(rope: str, head_dim: int) -> None:
    hf_config = ModelSpec(rope=rope, head_dim=head_dim, max_positions=2048).hf_config()
    rotary = transformers_rotary(hf_config)
    config = ModelConfig.from_hf(hf_config.to_dict())
    frequencies, attention_factor = rope_frequencies(config.rope, head_dim)
    assert torch.equal(frequencies, rotary.inv_freq) and attention_factor == rotary.attention_scaling
    positions = torch.arange(2048)[None]
    for table, expected in zip(rope_table(config.rope, head_dim, 2048), rotary(torch.zeros(1), positions), strict=True):
        assert table.dtype == torch.float32 and torch.equal(torch.cat((table, table), -1), expected[0])


def transformers_rotary(hf_config: Any) -> Any:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(hf_config)


SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 52,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama, only sizes": {"model_type": "llama"},
    "qwen2, only sizes": {"model_type": "qwen2"},
    "qwen3, only sizes": {"model_type": "qwen3"},
    "mistral, only sizes": {"model_type": "mistral"},
    "llama, nulls": {"model_type": "llama", "num_key_value_heads": None, "head_dim": None, "eos_token_id": None},
    "mistral, nulls": {"model_type": "mistral", "head_dim": None, "sliding_window": None},
    "llama 3.1": {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "eos_token_id": [1, 8, 9],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2, yarn by the old names": {
        "model_type": "qwen2",
        "rope_theta": 1_000_000,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        "sliding_window": 131_072,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen2, yarn without the original length": {
        "model_type": "qwen2",
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "yarn, original length beside the settings": {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": None},
    },
    "qwen2, windows in the upper layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 20,
    },
    "qwen2, windows above the last layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 30,
    },
    "qwen3, rope_parameters": {
        "model_type": "qwen3",
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e6},
    },
    "mistral 0.1": {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32_768},
}


@pytest.mark.parametrize("extra", CONFIGS.values(), ids=CONFIGS.keys())
def test_config_values_are_those_of_transformers(extra: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = ModelConfig.from_hf({**SIZES, **extra})
    given_settings = json.loads(json.dumps({**SIZES, **extra}))
    expected = AutoConfig.for_model(**given_settings)
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.tie_embeddings == expected.tie_word_embeddings
    ends = expected.eos_token_id
    assert list(config.eos_token_ids) == ([] if ends is None else ends if isinstance(ends, list) else [ends])
    rotary = transformers_rotary(expected)
    frequencies, attention_factor = rope_frequencies(config.rope, config.head_dim)
    assert torch.equal(frequencies, rotary.inv_freq) and attention_factor == rotary.attention_scaling
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(expected)
    assert {name: tuple(tensor.shape) for name, tensor in model.named_parameters()} == config.weight_shapes()
    windows = [layer.self_attn.sliding_window for layer in model.model.layers if has_window(layer)]
    if extra["model_type"] == "mistral" and expected.sliding_window is not None:
        windows = [expected.sliding_window]
    assert config.max_context == min([expected.max_position_embeddings, *windows])


def has_window(layer: Any) -> bool:
    return getattr(layer.self_attn, "sliding_window", None) is not None


@given(spec=specs())
@settings(max_examples=25)
def test_weight_names_and_shapes_are_those_of_transformers(spec: ModelSpec) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(spec.hf_config())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert shapes == ModelConfig.from_hf(spec.hf_config().to_dict()).weight_shapes()


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    build(ModelSpec(eos_token_ids=(5,)), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load_config(tmp_path).eos_token_ids == (5, 7)
