"""A decoder whose next token is a table look-up on the last one: tests that must know every token in advance use it.

Real kernels and real logits, trivial weights: embeddings are one-hot, the layers add nothing to the residual stream,
and row u of the head is one where u follows v. The listed successor gets all but 1e-12 of the probability.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder

_SILENT = ("o_proj", "down_proj")
_CERTAINTY = 40.0
"""How far the logit of the successor stands above all others."""


def scripted_decoder(
    successors: Mapping[int, int],
    eos_token_ids: Sequence[int] = (),
    vocab_size: int = 320,
    max_context: int = 512,
) -> Decoder:
    """Token v is followed by `successors[v]`, or by itself where none is listed."""
    config = _config(vocab_size, list(eos_token_ids), max_context)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.zeros(shape) if any(part in name for part in _SILENT) else torch.randn(shape, generator=generator)
        for name, shape in config.weight_shapes().items()
    }
    weights["model.embed_tokens.weight"] = torch.eye(vocab_size)
    weights["model.norm.weight"] = torch.full((vocab_size,), _CERTAINTY / math.sqrt(vocab_size))
    weights["lm_head.weight"] = torch.zeros(vocab_size, vocab_size)
    for token in range(vocab_size):
        weights["lm_head.weight"][successors.get(token, token), token] = 1.0
    return Decoder(config, weights)


def chain(token_ids: Sequence[int]) -> dict[int, int]:
    """Successors that make a model say these tokens, all different, one after the other."""
    assert len(set(token_ids)) == len(token_ids), "a token has one successor only"
    return dict(itertools.pairwise(token_ids))


def _config(vocab_size: int, eos_token_ids: list[int], max_context: int) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": vocab_size,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": max_context,
            "tie_word_embeddings": False,
            "eos_token_id": eos_token_ids or None,
        }
    )
