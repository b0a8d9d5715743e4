"""An EAGLE-3 drafter on the engine's operations; its keys and values are one more layer of the policy's cache.

`keep` runs with every step of the policy and costs a few percent of a layer. It writes keys and values for all rows of
the step, so drafting can start in the middle of a sequence and never needs a prefill. `advance` runs the whole layer
for one row per sequence: the first call takes the result of `keep`, later ones the previous state. As in all other
layers, later rows overwrite those that verification rejects. Called by the executors and `rollout/drafters/eagle.py`;
nothing here can affect a token of the policy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.eagle.network import (
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

_LINEARS = ((FC,), QKV, QKV[1:], (OUT,), GATE_UP, (DOWN,), (HEAD,))
"""Weights combined into one linear layer each."""
_NORMS = (EMBEDDING_NORM, HIDDEN_NORM, MLP_NORM, NORM)


class Tapped:
    """The hidden states that a drafter reads, concatenated: [rows, 3 * hidden]. A `decoder.Tap`.

    A forward with fewer rows fills the first ones: on a GPU one buffer serves all steps.
    """

    def __init__(
        self, num_layers: int, num_rows: int, hidden_size: int, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self._layers = tap_layers(num_layers)
        self.states = torch.empty(num_rows, len(self._layers) * hidden_size, dtype=dtype, device=device)

    def __call__(self, index: int, x: Tensor) -> None:
        for place, layer in enumerate(self._layers):
            if layer == index:
                self.states[: len(x), place * x.shape[1] : (place + 1) * x.shape[1]] = x


class EagleLayer:
    """One version of a drafter, ready to run with one decoder."""

    def __init__(self, eagle: Eagle, decoder: Decoder) -> None:
        config, policy = eagle.config, decoder.config
        if (config.num_kv_heads, config.head_dim) != (policy.num_kv_heads, policy.head_dim):
            raise ValueError(
                f"the drafter has {config.num_kv_heads} key/value heads of {config.head_dim}, the policy "
                f"{policy.num_kv_heads} of {policy.head_dim}; they share pages, so these must be equal"
            )
        if (config.target_hidden_size, config.vocab_size) != (policy.hidden_size, policy.vocab_size):
            raise ValueError("the drafter was made for a policy with another hidden size or vocabulary")
        self.eagle = eagle
        self._decoder, self.ops = decoder, decoder.ops.for_drafts()
        self._index = policy.num_layers
        self._eps, self._num_heads, self._rotary = config.rms_norm_eps, config.num_heads, decoder.rotary
        self._linears = {names: self.ops.prepare([eagle.weights[name] for name in names]) for names in _LINEARS}
        self._norms = {name: self.ops.prepare_vector([eagle.weights[name]]) for name in _NORMS}

    def take(self, eagle: Eagle) -> bool:
        """Load another version in place, as captured graphs require; False if that is impossible."""
        is_alike = eagle.config == self.eagle.config and torch.equal(eagle.draft_ids, self.eagle.draft_ids)
        if not (is_alike and self.ops.can_share):
            return False
        self.eagle = eagle
        for names, joined in self._linears.items():
            sizes = [len(eagle.weights[name]) for name in names]
            for part, name in zip(joined.split(sizes), names, strict=True):
                part.copy_(eagle.weights[name])
        for name, norm in self._norms.items():
            norm.copy_(eagle.weights[name])
        return True

    def keep(self, tapped: Tensor, next_ids: Tensor, rows: Any, cache: Any) -> Tensor:
        """Write keys and values of the policy's rows, which `next_ids` follow; return x, the input of `advance`."""
        x = self.ops.as_tensor(self._linear(tapped, (FC,)))
        self.ops.store(self._linear(self._input(x, next_ids), QKV[1:]), self._rotary, rows, cache, self._index)
        return x

    def advance(self, x: Tensor, next_ids: Tensor, rows: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """States and logits over the draft vocabulary for rows that `next_ids` follow."""
        ops, norms = self.ops, self._norms
        qkv = self._linear(self._input(x, next_ids), QKV)
        attended = ops.attention(qkv, self._num_heads, None, self._rotary, rows, cache, self._index)
        between, h = ops.residual(x.clone(), attended, self._linears[OUT,], None, norms[MLP_NORM], self._eps)
        inner = ops.swiglu(self._linear(h, GATE_UP))
        state, h = ops.residual(between, inner, self._linears[DOWN,], None, norms[NORM], self._eps)
        return state, ops.as_tensor(self._linear(h, (HEAD,)))

    def _linear(self, h: Any, names: tuple[str, ...]) -> Any:
        return self.ops.linear(h, self._linears[names])

    def _input(self, x: Tensor, next_ids: Tensor) -> Tensor:
        embedded = F.embedding(next_ids, self._decoder.policy.embedding).float()
        norms = ((embedded, EMBEDDING_NORM), (x, HIDDEN_NORM))
        return torch.cat([self.ops.rms_norm(part, self._norms[name], self._eps) for part, name in norms], dim=-1)
