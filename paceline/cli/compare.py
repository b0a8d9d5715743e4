"""`paceline compare`: the same rollouts with speculation off and on, timed and compared token by token."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import show
from paceline.cli.json_file import check_result_file, write_result
from paceline.cli.options import ConfigOption, JsonOption, ModelOption, PromptsArgument, PromptsOption
from paceline.cli.overrides import load_settings
from paceline.cli.policy import find_policy, loaded_engine
from paceline.cli.prompts import prepare_prompts, read_prompt_lines
from paceline.core.terminal_text import escaped

if TYPE_CHECKING:
    from paceline.rollout.compare import Comparison, Mode
    from paceline.rollout.engine import Engine
    from paceline.run.settings import RootSettings

# What a bare `paceline compare` runs.
DEMO_SETTINGS = {"sampling.n": "4", "sampling.max_new_tokens": "128", "sampling.temperature": "0.6"}
DEMO_PROMPTS = (
    "A train leaves at noon and",
    "The sum of 17 and 25 is",
    "def fibonacci(n):",
    "Once upon a time, a small",
    "The capital of France is",
    "To solve x + 3 = 10, first",
    "Riders take turns in front because",
    "1, 1, 2, 3, 5, 8,",
)


def command(
    ctx: typer.Context,
    prompt: PromptsArgument = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    prompts: PromptsOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per side, alternating.")] = 3,
    json_file: JsonOption = None,
) -> None:
    """Time speculation off and on, and compare every token.

    Both sides use the same prompts and random keys, so every token id and log-probability must match. If one does not,
    prints the first difference and exits with code 1. Without prompts, uses built-in ones: 4 samples of up to 128
    tokens each at temperature 0.6. Change settings as in --sampling.temperature=1 or --engine.drafter=ngram.
    """
    lines = read_prompt_lines(prompt, prompts)
    settings = load_settings({**({} if lines or config else DEMO_SETTINGS), **ctx.obj}, config, model)
    if settings.engine.drafter == "none":
        raise ValueError("engine.drafter is none, so there is nothing to compare; choose ngram or suffix")
    settings = find_policy(settings)
    if json_file is not None:
        check_result_file(json_file)
    with loaded_engine(settings) as opened:
        from paceline.rollout.compare import compare_engines

        opened.release_memory()  # only its weights are needed
        result = compare_engines(
            lambda mode: _sibling(opened, settings, mode),
            prepare_prompts(opened, settings.model.chat, lines or read_prompt_lines(DEMO_PROMPTS, None)),
            settings.sampling.build(),
            repeats,
            has_gpu=settings.model.device != "cpu",
        )
    from paceline.run.recipes import drafter_of

    if json_file is not None:
        write_result(json_file, result.to_json())
    _print_comparison(result, drafter_of(settings))
    if result.difference is not None:
        raise typer.Exit(1)


def _sibling(engine: Engine, settings: RootSettings, mode: Mode) -> Engine:
    """A new engine on the same weights, without any history."""
    from paceline.run.recipes import drafter_of

    drafter = None if mode == "off" else drafter_of(settings)
    budget = settings.budget.model_copy(update={"always": True}) if mode == "everything" else settings.budget
    given = settings.engine.model_copy(update={"run_ahead": False}) if mode == "off" else settings.engine
    return type(engine)(engine.decoder, engine.tokenizer, drafter, given, budget)


def _print_comparison(result: Comparison, drafter: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.rollout.compare import describe_speedup

    has_gpu = result.gpu_share_off is not None
    table = Table("speculation", "seconds", "tokens/s", "accept length", *(["GPU in forwards"] if has_gpu else []))
    sides = (
        ("off", result.seconds_off, 1.0, result.gpu_share_off),
        (drafter, result.seconds_on, result.accept_length, result.gpu_share_on),
    )
    for name, runs, accept_length, gpu_share in sides:
        seconds = statistics.median(runs)
        cells = (f"{seconds:.3f}", f"{result.num_tokens / seconds:,.0f}", f"{accept_length:.2f}")
        table.add_row(escaped(name), *cells, *([] if gpu_share is None else [f"{gpu_share:.0%}"]))
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    num_repeats = len(result.seconds_on)
    repeats = f"median of {num_repeats} repeats in turns" if num_repeats > 1 else "1 repeat"
    show(f"{describe_speedup(result.ratio, result.ratios)} ({repeats})")
    show(result.work)
    for name, counts in result.sources.items():
        far = ", ".join(f"{key[3:]}: {value:.0%}" for key, value in counts.items() if key.startswith("at_"))
        show(
            f"{name}: {counts['verified']:,.0f} of {counts['proposed']:,.0f} draft tokens verified in "
            f"{counts['milliseconds']:,.1f} ms, {counts['accepted']:,.0f} accepted, "
            f"{counts['accepted'] / result.num_tokens:.0%} of all tokens"
            + (f"; drafts accepted up to position {far}" if far else "")
        )
    show(
        f"{result.num_identical} of {result.num_rollouts} sequences identical in token ids and log-probabilities, "
        f"also when every draft token is verified ({result.num_accepted:,} of {result.num_verified:,} accepted)"
    )
    if result.difference is not None:
        show(f"first difference: {result.difference}")
