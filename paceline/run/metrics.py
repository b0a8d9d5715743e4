"""The metrics of a step: all names and formulas in one place. Called by `loop.py`.

Names follow TRL for rewards and lengths and verl for timing and speculation. Metrics that depend on time or on drafts
have a prefix that comparisons of runs ignore (`folder.py`); all others must be equal in equal runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.types import Rollout
from paceline.rollout.compare import Comparison
from paceline.rollout.stats import Stats
from paceline.run.prompts import Question
from paceline.tasks.grading import Grade


@dataclass(frozen=True, eq=False)
class Answer:
    """One response of a group, graded."""

    question: Question
    rollout: Rollout
    grade: Grade
    reward: float
    """Its score after shaping."""


def engine_metrics(stats: Stats) -> dict[str, float]:
    """Metrics of the engine's work in one step."""
    found = {
        "rollout/spec_accept_length": stats.accept_length,
        "rollout/spec_rows_per_token": stats.rows / stats.tokens if stats.tokens else 0.0,
        "perf/preemptions": float(stats.preemptions),
        "perf/forward_seconds": stats.machine_seconds,
    }
    if stats.drafters:
        spent = sum(drafter.milliseconds for drafter in stats.drafters.values())
        found["rollout/spec_saved_seconds"] = 1e-3 * (stats.saved_ms - spent) - stats.seconds.get("draft", 0.0)
    if stats.ahead_made or stats.ahead_offered or stats.ahead_survived:
        found["rollout/spec_ahead_made"] = float(stats.ahead_made)
        found["rollout/spec_ahead_offered"] = float(stats.ahead_offered)
        found["rollout/spec_ahead_survived"] = float(stats.ahead_survived)
    for name, drafter in sorted(stats.drafters.items()):
        found |= {f"rollout/spec_{name}_{key}": value for key, value in drafter.describe().items()}
    return found


def row_budget(stats: Stats) -> dict[str, list[list[int | float | str]]]:
    """Use of rows and drafters, for an event: [rows, forwards], [sequences, arm, steps], [rows, ms]."""
    return {
        "forwards": [[rows, count] for rows, count in sorted(stats.forwards.items())],
        "arms": [[size, arm, count] for (size, arm), count in sorted(stats.arms.items())],
        "curve": [[rows, round(ms, 4)] for rows, ms in stats.curve],
    }


def compare_event(found: Comparison) -> dict[str, Any]:
    """The measured gain of speculation, for an event."""
    shares = {"gpu_share_without": found.gpu_share_off, "gpu_share_with": found.gpu_share_on}
    return {
        "seconds_without": sum(found.seconds_off),
        "seconds_with": sum(found.seconds_on),
        "is_equal": found.difference is None,
        "repeats": len(found.seconds_on),
        "work": found.work,
    } | {name: share for name, share in shares.items() if share is not None}


def reward_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Scores come from the task; rewards are scores after shaping."""
    values = np.array([answer.reward for answer in answers], np.float64)
    scores = np.array([answer.grade.score for answer in answers])
    return {
        "reward": float(values.mean()),
        "reward_std": float(values.std()),
        "score": float(scores.mean()),
        "accuracy": float((scores >= 1.0).mean()),
    }


def length_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Lengths, with the tail that every step waits for."""
    found = list(rollouts)
    lengths = np.array([len(rollout.token_ids) for rollout in found])
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/p95_length": float(np.percentile(lengths, 95)),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([rollout.finish_reason == "length" for rollout in found])),
    }


def timing_metrics(seconds: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Seconds by phase, and response tokens per second of the whole step."""
    found = {f"timing_s/{name}": value for name, value in seconds.items()}
    total = seconds.get("step", 0.0)
    return found | {"perf/throughput": num_tokens / total if total else 0.0}
