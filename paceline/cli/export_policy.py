"""`paceline export-policy`: a run's policy as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import show
from paceline.cli.options import ForceOption, OutArgument


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run; uses its newest checkpoint.")],
    out: OutArgument,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, as in the run, or bfloat16.")] = "float32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter, in PEFT's layout, of a run with rl.lora.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Export a run's newest policy as a Hugging Face folder.

    Writes weights, config, generation config, and the tokenizer with its chat template, from the newest checkpoint that
    is intact. A run with rl.lora exports merged weights; with --adapter, the folder that PEFT loads on top of its base.
    """
    from paceline.integrations.targets import check_dtype, check_target
    from paceline.run.recipes import check_has_policy

    check_dtype(dtype)
    check_has_policy(run)
    check_target(out, run, force)
    from paceline.integrations.export import export_adapter, export_policy, step_in

    if adapter:
        show(f"wrote {out}: adapter of {step_in(export_adapter(run, out, force))}")
        return
    show(f"wrote {out}: policy of {step_in(export_policy(run, out, dtype, force))}, {dtype}")
