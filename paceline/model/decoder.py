"""One decoder for Llama, Qwen2, Qwen3 and Mistral: flat rows in, hidden states and logits out.

The engine's runner calls `forward` and `logits`; `score` is the same pass over one whole text. Residual stream, norms
and logits are float32. Nothing here knows about requests, drafts or sampling. The ops must keep results independent of
the batch shape.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.ops.base import Rotary
from paceline.model.ops.choose import choose_ops
from paceline.model.rope import rope_table
from paceline.model.rows import Rows, SequenceRows
from paceline.model.task_threads import each

Tap = Callable[[int, Tensor], None]
"""Called with the residual stream before every layer, with the layer's index, and after the last. It must copy what it
keeps, because the next layer may overwrite it, and must not write to it."""


@dataclass(frozen=True)
class Linear:
    weight: Any
    bias: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    attention_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class PolicyWeights:
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Any


ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)
"""Linear layers by the checkpoint names they combine."""


class Decoder:
    """The policy. Weights are replaced only through `load_weights` and `update_linears`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        exact: bool = True,
        device: str = "cpu",
        precision: str = "auto",
    ):
        self.config = config
        self.ops = choose_ops(device, exact, precision)
        cos, sin = (
            self.ops.prepare_vector([table]) for table in rope_table(config.rope, config.head_dim, config.max_context)
        )
        self.rotary = Rotary(cos.contiguous(), sin.contiguous(), config.rms_norm_eps)
        self._policy: PolicyWeights | None = None
        self._num_loads = 0
        self.load_weights(weights)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load a full set of weights under their Hugging Face names: all of them, or none.

        On a GPU the new values overwrite the old ones in place, so captured graphs and everything that shares them see
        them.
        """
        for name, shape in self.config.weight_shapes().items():
            if name not in weights or tuple(weights[name].shape) != tuple(shape):
                found = tuple(weights[name].shape) if name in weights else "nothing"
                raise ValueError(f"weight {name!r} must have shape {tuple(shape)}; found {found}")
        self._num_loads += 1
        if self._policy is not None and self.ops.can_share:
            for name, own in self.shared_weights().items():
                own.copy_(weights[name])
            return
        embedding = self.ops.prepare_table(weights["model.embed_tokens.weight"])
        prefixes = [f"model.layers.{i}." for i in range(self.config.num_layers)]
        load = functools.partial(self._layer, weights)
        # On a CPU, weights are packed, which takes as long as an optimizer's step.
        layers = each(load, prefixes) if self.ops.device == "cpu" else list(map(load, prefixes))
        norm = self.ops.prepare_vector([weights["model.norm.weight"]])
        is_tied = self.config.tie_embeddings
        head = self.ops.prepare_head(embedding if is_tied else weights["lm_head.weight"], is_tied)
        self._policy = PolicyWeights(embedding, layers, norm, head)

    @torch.no_grad()
    def update_linears(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights of these linear layers inside decoder layers, each read once; the rest stays.

        In place on a GPU, as by `load_weights`. If a read fails half-way, load a full set.
        """
        self._num_loads += 1
        if self.ops.can_share:
            own = self.shared_weights()
            for name in weights:
                own[name].copy_(weights[name])
            return
        update = functools.partial(self._updated, weights)
        layers = each(update, range(self.config.num_layers))
        self._policy = dataclasses.replace(self.policy, layers=layers)

    def _updated(self, weights: Mapping[str, Tensor], index: int) -> LayerWeights:
        """A layer with those of its linear layers replaced that `weights` has."""
        layer, prefix, shapes = self.policy.layers[index], f"model.layers.{index}.", self.config.weight_shapes()

        def updated(linear: Linear, names: tuple[str, ...]) -> Linear:
            keys = [f"{prefix}{name}.weight" for name in names]
            if not any(key in weights for key in keys):
                return linear
            parts = self.ops.restore(linear.weight).split([shapes[key][0] for key in keys])
            new = [weights.get(key, part) for key, part in zip(keys, parts, strict=True)]
            return Linear(self.ops.prepare(new), linear.bias)

        return dataclasses.replace(
            layer,
            qkv=updated(layer.qkv, QKV),
            out=updated(layer.out, OUT),
            gate_up=updated(layer.gate_up, GATE_UP),
            down=updated(layer.down, DOWN),
        )

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> LayerWeights:
        def linear(*names: str) -> Linear:
            biases = [weights[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in weights]
            joined = self.ops.prepare([weights[f"{prefix}{name}.weight"] for name in names])
            return Linear(joined, self.ops.prepare_vector(biases) if biases else None)

        def vector(name: str) -> Tensor:
            return self.ops.prepare_vector([weights[f"{prefix}{name}.weight"]])

        has_norms = f"{prefix}{QK_NORMS[0]}.weight" in weights
        return LayerWeights(
            attention_norm=vector(ATTENTION_NORM),
            qkv=linear(*QKV),
            qk_norms=(vector(QK_NORMS[0]), vector(QK_NORMS[1])) if has_norms else None,
            out=linear(*OUT),
            mlp_norm=vector(MLP_NORM),
            gate_up=linear(*GATE_UP),
            down=linear(*DOWN),
        )

    def shared_weights(self) -> dict[str, Tensor]:
        """Views of the weights in use under their Hugging Face names: writing to them changes the policy at once.

        Only on a GPU, which keeps weights as they are; a CPU packs them. Norms and biases are float32.
        """
        if not self.ops.can_share:
            raise ValueError("weights cannot be shared on a CPU, which keeps them packed; use load_weights")
        return self.weights()

    def copy(self) -> Decoder:
        """A second decoder with its own copy of these weights."""
        twin = copy.copy(self)
        twin._policy = None
        twin.load_weights(self.weights())
        return twin

    def weights(self) -> dict[str, Tensor]:
        """The weights in use under their Hugging Face names, readable on any device: views or copies."""
        policy, shapes = self.policy, self.config.weight_shapes()
        views = {"model.embed_tokens.weight": policy.embedding, "model.norm.weight": policy.norm}
        if not self.config.tie_embeddings:
            views["lm_head.weight"] = self.ops.restore(policy.head)
        for i, layer in enumerate(policy.layers):
            prefix = f"model.layers.{i}."
            norms = {ATTENTION_NORM: layer.attention_norm, MLP_NORM: layer.mlp_norm}
            norms |= dict(zip(QK_NORMS, layer.qk_norms or (), strict=False))
            views |= {f"{prefix}{name}.weight": norm for name, norm in norms.items()}
            linears = ((QKV, layer.qkv), (OUT, layer.out), (GATE_UP, layer.gate_up), (DOWN, layer.down))
            for names, linear in linears:
                for kind, joined in (("weight", self.ops.restore(linear.weight)), ("bias", linear.bias)):
                    if joined is not None:
                        keys = [f"{prefix}{name}.{kind}" for name in names]
                        views |= zip(keys, joined.split([shapes[key][0] for key in keys]), strict=True)
        return views

    @property
    def policy(self) -> PolicyWeights:
        """The weights in use."""
        assert self._policy is not None, "the constructor loads weights"
        return self._policy

    @property
    def weights_version(self) -> tuple[int, int, int]:
        """Changes when weights are loaded, or all of them are written through torch; costs nothing to read."""
        embedding, norm = (0 if w.is_inference() else w._version for w in (self.policy.embedding, self.policy.norm))
        return self._num_loads, embedding, norm

    @property
    def num_bytes(self) -> int:
        """Memory of the weights: the checkpoint's tensors in their stored precision."""
        return self.config.num_parameters * self.policy.embedding.element_size()

    def allocate_cache(self, num_pages: int) -> Any:
        """Allocate keys and values of `num_pages` pages."""
        return self.ops.allocate_cache(self.config, num_pages)

    def forward(self, rows: Rows, cache: Any, tap: Tap | None = None) -> Tensor:
        """Hidden states [rows, hidden] before the final norm; also writes keys and values of all rows to the cache."""
        assert rows.positions.max() < self.config.max_context, "no rotary angles beyond the context"
        return self.forward_placed(self.ops.place(rows, self.config), cache, tap)

    def forward_placed(self, rows: Any, cache: Any, tap: Tap | None = None) -> Tensor:
        """The same for rows already placed by the ops; `tap` sees the residual stream on the way."""
        ops, eps, policy = self.ops, self.config.rms_norm_eps, self.policy
        x = ops.embed(policy.embedding, rows)
        next_norms = [*(layer.attention_norm for layer in policy.layers), policy.norm]
        h = ops.rms_norm(x, next_norms[0], eps)
        for i, layer in enumerate(policy.layers):
            if tap is not None:
                tap(i, x)
            qkv = ops.linear(h, layer.qkv.weight, layer.qkv.bias)
            h = ops.attention(qkv, self.config.num_heads, layer.qk_norms, self.rotary, rows, cache, i)
            x, h = ops.residual(x, h, layer.out.weight, layer.out.bias, layer.mlp_norm, eps)
            h = ops.swiglu(ops.linear(h, layer.gate_up.weight, layer.gate_up.bias))
            x, h = ops.residual(x, h, layer.down.weight, layer.down.bias, next_norms[i + 1], eps)
        if tap is not None:
            tap(len(policy.layers), x)
        return x

    def head(self, hidden: Tensor) -> Any:
        """Logits of these hidden states, in the form a graph's sampler takes."""
        return self.ops.linear(self.ops.rms_norm(hidden, self.policy.norm, self.config.rms_norm_eps), self.policy.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of these hidden states."""
        return self.ops.as_tensor(self.head(hidden))

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [tokens, vocabulary] of one text, in one pass with its own cache."""
        if not 0 < len(token_ids) <= self.config.max_context:
            raise ValueError(f"a text must have 1 to {self.config.max_context} tokens; got {len(token_ids)}")
        size = self.ops.page_size
        num_pages = -(-len(token_ids) // size)
        rows = Rows.build([SequenceRows(np.asarray(token_ids, np.int32), 0, range(num_pages))], page_size=size)
        return self.logits(self.forward(rows, self.allocate_cache(num_pages)))
