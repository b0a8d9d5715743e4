"""The `model` section of the settings: which policy to load, and on which device. Read by commands and runs."""

from __future__ import annotations

from pydantic import Field, field_validator

from paceline.core.config import Settings
from paceline.model.device import check_name


class ModelSettings(Settings):
    path: str = Field(
        "random:5m",
        description="A Hugging Face folder or hub id; the folder of a run, whose newest policy it means; shipped:NAME, "
        "a model that comes with the package (shipped:countdown); random:SIZE, a model with random weights (tiny, 5m "
        "or 50m).",
    )
    device: str = Field("cpu", description="Device of the policy: cpu, cuda or cuda:N.")
    chat: bool = Field(False, description="Wrap plain text prompts in the tokenizer's chat template, as a user turn.")

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        return check_name(device)
