"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL_HELP = (
    "A Hugging Face folder or hub id; the folder of a run, whose newest policy it means; shipped:NAME, a model that "
    "comes with the package (shipped:countdown); or random:SIZE, a model with random weights (tiny, 5m or 50m)."
)

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help=_MODEL_HELP, show_default="random:5m"),
]
TrainedOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help=_MODEL_HELP, show_default="the recipe's"),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE.yaml", exists=True, dir_okay=False, help="YAML file with settings."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")]
PromptsArgument = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="One or more prompts.")]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Read prompts from a .txt file (one per line) or a .jsonl file.",
    ),
]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Write to this folder.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an earlier export.")]
