"""`paceline.train`: a training run from Python, in this process, with a reward and data that need no file.

The same run as `paceline train` makes: same settings, same folder, same numbers. A reward and rows given in Python
become files of the run first (`given.py`), so that graders can import the one, and a resumed run finds both. Nothing
here imports torch before everything that can be checked without it has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.config import SettingsError, load, overlay, read_yaml, validate
from paceline.run.given import GivenInputs
from paceline.run.own_task import TRIAL_MODEL, chosen_dials, describe_choice, is_own_task, run_name
from paceline.run.recipes import DEFAULT_RECIPE, describe, find_recipe, prepare, resumed_settings, run_folder
from paceline.run.settings import RootSettings
from paceline.run.store.record import CONFIG, flatten
from paceline.run.to_end import train_to_end
from paceline.run.trained import TrainedRun
from paceline.tasks.given_rows import GivenData
from paceline.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

SettingsTree = dict[str, Any]
"""Settings by section."""


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | str | None = None,
    dataset: GivenData | None = None,
    test_dataset: GivenData | None = None,
    model: str | Path | Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    resume: bool | str | Path = False,
    accept_changes: bool = False,
    start_over: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a model with reinforcement learning in this process, and return the finished run.

    `recipe` is the name of one, a YAML file, or settings as on the command line: `{"rl.steps": 3}` or `{"rl": {"steps":
    3}}`. Sections as keywords override it: `rl={"steps": 3}`. They are laid over the default recipe or, with a reward
    or data of your own, over the defaults and what suits the model (docs/training.md). The run goes into `folder`, or
    into the first free one of `runs/NAME-1`, `runs/NAME-2` and so on.

    `reward` is a function with the signature of TRL or verl, or names one; each call gets a list with one completion.
    It may be defined in a notebook: graders get its source. `dataset` is a list of dicts (or of plain prompts), a
    `datasets.Dataset`, or names a file, a folder or a data set; so is `test_dataset`, without which one prompt in eight
    is held out.

    `resume` continues the run in `folder`, or in the folder that it names; `accept_changes` and `start_over` are those
    of the command. `quiet` prints warnings only.
    """
    _refuse_graders()
    given = GivenInputs(reward, dataset, test_dataset)
    overrides = _overrides(recipe, model, folder, settings)
    if resume is False:
        if accept_changes or start_over:
            raise ValueError("accept_changes and start_over are for resume: add resume=True, or leave them out")
        tree, path, remark = _new_run(recipe, overrides, given)
    else:
        remark = None
        if isinstance(recipe, str | Path) or "model.path" in overrides:
            raise ValueError("resume uses the run's own recipe and model; leave them out")
        path = _resumed_folder(resume, overrides)
        tree = _resumed_run(path, overrides, given, accept_changes)
    with given.written(path):
        checked = prepare(validate(RootSettings, tree))
        words = {"accepts_changes": accept_changes, "starts_over": start_over}
        summary = _train(checked, path, resume is not False, words, quiet, remark)
    return TrainedRun(path, tuple(summary))


# --- settings ---------------------------------------------------------------------------------------------------------


def _overrides(
    recipe: str | Path | Mapping[str, Any] | None,
    model: str | Path | Mapping[str, Any] | None,
    folder: str | Path | None,
    settings: Mapping[str, Any],
) -> SettingsTree:
    """What was given, by dotted key."""
    tree: SettingsTree = {}
    overlay(tree, recipe if isinstance(recipe, Mapping) else {})
    overlay(tree, settings)
    overlay(tree, {"model": model} if isinstance(model, Mapping) else {})
    for name, section in tree.items():
        if not isinstance(section, dict):
            validate(RootSettings, {name: section})  # says what is wrong with it
    found = {f"{name}.{key}": value for name, section in tree.items() for key, value in section.items()}
    for argument, key, value in (("model", "model.path", model), ("folder", "run.dir", folder)):
        if isinstance(value, str | Path) and found.setdefault(key, os.fspath(value)) != os.fspath(value):
            raise SettingsError(f"{argument}= and {key} name different ones, {value} and {found[key]}; keep one")
    return found


def _new_run(
    recipe: str | Path | Mapping[str, Any] | None, overrides: SettingsTree, given: GivenInputs
) -> tuple[SettingsTree, Path, str | None]:
    """The settings and the folder of a new run, and what was chosen without being asked for."""
    has_recipe = isinstance(recipe, str | Path)
    is_own = not has_recipe and (given.has_reward or given.has_data or is_own_task(overrides))
    chosen = _choice(overrides) if is_own else {}
    name = str(recipe) if has_recipe else DEFAULT_RECIPE
    tree = _written(chosen) if is_own else read_yaml(find_recipe(name))
    if given.has_reward and "task.name" not in overrides:
        _choose_file_task(tree)
    overlay(tree, overrides)
    settings = validate(RootSettings, tree)
    _check_judged(settings.task, "task.name" in overrides, given)
    path = run_folder(settings, given.name or run_name(settings.task) if is_own else Path(name).stem)
    overlay(tree, given.settings(path))
    return tree, path, describe_choice(chosen, dashes="") if chosen else None


