"""Training forward through torch's own kernels and autograd: for `exact=False`, and the exact one's readable twin.

Its log-probabilities differ from a rollout's, in the last bits on a CPU and earlier in bfloat16 on a GPU. There torch's
attention backward also sums in no fixed order, so two equal runs diverge. `TrainingOptions.exact` says what that gains
on each device. Called by `policy.py`.

Attention groups texts of similar length, padded to the longest of the group, so a pack of hundreds of short texts takes
a few calls instead of hundreds; everything else works on unpadded rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from paceline.model.backward.layer import Forward
from paceline.model.backward.low_rank import with_gradients
from paceline.model.backward.states import StateTap
from paceline.model.decoder import ATTENTION_NORM, DOWN, GATE_UP, MLP_NORM, OUT, QK_NORMS, QKV
from paceline.model.formulas import split_heads, swiglu

SHORTEST_GROUP = 64
"""Texts of up to this many rows are padded alike: smaller groups would save nothing."""
MOST_PADDING = 1.5
"""Highest ratio of the longest to the shortest text of a group."""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, which sets itself up for every new shape, while packs hardly ever repeat one."""


@dataclass(frozen=True, eq=False)
class Padding:
    """Where a pack's rows are when texts of similar length form rectangles [texts, longest].

    Padding comes after a text, so under a causal mask no real row sees it.
    """

    shapes: tuple[tuple[int, int], ...]
    """Number of texts and longest length of every rectangle."""
    slots: Tensor
    """Slot of every row of the pack."""

    @classmethod
    def plan(cls, row_starts: Sequence[int], positions: Tensor) -> Padding:
        """`row_starts`: first row of every text, then the number of rows; `positions`: of every row in its text."""
        lengths = np.diff(row_starts)
        first_slots = np.empty_like(lengths)
        shapes: list[tuple[int, int]] = []
        num_slots = 0
        for texts in _group_by_length(lengths):
            longest = int(lengths[texts].max())
            first_slots[texts] = num_slots + np.arange(len(texts)) * longest
            shapes.append((len(texts), longest))
            num_slots += len(texts) * longest
        firsts = torch.from_numpy(np.repeat(first_slots, lengths)).to(positions.device)
        return cls(tuple(shapes), firsts + positions)

    def fill(self, rows: Tensor) -> Tensor:
        """Put rows into their slots, with zeros in between."""
        num_slots = sum(texts * longest for texts, longest in self.shapes)
        return rows.new_zeros(num_slots, *rows.shape[1:]).index_copy(0, self.slots, rows)

    def split(self, slots: Tensor) -> list[Tensor]:
        """Every rectangle, [texts, longest, ...]."""
        parts = slots.split([texts * longest for texts, longest in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def take(self, slots: Tensor) -> Tensor:
        """Take the pack's rows out of their slots."""
        return slots.index_select(0, self.slots)


def _group_by_length(lengths: NDArray[Any]) -> list[NDArray[Any]]:
    """Indices of texts of similar length, longest first."""
    groups: list[NDArray[Any]] = []
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        longest = max(lengths[order[0]], SHORTEST_GROUP)
        count = int(np.sum(np.maximum(lengths[order], SHORTEST_GROUP) * MOST_PADDING >= longest))
        groups.append(order[:count])
        order = order[count:]
    return groups


def causal_attention(q: Tensor, k: Tensor, v: Tensor, is_repeated: bool | None = None) -> Tensor:
    """Causal attention of queries [texts, heads, rows, dim] over keys and values with as many heads or fewer.

    `is_repeated`: give every query head its own keys and values; None: only if no fast kernel can share them.
    """
    if is_repeated is None:  # on a GPU, float32 has such a kernel only for equal numbers of heads
        is_repeated = q.is_cuda and q.dtype == torch.float32
    if is_repeated:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    with sdpa_kernel(KERNELS):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not is_repeated)


class PlainForward:
    """One forward over a pack, with the master weights rounded as in the decoder, or the decoder's own."""

    def __init__(self, forward: Forward, parameters: Mapping[str, Tensor], stage: Callable[..., Any]) -> None:
        """`stage`: see `TrainablePolicy`."""
        self._forward = forward
        self._stage = stage
        self._parameters = parameters
        self._eps = forward.decoder.config.rms_norm_eps
        self._padding = Padding.plan(forward.packed.row_starts, forward.packed.positions)

    def log_probs(self, chunk: int, temperature: float, tap: StateTap) -> Tensor:
        """Log-probability of every target, in chunks of rows; the logits of only one chunk exist at a time."""
        config = self._forward.decoder.config
        x = self._stage("model.embed_tokens", self._embed)
        for index in range(config.num_layers):
            tap.look(index, x)
            run = functools.partial(self._layer, f"model.layers.{index}.")
            if self._forward.checkpointing:
                run = functools.partial(_recomputed, run)
            x = self._stage(f"model.layers.{index}", run, x)
        tap.look(config.num_layers, x)
        scores: Tensor = self._stage("lm_head", functools.partial(self._score_all, chunk, temperature), x)
        return scores

    def _embed(self) -> Tensor:
        table = self._parameters["model.embed_tokens.weight"].to(self._weight_dtype)
        return F.embedding(self._forward.packed.token_ids, table).float()

    def _score_all(self, chunk: int, temperature: float, x: Tensor) -> Tensor:
        packed = self._forward.packed
        score = functools.partial(self._score, 1.0 if temperature == 0 else temperature)
        pieces = zip(x.index_select(0, packed.scored_rows).split(chunk), packed.targets.split(chunk), strict=True)
        return torch.cat([_recomputed(score, rows, targets) for rows, targets in pieces])

    @property
    def _weight_dtype(self) -> torch.dtype:
        return self._forward.decoder.ops.weight_dtype

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._parameters[f"{name}.weight"], self._eps)

    def _linear(self, h: Tensor, *names: str) -> Tensor:
        """h W^T (+ bias) for the stacked weights of these names, the result in float32."""
        weights = [self._parameters[f"{name}.weight"] for name in names]
        weight = torch.cat(weights).to(self._weight_dtype)
        # A CPU multiplies in float32 whatever the stored precision, as the engine does there.
        product = F.linear(h, weight.float()) if not h.is_cuda else F.linear(h.to(weight.dtype), weight).float()
        if self._forward.low_ranks is not None:
            product = with_gradients(product, h, self._forward.low_ranks, list(names), list(map(len, weights)))
        biases = [self._parameters[f"{name}.bias"] for name in names if f"{name}.bias" in self._parameters]
        return product + torch.cat(biases) if biases else product

    def _layer(self, prefix: str, x: Tensor) -> Tensor:
        def named(names: tuple[str, ...]) -> list[str]:
            return [f"{prefix}{name}" for name in names]

        qkv = self._linear(self._norm(x, f"{prefix}{ATTENTION_NORM}"), *named(QKV))
        x = x + self._linear(self._attention(prefix, qkv), *named(OUT))
        gate_up = self._linear(self._norm(x, f"{prefix}{MLP_NORM}"), *named(GATE_UP))
        return x + self._linear(swiglu(gate_up), *named(DOWN))

    def _attention(self, prefix: str, qkv: Tensor) -> Tensor:
        forward, padding = self._forward, self._padding
        norms = [self._parameters.get(f"{prefix}{name}.weight") for name in QK_NORMS]
        heads = split_heads(qkv, norms[0], norms[1], forward.head_sizes, forward.decoder.rotary.eps, *forward.turns())
        dtype = self._weight_dtype if qkv.is_cuda else torch.float32
        padded = padding.fill(torch.cat([values.to(dtype) for values in heads], dim=1))
        num_heads, num_kv_heads, _ = forward.head_sizes
        attended = []
        for group in padding.split(padded):
            q, k, v = group.transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            attended.append(causal_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
        return padding.take(torch.cat(attended)).float()

    def _score(self, temperature: float, hidden: Tensor, targets: Tensor) -> Tensor:
        is_tied = self._forward.decoder.config.tie_embeddings
        h = self._norm(hidden, "model.norm")
        logits = self._linear(h, "model.embed_tokens" if is_tied else "lm_head")
        return -F.cross_entropy(logits / temperature, targets, reduction="none")


def _recomputed(run: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """run(*inputs), keeping only the inputs for the backward."""
    result: Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
