"""The `spot` section of the settings: how to train a drafter during a run. It may change time, never a token."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.core.config import Settings


class SpotSettings(Settings):
    enabled: bool | None = Field(
        None,
        description="Train a drafter on the policy's hidden states while the run goes on. null: if engine.drafter "
        "names eagle, or is auto on a GPU.",
    )
    open_share: float = Field(
        0.03, ge=0, le=1, description="Share of a step's time that drafter training may take when nothing is idle."
    )
    ring_bytes: int = Field(2**28, ge=1, description="Memory for texts with hidden states.")
    ring_precision: Literal["auto", "float32", "bf16"] = Field(
        "auto", description="Precision of stored hidden states; auto: bf16 on a GPU, float32 on a CPU."
    )
    kept_share: float = Field(
        0.25, ge=0, le=1, description="Share of the ring for the longest responses of the previous step."
    )
    micro_tokens: int | None = Field(
        None, ge=1, description="Chains of guesses in a micro-step; null: 64 on a CPU, 2048 on a GPU."
    )
    context_tokens: int = Field(1024, ge=0, description="Tokens before a piece of text that its guesses see.")
    unroll: int = Field(4, ge=1, description="Guesses per chain to train.")
    decay: float = Field(0.8, gt=0, le=1, description="Weight of a guess relative to the one before it.")
    optimizer: Literal["muon", "adamw"] = Field("muon", description="Muon needs half as many micro-steps as AdamW.")
    lr: float = Field(4e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(10, ge=0, description="Micro-steps over which the learning rate rises.")
    settle_steps: int = Field(150, ge=1, description="Micro-steps after which it slowly falls to a quarter.")
    max_grad_norm: float = Field(1.0, gt=0, description="Longer gradients are scaled to this norm.")
    average: float = Field(
        0.99, ge=0, lt=1, description="Decay of the moving average of the weights, which is what gets published."
    )
    logits_chunk_rows: int = Field(1024, ge=1, description="Guesses whose logits are in memory at once.")
    draft_vocab_size: int | None = Field(None, ge=1, description="Ids the drafter can guess; null: all, at most 32768.")
    reward_weights: bool = Field(False, description="Weight texts by their advantage.")
    publish_every: int = Field(1, ge=1, description="Steps between published versions.")
    seed: int = Field(0, description="Seed of the initial weights and of the order of texts.")
