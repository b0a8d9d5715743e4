"""What the `model` section holds: which policy to load and where it runs. Read by the command line."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config import Settings


class ModelSettings(Settings):
    path: str = Field(
        "random:5m",
        description="A Hugging Face folder or hub id; random:SIZE makes a random-weight model on the spot.",
    )
    device: Literal["cpu"] = Field("cpu", description="Where the policy runs.")
    chat: bool = Field(False, description="Wrap plain text prompts in the tokenizer's chat template, as a user's turn.")