def _choice(overrides: SettingsTree) -> dict[str, str]:
    """What a run on the user's own task begins with, as on the command line: the default recipe is about countdown."""
    model = str(overrides.get("model.path", TRIAL_MODEL))
    found = {"model.path": model, **chosen_dials(model)}
    return {key: value for key, value in found.items() if key not in overrides}


def _written(chosen: Mapping[str, str]) -> SettingsTree:
    """Settings given as text, by section."""
    return load(RootSettings, None, chosen).model_dump(exclude_unset=True)


def _choose_file_task(tree: SettingsTree) -> None:
    """A reward of one's own judges prompts from a file; the dials of a recipe's other task mean nothing to it."""
    task = tree.get("task") or {}
    tree["task"] = {**(task if task.get("data") is not None else {}), "name": "file"}


def _check_judged(task: TaskSettings, is_chosen: bool, given: GivenInputs) -> None:
    """Prompts and who judges them come together."""
    if given.has_reward and not given.has_data and task.name == "file" and task.data is None:
        raise ValueError("reward: it needs prompts too: dataset=[{'prompt': ...}, ...], or the name of a file")
    if given.has_data and not given.has_reward and not is_chosen and task.data is None:
        raise ValueError(
            "dataset: say who judges the responses: reward=FUNCTION, or task={'name': 'math'} for final answers"
        )


def _resumed_folder(resume: bool | str | Path, overrides: SettingsTree) -> Path:
    named = overrides.get("run.dir")
    if isinstance(resume, bool):
        if named is None:
            raise ValueError("resume=True needs the run's folder: folder='runs/NAME', or resume='runs/NAME'")
        return Path(named)
    if named is not None and Path(named) != Path(resume):
        raise ValueError(f"resume and folder name different runs, {resume} and {named}; keep one")
    return Path(resume)


def _resumed_run(path: Path, overrides: SettingsTree, given: GivenInputs, accepts_changes: bool) -> SettingsTree:
    """The settings of a run to resume; raises if it is given another reward or other data, unless that is accepted."""
    tree = resumed_settings(path, {}, accepts_changes).model_dump(mode="json")
    for argument, known in given.changes(path, flatten(tree)):
        if not accepts_changes:
            raise SettingsError(
                f"{argument}: it is not what the run has, {known}; leave {argument} out to continue with that, or "
                "continue with this one: accept_changes=True"
            )
    overlay(tree, overrides)
    overlay(tree, given.settings(path))
    return tree


# --- the run ----------------------------------------------------------------------------------------------------------


def _refuse_graders() -> None:
    """A grader that imports a script must not begin the script's training again."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None and spec.name == "paceline.tasks.grader_start":
        raise ValueError(
            "a grader imports the reward's file, and the file calls paceline.train at once; put the call below "
            "if __name__ == '__main__':"
        )


def _train(
    settings: RootSettings, path: Path, is_resumed: bool, words: dict[str, bool], is_quiet: bool, remark: str | None
) -> list[str]:
    """Train to the last step, after a `remark` on the settings; returns the summary."""
    from paceline.run.ui.display import make_display

    with make_display(settings.rl.steps, is_quiet=is_quiet) as display:
        remarks = () if remark is None else (remark,)
        display.begin("paceline.train", (*remarks, *describe(settings, path), *_first_time(settings)))
        display.phase(0, "load")
        try:
            with _threads_restored():
                return train_to_end(
                    settings,
                    path,
                    display,
                    display.note,
                    is_resumed=is_resumed,
                    words=words,
                    is_summed_up=not is_quiet,
                )
        except KeyboardInterrupt:
            if (path / CONFIG).is_file():
                display.note(f"stopped; resume with: paceline.train(resume={str(path)!r})")
            raise


def _first_time(settings: RootSettings) -> tuple[str, ...]:
    """What to say about a wait that comes only once."""
    from paceline.kernels.cpu.jit import cache_folder

    if settings.model.device != "cpu" or any(cache_folder().iterdir()):
        return ()
    return ("compiling kernels first, once per machine: about a minute",)


@contextmanager
def _threads_restored() -> Iterator[None]:
    """A run takes one thread of torch's; the caller gets its own number of threads back."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
