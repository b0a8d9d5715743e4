"""Evaluates the policy on held-out items. Called by `loop.py` and by `paceline eval`.

Evaluation draws its noise from its own stream, so evaluating more or less often changes no training rollout. Every
figure comes with its standard error over items, since the samples of one item are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from paceline.core.types import Rollout, Sampling
from paceline.rollout.engine import OnFinish
from paceline.run.prompts import Question
from paceline.run.scoring import Note, grader_metrics, score_rollouts
from paceline.run.settings import EvalSettings
from paceline.run.standard_errors import SE, standard_error
from paceline.tasks.grading import Grade, Grader

STREAM = "eval"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One pass over the held-out questions; scores are [questions, samples]."""

    questions: Sequence[Question]
    rollouts: Sequence[Rollout]
    grades: Sequence[Grade]
    num_samples: int

    @property
    def is_solved(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        solved = np.array([grade.score >= 1.0 for grade in self.grades])
        return solved.reshape(len(self.questions), self.num_samples)

    @property
    def num_solved(self) -> list[int]:
        """Samples that solve their question, by question."""
        return [int(count) for count in self.is_solved.sum(1)]

    def first_answers(self) -> Iterator[tuple[str, str, float]]:
        """Prompt, text and score of each question's first sample."""
        for number, question in enumerate(self.questions):
            place = number * self.num_samples
            yield question.item.prompt, self.rollouts[place].text, self.grades[place].score

    def metrics(self, pass_at: Sequence[int] = ()) -> dict[str, float]:
        lengths = np.array([len(rollout.token_ids) for rollout in self.rollouts])
        is_cut = np.array([rollout.finish_reason == "length" for rollout in self.rollouts])
        rewards = np.array([grade.score for grade in self.grades])
        found = {
            "eval/accuracy": float(self.is_solved.mean()),
            "eval/reward": float(rewards.mean()),
            "eval/mean_length": float(lengths.mean()),
            "eval/max_length": float(lengths.max()),
            "eval/clipped_ratio": float(is_cut.mean()),
            **grader_metrics(self.grades, "eval/grader_"),
        }
        chances = {f"eval/pass@{k}": pass_at_k(self.num_solved, self.num_samples, k) for k in pass_at}
        found |= {name: float(np.mean(values)) for name, values in chances.items()}
        by_item = chances | {
            "eval/accuracy": self.is_solved.mean(1).tolist(),
            "eval/reward": rewards.reshape(self.is_solved.shape).mean(1).tolist(),
        }
        errors = ((f"{name}{SE}", standard_error(values)) for name, values in by_item.items())
        return found | {name: error for name, error in errors if error is not None}


class Answering(Protocol):
    """The part of an engine or a backend that an evaluation needs."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[int],
        on_finish: OnFinish | None = None,
        /,
    ) -> list[Rollout]: ...


def evaluate(
    generator: Answering,
    grader: Grader,
    questions: Sequence[Question],
    sampling: Sampling,
    note: Note,
    on_finish: OnFinish | None = None,
) -> Evaluation:
    """Solve each question `sampling.n` times and score every answer; `on_finish` gets each one as it finishes."""
    rollouts = generator.generate(
        [question.prompt_ids for question in questions],
        replace(sampling, stream=STREAM),
        [question.draw for question in questions],
        on_finish,
    )
    return Evaluation(questions, rollouts, score_rollouts(grader, questions, rollouts, note), sampling.n)


def eval_sampling(settings: EvalSettings, sampling: Sampling) -> Sampling:
    """Sampling for an evaluation: as in training, unless its settings say otherwise."""
    temperature = sampling.temperature if settings.temperature is None else settings.temperature
    return replace(sampling, n=settings.samples, temperature=temperature)


def pass_at_k(num_solved: Sequence[int], num_samples: int, k: int) -> list[float]:
    """For every question the chance that at least one of k samples, drawn without replacement, solves it."""
    total = math.comb(num_samples, k)
    return [1 - math.comb(num_samples - solved, k) / total for solved in num_solved]
