"""Models that come with the package: small, trained from nothing by the recipe that lies beside each."""

from __future__ import annotations

from pathlib import Path

from paceline.config import nearest

FOLDER = Path(__file__).parent / "shipped"


def shipped_names() -> list[str]:
    return sorted(file.parent.name for file in FOLDER.glob("*/config.json"))


def shipped_folder(name: str) -> Path:
    """The folder of a model by its name, as in `shipped:countdown`."""
    if name not in shipped_names():
        guess = nearest(name, shipped_names())
        hint = (
            f"did you mean shipped:{guess}?"
            if guess
            else "make one with `paceline warmup FOLDER` and give --model FOLDER"
        )
        raise ValueError(f"model.path: no model named {name!r} comes with paceline: {hint}")
    return FOLDER / name
