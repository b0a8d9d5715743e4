"""Scores for rollouts: the grader's, with its failures said aloud. Called by `loop.py` and `evaluate.py`.

A grader process that crashes or takes too long costs its item, which counts as 0 and is named. A reward that raises or
gives something that is no number is a mistake of its author: every other score may be wrong too, so it ends the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.core.types import Rollout
from paceline.run.prompts import Question
from paceline.tasks.grading import Grade, Grader, count_problems

Note = Callable[[str], None]

FATAL = ("error", "not a number")
MAX_NOTED = 3
"""Failed gradings that one call shows in full; the rest are counted."""


def score_rollouts(
    grader: Grader, questions: Sequence[Question], rollouts: Sequence[Rollout], note: Note
) -> list[Grade]:
    """One grade per rollout, in their order."""
    grades = grader.score([(questions[rollout.prompt_index].item, rollout.text) for rollout in rollouts])
    problems = [grade for grade in grades if grade.kind is not None]
    fatal = next((grade for grade in problems if grade.kind in FATAL), None)
    if fatal is not None:
        raise ValueError(f"the reward failed while {fatal.problem}; mend it and go on (a run: with --resume)")
    for grade in problems[:MAX_NOTED]:
        note(f"counted as 0: {grade.problem}")
    if len(problems) > MAX_NOTED:
        note(f"and {len(problems) - MAX_NOTED} more gradings that failed, counted as 0")
    return grades


def grader_metrics(grades: Iterable[Grade], prefix: str = "grader/") -> dict[str, float]:
    """How many gradings failed in which way."""
    return {f"{prefix}{kind.replace(' ', '_')}": float(count) for kind, count in count_problems(grades).items()}
