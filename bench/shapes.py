"""Models of real shapes with random weights, made on the spot: the GPU benchmarks need no download.

`SHAPES` holds Hugging Face configs, for our config and for that of `transformers`. The output of such a model means
nothing; its speed is that of a trained model of this shape. `LLAMA_SHAPES` holds only sizes, for `inflate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.core.noise import prompt_hash
from paceline.model.config import ModelConfig

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "eos_token_id": 151_645,
}

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "eos_token_id": 151_645,
    },
    "1.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "eos_token_id": 151_645,
    },
    "8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN3,
        "head_dim": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "eos_token_id": 511,
    },
}
"""The last one is for trying out a benchmark."""

LLAMA_SHAPES: dict[str, dict[str, int]] = {
    "0.3b": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "1.7b": {
        "hidden_size": 2304,
        "intermediate_size": 5760,
        "num_hidden_layers": 30,
        "num_attention_heads": 36,
        "num_key_value_heads": 12,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": 16,
    },
}
"""What a Llama like SmolLM2-135M is inflated to; it keeps its head width and vocabulary. The first is for a CPU."""

TITLES = {
    "0.6b": "Qwen3-0.6B shapes",
    "1.7b": "Qwen3-1.7B shapes",
    "1.5b": "Qwen2.5-1.5B shapes",
    "7b": "Qwen2.5-7B shapes",
    "8b": "Qwen3-8B shapes",
    "14b": "Qwen3-14B shapes",
    "32b": "Qwen3-32B shapes",
    "tiny": "tiny",
}

_STD = 0.02
_NUM_LOUD = 1024
"""Token ids whose logits have the full spread; the others hardly vary, as in a trained model, where few are likely."""
_QUIET = 0.2
_LOGIT_STD_PER_NAT = 0.65


def model_config(name: str) -> ModelConfig:
    return ModelConfig.from_hf(SHAPES[name])


def llama_config(name: str, small: ModelConfig) -> ModelConfig:
    """The sizes of a Llama shape, with everything else from the small model."""
    return ModelConfig.from_hf({**small.hf, "head_dim": small.head_dim, **LLAMA_SHAPES[name]}, small.hf_generation)


def transformers_config(name: str) -> Any:
    """The same model for `transformers`."""
    from transformers import AutoConfig

    settings = {key: value for key, value in SHAPES[name].items() if key != "model_type"}
    return AutoConfig.for_model(SHAPES[name]["model_type"], **settings)


class LazyWeights(Mapping[str, Tensor]):
    """The same kind of weights, each generated when it is read: a model of 32B is never in memory twice."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._config, self._device = config, device
        self._shapes = config.weight_shapes()

    def __getitem__(self, name: str) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(prompt_hash(list(name.encode())) % 2**63)
        return _tensor(name, self._shapes[name], self._config, generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes


def random_weights(config: ModelConfig, device: str, seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 weights under their Hugging Face names, generated on the device.

    Matrices are normal with standard deviation 0.02. Norms are 1 but for the last, which spreads the logits so that
    the next token is neither certain nor uniform over 150,000.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {name: _tensor(name, shape, config, generator) for name, shape in config.weight_shapes().items()}


def _tensor(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": generator.device}
    if name == "model.norm.weight":
        spread = _LOGIT_STD_PER_NAT * math.log(config.vocab_size)
        return torch.full(shape, spread / (_STD * math.sqrt(config.hidden_size)), **made)
    if name.endswith("norm.weight"):
        return torch.ones(shape, **made)
    weight = torch.empty(shape, **made).normal_(0.0, _STD, generator=generator)
    if name == ("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"):
        weight[_NUM_LOUD:] *= _QUIET
    return weight


def floor_bytes(config: ModelConfig) -> int:
    """Bytes one step must read: all weights in bfloat16, except an untied input embedding (a few rows of it)."""
    unread = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return 2 * (config.num_parameters - unread)


def kv_bytes(config: ModelConfig) -> int:
    """Bytes of one token's keys and values in bfloat16."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
