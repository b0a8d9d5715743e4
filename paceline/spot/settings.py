"""The `spot` section of the settings: how a drafter trains during a run. It may change time, never a token."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.core.config import Settings


class SpotSettings(Settings):
    enabled: bool | None = Field(
        None,
        description="Train a drafter on the policy's hidden states during the run. null: if engine.drafter names "
        "eagle, or is auto on a GPU.",
    )
    open_share: float = Field(
        0.03, ge=0, le=1, description="Fraction of a step's time that drafter training may take when nothing is idle."
    )
    ring_bytes: int = Field(2**28, ge=1, le=2**46, description="Memory for texts with hidden states.")
    ring_precision: Literal["auto", "float32", "bf16"] = Field(
        "auto", description="Precision of the stored hidden states; auto: bf16 on a GPU, float32 on a CPU."
    )
    kept_share: float = Field(
        0.25, ge=0, le=1, description="Fraction of the ring for the longest responses of the previous step."
    )
    micro_tokens: int | None = Field(
        None, ge=1, le=2**24, description="Draft chains per micro-step; null: 64 on a CPU, 2048 on a GPU."
    )
    context_tokens: int = Field(1024, ge=0, le=2**22, description="Tokens of context in front of each piece of text.")
    unroll: int = Field(4, ge=1, le=64, description="Trained draft tokens per chain.")
    decay: float = Field(0.8, gt=0, le=1, description="Weight of a draft token, as a fraction of the one before it.")
    optimizer: Literal["muon", "adamw", "celo2"] = Field(
        "muon", description="muon, adamw or celo2; Muon needs half as many micro-steps as AdamW."
    )
    optimizer_options: dict[str, Any] = Field(
        {}, description="Further options of the optimizer, under its own names; celo2 needs weights, a file."
    )
    lr: float = Field(4e-3, gt=0, le=1000, description="Peak learning rate.")
    warmup_steps: int = Field(
        10, ge=0, le=10**9, description="Micro-steps over which the learning rate rises to its peak."
    )
    settle_steps: int = Field(
        150, ge=1, le=10**9, description="Micro-steps before the rate falls, slowly, to a quarter."
    )
    max_grad_norm: float = Field(1.0, gt=0, le=10**12, description="Clip gradients to this norm.")
    average: float = Field(
        0.99, ge=0, lt=1, description="Decay of the moving average of the weights, which is what gets published."
    )
    logits_chunk_rows: int = Field(1024, ge=1, le=2**24, description="Draft tokens whose logits are in memory at once.")
    draft_vocab_size: int | None = Field(
        None, ge=1, le=2**24, description="Token ids to draft from; null: all, at most 32768."
    )
    reward_weights: bool = Field(False, description="Give texts with a higher advantage more weight.")
    publish_every: int = Field(
        1, ge=1, le=10**9, description="Steps between versions published to the engines that draft."
    )
    seed: int = Field(
        0, ge=-(2**63), lt=2**63, description="Seed of the drafter's initial weights and of the order of texts."
    )
