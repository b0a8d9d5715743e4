"""CPU operations through torch's own kernels: for `exact=False`, and as the oracle of the native ones.

Readability comes first. torch picks the summation order by batch shape, so a row's last bits may change with its
neighbours: exactly the difference that the exactness tests must be able to detect.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.kv_cache import KVCache
from paceline.model.ops.base import Rotary
from paceline.model.ops.host import HostOps
from paceline.model.ops.native import NativeOps
from paceline.model.rows import Rows


class PlainOps(HostOps):
    """See `base.Ops`."""

    name = "plain"
    is_exact = False

    def prepare(self, weights: Sequence[Tensor]) -> Tensor:
        return self._rounded(torch.cat(list(weights))).float()

    def restore(self, prepared: Tensor) -> Tensor:
        return prepared

    def linear(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(h, weight, bias)

    def residual(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x.add_(F.linear(h, weight, bias))
        return x, self.rms_norm(x, norm, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attention(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: tuple[Tensor, Tensor] | None,
        rotary: Rotary,
        rows: Rows,
        cache: KVCache,
        layer: int,
    ) -> Tensor:
        keys, values = torch.from_numpy(cache.keys[layer]), torch.from_numpy(cache.values[layer])
        _, num_kv_heads, head_dim, _ = keys.shape
        q, k, v = qkv.view(len(rows), -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms:
            q, k = self.rms_norm(q, norms[0], rotary.eps), self.rms_norm(k, norms[1], rotary.eps)
        q = _rotate(q, rotary, rows)
        self.store(torch.cat([k.flatten(1), v.flatten(1)], dim=1), rotary, rows, cache, layer)
        tables = torch.from_numpy(rows.page_tables)
        gathered_k = keys[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
        gathered_v = values[tables][..., :head_dim].permute(0, 2, 1, 3, 4).flatten(2, 3)
        mask = torch.from_numpy(_visible(rows))
        padded = q.new_zeros(mask.shape[0], mask.shape[1], num_heads, head_dim)
        at = torch.from_numpy(rows.sequence_of_row), torch.from_numpy(rows.row_in_sequence)
        padded[at] = q
        out = F.scaled_dot_product_attention(
            padded.transpose(1, 2), gathered_k, gathered_v, mask[:, None], enable_gqa=True
        )
        return out.transpose(1, 2)[at].flatten(1)

    def store(self, kv: Tensor, rotary: Rotary, rows: Rows, cache: KVCache, layer: int) -> None:
        keys, values = torch.from_numpy(cache.keys[layer]), torch.from_numpy(cache.values[layer])
        _, num_kv_heads, head_dim, page_size = keys.shape
        k, v = kv.view(len(rows), -1, head_dim).split([num_kv_heads, num_kv_heads], dim=1)
        slots = torch.from_numpy(rows.slots)
        keys[slots // page_size, :, :, slots % page_size] = _rotate(k, rotary, rows)
        values[slots // page_size, :, slots % page_size, :head_dim] = v

    # The sampler works row by row in one order anyway; a second implementation would prove nothing.
    sample = NativeOps.sample
    log_probs = NativeOps.log_probs


def _rotate(x: Tensor, rotary: Rotary, rows: Rows) -> Tensor:
    positions = torch.from_numpy(rows.positions)
    cos, sin = rotary.cos[positions, None], rotary.sin[positions, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _visible(rows: Rows) -> NDArray[np.bool_]:
    """[sequences, max rows, slots]: the logical slots each row may attend to: the context and its ancestors."""
    num_slots = rows.page_tables.shape[1] * rows.page_size
    most_rows = int(np.diff(rows.row_starts).max())
    mask = np.zeros((len(rows.contexts), most_rows, num_slots), np.bool_)
    # Padding rows attend to the first slot, which keeps their (unused) softmax defined.
    mask[:, :, 0] = True
    for s, context in enumerate(rows.contexts):
        start, stop = rows.row_starts[s], rows.row_starts[s + 1]
        mask[s, : stop - start, :context] = True
        for i, parent in enumerate(rows.parents[start:stop]):
            if parent >= 0:
                mask[s, i] |= mask[s, parent]
            mask[s, i, context + i] = True
    return mask
