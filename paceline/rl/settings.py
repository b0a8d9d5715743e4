"""The `rl` section of the settings. Field descriptions become the help text of the command line.

A null dial keeps the value of the algorithm's row in `algorithms.py`; `build` returns the row with the dials applied.
Read by the run loop and the learner. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.core.config import Settings, SettingsError, validate
from paceline.core.plugins import names_file
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


class RlSettings(Settings):
    algorithm: str = Field(
        "grpo",
        description="grpo, dr_grpo, dapo, rloo, reinforce++, reinforce++-baseline or gspo, or a row of your own as "
        "file.py:NAME; the settings below override its parts.",
    )
    steps: int = Field(20, ge=1, description="Training steps of the run.")
    prompts_per_step: int = Field(16, ge=1, description="Groups that each step trains on.")
    group_size: int = Field(8, ge=1, description="Responses per prompt.")
    epochs: int = Field(1, ge=1, description="Optimizer steps on each batch; above 1 the clip range matters.")
    seed: int = Field(0, description="Fixes the noise of the responses; task.seed fixes the order of the data.")

    lr: float = Field(3e-5, ge=0, allow_inf_nan=False, description="Peak learning rate.")
    schedule: Schedule = Field("constant", description="Learning rate after the warm-up: constant, linear or cosine.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises to its peak.")
    lr_floor: float = Field(0.0, ge=0, le=1, description="Final value of linear and cosine, as a share of the peak.")
    optimizer: str = Field(
        "adamw", description="adamw, sgd, muon, or the import path of a class (torch.optim:RMSprop)."
    )
    optimizer_options: dict[str, Any] = Field({}, description="More options of the optimizer, under its own names.")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="For matrices; norms and biases have none.")
    betas: tuple[float, float] | None = Field(None, description="Adam's decay rates; null: the optimizer's own.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Longer gradients are scaled to this norm; null: never.")

    advantage: str | None = Field(
        None, description="group_standardised, group_centred, leave_one_out or raw_reward; null: the algorithm's."
    )
    normalise: Normalise | None = Field(
        None,
        description="Tokens weigh by sequence (each response alike), token (each token alike) or constant (each token "
        "alike, by the length limit); null: the algorithm's.",
    )
    clip_low: float | None = Field(
        None, ge=0, le=1, description="Ratios are clipped below 1 minus this (1: no clip); null: the algorithm's."
    )
    clip_high: float | None = Field(
        None, ge=0, description="Ratios are clipped above 1 plus this (.inf: no clip); null: the algorithm's."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="Largest ratio that counts against a bad response; null: no bound."
    )
    ratio: Ratio | None = Field(None, description="Ratios per token or per sequence; null: the algorithm's.")
    whiten: bool | None = Field(None, description="Normalise advantages over the batch; null: the algorithm's.")
    kl_coef: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="Weight of KL to the initial policy, which then stays in memory."
    )
    kl_estimator: KlEstimator | None = Field(None, description="k1, k2 or k3; null: the algorithm's.")
    kl_in: KlPlace | None = Field(None, description="KL as a term of the loss or a cost in the reward.")
    filter: Filter | None = Field(
        None, description="spread: draw more prompts in place of groups with equal scores; null: the algorithm's."
    )
    draw_limit: float = Field(
        4.0, ge=1, allow_inf_nan=False, description="Most prompts drawn in a step, as a multiple of prompts_per_step."
    )
    overlong_share: float | None = Field(
        None, ge=0, le=1, description="Last part of the length limit over which rewards fall; null: the algorithm's."
    )
    overlong_penalty: float = Field(1.0, ge=0, allow_inf_nan=False, description="How far they fall at the limit.")
    truncated: Truncated = Field(
        "score", description="Responses that hit the length limit: scored like others, or masked out of the loss."
    )

    pack_tokens: int = Field(4096, ge=1, description="Most token rows in one forward and backward of the learner.")
    virtual_workers: int = Field(
        4, ge=1, description="Parts whose gradients are summed in a fixed tree; up to as many workers change no number."
    )
    exact: bool = Field(
        True, description="Use the engine's kernels in the learner's forward: log-probabilities agree bit for bit."
    )
    checkpoint_activations: bool = Field(False, description="Recompute layers in the backward to save memory.")
    logits_chunk_rows: int | None = Field(
        None, ge=1, description="Rows of logits in memory at once; null: 256 on a CPU, 1024 on a GPU."
    )
    backward_precision: Literal["auto", "float32", "bf16"] = Field(
        "auto", description="Precision of the backward's matrix products; auto: bf16 on a GPU, float32 on a CPU."
    )
    master_precision: Literal["float32", "bf16"] = Field(
        "float32", description="Precision in which the optimizer keeps the weights, whatever the engine runs in."
    )

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, name: str) -> str:
        return name if names_file(name) else find_algorithm(name).name

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, name: str) -> str:
        return check_optimizer(name)

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
    def _check_group_size(self) -> RlSettings:
        if not names_file(self.algorithm):  # only training loads a file, not reading a run's settings
            self.build()
        return self

    def build(self) -> Algorithm:
        """The algorithm's row with every set dial applied."""
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
        """Validate a user's row like the dials."""
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
