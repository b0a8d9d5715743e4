"""A step's metrics from what it made: names and formulas in one place. Called by `loop.py`.

Names follow TRL for rewards and lengths and verl for timing and speculation. Whatever depends on time or on drafts has
one of the prefixes that are left out when runs are compared (`folder.py`); everything else must be equal in equal runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.types import Rollout
from paceline.rollout.stats import DrafterStats, Stats
from paceline.run.prompts import Question
from paceline.tasks.grading import Grade


@dataclass(frozen=True, eq=False)
class Answer:
    """One response of a group, graded."""

    question: Question
    rollout: Rollout
    grade: Grade
    reward: float
    """What its score came to after shaping."""


@dataclass
class Work:
    """What the engine did in the calls of one step."""

    tokens: int = 0
    visits: int = 0
    rows: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    """By the machine's own clock."""
    ahead: Counter[str] = field(default_factory=Counter)
    """Tokens made for later steps, tokens made before for this one, and how many of those came true."""
    drafts: dict[str, DrafterStats] = field(default_factory=dict)
    saved_ms: float = 0.0
    draft_seconds: float = 0.0
    """The host's time for drafts."""
    forwards: Counter[int] = field(default_factory=Counter)
    arms: Counter[tuple[int, str]] = field(default_factory=Counter)
    curve: tuple[tuple[int, float], ...] = ()

    def add(self, stats: Stats) -> None:
        self.tokens += stats.tokens
        self.visits += stats.visits
        self.rows += stats.rows
        self.preemptions += stats.preemptions
        self.seconds += stats.machine_seconds
        self.ahead.update(made=stats.ahead_made, offered=stats.ahead_offered, survived=stats.ahead_survived)
        for name, drafter in stats.drafters.items():
            self.drafts.setdefault(name, DrafterStats()).add(drafter)
        self.saved_ms += stats.saved_ms
        self.draft_seconds += stats.seconds.get("draft", 0.0)
        self.forwards.update(stats.forwards)
        self.arms.update(stats.arms)
        self.curve = stats.curve or self.curve

    def metrics(self) -> dict[str, float]:
        found = {
            "rollout/spec_accept_length": self.tokens / self.visits if self.visits else 0.0,
            "rollout/spec_rows_per_token": self.rows / self.tokens if self.tokens else 0.0,
            "perf/preemptions": float(self.preemptions),
            "perf/forward_seconds": self.seconds,
        }
        if self.drafts:
            spent = sum(drafter.milliseconds for drafter in self.drafts.values())
            found["rollout/spec_saved_seconds"] = 1e-3 * (self.saved_ms - spent) - self.draft_seconds
        if any(self.ahead.values()):
            found |= {f"rollout/spec_ahead_{kind}": float(count) for kind, count in sorted(self.ahead.items())}
        for name, drafter in sorted(self.drafts.items()):
            found |= {f"rollout/spec_{name}_{key}": value for key, value in drafter.describe().items()}
        return found

    def budget(self) -> dict[str, list[list[int | float | str]]]:
        """How rows were used and who drafted, for an event: [rows, forwards], [sequences, arm, steps], [rows, ms]."""
        return {
            "forwards": [[rows, count] for rows, count in sorted(self.forwards.items())],
            "arms": [[size, arm, count] for (size, arm), count in sorted(self.arms.items())],
            "curve": [[rows, round(ms, 4)] for rows, ms in self.curve],
        }


def reward_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Scores are the task's, rewards what became of them after shaping."""
    values = np.array([answer.reward for answer in answers], np.float64)
    scores = np.array([answer.grade.score for answer in answers])
    return {
        "reward": float(values.mean()),
        "reward_std": float(values.std()),
        "score": float(scores.mean()),
        "accuracy": float((scores >= 1.0).mean()),
    }


def length_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """The tail is what everybody waits for."""
    found = list(rollouts)
    lengths = np.array([len(rollout.token_ids) for rollout in found])
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/p95_length": float(np.percentile(lengths, 95)),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([rollout.finish_reason == "length" for rollout in found])),
    }


def timing_metrics(seconds: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """By phase, and tokens of responses per second of the whole step."""
    found = {f"timing_s/{name}": value for name, value in seconds.items()}
    total = seconds.get("step", 0.0)
    return found | {"perf/throughput": num_tokens / total if total else 0.0}
