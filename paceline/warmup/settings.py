"""The settings of `paceline warmup`: the texts, the model, its training and its checks.

A recipe in `recipes/` holds these sections. So does the `recipe.yaml` that a warm start writes beside its model, which
trains the same model again. Read by the command line and `warmup/train.py`. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.core.config import Settings
from paceline.model.device import check_name
from paceline.rl.settings import LearnerSettings
from paceline.tasks.settings import MAX_LEVEL, Dial


class DataSettings(Settings):
    task: str = Field(
        "countdown", description="Whose worked solutions to learn: countdown, counting, graph or spatial."
    )
    dials: dict[str, Dial] = Field({}, description="Parameters of the task, at every level.")
    levels: dict[int, float] = Field(
        {0: 1.0}, description="How often to draw each level, as shares of the texts; they need not add up to 1."
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="Fixes every text, and so every batch.")
    batch_tokens: int = Field(16_384, ge=1, le=2**31, description="Tokens that fill a step's batch.")
    workers: int = Field(0, ge=0, le=64, description="Processes that write texts in advance; 0: none. No text changes.")

    @field_validator("levels")
    @classmethod
    def _check_levels(cls, levels: dict[int, float]) -> dict[int, float]:
        if not levels or not all(0 < share < float("inf") for share in levels.values()):
            raise ValueError("name at least one level, each with a share above 0")
        if min(levels) < 0:
            raise ValueError("levels begin with 0")
        if max(levels) > MAX_LEVEL:
            raise ValueError(f"levels end with {MAX_LEVEL}")
        return dict(sorted(levels.items()))


class ShapeSettings(Settings):
    """A Qwen3 decoder. Two key/value heads of up to 128 values let it be embedded in the shapes of real ones."""

    hidden_size: int = Field(192, ge=8, le=2**16, multiple_of=8, description="Width of the residual stream.")
    intermediate_size: int = Field(512, ge=8, le=2**18, multiple_of=8, description="Width of the MLP.")
    num_layers: int = Field(10, ge=1, le=2**10, description="Decoder layers.")
    num_heads: int = Field(4, ge=1, le=2**10, description="Query heads.")
    num_kv_heads: int = Field(
        2, ge=1, le=2**10, description="Key/value heads, each shared by equally many query heads."
    )
    head_dim: int = Field(64, ge=2, le=2**10, multiple_of=2, description="Width of a head.")
    max_context: int = Field(4608, ge=64, le=2**22, description="Longest text in tokens, prompt included.")
    rope_theta: float = Field(
        10_000.0, gt=1, le=10**15, allow_inf_nan=False, description="Base of the rotary embedding."
    )

    @model_validator(mode="after")
    def _check_heads(self) -> ShapeSettings:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class TrainSettings(LearnerSettings):
    steps: int = Field(2000, ge=1, le=10**9, description="Optimizer steps, one batch each.")
    seed: int = Field(0, ge=0, lt=2**63, description="Fixes the initial weights.")
    device: str = Field("cpu", description="Device to train on: cpu, cuda or cuda:N.")
    precision: Literal["auto", "bf16", "mixed", "float32"] = Field(
        "auto", description="Arithmetic, as in engine.precision; auto: bf16 on a GPU, float32 on a CPU."
    )
    lr: float = Field(2e-3, gt=0, le=1000, allow_inf_nan=False, description="Peak learning rate, with cosine decay.")
    lr_floor: float = Field(0.05, ge=0, le=1, description="Final learning rate, as a fraction of the peak.")
    warmup_steps: int = Field(100, ge=0, le=10**9, description="Steps over which the learning rate rises to its peak.")
    betas: tuple[float, float] | None = Field((0.9, 0.98), description="Adam's decay rates; null: the optimizer's own.")
    weight_decay: float = Field(0.01, ge=0, le=1000, allow_inf_nan=False, description="For matrices.")
    pack_tokens: int = Field(8192, ge=1, le=2**31, description="Most token rows per forward and backward pass.")
    exact: bool = Field(False, description="Train on the engine's own kernels: the same bits every time.")

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        return check_name(device)


class CheckSettings(Settings):
    """Held-out items, solved by generating for real at temperature 1."""

    every: int = Field(
        500, ge=1, le=10**9, description="Steps between checks; each saves the model, as does the last step."
    )
    items: int = Field(256, ge=1, le=10**7, description="Held-out items per check.")
    level: int = Field(0, ge=0, le=MAX_LEVEL, description="Level of these items.")
    max_new_tokens: int = Field(512, ge=1, le=2**22, description="Length limit of a response, in tokens.")
    stop_at: float | None = Field(
        None, gt=0, le=1, description="Stop early once this share of the items is solved; null: never."
    )


class WarmupSettings(Settings):
    data: DataSettings = DataSettings()
    model: ShapeSettings = ShapeSettings()
    train: TrainSettings = TrainSettings()
    check: CheckSettings = CheckSettings()
    made: dict[str, Any] = Field(
        {}, description="In a recipe.yaml: the results, and the code they came from. Never read."
    )
