"""`paceline generate`: rollouts of prompts, as text or as JSONL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import say, show
from paceline.cli.options import ConfigOption, ModelOption, PromptsArgument, PromptsOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import find_policy, loaded_engine
from paceline.cli.prompts import prepare_prompts, read_prompt_lines

if TYPE_CHECKING:
    from paceline.core.types import Prompt, Sampling
    from paceline.rollout.engine import Engine
    from paceline.rollout.files import PromptLine


def command(
    ctx: typer.Context,
    prompt: PromptsArgument = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    prompts: PromptsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Write rollouts to this file; - is stdout.")
    ] = None,
) -> None:
    """Generate rollouts for prompts.

    Prints the texts. With --out, writes each rollout to disk as one line of JSON as soon as it finishes.
    """
    from paceline.rollout.files import check_rollout_file

    settings = load_settings(ctx.obj, config, model)
    lines = read_prompt_lines(prompt, prompts)
    if not lines:
        raise ValueError('give a prompt (paceline generate "Once upon a time") or a file of prompts (--prompts FILE)')
    settings = find_policy(settings)
    if out is not None and str(out) != "-":
        check_rollout_file(out)
    with loaded_engine(settings) as engine:
        given, sampling = prepare_prompts(engine, settings.model.chat, lines), settings.sampling.build()
        if out is None or str(out) == "-":
            _generate_to_stdout(engine, given, sampling, lines, is_jsonl=out is not None)
        else:
            _generate_to_file(engine, given, sampling, lines, out)


def _generate_to_stdout(
    engine: Engine, given: Sequence[Prompt], sampling: Sampling, lines: Sequence[PromptLine], is_jsonl: bool
) -> None:
    from paceline.rollout.files import to_line

    for rollout in engine.generate(given, sampling, progress=True):
        if is_jsonl:
            show(to_line(rollout, lines[rollout.prompt_index]))
        else:
            show(f"--- prompt {rollout.prompt_index}, sample {rollout.sample_index} ({rollout.finish_reason})")
            show(rollout.text)


def _generate_to_file(
    engine: Engine, given: Sequence[Prompt], sampling: Sampling, lines: Sequence[PromptLine], out: Path
) -> None:
    from paceline.rollout.files import RolloutFile
    from paceline.run.ui.summary import counted

    file = RolloutFile(out, lines)
    try:
        with file:
            engine.generate(given, sampling, on_finish=file.write, progress=True)
    except BaseException:
        if file.num_written:
            say(f"stopped early; {counted(file.num_written, 'rollout')} in {file.partial}")
        raise
    say(f"wrote {counted(file.num_written, 'rollout')} to {out}")
