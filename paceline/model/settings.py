"""The `model` section of the settings: which policy to load, and on which device. Read by commands and runs."""

from __future__ import annotations

from pydantic import Field

from paceline.core.config import Settings


class ModelSettings(Settings):
    path: str = Field(
        "random:5m",
        description="A Hugging Face folder or hub id; shipped:NAME, a model that comes with the package "
        "(shipped:countdown); random:SIZE, a model with random weights (tiny, 5m or 50m).",
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Device of the policy: cpu, cuda or cuda:N.")
    chat: bool = Field(False, description="Wrap plain text prompts in the tokenizer's chat template, as a user turn.")
