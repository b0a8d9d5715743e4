"""Mistakes in settings that show before torch is imported: devices, drafters, code of the user's, missing packages.

`recipes.prepare` calls `check_run` for a run, the other commands `check_engine` for an engine. Both only look: they
import no code of the user's, open no weights and start nothing. A model has its own check, `model.folder.check_model`.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.documents import brief
from paceline.fleet.transport.ray_extra import require_ray_extra
from paceline.model.device import check_arithmetic, require_driver
from paceline.model.folder import ADAPTER_CONFIG, is_adapter, model_config
from paceline.model.lora.adapter import find_modules
from paceline.rl.optimizers import check_available
from paceline.rollout.drafters import check_drafters
from paceline.run.settings import RootSettings
from paceline.run.ui.loggers import check_loggers
from paceline.tasks.files import require_extra
from paceline.tasks.grading import sandbox_limits
from paceline.tasks.rewards import check_reward
from paceline.tasks.settings import TaskSettings


def check_engine(settings: RootSettings) -> None:
    """Raise a ValueError if no engine can be made with these settings on this machine."""
    device = settings.model.device
    is_driver_elsewhere = settings.fleet.address is not None  # another machine of the cluster may have the GPUs
    if not is_driver_elsewhere:
        require_driver(device)
    check_arithmetic(device, settings.engine.precision)
    check_drafters(settings.engine.drafter)


def check_run(settings: RootSettings) -> None:
    """Raise a ValueError if a run cannot begin with these resolved settings."""
    check_engine(settings)
    check_available(settings.rl.optimizer, settings.rl.optimizer_options)
    if settings.spot.enabled is not False:
        check_available(settings.spot.optimizer, settings.spot.optimizer_options, "spot.optimizer")
    check_adapter(settings)
    check_loggers(settings.run.loggers)
    check_task_code(settings.task)
    if settings.fleet.is_many and not settings.fleet.in_process:
        require_ray_extra()


def check_adapter(settings: RootSettings) -> None:
    """Raise a ValueError if there is nothing to adapt, or if the model to train is an adapter itself."""
    path, lora = settings.model.path, settings.rl.lora
    folder = Path(path).expanduser()
    if os.path.isdir(folder) and is_adapter(folder):
        raise ValueError(
            f"model.path: {path} holds an adapter; to train it further, give the model behind it as model.path and "
            "this folder as rl.lora.adapter; to train all weights, merge it first (paceline export-policy)"
        )
    if lora.adapter is not None:
        given = Path(lora.adapter).expanduser()
        if not os.path.isdir(given) or not is_adapter(given):
            raise ValueError(f"rl.lora.adapter: {brief(lora.adapter)} is no folder with {ADAPTER_CONFIG}")
    elif lora.is_on:
        try:
            find_modules(lora.targets, model_config(path))
        except ValueError as error:
            raise ValueError(f"rl.lora.targets: {error}") from error


def check_task_code(task: TaskSettings) -> None:
    """Raise a ValueError if graders could not make the task: they import its code in processes of their own."""
    sandbox_limits(task)
    if task.name == "file" and task.reward is not None:
        check_reward(task.reward)
    if task.name == "math":
        require_extra("math_verify", "task math")
