"""Scores rollouts with the grader and reports its failures. Called by `loop.py` and `evaluate.py`.

If a grader process crashes or takes too long, its item counts as 0, with a note. A reward that raises or does not
return a number is a bug: every other score may be wrong too, so it ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.core.types import Rollout
from paceline.run.prompts import Question
from paceline.tasks.grading import Grade, Grader, count_problems

Note = Callable[[str], None]

FATAL = ("error", "not a number")
MAX_NOTED = 3
"""Failures that one call reports in full; the rest are only counted."""


def score_rollouts(
    grader: Grader, questions: Sequence[Question], rollouts: Sequence[Rollout], note: Note
) -> list[Grade]:
    """One grade per rollout, in their order."""
    grades = grader.score([(questions[rollout.prompt_index].item, rollout.text) for rollout in rollouts])
    for line in grader.take_notes():
        note(line)
    problems = [grade for grade in grades if grade.kind is not None]
    fatal = next((grade for grade in problems if grade.kind in FATAL), None)
    if fatal is not None:
        raise ValueError(
            f"the reward failed while {fatal.problem}; fix it and try again (a run: with --resume --accept-changes)"
        )
    for grade in problems[:MAX_NOTED]:
        note(f"counted as 0: {grade.problem}")
    if len(problems) > MAX_NOTED:
        note(f"{len(problems) - MAX_NOTED} more gradings failed and counted as 0")
    return grades


def grader_metrics(grades: Iterable[Grade], prefix: str = "grader/") -> dict[str, float]:
    """Failed gradings by kind."""
    return {f"{prefix}{kind.replace(' ', '_')}": float(count) for kind, count in count_problems(grades).items()}
