"""`paceline train`: a run of reinforcement learning, new or resumed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import say, show
from paceline.cli.options import TrainedOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import say_loading

if TYPE_CHECKING:
    from paceline.run.settings import RootSettings
    from paceline.run.ui.display import Display


def command(
    ctx: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Recipe name or .yaml file.", show_default="countdown-cpu")
    ] = None,
    model: TrainedOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --run.dir.")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although data, code or config.yaml have changed.")
    ] = False,
    start_over: Annotated[
        bool, typer.Option("--start-over", help="Resume at step 1; the old records move to RUN/before-N.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print settings and memory use, then exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and the summary.")] = False,
) -> None:
    """Train a model with reinforcement learning.

    Without a recipe, trains the small model that comes with the package on the countdown task, on this machine, or
    with --task.data and --task.reward a model on your own data. A recipe sets everything; override single settings as
    in --rl.lr=1e-5 or --engine.drafter=none. A run is a folder, runs/RECIPE-N, with metrics, texts and checkpoints.
    Resume a stopped run with --run.dir=FOLDER --resume: it ends as if it had never stopped.
    """
    words = {"accepts_changes": accept_changes, "starts_over": start_over}
    if any(words.values()) and not resume:
        raise ValueError("--accept-changes and --start-over are for --resume: add it, or leave them out")
    remark = None
    if resume:
        settings, folder = _resumed_run(ctx.obj, recipe, model, accept_changes)
        if not (start_over or dry_run) and _say_finished(settings, folder):
            return
    else:
        settings, folder, remark = _new_run(ctx.obj, recipe, model, needs_weights=not dry_run)
    if remark and not quiet:
        say(remark)
    if dry_run:
        _show_plan(settings, folder)
        return
    if not quiet:
        say_loading(settings)
    _train(settings, folder, resume, words, quiet)


def _new_run(
    overrides: dict[str, str], recipe: str | None, model: str | None, needs_weights: bool
) -> tuple[RootSettings, Path, str | None]:
    """The settings of a new run, resolved and checked, its folder, and what it chose itself."""
    from paceline.model.folder import check_model
    from paceline.run.own_task import is_own_task, run_name
    from paceline.run.recipes import DEFAULT_RECIPE, find_recipe, prepare, run_folder, with_newest_policy

    if recipe is None and is_own_task(overrides):
        settings, remark = _own_settings(overrides, model)
        name = run_name(settings.task)
    else:
        settings = with_newest_policy(load_settings(overrides, find_recipe(recipe or DEFAULT_RECIPE), model))
        name, remark = Path(recipe or DEFAULT_RECIPE).stem, None
    folder = run_folder(settings, name)
    check_model(settings.model.path, needs_weights)
    return prepare(settings), folder, remark


def _own_settings(overrides: dict[str, str], model: str | None) -> tuple[RootSettings, str | None]:
    """Those of a run on the user's own task, and which of them the user has not chosen."""
    from paceline.run.own_task import chosen_settings, describe_choice
    from paceline.run.recipes import policy_of

    load_settings(overrides, None, model)  # a misspelt setting, before anything is chosen
    given = overrides if model is None else {**overrides, "model.path": model}
    if "model.path" in given:
        given = {**given, "model.path": policy_of(given["model.path"])}
    chosen = chosen_settings(given)
    settings = load_settings({**chosen, **given}, None, None)
    return settings, describe_choice(chosen) if chosen else None


def _resumed_run(
    overrides: dict[str, str], recipe: str | None, model: str | None, accepts_changes: bool
) -> tuple[RootSettings, Path]:
    """The settings of a run that continues, resolved and checked, and its folder."""
    from paceline.model.folder import find_folder
    from paceline.model.random_config import RANDOM
    from paceline.run.recipes import prepare, resumed_settings, with_newest_policy

    if recipe is not None or model is not None:
        raise ValueError("--resume uses the run's own recipe and model; leave them out")
    if "run.dir" not in overrides:
        raise ValueError("--resume needs the run's folder: --run.dir=runs/NAME")
    folder = Path(overrides["run.dir"])
    settings = with_newest_policy(resumed_settings(folder, overrides, accepts_changes))
    if not settings.model.path.startswith(RANDOM):
        find_folder(settings.model.path)  # its config may have changed; the run has kept its own
    return prepare(settings), folder


def _say_finished(settings: RootSettings, folder: Path) -> bool:
    """Whether a run that is to be resumed has nothing left to do; if so, say it and what its user may want."""
    from paceline.run.ui.finished import finished_lines

    lines = finished_lines(folder, settings)
    for line in lines:
        show(line)
    return bool(lines)


def _show_plan(settings: RootSettings, folder: Path) -> None:
    """Print the settings, and the memory that the model's config asks for: no weights are opened."""
    from paceline.core.config import dump
    from paceline.model.folder import check_model
    from paceline.rollout.memory_plan import gib, plan_memory
    from paceline.run.memory import planned_learner
    from paceline.run.recipes import drafter_of, kv_tokens_of

    show(dump(settings), end="")
    path, engine = settings.model.path, settings.engine
    has_network = "eagle" in [name.strip().partition(":")[0] for name in drafter_of(settings).split(",")]
    config = check_model(path, needs_weights=False)
    plan = plan_memory(config, settings.model.device, engine.precision, kv_tokens_of(settings), has_network)
    learner = planned_learner(settings, config)
    show(f"# {plan.of_engine()}")
    show(f"# {learner}; {gib(plan.weights + plan.cache + learner.total)} with the engine")
    show(f"# run folder: {folder}")
    try:
        check_model(path)
    except ValueError as error:
        say(f"note: {error}")


def _train(settings: RootSettings, folder: Path, is_resumed: bool, words: dict[str, bool], is_quiet: bool) -> None:
    """`words` are what a resumed run was told: see `open_run`."""
    from paceline.run.recipes import describe
    from paceline.run.to_end import train_to_end
    from paceline.run.ui.display import make_display

    with make_display(settings.rl.steps, is_quiet=is_quiet) as display:
        display.begin("paceline train", describe(settings, folder))
        display.phase(0, "load")
        try:
            train_to_end(settings, folder, display, say, is_resumed=is_resumed, words=words)
        except KeyboardInterrupt:
            _note_stop(display, folder)
            raise


def _note_stop(display: Display, folder: Path) -> None:
    """Say what is left of an interrupted run, and how to continue it."""
    if (folder / "config.yaml").is_file():
        display.close()  # so that the command is the last line
        display.note(f"stopped{_saved(folder)}; resume with:")
        display.command(f"paceline train --resume --run.dir={shlex.quote(str(folder))}")
    else:
        display.note("stopped while loading; nothing was written")


def _saved(folder: Path) -> str:
    """What a stopped run falls back to."""
    from paceline.run.store.folder import step_of  # must not load torch: a signal may have interrupted just that

    steps = [step_of(path.name) or 0 for path in (folder / "checkpoints").glob("step-*")]
    if not steps:
        return " before the first checkpoint"
    return f"; work since the checkpoint of step {max(steps)} will be repeated"
