"""The `budget` section of the settings: when a draft node is worth a row. Read by `draft_rows.py` and the proposer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class BudgetSettings(BaseModel):
    """How rows are spent on draft nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_draft_nodes: int = Field(
        16, ge=0, le=2**12, description="Most draft nodes per sequence and step; 0 turns drafting off."
    )
    max_ahead_nodes: int = Field(
        128,
        ge=1,
        le=2**12,
        description="The same limit for run-ahead text, which is verified in long pieces while accepted.",
    )
    min_gain: float = Field(
        1.03,
        ge=1.0,
        le=10**6,
        description="Draft only where expected tokens per millisecond grow by at least this factor.",
    )
    min_probability: float = Field(
        0.01, gt=0.0, lt=1.0, description="Never spend a row on a node less likely than this to be accepted."
    )
    memory_steps: int = Field(500, ge=1, le=10**9, description="Steps over which observations of acceptance fade.")
    calibrate: bool = Field(
        True, description="Measure ms(rows, KV tokens) at startup; off: start from an estimate and learn while running."
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="Seed for exploring the drafters.")
    remember: bool = Field(
        True,
        description="Keep what a run learns about speed in the user's cache folder, for later runs of such a model on "
        "such a device. No token depends on it.",
    )
    always: bool = Field(
        False, description="Verify every proposed node, whatever it costs; for tests and for measuring drafters."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_late(cls, given: Any) -> Any:
        """Runs of older versions have a setting `late` in their files, which chose between loops; now there is one."""
        return {key: value for key, value in given.items() if key != "late"} if isinstance(given, Mapping) else given
