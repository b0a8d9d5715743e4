"""The memory plan of a learner: what training takes beside the engine, foreseen from the config and the settings.

The command line prints it, tests hold recipes to what their GPU has, and `run/memory.py` compares it with what a GPU
has free. Nothing here imports torch: a dry run
allocates nothing and opens no weights. Activations are an estimate from above; the rest is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.kernels.small_moments import BLOCK
from paceline.model.config import ModelConfig
from paceline.model.lora.adapter import Adapter, find_modules
from paceline.rl.optimizers import HIDDEN_ONLY, is_hidden
from paceline.rl.settings import RlSettings
from paceline.rollout.memory_plan import gib

Shapes = Mapping[str, tuple[int, ...]]

_FLOAT = 4
_HEAD_ROWS = {"cpu": 256, "cuda": 1024}


@dataclass(frozen=True)
class LearnerPlan:
    """Bytes by use."""

    weights: int
    """Master weights."""
    gradients: int
    """Of the virtual workers whose sums are in memory at once."""
    states: int
    """What the optimizer keeps."""
    activations: int
    """Of one pack: what layers keep for the backward, one layer's own, and the logits."""
    base: int = 0
    """The frozen weights behind an adapter's merged ones; they may stay in host memory."""
    reference: int = 0
    """The initial policy, if the algorithm has a KL term."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states + self.activations + self.base + self.reference

    def __str__(self) -> str:
        kept = {"frozen base": self.base, "reference": self.reference}
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.states}
        parts |= {name: size for name, size in kept.items() if size}
        exact = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
        return f"learner: {exact}, activations up to {gib(self.activations)}"


def plan_learner(config: ModelConfig, settings: RlSettings, device: str, weight_size: int = 2) -> LearnerPlan:
    """What a learner over all weights, or over an adapter, will take at most. `weight_size`: bytes of a weight in the
    engine."""
    size = _FLOAT if settings.master_precision == "float32" else 2
    adapter = _adapter(config, settings)
    shapes: Shapes = config.weight_shapes() if adapter is None else adapter.shapes(config)
    count = sum(map(math.prod, shapes.values()))
    return LearnerPlan(
        weights=size * count,
        gradients=size * count * gradient_copies(settings.virtual_workers),
        states=state_bytes(settings.optimizer, shapes, size, bool(settings.optimizer_options.get("momentum"))),
        activations=_activations(config, settings, "cpu" if device == "cpu" else "cuda"),
        base=0 if adapter is None else weight_size * adapter.num_adapted(config),
        reference=weight_size * config.num_parameters if settings.build().kl_coef else 0,
    )


def _adapter(config: ModelConfig, settings: RlSettings) -> Adapter | None:
    """The adapter that is trained; the rank of one to begin with, which its folder holds, hardly matters here."""
    lora = settings.lora
    return Adapter(lora.rank or 1, lora.alpha, find_modules(lora.targets, config)) if lora.is_on else None


def gradient_copies(num_workers: int) -> int:
    """Most sums of gradients in memory at once: the current worker's, and the subtrees before it (`TreeSum`)."""
    return 1 + max(worker.bit_count() for worker in range(num_workers))


def state_bytes(optimizer: str, shapes: Shapes, size: int = _FLOAT, has_momentum: bool = False) -> int:
    """What an optimizer keeps of weights of `size` bytes each. A class of the user's counts as AdamW."""
    if optimizer not in HIDDEN_ONLY:
        return sum(_tensor_bytes(optimizer, shape, size, has_momentum) for shape in shapes.values())
    return sum(
        _tensor_bytes(optimizer if is_hidden(name, len(shape)) else "adamw", shape, size, has_momentum)
        for name, shape in shapes.items()
    )


def _tensor_bytes(optimizer: str, shape: tuple[int, ...], size: int, has_momentum: bool) -> int:
    count = math.prod(shape)
    if optimizer == "adamw_bf16":
        return 4 * count
    if optimizer == "adamw_8bit":
        return 2 * (count + _FLOAT * -(-count // BLOCK))
    if optimizer == "celo2":
        return _FLOAT * (4 * count + 3 * sum(shape))
    if optimizer == "sgd":
        return size * count * has_momentum
    return size * count * (1 if optimizer == "muon" else 2)


def _activations(config: ModelConfig, settings: RlSettings, kind: str) -> int:
    """With checkpointing a layer keeps its input and that input's norm, otherwise all its products (`Tape`)."""
    rows = settings.pack_tokens
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    tape = 2 * config.hidden_size + attention + 2 * config.intermediate_size
    kept = 2 * config.hidden_size if settings.checkpoint_activations else tape
    logits = 3 * (settings.logits_chunk_rows or _HEAD_ROWS[kind]) * config.vocab_size
    # Gradients of embedding and head, which an adapter does not make.
    tables = (not settings.lora.is_on) * (1 + (not config.tie_embeddings)) * config.vocab_size * config.hidden_size
    return _FLOAT * (rows * (config.num_layers * kept + 3 * tape) + logits + tables)
