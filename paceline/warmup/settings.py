"""What `paceline warmup` can be set to: the texts, the model, its training and its checks.

A recipe in `recipes/` holds these sections, and so does the `recipe.yaml` in a folder that a warm start made, which
trains the same model again. Read by the command line and `warmup.py`. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.core.config import Settings
from paceline.rl.optimizers import check_optimizer
from paceline.tasks.settings import Dial


class DataSettings(Settings):
    task: str = Field("countdown", description="Whose worked solutions to learn: countdown, counting, graph, spatial.")
    dials: dict[str, Dial] = Field({}, description="What the task can be set to, at every level.")
    levels: dict[int, float] = Field(
        {0: 1.0}, description="How often each level is drawn, as shares of the texts; they need not add up to 1."
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="Fixes every text, and with it every batch.")
    batch_tokens: int = Field(16_384, ge=1, description="A step's batch is full when it has so many tokens.")
    workers: int = Field(0, ge=0, le=64, description="Processes that write texts ahead of time; 0: none. Changes none.")

    @field_validator("levels")
    @classmethod
    def _check_levels(cls, levels: dict[int, float]) -> dict[int, float]:
        if not levels or not all(0 < share < float("inf") for share in levels.values()):
            raise ValueError("name at least one level, each with a share above 0")
        if min(levels) < 0:
            raise ValueError("levels begin with 0")
        return dict(sorted(levels.items()))


class ShapeSettings(Settings):
    """A Qwen3 decoder. Two key/value heads of up to 128 values let it be embedded in the shapes of real ones."""

    hidden_size: int = Field(192, ge=8, multiple_of=8, description="Width of the residual stream.")
    intermediate_size: int = Field(512, ge=8, multiple_of=8, description="Width of an MLP.")
    num_layers: int = Field(10, ge=1, description="Decoder layers.")
    num_heads: int = Field(4, ge=1, description="Query heads.")
    num_kv_heads: int = Field(2, ge=1, description="Key/value heads, each shared by equally many query heads.")
    head_dim: int = Field(64, ge=2, multiple_of=2, description="Width of a head.")
    max_context: int = Field(4608, ge=64, description="Longest text, prompt included.")
    rope_theta: float = Field(10_000.0, gt=1, allow_inf_nan=False, description="Base of the rotary positions.")

    @model_validator(mode="after")
    def _check_heads(self) -> ShapeSettings:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class TrainSettings(Settings):
    steps: int = Field(2000, ge=1, description="Optimizer steps, one batch each.")
    seed: int = Field(0, ge=0, lt=2**63, description="Fixes the weights at the start.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where it runs: cpu, cuda or cuda:N.")
    precision: Literal["auto", "bf16", "mixed", "float32"] = Field(
        "auto", description="Arithmetic, as in engine.precision; auto is bf16 on a GPU and float32 on a CPU."
    )
    optimizer: str = Field("adamw", description="adamw, sgd, muon, or the import path of a class.")
    optimizer_options: dict[str, Any] = Field({}, description="Further options of the optimizer, by its own names.")
    lr: float = Field(2e-3, gt=0, allow_inf_nan=False, description="Peak learning rate; falls like a cosine.")
    lr_floor: float = Field(0.05, ge=0, le=1, description="Where the cosine ends, as a share of the peak.")
    warmup_steps: int = Field(100, ge=0, description="Steps in which the learning rate rises to its peak.")
    betas: tuple[float, float] | None = Field((0.9, 0.98), description="Adam's decay rates; null: the optimizer's own.")
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="For matrices.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Longer gradients are scaled to this norm; null: never.")
    pack_tokens: int = Field(8192, ge=1, description="Most token rows in one forward and backward.")
    exact: bool = Field(False, description="Train through the engine's own kernels: the same bits every time.")
    checkpoint_activations: bool = Field(False, description="Recompute layers in the backward to save memory.")

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, name: str) -> str:
        return check_optimizer(name)


class CheckSettings(Settings):
    """Held-out items, solved by generating for real at temperature 1."""

    every: int = Field(500, ge=1, description="Steps between checks; the model is saved at each, and at the end.")
    items: int = Field(256, ge=1, description="Test items of a check.")
    level: int = Field(0, ge=0, description="Their level.")
    max_new_tokens: int = Field(512, ge=1, description="Length limit of a response.")
    stop_at: float | None = Field(
        None, gt=0, le=1, description="Share of solved items that ends the training early; null: never."
    )


class WarmupSettings(Settings):
    data: DataSettings = DataSettings()
    model: ShapeSettings = ShapeSettings()
    train: TrainSettings = TrainSettings()
    check: CheckSettings = CheckSettings()
    made: dict[str, Any] = Field({}, description="In a recipe.yaml: what came out, and by which code. Never read.")
