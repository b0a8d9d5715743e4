"""Models that ship with the package: small, and trained from scratch by the recipe next to each.

`folder.find_folder` looks up their folders wherever a model is named.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.config import nearest
from paceline.core.documents import brief

FOLDER = Path(__file__).parent / "shipped"
SHIPPED = "shipped:"
"""Prefix of such a model's name, wherever a model is named."""


def shipped_names() -> list[str]:
    return sorted(file.parent.name for file in FOLDER.glob("*/config.json"))


def shipped_folder(name: str) -> Path:
    """Folder of a model by name, as in `shipped:countdown`."""
    if name not in shipped_names():
        guess = nearest(name, shipped_names())
        hint = f"did you mean {SHIPPED}{guess}?" if guess else f"there are {', '.join(shipped_names())}"
        raise ValueError(f"no model named {brief(name)} comes with paceline (model.path): {hint}")
    return FOLDER / name
