"""The `rl` section of the settings: the algorithm, its dials, and the learner.

A null dial keeps the value of the algorithm's row in `algorithms.py`; `build` returns that row with the other dials
applied. Read by the run loop and the learner. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.core.config import Settings, SettingsError, validate
from paceline.core.plugins import names_file
from paceline.core.types import MAX_SAMPLES
from paceline.model.lora.adapter import ALL_LINEAR, MAX_RANK, BasePlace, Rounding
from paceline.rl.advantage import ADVANTAGES
from paceline.rl.algorithms import (
    Algorithm,
    Filter,
    KlEstimator,
    KlPlace,
    Normalise,
    Ratio,
    check_advantage,
    find_algorithm,
)
from paceline.rl.filters import Truncated
from paceline.rl.optimizers import Schedule, check_optimizer

DIALS = (
    "advantage",
    "normalise",
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio",
    "whiten",
    "kl_coef",
    "kl_estimator",
    "kl_in",
    "filter",
    "overlong_share",
)
"""Settings that override a field of the algorithm's row."""


class LearnerSettings(Settings):
    """What every training of a policy can set: RL, and the warm start before it."""

    steps: int = Field(20, ge=1, le=10**9, description="Number of training steps.")
    lr: float = Field(3e-5, ge=0, le=1000, allow_inf_nan=False, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, le=10**9, description="Steps over which the learning rate rises to its peak.")
    lr_floor: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, as a fraction of the peak.")
    optimizer: str = Field(
        "adamw",
        description="adamw, adamw_bf16 or adamw_8bit (AdamW with smaller states), sgd, muon, celo2, or a class of your "
        "own: torch.optim:RMSprop, file.py:CLASS.",
    )
    optimizer_options: dict[str, Any] = Field(
        {}, description="Further options of the optimizer, under its own names; celo2 needs weights, a file."
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1000, allow_inf_nan=False, description="For matrices; norms and biases have none."
    )
    betas: tuple[float, float] | None = Field(None, description="Adam's decay rates; null: the optimizer's own.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip gradients to this norm; null: never.")
    pack_tokens: int = Field(
        4096, ge=1, le=2**31, description="Most token rows per forward and backward pass of the learner."
    )
    exact: bool = Field(
        True, description="Run the learner's forward pass on the engine's kernels: log-probabilities agree bit for bit."
    )
    checkpoint_activations: bool = Field(False, description="Recompute layers in the backward pass to save memory.")

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, name: str) -> str:
        return check_optimizer(name)


class LoraSettings(Settings):
    """Train an adapter instead of the weights. See docs/lora.md."""

    rank: int = Field(0, ge=0, le=MAX_RANK, description="Rank of the adapters; 0: train the weights themselves.")
    alpha: float = Field(
        32.0,
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="The update is alpha / rank times B A.",
    )
    targets: tuple[str, ...] = Field(
        (ALL_LINEAR,),
        description="Linear layers to adapt: all-linear, or ends of their names such as [q_proj, v_proj].",
    )
    adapter: str | None = Field(
        None, description="Folder of an adapter in PEFT's layout to begin with; it sets rank, alpha and targets."
    )
    rounding: Rounding = Field(
        "dither",
        description="How merged weights become bfloat16: dither rounds by a fixed threshold per element, which keeps "
        "small updates on average; nearest loses most of them.",
    )
    base: BasePlace = Field(
        "auto",
        description="Where the frozen weights behind the merged ones stay: device, host (pinned memory), or auto: on "
        "the device if they fit.",
    )

    @property
    def is_on(self) -> bool:
        return self.rank > 0 or self.adapter is not None

    @model_validator(mode="after")
    def _check_rank(self) -> LoraSettings:
        given = sorted(self.model_fields_set & {"alpha", "targets"})
        changed = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if changed and not self.is_on:
            raise ValueError(f"with rank 0 there is no adapter, and {changed[0]} has no effect; set rl.lora.rank")
        return self


