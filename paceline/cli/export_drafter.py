"""`paceline export-drafter`: a run's drafter as other engines load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import say, show
from paceline.cli.options import ForceOption, OutArgument


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of one drafter (RUN/drafter/step-N).")
    ],
    out: OutArgument,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    check: Annotated[
        bool, typer.Option("--check", help="Read the export back and compare it with the run's drafter.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Export a run's newest drafter for vLLM and SGLang.

    Writes the EAGLE-3 layout: config.json and model.safetensors. Engines recognise it if the folder's name contains
    eagle3. --check reads the files with a second implementation, which knows only the format, and compares its logits
    on the run's texts with those of the run's drafter, both in float32. Exits with code 1 if they differ.
    """
    from paceline.integrations.targets import check_drafter_source, check_dtype, check_target, run_around

    check_dtype(dtype)
    check_drafter_source(run)
    check_target(out, run_around(run), force)
    from paceline.integrations.export import export_drafter, find_drafter, step_in

    drafter = find_drafter(run)
    if check:
        drafter.find_policy()  # fails before anything is written
    for note in export_drafter(drafter, out, dtype, force):
        say(note)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    show(f"wrote {out}: version {drafter.eagle.version} of {step_in(drafter.folder)}, {dtype}, {size:,.1f} MB")
    if not check:
        return
    from paceline.integrations.check import check_drafter

    found = check_drafter(out, drafter)
    show(str(found))
    if not found.is_good:
        raise typer.Exit(1)
