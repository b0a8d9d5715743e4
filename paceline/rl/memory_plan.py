"""The memory that a learner takes beside its engine, foreseen from the model's config and the settings.

`paceline train --dry-run` prints it below the engine's own plan (`rollout/memory_plan.py`), and `open.py` compares both
with a GPU's free memory before anything is loaded. Nothing here imports torch. Kernels' workspaces and fragments are
left out: a measured peak is a few percent higher.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.model.config import ModelConfig
from paceline.model.lora.adapter import Adapter, find_modules
from paceline.rl.settings import RlSettings

OPTIMIZER_BYTES = {"adamw": 8, "muon": 4, "sgd": 0}
"""State per trained number; other optimizers are counted like AdamW."""
_MASTER_BYTES = {"float32": 4, "bf16": 2}
_LOGITS_ROWS = {"cpu": 256, "cuda": 1024}
_GIB = 2**30


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes by use."""

    num_trained: int
    base: int
    """The frozen weights behind merged ones, which may stay in host memory; 0 without an adapter."""
    trained: int
    """Master weights or adapters, their gradients and the optimizer's state."""
    reference: int
    """The initial policy, if the algorithm has a KL term."""
    activations: int
    """What a pack's backward needs."""

    @property
    def total(self) -> int:
        return self.base + self.trained + self.reference + self.activations

    def __str__(self) -> str:
        parts = {
            "frozen base": self.base,
            "trained weights, gradients and optimizer": self.trained,
            "reference": self.reference,
            "activations about": self.activations,
        }
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        less = f"; with rl.lora.base=host {_gib(self.total - self.base)} on the device" if self.base else ""
        return f"training {self.num_trained:,} parameters: {listed}, in all {_gib(self.total)}{less}"


def plan_learner(config: ModelConfig, settings: RlSettings, device: str, weight_bytes: int) -> LearnerMemory:
    """What a learner takes. `weight_bytes`: of one number of the engine's weights."""
    is_gpu, lora = device.startswith("cuda"), settings.lora
    num_trained, base = config.num_parameters, 0
    if lora.is_on:  # one to begin with has a rank of its own, which matters little beside its base
        adapter = Adapter(lora.rank or 1, lora.alpha, find_modules(lora.targets, config))
        num_trained, base = adapter.num_parameters(config), weight_bytes * adapter.num_adapted(config)
    # The tree of sums holds that many sets of gradients at most, with the one that is being made.
    gradients = 4 * settings.virtual_workers.bit_length()
    each = _MASTER_BYTES[settings.master_precision] + gradients + OPTIMIZER_BYTES.get(settings.optimizer, 8)
    reference = weight_bytes * config.num_parameters if settings.build().kl_coef else 0
    return LearnerMemory(num_trained, base, each * num_trained, reference, _activations(config, settings, is_gpu))


def _activations(config: ModelConfig, settings: RlSettings, is_gpu: bool) -> int:
    """The tape of every layer, or with checkpointing its inputs; the widest layer's gradients; a chunk of logits."""
    rows = settings.pack_tokens
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attended = 2 * heads if is_gpu else 4 * heads
    tape = 4 * (2 * hidden + heads + 2 * kv_heads + 2 * inner) + attended
    inputs = (4 + (2 if is_gpu else 4)) * hidden
    kept = rows * config.num_layers * (inputs if settings.checkpoint_activations else tape)
    gradients = rows * (tape if settings.checkpoint_activations else 0) + rows * 4 * (2 * inner + 2 * hidden)
    logits_rows = min(settings.logits_chunk_rows or _LOGITS_ROWS["cuda" if is_gpu else "cpu"], rows)
    return kept + gradients + 3 * 4 * logits_rows * config.vocab_size


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
