"""Models with random weights, generated as complete Hugging Face folders.

The demo, the benchmarks and the tests use them when no trained model is available. They are byte-level: the tokenizer
has one token per byte and four special ones; the rest of the vocabulary is padding. The same arguments give the same
bytes on disk. Their output is meaningless, so never report a quality figure for them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.core.files import write_file
from paceline.model.checkpoint import save_checkpoint
from paceline.model.config import FAMILIES, ModelConfig

RandomSize = Literal["tiny", "5m", "50m"]

_SIZES: dict[str, dict[str, int | bool]] = {
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

_PAD, _END_OF_TEXT, _TURN_START, _TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPACE = "\u0120"  # How byte-level tokenizers write a space.

_EMBEDDING_STD = 0.02
_LOGIT_STD_PER_NAT = 0.65
# Sharpens attention: with plain random weights it is flat, every step sees the same average and the text gets stuck.
_QUERY_GAIN = 2.0


def make_random_model(folder: Path, size: RandomSize = "5m", family: str = "qwen3", seed: int = 0) -> Path:
    """Write a random model of about this many parameters to `folder` and return it."""
    if size not in _SIZES or family not in FAMILIES:
        known = f"sizes {', '.join(_SIZES)} and families {', '.join(FAMILIES)}"
        raise ValueError(f"no random model of size {size!r}, family {family!r}; choose from {known}")
    folder = Path(folder)
    vocabulary = _vocabulary()
    config = _config(size, family, vocabulary)
    weights = _weights(config, _loudness(vocabulary, config.vocab_size), seed)
    save_checkpoint(folder, config, weights, lambda new: _write_tokenizer(new, vocabulary, config.max_context))
    return folder


def _config(size: str, family: str, vocabulary: dict[str, int]) -> ModelConfig:
    ends = [vocabulary[_END_OF_TEXT], vocabulary[_TURN_END]]
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
        "pad_token_id": vocabulary[_PAD],
        **_SIZES[size],
    }
    return ModelConfig.from_hf(hf, {"eos_token_id": ends, "pad_token_id": vocabulary[_PAD]})


def _weights(config: ModelConfig, loudness: Tensor, seed: int) -> dict[str, Tensor]:
    """Random weights that make every layer matter and the next token neither certain nor uniform."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _tensor(name, shape, loudness, generator) for name, shape in config.weight_shapes().items()}


def _tensor(name: str, shape: tuple[int, ...], loudness: Tensor, generator: torch.Generator) -> Tensor:
    if name == "model.norm.weight":
        # The last norm sets the spread of the logits; a larger vocabulary needs a wider one to be equally peaked.
        logit_std = _LOGIT_STD_PER_NAT * math.log(len(loudness))
        return torch.full(shape, logit_std / (_EMBEDDING_STD * math.sqrt(shape[0])))
    if name.endswith("q_norm.weight"):
        return torch.full(shape, _QUERY_GAIN)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return values * 0.1
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        # Small compared with what the layers add, so that a tied head does not just repeat its input.
        return values * _EMBEDDING_STD * loudness[:, None]
    return values / math.sqrt(shape[1]) * (_QUERY_GAIN if name.endswith("q_proj.weight") else 1.0)


def _loudness(vocabulary: dict[str, int], vocab_size: int) -> Tensor:
    """Scale of each token's logit: 0 for padding, high for readable characters, to keep demos readable."""
    loudness = torch.zeros(vocab_size)
    for token, index in vocabulary.items():
        is_readable = token.isascii() and len(token) == 1
        loudness[index] = 1.0 if is_readable or token in (_SPACE, _END_OF_TEXT) else 0.2
    return loudness


def _vocabulary() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    return {token: index for index, token in enumerate([*sorted(ByteLevel.alphabet()), *_special_tokens()])}


def _special_tokens() -> list[str]:
    return [_PAD, _END_OF_TEXT, _TURN_START, _TURN_END]


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _special_tokens()])
    write_file(folder / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END_OF_TEXT,
        "pad_token": _PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    write_file(folder / "tokenizer_config.json", [f"{json.dumps(settings, indent=2)}\n".encode()])
