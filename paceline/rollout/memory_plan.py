"""The memory plan of a GPU, reported once at start-up: the engine fills it in, the command line prints it."""

from __future__ import annotations

from dataclasses import dataclass

_OPTIMIZER_BYTES = 12
"""Per parameter in training: float32 master weight and two moments."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use. `graphs` grows whenever a new row count is captured."""

    device: str
    weights: int
    cache: int
    cache_tokens: int
    graphs: int
    free: int
    num_parameters: int

    @property
    def optimizer(self) -> int:
        """What AdamW training would take on top."""
        return _OPTIMIZER_BYTES * self.num_parameters

    def __str__(self) -> str:
        return (
            f"memory on {self.device}: weights {_gib(self.weights)}, KV cache {_gib(self.cache)} "
            f"({self.cache_tokens:,} tokens), graphs and buffers {_gib(self.graphs)}, free {_gib(self.free)}; "
            f"training would take {_gib(self.optimizer)} for the optimizer"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
