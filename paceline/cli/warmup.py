"""`paceline warmup`: a small model trained from scratch on a task's worked solutions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import say, show

if TYPE_CHECKING:
    from paceline.warmup.train import WarmupProgress


def command(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Write the model to this folder.")],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="RECIPE", help="Recipe name or .yaml file.")
    ] = "warmup-countdown",
) -> None:
    """Train a small model from scratch on a task's solutions.

    Writes a Hugging Face folder for `paceline train --model FOLDER`, with the recipe.yaml that made it. Saves the model
    at every check, so Ctrl-C keeps the last save. The default recipe needs a GPU; train a smaller model on a CPU with
    settings such as --train.device=cpu --model.num_layers=4 --data.batch_tokens=4096.
    """
    from paceline.core.config import load
    from paceline.run.recipes import find_recipe
    from paceline.warmup.checks import check_warmup
    from paceline.warmup.settings import WarmupSettings

    settings = load(WarmupSettings, find_recipe(recipe, is_warmup=True), ctx.obj)
    check_warmup(settings, out)
    say("generating training texts ...")
    try:
        from paceline.warmup.train import warm_up

        found = warm_up(settings, out, _print_progress)
    except KeyboardInterrupt:
        say(f"stopped; the last save is in {out}" if out.is_dir() else "stopped before the first save")
        raise
    show(f"wrote {out}: solves {found['eval/accuracy']:.1%} of {settings.check.items} held-out items")


def _print_progress(progress: WarmupProgress) -> None:
    """Print a line per check, and one now and then in between."""
    if progress.check is None and progress.step % 25 and progress.step != 1:
        return
    line = (
        f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.4f}  "
        f"{progress.tokens_per_second:,.0f} tokens/s  {progress.seconds_left:,.0f} s left"
    )
    if progress.check is not None:
        line += "".join(f"  {name} {value:.3g}" for name, value in progress.check.items())
    show(line)
