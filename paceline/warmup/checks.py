"""Mistakes in the settings of a warm start that show before torch is imported. The command calls it first."""

from __future__ import annotations

from pathlib import Path

from paceline.model.device import check_arithmetic, require_driver
from paceline.rl.optimizers import check_available
from paceline.warmup.settings import WarmupSettings
from paceline.warmup.texts import make_worked_task

RECIPE = "recipe.yaml"
"""What a warm start writes beside its model, and knows its own result by."""


def check_warmup(settings: WarmupSettings, out: Path) -> None:
    """Raise a ValueError if the training could not begin."""
    refuse_foreign_folder(out)
    require_driver(settings.train.device, "train.device")
    check_arithmetic(settings.train.device, settings.train.precision, "train.precision")
    check_available(settings.train.optimizer, settings.train.optimizer_options, "train.optimizer")
    for level in (*settings.data.levels, settings.check.level):
        make_worked_task(settings.data, level)


def refuse_foreign_folder(out: Path) -> None:
    """Refuse to replace anything but the result of another warm start."""
    if out.exists() and not (out / RECIPE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and was not made by a warm start; choose another folder or remove it")
