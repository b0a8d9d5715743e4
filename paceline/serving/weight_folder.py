"""Finds the folder of weights that a client names: below one root, whatever the name or a link in it says.

Called by `weights.py`, and by `paceline serve` for what its journal names. It opens no file and must not import torch.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.documents import brief
from paceline.serving.state import Refusal


def folder_below(root: Path | None, given: str) -> Path:
    """A folder below the root, wherever links lead."""
    if root is None:
        raise Refusal(403, "this server loads no weights; start it with --weight-root FOLDER")
    try:
        folder = (root / given).resolve()
        is_inside = folder.is_relative_to(root.resolve())
        is_folder = is_inside and folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"weight_dir {brief(given)} cannot be the name of a folder") from error
    if not is_inside:
        raise Refusal(403, "weight_dir must be a folder below --weight-root")
    if not is_folder:
        raise ValueError(f"weight_dir {brief(given)} is not a folder")
    return folder
