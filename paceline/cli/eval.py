"""`paceline eval`: a model's metrics on held-out items of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import say, show
from paceline.cli.json_file import check_result_file, write_result
from paceline.cli.options import ConfigOption, JsonOption, ModelOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import find_policy, interruptible, policy_folder, say_loading


def command(
    ctx: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of a run; uses its newest checkpoint.")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    json_file: JsonOption = None,
) -> None:
    """Evaluate a model on held-out items of a task.

    Takes the folder of a run, and then uses that run's settings, or a model (--model). Choose how much to measure with
    --eval.items, --eval.samples and --eval.pass_at. Figures come with their standard errors; --json FILE writes every
    number by its name in metrics.jsonl.
    """
    from paceline.run.own_task import chosen_task
    from paceline.run.recipes import config_of, prepare_evaluation

    chosen = str(run) if model is None and run is not None else model
    given = chosen_task(ctx.obj) if run is None and config is None else {}
    settings = load_settings({**given, **ctx.obj}, config if run is None else config_of(run), chosen)
    settings = prepare_evaluation(find_policy(settings))
    if json_file is not None:
        check_result_file(json_file)
    say_loading(settings)
    with interruptible(f"evaluating {settings.model.path}"), policy_folder(settings) as path:
        from paceline.run.open import evaluate_model
        from paceline.run.ui.summary import evaluation_lines

        found = evaluate_model(settings, path, say)
    if json_file is not None:
        write_result(json_file, found)
    for line in evaluation_lines(found):
        show(line)
