"""The `model` section of the settings: which policy to load and where it runs."""

from __future__ import annotations

from pydantic import Field

from paceline.core.config import Settings


class ModelSettings(Settings):
    path: str = Field(
        "random:5m",
        description="A Hugging Face folder or hub id; shipped:NAME comes with the package (there is "
        "shipped:countdown); random:SIZE is made on the spot.",
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where the policy runs: cpu, cuda or cuda:N."
    )
    chat: bool = Field(False, description="Wrap plain text prompts in the tokenizer's chat template, as a user's turn.")
