"""A run before anything is loaded: finds its recipe, settings and folder, and checks them.

Called by the commands and by code that opens runs. Nothing here imports torch, so that a run reports mistakes and
its plan at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.core.config import SettingsError, load, nearest, read_yaml, validate
from paceline.core.types import Sampling
from paceline.model.folder import CONFIG as MODEL_CONFIG
from paceline.run.checks import check_run, check_task_code
from paceline.run.settings import RootSettings
from paceline.run.store.folder import CHECKPOINTS, free_name, refuse_used
from paceline.run.store.record import CONFIG as RUN_CONFIG
from paceline.run.store.record import read_record, refuse_config_changes
from paceline.run.store.sealed import MANIFEST, POLICY, candidates, find_checkpoint
from paceline.run.ui.summary import counted
from paceline.tasks.own import ask_item
from paceline.tasks.registry import make_task

RECIPES = (Path(__file__).parent.parent / "recipes", Path(__file__).parent.parent.parent / "recipes")
"""Where recipes are: in an installed package, and beside the package in a clone."""
RUNS = Path("runs")
DEFAULT_RECIPE = "countdown-cpu"
PROMPT_ROOM = 1024
"""Prompt tokens per sequence that the KV cache has room for, unless engine.kv_tokens sets its size."""


def recipe_names(is_warmup: bool = False) -> list[str]:
    """The recipes of the package, for `train` or for `warmup`."""
    names = {file.stem for folder in RECIPES for file in folder.glob("*.yaml")}
    return sorted(name for name in names if name.startswith("warmup") == is_warmup)


def recipe_summary(name: str) -> str:
    """The first line of a recipe's file, which says what it trains."""
    first, *_ = find_recipe(name).read_text(encoding="utf-8").splitlines()
    return first.removeprefix("#").strip()


def find_recipe(name: str, is_warmup: bool = False) -> Path:
    """The file of a recipe, given by path or by its name in the package."""
    names = recipe_names(is_warmup)
    if name in names:
        return next(folder / f"{name}.yaml" for folder in RECIPES if (folder / f"{name}.yaml").is_file())
    if not Path(name).is_file():
        guess = nearest(name, names)
        hint = f"did you mean {guess}?" if guess else f"choose from {', '.join(names)}, or give a .yaml file"
        raise SettingsError(f"no recipe {name!r}: {hint}")
    return Path(name)


def resumed_settings(folder: Path, overrides: dict[str, str], accepts_changes: bool = False) -> RootSettings:
    """The settings of a run, with the given overrides; raises if config.yaml is not as the run wrote it."""
    if not (folder / "config.yaml").is_file():
        raise SettingsError(f"run.dir: {folder} holds no run to resume; leave --resume out to begin one there")
    record = read_record(folder)
    if record is not None and not accepts_changes:
        refuse_config_changes(folder, record.settings)
    validate(RootSettings, read_yaml(folder / "config.yaml"))
    return load(RootSettings, folder / "config.yaml", overrides)


def config_of(run: Path) -> Path:
    """The file with a run's settings."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} holds no run; give the folder of one, or --model PATH")
    return run / "config.yaml"


def newest_policy(run: Path) -> Path:
    """The policy in the newest good checkpoint of a run."""
    check_has_policy(run)
    return find_checkpoint(run / CHECKPOINTS).policy


def check_has_policy(run: Path) -> None:
    """Raise a ValueError unless a folder is a run's and has a checkpoint, good or not."""
    config_of(run)
    if not candidates(run / CHECKPOINTS):
        raise ValueError(
            f"{run} holds no checkpoint yet; a run saves one every run.checkpoint_every steps, and when it ends"
        )


def with_newest_policy(settings: RootSettings) -> RootSettings:
    """The settings; if their model is a run's folder, with its newest policy instead, or a checkpoint's own."""
    found = policy_of(settings.model.path)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": found})})


def policy_of(model: str) -> str:
    """A model's name; the newest policy's if it is a run's folder, or a checkpoint's own."""
    path = Path(model).expanduser()
    if not os.path.isdir(path) or os.path.isfile(path / MODEL_CONFIG):  # no error for what cannot be a name
        return model
    if (path / RUN_CONFIG).is_file():
        return str(newest_policy(path))
    is_checkpoint = (path / MANIFEST).is_file() and (path / POLICY / MODEL_CONFIG).is_file()
    return str(path / POLICY) if is_checkpoint else model


def run_folder(settings: RootSettings, recipe: str) -> Path:
    """The folder of a new run; rejects one that is in use before anything is loaded."""
    path = Path(settings.run.dir) if settings.run.dir else free_name(RUNS, recipe)
    if path.is_dir():
        refuse_used(path)
    return path


def prepare(settings: RootSettings) -> RootSettings:
    """Resolve settings for `open_run`, and check them as far as possible before a model is loaded."""
    settings = settings.resolved()
    training_sampling(settings)
    settings.rl.build()
    check_run(settings)
    task = make_task(settings.task)
    ask_item(settings.task, task, 0)  # finds an empty data set before the model is loaded
    if settings.eval.items:
        ask_item(settings.task, task, 0, "test")
    return settings


def prepare_evaluation(settings: RootSettings) -> RootSettings:
    """Check settings for `evaluate_model` as far as possible before a model is loaded."""
    if not settings.eval.items:
        raise SettingsError("eval.items: there is nothing to evaluate with 0 items; set it to 1 or more")
    training_sampling(settings)
    check_task_code(settings.task)
    ask_item(settings.task, make_task(settings.task), 0, "test")
    return settings


def training_sampling(settings: RootSettings) -> Sampling:
    """Sampling for training: `sampling`, with the group size and the seed of `rl`."""
    given, default = settings.sampling, type(settings.sampling)()
    for key, ours in (("n", "rl.group_size"), ("seed", "rl.seed"), ("stream", "rl.seed")):
        if getattr(given, key) != getattr(default, key):
            raise SettingsError(f"sampling.{key}: training has its own; set {ours} instead")
    return replace(given.build(), n=settings.rl.group_size, seed=settings.rl.seed, stream="train")


def drafter_of(settings: RootSettings) -> str:
    """The engine's drafter: `auto` means suffix, plus the learned drafter if one is trained."""
    if settings.engine.drafter != "auto":
        return settings.engine.drafter
    return "suffix,eagle" if settings.spot.enabled else "suffix"


def kv_tokens_of(settings: RootSettings) -> int:
    """The capacity of a run's KV cache: room for what rollouts need, not all the memory, as the learner needs some."""
    given = settings.engine
    return given.kv_tokens or given.max_sequences * (settings.sampling.max_new_tokens + PROMPT_ROOM)


def describe(settings: RootSettings, path: Path) -> Sequence[str]:
    """What a run is about to do, for the display."""
    rl, fleet = settings.rl, settings.fleet
    how = "in this process" if fleet.in_process else f"of the Ray at {fleet.address}" if fleet.address else "under Ray"
    shared = (f"starting {fleet.workers} workers {how}",) if fleet.is_many else ()
    return (
        *shared,
        f"model {settings.model.path} on {settings.model.device}, drafter {drafter_of(settings)}",
        f"task {settings.task.name}, {rl.algorithm}, {counted(rl.steps, 'step')} of "
        f"{counted(rl.prompts_per_step, 'prompt')} x {counted(rl.group_size, 'response')}, learning rate {rl.lr:g}",
        f"folder {path}",
    )
