"""An EAGLE-3 drafter on the engine's operations: its keys and values are one more layer of the policy's cache.

`keep` runs with every step of the policy and costs a few percent of a layer: it writes keys and values for all rows of
the step, so that drafting may begin in the middle of a sequence and nothing is ever prefilled for it. `advance` is the
whole layer for one row of each sequence: the first takes what `keep` returned, the next ones take the state before.
Rows that verification rejects are written over by those that come in their place, as in all other layers. Called by the
executors and by `drafters/eagle.py`; nothing here can reach a token of the policy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.eagle import (
    DOWN,
    EMBEDDING_NORM,
    FC,
    GATE_UP,
    HEAD,
    HIDDEN_NORM,
    MLP_NORM,
    NORM,
    OUT,
    QKV,
    Eagle,
    tap_layers,
)


class Tapped:
    """The hidden states that a drafter reads, side by side: [rows, 3 * hidden]. A `decoder.Tap`."""

    def __init__(self, num_layers: int, num_rows: int, hidden_size: int, device: str) -> None:
        self._layers = tap_layers(num_layers)
        self.states = torch.empty(num_rows, len(self._layers) * hidden_size, device=device)

    def __call__(self, index: int, x: Tensor) -> None:
        for place, layer in enumerate(self._layers):
            if layer == index:
                self.states[:, place * x.shape[1] : (place + 1) * x.shape[1]] = x


class EagleLayer:
    """One version of a drafter, ready to run beside one decoder."""

    def __init__(self, eagle: Eagle, decoder: Decoder) -> None:
        config, policy = eagle.config, decoder.config
        if (config.num_kv_heads, config.head_dim) != (policy.num_kv_heads, policy.head_dim):
            raise ValueError(
                f"the drafter has {config.num_kv_heads} key/value heads of {config.head_dim}, the policy "
                f"{policy.num_kv_heads} of {policy.head_dim}; they share pages, so these must be equal"
            )
        if (config.target_hidden_size, config.vocab_size) != (policy.hidden_size, policy.vocab_size):
            raise ValueError("the drafter was made for a policy of another width or vocabulary")
        self.eagle = eagle
        self._decoder, self._ops = decoder, decoder.ops
        self._index = policy.num_layers
        weights, ops, eps = eagle.weights, decoder.ops, config.rms_norm_eps
        self._eps, self._num_heads, self._rotary = eps, config.num_heads, decoder.rotary
        self._fc, self._head = ops.prepare([weights[FC]]), ops.prepare([weights[HEAD]])
        self._qkv, self._kv = (ops.prepare([weights[name] for name in names]) for names in (QKV, QKV[1:]))
        self._out, self._down = ops.prepare([weights[OUT]]), ops.prepare([weights[DOWN]])
        self._gate_up = ops.prepare([weights[name] for name in GATE_UP])
        self._norms = {
            name: ops.prepare_vector([weights[name]]) for name in (EMBEDDING_NORM, HIDDEN_NORM, MLP_NORM, NORM)
        }

    def keep(self, tapped: Tensor, next_ids: Tensor, rows: Any, cache: Any) -> Tensor:
        """Write keys and values of the policy's rows, of which `next_ids` follow; returns x, what `advance` takes."""
        x = self._ops.as_tensor(self._ops.linear(tapped, self._fc))
        self._ops.store(self._ops.linear(self._input(x, next_ids), self._kv), self._rotary, rows, cache, self._index)
        return x

    def advance(self, x: Tensor, next_ids: Tensor, rows: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """States and logits over the draft vocabulary for rows of which `next_ids` follow."""
        ops, norms = self._ops, self._norms
        qkv = ops.linear(self._input(x, next_ids), self._qkv)
        attended = ops.attention(qkv, self._num_heads, None, self._rotary, rows, cache, self._index)
        between, h = ops.residual(x.clone(), attended, self._out, None, norms[MLP_NORM], self._eps)
        inner = ops.swiglu(ops.linear(h, self._gate_up))
        state, h = ops.residual(between, inner, self._down, None, norms[NORM], self._eps)
        return state, ops.as_tensor(ops.linear(h, self._head))

    def _input(self, x: Tensor, next_ids: Tensor) -> Tensor:
        embedded = F.embedding(next_ids, self._decoder.policy.embedding).float()
        norms = ((embedded, EMBEDDING_NORM), (x, HIDDEN_NORM))
        return torch.cat([self._ops.rms_norm(part, self._norms[name], self._eps) for part, name in norms], dim=-1)
