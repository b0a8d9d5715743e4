"""The memory plan of an engine: the engine reports its own at start-up, and `plan_memory` foresees it from a config.

The command line prints it. Nothing here imports torch: a dry run allocates nothing and opens no weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from paceline.model.config import ModelConfig

GPU_PAGE = 256
"""Tokens per page of a GPU's cache."""
_OPTIMIZER_BYTES = 12
"""Per parameter in training: float32 master weight and two moments."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use. `graphs` grows whenever a new row count is captured; 0 there or in `free`: not known yet."""

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
        return f"{self.of_engine()}; training would take {gib(self.optimizer)} for the optimizer"

    def of_engine(self) -> str:
        """The part that generating alone takes; `rl/memory_plan.py` knows the rest of a run."""
        known = {"graphs and buffers": self.graphs, "free": self.free}
        rest = "".join(f", {name} {gib(size)}" for name, size in known.items() if size)
        return (
            f"memory on {self.device}: weights {gib(self.weights)}, KV cache {gib(self.cache)} "
            f"({self.cache_tokens:,} tokens){rest}"
        )


def plan_memory(
    config: ModelConfig, device: str, precision: str, kv_tokens: int, has_network: bool = False
) -> MemoryPlan:
    """What an engine will take, as far as the config says. `has_network`: a drafter has a layer of its own to cache."""
    is_gpu = device.startswith("cuda")
    cached = replace(config, num_layers=config.num_layers + has_network)
    page, token_bytes = _gpu_cache(cached, precision) if is_gpu else _host_cache(cached)
    num_pages = max(-(-kv_tokens // page), 1) + 1  # as the engine counts them
    return MemoryPlan(
        device=device,
        weights=config.num_parameters * weight_bytes(config, device, precision),
        cache=num_pages * page * token_bytes,
        cache_tokens=num_pages * page,
        graphs=0,
        free=0 if is_gpu else free_host_bytes(),
        num_parameters=config.num_parameters,
    )


def free_host_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _host_cache(config: ModelConfig) -> tuple[int, int]:
    """Tokens per page and bytes per token."""
    from paceline.kernels.cpu.attention import PAGE
    from paceline.model.kv_cache import token_bytes

    return PAGE, token_bytes(config)


def _gpu_cache(config: ModelConfig, precision: str) -> tuple[int, int]:
    size = 2 if precision in ("auto", "bf16") else 4
    return GPU_PAGE, 2 * config.num_layers * config.num_kv_heads * config.head_dim * size


def weight_bytes(config: ModelConfig, device: str, precision: str) -> int:
    """Bytes per weight: a CPU keeps what the file holds, unless a precision says otherwise."""
    if device.startswith("cuda") or precision == "mixed":
        return 4 if precision == "float32" else 2
    stored = str(config.hf.get("dtype") or config.hf.get("torch_dtype") or "float32")
    return 2 if stored.removeprefix("torch.") in ("bfloat16", "float16") else 4


def gib(num_bytes: int) -> str:
    """A size as plans show it."""
    return f"{num_bytes / 2**30:.2f} GiB"
