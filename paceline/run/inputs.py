"""Which files a run depends on besides its settings: model, data, and the user's own code.

`open.py` has them hashed (`store/inputs.py`). What only costs time is listed too, and marked in `HARMLESS`: a change
there is worth a note and stops nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.core.plugins import names_file
from paceline.core.sources import sources
from paceline.model.checkpoint import model_files
from paceline.model.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from paceline.run.settings import RootSettings
from paceline.run.store.inputs import Files
from paceline.tasks.files import data_files

SPOT_WEIGHTS = "spot.optimizer_options.weights"
HARMLESS = ("engine.drafter", SPOT_WEIGHTS)
"""Settings whose files change no token."""


def input_files(settings: RootSettings, model: Path) -> Files:
    """By setting, then by name; `model` is the folder behind `model.path`."""
    task = settings.task
    code = {
        "task.name": [task.name],
        "task.reward": [task.reward or "none"],
        "rl.algorithm": [settings.rl.algorithm],
        "rl.optimizer": [settings.rl.optimizer],
        "engine.drafter": [name.strip() for name in settings.engine.drafter.split(",")],
    }
    takes_modules = ("task.reward", "rl.optimizer")
    found: dict[str, dict[str, Path]] = {key: {} for key in code}
    for key, specs in code.items():
        for spec in specs:
            found[key] |= sources(spec) if key in takes_modules or names_file(spec) else {}
    for key, data in (("task.data", task.data), ("task.dials.test_data", task.dials.get("test_data"))):
        # To a task of the user's own, it may be anything.
        is_read = isinstance(data, str) and (not names_file(task.name) or Path(data).expanduser().exists())
        found[key] = _named(data_files(str(data))) if is_read else {}
    if settings.rl.lora.adapter is not None:
        folder = Path(settings.rl.lora.adapter).expanduser()
        held = [folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (folder / name).is_file()]
        found["rl.lora.adapter"] = _named(held) if held else {}
    for key, part in (("rl.optimizer_options.weights", settings.rl), (SPOT_WEIGHTS, settings.spot)):
        weights = part.optimizer_options.get("weights") if part.optimizer == "celo2" else None
        found[key] = _named([Path(str(weights)).expanduser()]) if weights else {}
    return {key: files for key, files in {"model.path": _named(model_files(model)), **found}.items() if files}


def _named(files: Sequence[Path]) -> dict[str, Path]:
    """Files by their place beside the first one."""
    return {os.path.relpath(file, files[0].parent): file for file in files}
