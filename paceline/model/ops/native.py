"""Exact operations on a CPU: our own kernels, compiled on first use, every sum in one fixed order.

Exact by construction: neither the number of rows nor that of threads decides a summation order. `self_test.py` still
checks it on the actual machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.types import Sampling
from paceline.kernels.cpu import attention, rowwise
from paceline.kernels.cpu import sampling as kernels
from paceline.kernels.cpu.linear import PackedWeight, empty, linear, pack, unpack
from paceline.model.kv_cache import KVCache
from paceline.model.mixed_sampling import RowSampling, runs
from paceline.model.ops.base import Rotary, Sampled
from paceline.model.ops.host import HostOps
from paceline.model.rows import Rows


class NativeOps(HostOps):
    """See `base.Ops`."""

    name = "native"
    is_exact = True

    def prepare(self, weights: Sequence[Tensor]) -> PackedWeight:
        return pack(self._rounded(torch.cat(list(weights))))

    def restore(self, prepared: PackedWeight) -> Tensor:
        return unpack(prepared)

    def linear(self, h: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        return linear(h, weight, None if bias is None else bias.repeat(h.shape[0], 1))

    def residual(
        self, x: Tensor, h: Tensor, weight: PackedWeight, bias: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = linear(h, weight, x if bias is None else x.add_(bias))
        return x, self.rms_norm(x, norm, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        rowwise.rms_norm(x.data_ptr(), x.shape[0], x.shape[1], weight.data_ptr(), eps, y.data_ptr())
        return y

    def swiglu(self, gate_up: Tensor) -> Tensor:
        y = empty(gate_up.shape[0], gate_up.shape[1] // 2)
        rowwise.swiglu(gate_up.data_ptr(), y.shape[0], y.shape[1], y.data_ptr())
        return y

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
        keys, values = cache.keys[layer], cache.values[layer]
        queries = _rotate_and_store(qkv, num_heads, norms, rotary, rows, keys, values)
        out = torch.empty_like(queries)
        attention.attend(
            queries.data_ptr(),
            rows.positions,
            rows.parents,
            rows.row_starts,
            rows.contexts,
            rows.is_tree,
            rows.page_tables,
            num_heads,
            keys,
            values,
            out.data_ptr(),
            rows.num_pairs,
        )
        return out

    def store(self, kv: Tensor, rotary: Rotary, rows: Rows, cache: KVCache, layer: int) -> None:
        _rotate_and_store(kv, 0, None, rotary, rows, cache.keys[layer], cache.values[layer])

    def sample(
        self, logits: Tensor, sampling: RowSampling, keys: NDArray[np.uint64], steps: NDArray[np.int64]
    ) -> Sampled:
        sampled = Sampled.empty(len(keys))
        for rows, own in runs(sampling, len(keys)):
            _sample(logits.numpy()[rows], own, keys[rows], steps[rows], sampled.part(rows))
        return sampled

    def log_probs(self, product: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        found = empty(len(tokens))
        kernels.log_probs(product.numpy(), temperature, tokens.numpy(), found.numpy())
        return found


def _sample(
    logits: NDArray[np.float32],
    sampling: Sampling,
    keys: NDArray[np.uint64],
    steps: NDArray[np.int64],
    sampled: Sampled,
) -> None:
    """Sample rows that have the same settings."""
    kernels.sample(logits, sampling.temperature, keys, steps, sampled.tokens, sampled.logprobs, sampled.is_finite)
    sampled.truncated_logprobs[:] = sampled.logprobs
    if sampling.is_truncated:
        for i in np.flatnonzero(sampled.is_finite):
            sampled.tokens[i], sampled.logprobs[i], sampled.truncated_logprobs[i] = kernels.sample_truncated(
                logits[i], sampling.temperature, keys[i], steps[i], sampling.top_k, sampling.top_p, sampling.min_p
            )


def _rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    rotary: Rotary,
    rows: Rows,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> Tensor:
    """Store keys and values; return the queries."""
    head_dim = keys.shape[2]
    queries = empty(len(rows), num_heads * head_dim)
    q_norm, k_norm = (norms[0].data_ptr(), norms[1].data_ptr()) if norms else (0, 0)
    rowwise.rotate_and_store(
        qkv.data_ptr(),
        q_norm,
        k_norm,
        rotary.eps,
        rotary.cos.data_ptr(),
        rotary.sin.data_ptr(),
        1 / math.sqrt(head_dim),
        rows.positions,
        rows.slots,
        num_heads,
        queries.data_ptr(),
        keys,
        values,
    )
    return queries
