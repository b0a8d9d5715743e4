"""`paceline warmup`: a small model trained from nothing on a task's worked solutions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import say

if TYPE_CHECKING:
    from paceline.warmup.train import WarmupProgress


def command(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written.")],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="RECIPE", help="A name or a .yaml file.")
    ] = "warmup-countdown",
) -> None:
    """Train a small model from nothing on a task's worked solutions.

    What comes out is a Hugging Face folder that `paceline train --model FOLDER` goes on with, and the recipe.yaml that
    made it. It is saved at every check; Ctrl-C keeps what was saved last. The default recipe wants a GPU; settings such
    as --train.device=cpu --model.num_layers=4 --data.batch_tokens=4096 make a smaller one.
    """
    from paceline.core.config import load
    from paceline.run.recipes import find_recipe
    from paceline.warmup.settings import WarmupSettings

    settings = load(WarmupSettings, find_recipe(recipe, is_warmup=True), ctx.obj)
    say("making texts to learn from ...")
    from paceline.warmup.train import warm_up

    found = warm_up(settings, out, _print_progress)
    print(f"wrote {out}: solves {found['eval/accuracy']:.1%} of {settings.check.items} held-out items")


def _print_progress(progress: WarmupProgress) -> None:
    """A line per check, and one now and then between them."""
    if progress.check is None and progress.step % 25 and progress.step != 1:
        return
    line = (
        f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.4f}  "
        f"{progress.tokens_per_second:,.0f} tokens/s  {progress.seconds_left:,.0f} s left"
    )
    if progress.check is not None:
        line += "".join(f"  {name} {value:.3g}" for name, value in progress.check.items())
    print(line, flush=True)
