"""The shapes and the vocabulary of models with random weights: all of them but the weights, and without torch.

`random_model.py` fills them with weights; `folder.py` answers for `random:SIZE` before one has been made. The tokenizer
has one token per byte and four special ones; the rest of the vocabulary is padding.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from paceline.core.documents import brief
from paceline.model.config import FAMILIES, ModelConfig

RANDOM = "random:"
"""Prefix of such a model's size, wherever a model is named."""
RandomSize = Literal["tiny", "5m", "50m"]

SIZES: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "5m": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "50m": {
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}

PAD, END_OF_TEXT, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def random_names() -> list[str]:
    """How a model of each size is named: `random:5m`."""
    return [f"{RANDOM}{size}" for size in get_args(RandomSize)]


def check_size(name: str) -> None:
    """Raise a ValueError if there is no random model of this size."""
    if name not in SIZES:
        raise ValueError(f"no random model of size {brief(name)}; choose from {', '.join(random_names())}")


def random_config(size: str, family: str = "qwen3") -> ModelConfig:
    """The config of a random model."""
    check_size(size)
    if family not in FAMILIES:
        raise ValueError(f"no random model of family {family!r}; choose from {', '.join(FAMILIES)}")
    vocabulary = random_vocabulary()
    ends = [vocabulary[END_OF_TEXT], vocabulary[TURN_END]]
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[family]
    hf: dict[str, Any] = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": ends,
        "pad_token_id": vocabulary[PAD],
        **SIZES[size],
    }
    return ModelConfig.from_hf(hf, {"eos_token_id": ends, "pad_token_id": vocabulary[PAD]})


def random_vocabulary() -> dict[str, int]:
    """Token ids by token: a byte as byte-level tokenizers write it, or a special token."""
    from tokenizers.pre_tokenizers import ByteLevel

    return {token: index for index, token in enumerate([*sorted(ByteLevel.alphabet()), *special_tokens()])}


def special_tokens() -> list[str]:
    """The tokens that are no text, in the order of their ids."""
    return [PAD, END_OF_TEXT, TURN_START, TURN_END]
