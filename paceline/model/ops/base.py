"""Interface between the decoder and a device, with one implementation per kind of device and guarantee.

`choose.py` picks the implementation, which declares with `is_exact` whether a row's result is independent of its
neighbours. It may keep packed copies of weights; it never decides what to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.mixed_sampling import RowSampling
from paceline.model.rows import Rows

OLDEST_GPU = (8, 0)
"""Compute capability of the first GPUs with bfloat16 tensor cores."""


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: cos and sin tables [positions, head dim / 2]; eps is that of the query and key norms."""

    cos: Tensor
    sin: Tensor
    eps: float


@dataclass(frozen=True)
class Sampled:
    """One sampled token per requested row, with log-probabilities before and, if applicable, after truncation."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    truncated_logprobs: NDArray[np.float32]
    is_finite: NDArray[np.bool_]
    states: Any = None
    """What a model drafter on the host starts from, if there is one: a tensor with a row for every row of the step."""
    guessed: Any = None
    """What the device itself has guessed behind the step: an `executor.Guessed`."""
    inputs: NDArray[np.int32] | None = None
    """The token that stood in each row, if the device filled in some."""
    num_accepted: NDArray[np.int32] | None = None
    """Per sequence, how many drafted tokens the device itself found right, if it checks."""
    ranks: NDArray[np.int32] | None = None
    """Per sequence, the rank of the best match for it in the texts of the device, if it looked; 0: none."""
    predicted: NDArray[np.int32] | None = None
    """Per sequence, the token after that match."""

    @classmethod
    def empty(cls, count: int) -> Sampled:
        """Allocate `count` rows."""
        return cls(
            np.zeros(count, np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
            np.zeros(count, np.bool_),
        )

    def part(self, rows: slice) -> Sampled:
        """Views of some rows, to be filled."""
        return Sampled(self.tokens[rows], self.logprobs[rows], self.truncated_logprobs[rows], self.is_finite[rows])


class Cache(Protocol):
    """Storage of keys and values; `kv_cache.KVCache` on a CPU."""

    page_size: int

    @property
    def num_pages(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    def copy_page(self, source: int, target: int) -> None:
        """Copy the contents of `source` to `target` in every layer."""


class Ops(Protocol):
    """The operations of one forward pass. The residual stream is float32 [rows, features] and logits are float32.

    Everything in between (normed rows, products of linear layers) is in a form private to the implementation and only
    passed from one operation to the next.
    """

    name: str
    is_exact: bool
    device: str
    page_size: int
    stretch: int
    """Tokens after which attention takes another code path: a self-test must go beyond it."""

    weight_dtype: torch.dtype
    """Storage dtype of embedding, linear layers and head; norms and biases stay float32."""

    can_share: bool
    """Whether weights are kept as plain tensors that other code may write to."""

    def for_drafts(self) -> Ops:
        """The fastest operations for a drafter next to this policy; drafters need no exactness."""

    def prepare(self, weights: Sequence[Tensor]) -> Any:
        """Stack [out, in] weights into the form `linear` takes."""

    def prepare_head(self, weight: Tensor, is_own: bool) -> Any:
        """The same for the output head, which may be the embedding and thus already our own copy."""

    def restore(self, prepared: Any) -> Tensor:
        """The stacked [out, in] weight, value for value, in its stored precision."""

    def prepare_vector(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate small parameters (norms, biases) as float32."""

    def prepare_table(self, weight: Tensor) -> Tensor:
        """Our own copy of the embedding."""

    def token_bytes(self, config: ModelConfig) -> int:
        """Cache memory per token."""

    def allocate_cache(self, config: ModelConfig, num_pages: int) -> Any: ...

    def place(self, rows: Rows, config: ModelConfig) -> Any:
        """Move a step's rows to where the operations read them."""

    def embed(self, table: Tensor, rows: Any) -> Tensor:
        """The initial residual stream."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Any: ...

    def linear(self, h: Any, weight: Any, bias: Tensor | None = None) -> Any:
        """h W^T (+ bias)."""

    def residual(
        self, x: Tensor, h: Any, weight: Any, bias: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Any]:
        """x + h W^T (+ bias), which may overwrite x, and its norm."""

    def swiglu(self, gate_up: Any) -> Any: ...

    def attention(
        self,
        qkv: Any,
        num_heads: int,
        norms: tuple[Tensor, Tensor] | None,
        rotary: Rotary,
        rows: Any,
        cache: Any,
        layer: int,
    ) -> Any:
        """Rotate, write keys and values to the rows' slots, attend to all ancestors: [rows, heads * head dim]."""

    def store(self, kv: Any, rotary: Rotary, rows: Any, cache: Any, layer: int) -> None:
        """The first half of `attention`, for rows without queries: rotated keys, and values, to their slots."""

    def as_tensor(self, product: Any) -> Tensor:
        """A product of `linear` as one float32 tensor [rows, features]."""

    def as_rows(self, h: Any) -> Tensor:
        """An activation as one tensor [rows, features], in bfloat16 if that loses nothing."""

    def sample(
        self, logits: Tensor, sampling: RowSampling, keys: NDArray[np.uint64], steps: NDArray[np.int64]
    ) -> Sampled:
        """Sample a token per row; `steps` are positions in the response."""

    def log_probs(self, product: Any, tokens: Tensor, temperature: float) -> Tensor:
        """The log-probabilities that `sample` would report for these tokens, one per row, bit for bit.

        `product` is the head's; tokens are int64. NaN if a row of logits is not finite.
        """
