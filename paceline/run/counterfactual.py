"""The comparison at the end of a run (`run.compare`): the run's engine against plain decoding, on the same rollouts.

Both sides make rollouts that the run has not made, of the prompts it would draw next, in batches of a step's size. The
run's engine brings what it has learned; nobody has begun these rollouts early, so there is no run-ahead text. `loop.py`
asks what a run can afford, `local.py` measures. It comes after the last checkpoint, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from paceline.core.types import Rollout, Sampling
from paceline.rollout.compare import Comparison, Made, compare_in_turns
from paceline.rollout.engine import Engine, OnFinish
from paceline.rollout.settings import EngineSettings
from paceline.run.backend import NamedDraw
from paceline.run.ui.summary import counted

MAX_REPEATS = 3
RUN_SHARE = 0.1
"""The share of a run's steps that the comparison may take, unless that is too little for its smallest form."""
STREAM = "compare"
"""Keys of its own: not even run-ahead text of draws that the run left over has these tokens."""


@dataclass(frozen=True)
class Allowance:
    """What a run can afford."""

    num_prompts: int
    """Prompts per batch."""
    seconds: float
    """No further repeat begins that would end later."""


def afford(rows: Iterable[Mapping[str, Any]], num_prompts: int) -> Allowance:
    """What a run with these metrics can afford, if a step has so many prompts.

    The least is one repeat after one round to warm up: on both sides, so as much as four steps generate. A short run
    compares fewer prompts.
    """
    rows = [row for row in rows if "timing_s/gen" in row and "timing_s/step" in row]
    seconds = RUN_SHARE * sum(row["timing_s/step"] for row in rows)
    least = 4 * fmean(row["timing_s/gen"] for row in rows) if rows else 0.0
    share = min(1.0, seconds / least) if least > 0 else 1.0
    return Allowance(max(1, int(share * num_prompts)), seconds)


def describe_work(num_prompts: int, num_of_step: int, num_samples: int, has_run_ahead: bool) -> str:
    """What is compared, in words."""
    prompts = f"{counted(num_prompts, 'new prompt')} x {counted(num_samples, 'response')}"
    smaller = f" (a step has {counted(num_of_step, 'prompt')})" if num_prompts < num_of_step else ""
    return f"{prompts}{smaller}{', without run-ahead text' if has_run_ahead else ''}"


def compare_with_plain(
    engine: Engine,
    rounds: Sequence[Sequence[NamedDraw]],
    sampling: Sampling,
    seconds: float,
    track: Callable[[int, str], OnFinish],
    note: Callable[[str], None],
    has_gpu: bool,
) -> Comparison | None:
    """Time the rollouts of every round with `engine` and without a drafter; None, and a note, if that cannot be.

    `track` takes the number of rollouts in a pass, and which pass it is, in words.
    """
    if engine.settings.drafter == "none":
        note("run.compare is skipped: engine.drafter is none, so there is nothing to compare with plain decoding")
        return None
    count = len(rounds[0]) * sampling.n
    note(
        f"run.compare: timing {counted(count, 'rollout')} with and without speculation, at least once and at most "
        f"{MAX_REPEATS} times in {seconds:.1f} s"
    )
    sampling = replace(sampling, stream=STREAM)

    def run(engine: Engine, turn: int, side: str) -> Made:
        prompts, draws = zip(*rounds[turn], strict=True)
        name = f"round {turn} of up to {len(rounds) - 1}" if turn else "warm-up"
        rollouts: list[Rollout] = engine.generate(prompts, sampling, draws, track(count, f"{name}, {side}"))
        return rollouts, engine.stats

    plain: Engine | None = None
    try:
        plain = Engine(engine.decoder, engine.tokenizer, None, plain_settings(engine, rounds, sampling))
        return compare_in_turns(
            lambda turn: run(plain, turn, "plain"),
            lambda turn: run(engine, turn, "with speculation"),
            range(len(rounds)),
            seconds,
            has_gpu,
        )
    except (torch.OutOfMemoryError, ValueError) as error:  # the run itself is complete
        note(f"run.compare is skipped: {error}")
        return None
    finally:
        if plain is not None:
            plain.release_memory()


def plain_settings(engine: Engine, rounds: Sequence[Sequence[NamedDraw]], sampling: Sampling) -> EngineSettings:
    """Settings of an engine that only decodes, beside the run's own: its KV cache is as large as these rounds need."""
    page, longest = engine.decoder.ops.page_size, engine.decoder.config.max_context

    def tokens(named: Sequence[NamedDraw]) -> int:
        lengths = [min(len(prompt) + sampling.max_new_tokens, longest) for prompt, _ in named]
        return sampling.n * sum((-(-length // page) + 1) * page for length in lengths)

    needed, given = max(map(tokens, rounds)), engine.settings
    kv_tokens = min(needed, given.kv_tokens or needed)
    return given.model_copy(update={"drafter": "none", "run_ahead": False, "kv_tokens": kv_tokens})
