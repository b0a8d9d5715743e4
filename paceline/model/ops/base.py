"""What the decoder needs from a machine. One implementation per kind of machine and guarantee, chosen in `__init__`.

An implementation says with `is_exact` whether a row's result is independent of the rows beside it. It may keep packed
copies of weights; it never decides what to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.kv_cache import KVCache
from paceline.model.rows import Rows
from paceline.types import Sampling


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are turned: cos and sin tables [positions, head dim / 2]; eps is that of their norms."""

    cos: Tensor
    sin: Tensor
    eps: float


@dataclass(frozen=True)
class Drawn:
    """One sampled token per requested row; log-probabilities before truncation and, where it applies, after."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    truncated_logprobs: NDArray[np.float32]
    is_finite: NDArray[np.bool_]

    @classmethod
    def empty(cls, count: int) -> Drawn:
        """Room for `count` rows."""
        return cls(
            np.zeros(count, np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
            np.zeros(count, np.bool_),
        )


class Ops(Protocol):
    """The operations of one forward pass. All activations are float32 [rows, features]."""

    name: str
    is_exact: bool

    def prepare(self, weight: Tensor) -> Any:
        """Bring a [out, in] weight into the form `linear` wants."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """x W^T (+ bias); with `onto`, which may be overwritten, that plus the product."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

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
        """Rotate, write keys and values to the rows' slots, attend to all ancestors: [rows, heads * head dim]."""

    def sample(self, logits: Tensor, sampling: Sampling, keys: NDArray[np.uint64], steps: NDArray[np.int64]) -> Drawn:
        """Draw a token per row; `steps` are positions in the response."""
