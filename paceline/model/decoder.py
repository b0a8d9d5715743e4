"""One decoder for Llama, Qwen2, Qwen3 and Mistral: flat rows in, hidden states and logits out.

The engine's runner calls `forward` and `logits`; `score` is the same pass over one whole text. Residual stream, norms
and logits are float32. Nothing here knows about requests, drafts or sampling, and no batch shape may enter a result:
that is the business of the ops it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.kv_cache import KVCache
from paceline.model.ops import choose_ops
from paceline.model.ops.base import Rotary
from paceline.model.rope import rope_table
from paceline.model.rows import Rows, SequenceRows


@dataclass(frozen=True)
class _Linear:
    weight: Any
    bias: Tensor | None


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Linear
    qk_norms: tuple[Tensor, Tensor] | None
    out: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear


class Decoder:
    """The policy. Weights are replaced only through `load_weights`."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], exact: bool = True, device: str = "cpu"):
        self.config = config
        self.ops = choose_ops(device, exact)
        cos, sin = rope_table(config.rope, config.head_dim, config.max_context)
        self._rotary = Rotary(cos.contiguous(), sin.contiguous(), config.rms_norm_eps)
        self.load_weights(weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over a full set of weights under their Hugging Face names: all of it, or nothing."""
        for name, shape in self.config.weight_shapes().items():
            if name not in weights or tuple(weights[name].shape) != tuple(shape):
                found = tuple(weights[name].shape) if name in weights else "nothing"
                raise ValueError(f"weight {name!r} must have shape {tuple(shape)}; found {found}")
        # A copy of our own: a learner that updates its tensors in place must not change half a policy.
        embedding = weights["model.embed_tokens.weight"].clone()
        layers = [self._layer(weights, f"model.layers.{i}.") for i in range(self.config.num_layers)]
        norm = _vector(weights["model.norm.weight"])
        head = self.ops.prepare(embedding if self.config.tie_embeddings else weights["lm_head.weight"])
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
        def linear(*names: str) -> _Linear:
            biases = [weights[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in weights]
            joined = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
            return _Linear(self.ops.prepare(joined), _vector(torch.cat(biases)) if biases else None)

        attention = "self_attn."
        norms = [weights.get(f"{prefix}{attention}{name}.weight") for name in ("q_norm", "k_norm")]
        return _Layer(
            attention_norm=_vector(weights[f"{prefix}input_layernorm.weight"]),
            qkv=linear(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
            qk_norms=(_vector(norms[0]), _vector(norms[1])) if norms[0] is not None and norms[1] is not None else None,
            out=linear(f"{attention}o_proj"),
            mlp_norm=_vector(weights[f"{prefix}post_attention_layernorm.weight"]),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def forward(self, rows: Rows, cache: KVCache) -> Tensor:
        """Hidden states [rows, hidden] before the final norm; keys and values of all rows are in the cache after it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        assert rows.positions.max() < self.config.max_context, "no rotary angles beyond the context"
        x = self._embedding[torch.from_numpy(rows.token_ids).long()].float()
        for i, layer in enumerate(self._layers):
            h = ops.rms_norm(x, layer.attention_norm, eps)
            qkv = ops.linear(h, layer.qkv.weight, layer.qkv.bias)
            h = ops.attention(qkv, self.config.num_heads, layer.qk_norms, self._rotary, rows, cache, i)
            x = ops.linear(h, layer.out.weight, layer.out.bias, onto=x)
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            h = ops.swiglu(ops.linear(h, layer.gate_up.weight, layer.gate_up.bias))
            x = ops.linear(h, layer.down.weight, layer.down.bias, onto=x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of the hidden states given."""
        return self.ops.linear(self.ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps), self._head)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [tokens, vocabulary] of one text, in one pass with a cache of its own."""
        if not 0 < len(token_ids) <= self.config.max_context:
            raise ValueError(f"a text must have 1 to {self.config.max_context} tokens; got {len(token_ids)}")
        num_pages = -(-len(token_ids) // KVCache.page_size)
        rows = Rows.build(
            [SequenceRows(np.asarray(token_ids, np.int32), 0, range(num_pages))], page_size=KVCache.page_size
        )
        return self.logits(self.forward(rows, KVCache.allocate(self.config, num_pages)))


def _vector(tensor: Tensor) -> Tensor:
    return tensor.float().clone()
