"""A run on a task of the user's own without a recipe: what it begins with, and what it is called.

`paceline train` and `paceline.train` ask here when settings name data, a reward or another task and no recipe is given:
the default recipe is about countdown. Everything not chosen here has its documented default. Nothing here imports
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from paceline.core.config import SettingsError
from paceline.core.plugins import names_file
from paceline.model.folder import model_config
from paceline.model.random_config import RANDOM
from paceline.tasks.settings import TaskSettings

TRIAL_MODEL = "random:5m"
"""Reads any text, needs no download and learns within minutes whether a reward can be learned at all."""
TRIAL_DIALS = {"sampling.max_new_tokens": "64", "rl.lr": "1e-3"}
"""For random weights: there is nothing to unlearn, and long noise teaches no more than short."""
MODEL_DIALS = {"sampling.max_new_tokens": "512", "rl.lr": "1e-6"}
"""For a pretrained model, as in the recipes: a higher rate ruins one within a few steps."""
PRETRAINED = 50_000_000
"""A model with so many parameters is taken for a pretrained one."""
DEFAULT_TASK = "countdown"


def is_own_task(overrides: Mapping[str, str]) -> bool:
    """Whether settings name a task for which the default recipe is not meant."""
    return bool({"task.data", "task.reward"} & set(overrides)) or overrides.get("task.name") not in (None, DEFAULT_TASK)


def chosen_task(overrides: Mapping[str, str]) -> dict[str, str]:
    """The task that data and a reward need; a SettingsError if they do not say how to score."""
    if "task.name" in overrides or not is_own_task(overrides):
        return {}
    if "task.reward" not in overrides:
        raise SettingsError(
            "task.reward: data of your own needs a reward: --task.reward=FILE.py:FUNCTION; or, for questions with a "
            "final answer, --task.name=math"
        )
    return {"task.name": "file"}


def chosen_settings(overrides: Mapping[str, str]) -> dict[str, str]:
    """What a run without a recipe sets besides the user's `overrides`, by dotted key."""
    model = overrides.get("model.path", TRIAL_MODEL)
    chosen = {**chosen_task(overrides), "model.path": model, **chosen_dials(model)}
    return {key: value for key, value in chosen.items() if key not in overrides}


def chosen_dials(model: str) -> dict[str, str]:
    """Learning rate and response length that suit a model."""
    is_trial = model.startswith(RANDOM)
    is_pretrained = not is_trial and model_config(model).num_parameters >= PRETRAINED
    return TRIAL_DIALS if is_trial else MODEL_DIALS if is_pretrained else {}


def describe_choice(chosen: Mapping[str, str], dashes: str = "--") -> str:
    """What was chosen, in one line."""
    choices = " ".join(f"{dashes}{key}={value}" for key, value in chosen.items())
    trial = f" ({TRIAL_MODEL} has random weights, for a trial; name yours with {dashes}model)"
    return f"your own task, without a recipe: {choices}{trial if 'model.path' in chosen else ''}"


def run_name(task: TaskSettings) -> str:
    """What a run is called after its data or its task."""
    if names_file(task.name):
        name = Path(task.name.rpartition(":")[0]).stem
    elif task.data is not None:
        name = Path(task.data.partition(":")[0]).stem
    else:
        name = task.name.rpartition(":")[2]
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
