"""Models that come with the package: small, trained from nothing by the recipe that lies beside each."""

from __future__ import annotations

from pathlib import Path

from paceline.config import nearest

FOLDER = Path(__file__).parent / "shipped"


def shipped_names() -> list[str]:
    return sorted(folder.name for folder in FOLDER.iterdir() if (folder / "config.json").is_file())


def shipped_folder(name: str) -> Path:
    """The folder of a model by its name, as in `shipped:countdown`."""
    if name not in shipped_names():
        guess = nearest(name, shipped_names())
        hint = f"did you mean shipped:{guess}?" if guess else f"there are {', '.join(shipped_names())}"
        raise ValueError(f"model.path: no model named {name!r} comes with paceline: {hint}")
    return FOLDER / name
