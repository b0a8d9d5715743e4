"""`paceline export-drafter`: a run's drafter as other engines load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import say
from paceline.cli.options import ForceOption, OutArgument


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or a drafter in it (RUN/drafter/step-N).")
    ],
    out: OutArgument,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    check: Annotated[bool, typer.Option("--check", help="Read it back and compare it with the run's drafter.")] = False,
    force: ForceOption = False,
) -> None:
    """Write a run's newest drafter as vLLM and SGLang load it.

    The layout is EAGLE-3: config.json and model.safetensors; a folder whose name contains eagle3 is recognised. --check
    computes logits from the written files by a second implementation, which knows the format alone, on texts of the
    run, and compares them with those of the run's drafter, both in float32. Exit code 1 if they differ.
    """
    from paceline.integrations.export import export_drafter, find_drafter, step_in

    drafter = find_drafter(run)
    if check:
        drafter.find_policy()  # what it lacks is better said before anything is written
    for note in export_drafter(drafter, out, dtype, force):
        say(note)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"wrote {out}: version {drafter.eagle.version} of {step_in(drafter.folder)}, {dtype}, {size:,.1f} MB")
    if not check:
        return
    from paceline.integrations.check import check_drafter

    found = check_drafter(out, drafter)
    print(found)
    if not found.is_good:
        raise typer.Exit(1)