class RlSettings(LearnerSettings):
    lora: LoraSettings = Field(LoraSettings(), description="Train an adapter instead of the weights; see docs/lora.md.")

    algorithm: str = Field(
        "grpo",
        description="grpo, dr_grpo, dapo, rloo, reinforce++, reinforce++-baseline or gspo, or your own as "
        "file.py:NAME; the settings below override parts of it.",
    )
    prompts_per_step: int = Field(
        16, ge=1, le=2**20, description="Prompts per training step, one group of responses each."
    )
    group_size: int = Field(8, ge=1, le=MAX_SAMPLES, description="Responses per prompt.")
    epochs: int = Field(1, ge=1, le=10**4, description="Optimizer steps per batch; above 1, the clip range matters.")
    seed: int = Field(
        0, ge=-(2**63), lt=2**63, description="Fixes the sampling noise; task.seed fixes the order of the data."
    )

    schedule: Schedule = Field("constant", description="Learning rate after warmup: constant, linear or cosine.")

    advantage: str | None = Field(
        None, description="group_standardised, group_centred, leave_one_out or raw_reward; null: per algorithm."
    )
    normalise: Normalise | None = Field(
        None,
        description="How the loss weighs tokens: sequence (every response equally), token (every token equally) or "
        "constant (every token equally, divided by the length limit); null: per algorithm.",
    )
    clip_low: float | None = Field(
        None, ge=0, le=1, description="Clip ratios below 1 minus this (1: no clipping); null: per algorithm."
    )
    clip_high: float | None = Field(
        None, ge=0, description="Clip ratios above 1 plus this (.inf: no clipping); null: per algorithm."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="Largest ratio that counts against a bad response; null: no bound."
    )
    ratio: Ratio | None = Field(None, description="Ratios per token or per sequence; null: per algorithm.")
    whiten: bool | None = Field(None, description="Normalise advantages over the batch; null: per algorithm.")
    kl_coef: float | None = Field(
        None,
        ge=0,
        le=10**6,
        allow_inf_nan=False,
        description="Weight of the KL to the initial policy, which then stays in memory; null: per algorithm.",
    )
    kl_estimator: KlEstimator | None = Field(None, description="k1, k2 or k3; null: per algorithm.")
    kl_in: KlPlace | None = Field(None, description="Count the KL in the loss or in the reward; null: per algorithm.")
    filter: Filter | None = Field(
        None,
        description="spread: draw more prompts in place of groups whose scores are all equal; null: per algorithm.",
    )
    draw_limit: float = Field(
        4.0,
        ge=1,
        le=10**4,
        allow_inf_nan=False,
        description="Most prompts a step may draw, as a multiple of prompts_per_step.",
    )
    overlong_share: float | None = Field(
        None, ge=0, le=1, description="Last fraction of the length limit, where rewards fall; null: per algorithm."
    )
    overlong_penalty: float = Field(
        1.0, ge=0, le=10**6, allow_inf_nan=False, description="Penalty reached at the length limit."
    )
    truncated: Truncated = Field(
        "score", description="Responses that hit the length limit: score them like others, or mask them in the loss."
    )

    virtual_workers: int = Field(
        4,
        ge=1,
        le=2**16,
        description="Gradient shards, added in a fixed tree; any number of workers up to this gives the same bits.",
    )
    logits_chunk_rows: int | None = Field(
        None, ge=1, le=2**24, description="Rows of logits in memory at once; null: 256 on a CPU, 1024 on a GPU."
    )
    backward_precision: Literal["auto", "float32", "bf16"] = Field(
        "auto", description="Precision of matrix products in the backward pass; auto: bf16 on a GPU, float32 on a CPU."
    )
    master_precision: Literal["float32", "bf16"] = Field(
        "float32", description="Precision of the master weights in the optimizer, whatever the engine runs in."
    )

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, name: str) -> str:
        return name if names_file(name) else find_algorithm(name).name

    @field_validator("advantage")
    @classmethod
    def _check_advantage(cls, name: str | None) -> str | None:
        return name if name is None else check_advantage(name)

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float] | None) -> tuple[float, float] | None:
        if betas is not None and not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both must be at least 0 and below 1")
        return betas

    @model_validator(mode="after")
    def _check_lora(self) -> RlSettings:
        if self.lora.is_on and self.master_precision != "float32":
            raise ValueError("master_precision has no effect with rl.lora: adapters are float32; leave it out")
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> RlSettings:
        if not names_file(self.algorithm):  # a file is loaded by who trains, not by who reads a run's settings
            self.build()
        return self

    def build(self) -> Algorithm:
        """The algorithm's row with every dial that is set on top."""
        row = find_algorithm(self.algorithm)
        if names_file(self.algorithm):
            self._check_own(row)
        dials = {name: getattr(self, name) for name in DIALS}
        algorithm = dataclasses.replace(row, **{name: value for name, value in dials.items() if value is not None})
        if self.group_size == 1 and algorithm.advantage in ADVANTAGES and algorithm.advantage != "raw_reward":
            raise ValueError(
                f"{self.algorithm} compares the responses of a group, and group_size is 1: "
                "make it 2 or more, or set algorithm to reinforce++"
            )
        return algorithm

    def _check_own(self, row: Algorithm) -> None:
        """Hold a row of the user's to what the dials may be."""
        given = {name: getattr(row, name) for name in DIALS}
        if callable(row.advantage):
            del given["advantage"]
        try:
            validate(RlSettings, given)
        except SettingsError as error:
            raise SettingsError(f"rl.algorithm: {self.algorithm}: {error}") from None

    @property
    def max_draws(self) -> int:
        """Most prompts drawn in a step."""
        return math.ceil(self.draw_limit * self.prompts_per_step)
