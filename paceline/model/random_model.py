"""Models with random weights, generated as complete Hugging Face folders.

The demo, the benchmarks and the tests use them when no trained model is available; `random_config.py` has their shapes.
The same arguments give the same bytes on disk. Their output is meaningless, so never report a quality figure for them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.files import write_file
from paceline.model.checkpoint import save_checkpoint
from paceline.model.config import ModelConfig
from paceline.model.random_config import (
    END_OF_TEXT,
    PAD,
    RandomSize,
    random_config,
    random_vocabulary,
    special_tokens,
)

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
    folder = Path(folder)
    vocabulary, config = random_vocabulary(), random_config(size, family)
    weights = _weights(config, _loudness(vocabulary, config.vocab_size), seed)
    save_checkpoint(folder, config, weights, lambda new: _write_tokenizer(new, vocabulary, config.max_context))
    return folder


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
        loudness[index] = 1.0 if is_readable or token in (_SPACE, END_OF_TEXT) else 0.2
    return loudness


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens()])
    write_file(folder / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    write_file(folder / "tokenizer_config.json", [f"{json.dumps(settings, indent=2)}\n".encode()])
