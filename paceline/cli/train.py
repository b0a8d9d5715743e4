"""`paceline train`: a run of reinforcement learning, new or resumed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import show
from paceline.cli.options import TrainedOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import policy_folder, say_loading

if TYPE_CHECKING:
    from paceline.run.settings import RootSettings


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

    Without a recipe, trains the small model that comes with the package on the countdown task, on this machine. A
    recipe sets everything; override single settings as in --rl.lr=1e-5 or --engine.drafter=none. A run is a folder,
    runs/RECIPE-N, with metrics, texts and checkpoints. Resume a stopped run with --run.dir=FOLDER --resume: it ends
    as if it had never stopped.
    """
    words = {"accepts_changes": accept_changes, "starts_over": start_over}
    if any(words.values()) and not resume:
        raise ValueError("--accept-changes and --start-over are for --resume: add it, or leave them out")
    settings, folder = _run_settings(ctx.obj, recipe, model, resume, accept_changes)
    if resume and not (start_over or dry_run) and _say_finished(settings, folder):
        return
    if not quiet:
        say_loading(settings)
    if dry_run:
        _show_plan(settings, folder)
    else:
        _train(settings, folder, resume, words, quiet)


def _run_settings(
    overrides: dict[str, str], recipe: str | None, model: str | None, is_resumed: bool, accepts_changes: bool
) -> tuple[RootSettings, Path]:
    """The settings of a run, resolved and checked, and its folder."""
    from paceline.run.recipes import DEFAULT_RECIPE, find_recipe, prepare, resumed_settings, run_folder

    if is_resumed:
        if recipe is not None or model is not None:
            raise ValueError("--resume uses the run's own recipe and model; leave them out")
        if "run.dir" not in overrides:
            raise ValueError("--resume needs the run's folder: --run.dir=runs/NAME")
        folder = Path(overrides["run.dir"])
        settings = resumed_settings(folder, overrides, accepts_changes)
    else:
        settings = load_settings(overrides, find_recipe(recipe or DEFAULT_RECIPE), model)
        folder = run_folder(settings, Path(recipe or DEFAULT_RECIPE).stem)
    return prepare(settings), folder


def _say_finished(settings: RootSettings, folder: Path) -> bool:
    """Whether a run that is to be resumed has nothing left to do; if so, say it and what its user may want."""
    from paceline.run.ui.finished import finished_lines

    lines = finished_lines(folder, settings)
    for line in lines:
        show(line)
    return bool(lines)


def _show_plan(settings: RootSettings, folder: Path) -> None:
    from paceline.core.config import dump
    from paceline.run.parts import load_policy, open_engine

    show(dump(settings), end="")
    with policy_folder(settings) as path:
        show(f"# {open_engine(settings, load_policy(settings, path)).memory_plan()}")
    show(f"# run folder: {folder}")


def _train(settings: RootSettings, folder: Path, is_resumed: bool, words: dict[str, bool], is_quiet: bool) -> None:
    """`words` are what a resumed run was told: see `open_run`."""
    from paceline.run.recipes import describe
    from paceline.run.ui.display import make_display

    with policy_folder(settings) as path, make_display(settings.rl.steps, is_quiet=is_quiet) as display:
        display.begin("paceline train", describe(settings, folder))
        display.phase(0, "load")
        try:
            from paceline.run.open import open_run  # loads torch, which a signal may interrupt
            from paceline.run.ui.interrupts import Interrupts

            with (
                Interrupts(display.note, settings.run.grace_s) as interrupts,
                open_run(settings, path, folder, display, is_resumed, interrupts, **words) as run,
            ):
                display.finish(run.summary(run.train()))
                interrupts.finish()
        except KeyboardInterrupt:
            if (folder / "config.yaml").is_file():
                display.close()  # so that the command is the last line
                display.note(f"stopped{_saved(folder)}; resume with:")
                display.command(f"paceline train --resume --run.dir={shlex.quote(str(folder))}")
            raise


def _saved(folder: Path) -> str:
    """What a stopped run falls back to."""
    from paceline.run.store.folder import step_of  # must not load torch: a signal may have interrupted just that

    steps = [step_of(path.name) or 0 for path in (folder / "checkpoints").glob("step-*")]
    if not steps:
        return " before the first checkpoint"
    return f"; work since the checkpoint of step {max(steps)} will be repeated"
