"""One training run, from its settings to its last checkpoint.

    draws -> prompt source -> backend.generate -> grader (scores) -> advantages -> backend.learn (weights) -> ...

A step generates the next draws, grades them, keeps the first groups that pass in draw order, learns, and writes one row
of metrics. Called by `paceline train`. Everything that decides a token or a weight is in the checkpoint (`state.py`): a
run that is killed and resumed writes the same rows as one that was not. Ctrl-C, SIGTERM and SIGHUP save the last
finished step.
Nothing here may let time, drafts or the order of completion decide what is trained on.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from paceline.core.trace import Trace
from paceline.core.types import Rollout
from paceline.rl.algorithms import assign_advantages
from paceline.rl.filters import ScoredGroup, Selection, select, shape_rewards, trained_mask
from paceline.rl.learner import Learner
from paceline.rl.packing import Sample
from paceline.rollout.compare import Comparison
from paceline.rollout.engine import OnFinish
from paceline.rollout.stats import Stats
from paceline.run.backend import Backend, NamedDraw
from paceline.run.counterfactual import MAX_REPEATS, RUN_SHARE, afford, describe_work
from paceline.run.evaluate import eval_sampling, evaluate
from paceline.run.metrics import (
    Answer,
    compare_event,
    engine_metrics,
    length_metrics,
    reward_metrics,
    row_budget,
    timing_metrics,
)
from paceline.run.prompts import PromptSource, Question
from paceline.run.recipes import training_sampling
from paceline.run.scoring import grader_metrics, score_rollouts
from paceline.run.settings import RootSettings
from paceline.run.standard_errors import gain_error, solved_event
from paceline.run.state import RunState
from paceline.run.store.folder import RunFolder, earlier_seconds, read_events, read_metrics
from paceline.run.ui.display import EVALUATE, Agenda, Display
from paceline.run.ui.example import Lines, find_example, kept_answers
from paceline.run.ui.finished import has_compared, next_commands
from paceline.run.ui.interrupts import Interrupts
from paceline.run.ui.loggers import Logger
from paceline.run.ui.summary import GPU_GAIN, PHASES, Outcome, summarise
from paceline.tasks.grading import Grade, Grader

EMPTY_STEPS = 3
"""Print a note after this many initial steps with nothing to learn from."""


class Run:
    """An open run: `train` takes it from its current step to its last."""

    def __init__(
        self,
        settings: RootSettings,
        backend: Backend,
        learner: Learner,
        prompt_source: PromptSource,
        grader: Grader,
        folder: RunFolder,
        state: RunState,
        trace: Trace,
        display: Display,
        loggers: Sequence[Logger],
        interrupts: Interrupts,
    ) -> None:
        self._settings, self._rl = settings, settings.rl
        self.backend, self.learner, self._prompt_source, self._grader = backend, learner, prompt_source, grader
        self._folder, self.state, self._trace = folder, state, trace
        self._display, self._loggers, self._interrupts = display, loggers, interrupts
        self._is_whole = True
        """Whether everything a checkpoint holds belongs to the last finished step."""
        self._num_empty = 0
        """Initial steps that had nothing to learn from."""
        self._sampling = training_sampling(settings)

    def train(self) -> Comparison | None:
        """Run the remaining steps, evaluating before the first and after the last. Only SIGKILL can lose a step."""
        try:
            return self._train()
        except KeyboardInterrupt:
            self._save_finished()
            raise

    def _train(self) -> Comparison | None:
        self._display.expect(self._agenda())
        if self.state.num_steps == 0 and self._settings.eval.items:
            self._write({"step": 0} | self._evaluate(0))
        while self.state.num_steps < self._rl.steps:
            self.step()
        self.state.wait()
        self._folder.append_events(self._trace.drain())
        is_due = self._settings.run.compare and not has_compared(self._folder.path, self.state.num_steps)
        return self._compare() if is_due else None

    def _agenda(self) -> Agenda:
        given, earlier = self._settings.eval, self._events("eval")
        return Agenda(
            evaluates=bool(given.items),
            eval_every=given.every,
            comparison_share=RUN_SHARE if self._settings.run.compare else 0.0,
            evaluation_s=earlier[-1]["dur_s"] if earlier else 0.0,
        )

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run the next step, and save a checkpoint if one is due."""
        step = self.state.num_steps + 1
        self._trace.step = step
        work, begun = Stats(), time.perf_counter()
        self.backend.begin_step()
        with self._trace.span("step"):
            selection = self._gather(step, work)
            # From here until its row is written, the step changes what a checkpoint holds.
            self._interrupts.hold()
            self._is_whole = False
            self._display.phase(step, "learn")
            with self._trace.span("update"):
                learned = self.backend.learn(self._samples([a for group in selection.kept for a in group.members]))
            spare = self.backend.end_step(step, time.perf_counter() - begun)
        self.state.num_steps, self.state.next_draw = step, selection.next_draw
        # Include what dynamic sampling drops: it too shows how good the policy is and what is hard.
        groups = sorted((*selection.kept, *selection.dropped), key=lambda group: group.draw)
        drawn = [answer for group in groups for answer in group.members]
        self._prompt_source.record(step, _by_question(drawn), selection.next_draw)
        row: dict[str, Any] = {"step": step} | reward_metrics(drawn)
        row |= length_metrics(answer.rollout for answer in drawn) | learned | self._draw_metrics(selection)
        self._watch_rewards(step, [answer.reward for answer in drawn], row)
        if self._is_due(step, self._settings.eval.every) and self._settings.eval.items:
            row |= self._evaluate(step)
        self._trace.add(self._trace.worker, "budget", time.perf_counter(), 0.0, row_budget(work))
        row |= engine_metrics(work) | spare | timing_metrics(self._trace.seconds(step), work.tokens)
        self._write(row, drawn)
        if self._is_due(step, self._settings.run.checkpoint_every) or self._interrupts.came:
            self._save()
        self._is_whole = True
        self._interrupts.release()

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._rl.steps or bool(every and step % every == 0)

    def _gather(self, step: int, work: Stats) -> Selection[Answer]:
        """Generate and grade draws until the step's groups are decided."""
        groups: list[ScoredGroup[Answer]] = []
        decide = functools.partial(
            select,
            first_draw=self.state.next_draw,
            num_wanted=self._rl.prompts_per_step,
            max_draws=self._rl.max_draws,
            filter=self.learner.algorithm.filter,
        )
        selection = decide(groups)
        while selection.missing:
            groups += self._make_groups(step, selection.missing, work)
            selection = decide(groups)
        if selection.is_short:
            self._display.note(
                f"step {step}: only {len(selection.kept)} of {self._rl.prompts_per_step} groups had unequal scores in "
                f"{self._rl.max_draws} draws; the task may be too easy or too hard, or raise rl.draw_limit"
            )
        return selection

    def _make_groups(self, step: int, draws: Sequence[int], work: Stats) -> list[ScoredGroup[Answer]]:
        questions = [self._prompt_source.question(step, draw) for draw in draws]
        self._display.phase(step, "generate")
        with self._trace.span("gen", draws=len(draws)):
            rollouts = self.backend.generate(
                [question.prompt_ids for question in questions],
                self._sampling,
                draws,
                self._track(len(questions) * self._sampling.n),
                self._later_draws(step, draws[-1] + 1),
            )
        for stats in self.backend.take_stats():
            work.add(stats)
        self._display.phase(step, "score")
        with self._trace.span("score"):
            grades = score_rollouts(self._grader, questions, rollouts, self._display.note)
        rewards = self._rewards(rollouts, grades)
        answers = [
            Answer(questions[rollout.prompt_index], rollout, grade, float(reward))
            for rollout, grade, reward in zip(rollouts, grades, rewards, strict=True)
        ]
        size = self._sampling.n
        members = (tuple(answers[first : first + size]) for first in range(0, len(answers), size))
        return [
            ScoredGroup(question.draw, tuple(answer.grade.score for answer in own), own)
            for question, own in zip(questions, members, strict=True)
        ]

    def _later_draws(self, step: int, first: int) -> list[NamedDraw]:
        """Draws of the next steps for spare rows or workers; they do not depend on this step."""
        if not self.backend.runs_ahead:
            return []
        found = []
        for later in range(step + 1, min(step + self._settings.engine.ahead_calls, self._rl.steps) + 1):
            if self._prompt_source.is_planned(later):
                found += self._foresee(later, first)
                first += self._rl.prompts_per_step
        return found

    def _foresee(self, step: int, first: int) -> list[NamedDraw]:
        found: list[NamedDraw] = []
        with suppress(ValueError):  # the step that needs a bad item will raise for it
            for draw in range(first, first + self._rl.prompts_per_step):
                found.append((self._prompt_source.foresee(step, draw).prompt_ids, draw))
        return found

    def _track(self, total: int, num_samples: int = 1) -> OnFinish:
        """A callback that shows how many of a call's rollouts are done, or of its items with so many samples each."""
        finished: Counter[int] = Counter()
        num_done = num_tokens = 0

        def report(rollout: Rollout) -> None:
            nonlocal num_done, num_tokens
            finished[rollout.prompt_index] += 1
            num_done += finished[rollout.prompt_index] % num_samples == 0
            num_tokens += len(rollout.token_ids)
            self._display.progress(num_done, total, num_tokens)

        return report

    def _track_pass(self, total: int, detail: str) -> OnFinish:
        """The same for one of several passes."""
        self._display.phase(self.state.num_steps, "compare")
        self._display.detail(detail)
        return self._track(total)

    def _rewards(self, rollouts: Sequence[Rollout], grades: Sequence[Grade]) -> Iterable[float]:
        return shape_rewards(
            [grade.score for grade in grades],
            [len(rollout.token_ids) for rollout in rollouts],
            limit=self._sampling.max_new_tokens,
            share=self.learner.algorithm.overlong_share,
            penalty=self._rl.overlong_penalty,
        )

    def _samples(self, answers: Sequence[Answer]) -> list[Sample]:
        """The learner's input: texts, log-probabilities and an advantage for every token."""
        if not answers:
            return []
        algorithm, learner, rewards = self.learner.algorithm, self.learner, [answer.reward for answer in answers]
        masks = [trained_mask(len(a.rollout.token_ids), a.rollout.finish_reason, self._rl.truncated) for a in answers]
        bare = [_sample(answer, 0.0, mask) for answer, mask in zip(answers, masks, strict=True)]
        has_cost = algorithm.kl_coef and algorithm.kl_in == "reward"
        kl = learner.reference_kl(bare) if has_cost else None
        draws = [answer.question.draw for answer in answers]
        advantages = assign_advantages(algorithm, np.asarray(rewards), np.asarray(draws), masks, kl)
        return [_sample(*given) for given in zip(answers, advantages, masks, strict=True)]

    def _watch_rewards(self, step: int, rewards: Sequence[float], row: Mapping[str, Any]) -> None:
        """Print a note once if nothing was learned since the run began; later on, the task may simply be solved."""
        # Some algorithms learn from differences between groups, and a KL term trains without any reward.
        is_empty = row["frac_reward_zero_std"] == 1 and (min(rewards) == max(rewards) or not row["num_tokens"])
        if not is_empty or self._num_empty != step - 1:
            return
        self._num_empty = step
        if step == EMPTY_STEPS:
            self._display.note(
                f"nothing was learned in {step} steps: in every group all responses had the same reward (on average "
                f"{sum(rewards) / len(rewards):.3g}). Read some texts (paceline report {self._folder.path}) and check "
                "the reward; try easier or harder items, a larger rl.group_size, or a reward with partial credit"
            )

    def _draw_metrics(self, selection: Selection[Answer]) -> dict[str, float]:
        looked_at = [*selection.kept, *selection.dropped]
        return {
            "frac_reward_zero_std": selection.num_uniform / len(looked_at) if looked_at else 0.0,
            "draws": float(len(looked_at)),
            "next_draw": float(selection.next_draw),
        } | grader_metrics(answer.grade for group in looked_at for answer in group.members)

    # --- between steps ------------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> dict[str, float]:
        given = self._settings.eval
        self._display.phase(step, EVALUATE)
        self._display.detail(
            "before training" if not step else "after training" if step == self._rl.steps else f"after step {step}",
            "items",
        )
        questions = self._prompt_source.test_questions(given.items)
        if len(questions) < given.items and step == 0:
            self._display.note(f"the data has {len(questions)} held-out items, fewer than eval.items={given.items}")
        with self._trace.span("eval") as args:
            found = evaluate(
                self.backend,
                self._grader,
                questions,
                eval_sampling(given, self._sampling),
                self._display.note,
                self._track(len(questions), given.samples),
            )
            args |= solved_event(found.num_solved, found.num_samples)
            if self._settings.run.rollouts:
                args["answers"] = kept_answers(found.first_answers())
        return found.metrics(given.pass_at)

    def _compare(self) -> Comparison | None:
        """Time rollouts of the next draws with and without speculation, for a small share of the run."""
        step, of_step = self.state.num_steps + 1, self._rl.prompts_per_step
        self._display.phase(self.state.num_steps, "compare")
        allowed = afford(read_metrics(self._folder.path), of_step)
        size = allowed.num_prompts
        draws = range(self.state.next_draw, self.state.next_draw + (MAX_REPEATS + 1) * size)
        with self._trace.span("compare") as args:
            named = [(self._prompt_source.question(step, draw).prompt_ids, draw) for draw in draws]
            rounds = [named[first : first + size] for first in range(0, len(named), size)]
            found = self.backend.compare(rounds, self._sampling, allowed.seconds, self._track_pass)
            if found is not None:
                found.work = describe_work(size, of_step, self._sampling.n, self.backend.runs_ahead)
                args |= compare_event(found)
        self._folder.append_events(self._trace.drain())
        return found

    # --- the folder ---------------------------------------------------------------------------------------------------

    def _write(self, row: dict[str, Any], answers: Sequence[Answer] = ()) -> None:
        step = row["step"]
        if self._settings.run.rollouts and step:
            records = [_record(answer, version=step - 1) for answer in answers]
            self._folder.write_rollouts(step, records, [_spans(answer.rollout) for answer in answers])
        self._folder.append_metrics(row)
        self._folder.append_events(self._trace.drain())
        for logger in self._loggers:
            logger.log(step, row)
        self._display.step(step, row)

    def _save_finished(self) -> None:
        """Save the last finished step and discard the next one's progress; tell the user where, or why not."""
        state = self.state
        if not self._is_whole:
            self._display.note(f"step {self._trace.step} was interrupted while learning: it is discarded")
        elif state.num_steps:
            if state.num_steps != state.saved_step:
                self._save(has_memories=False)
            state.wait()
            self._display.note(f"step {state.num_steps} is saved in {state.path(state.num_steps)}")

    def _save(self, has_memories: bool = True) -> None:
        self._display.phase(self.state.num_steps, "checkpoint")
        with self._trace.span("checkpoint"):
            self.state.save(has_memories)

    def summary(self, comparison: Comparison | None = None) -> list[str]:
        """A summary of the run, earlier processes included, as lines of text."""
        path, trace = self._folder.path, self._trace
        outcome = Outcome(
            num_steps=self._rl.steps,
            seconds=trace.age_s,
            comparison=comparison,
            folder=path,
            checkpoints=self.state.paths(),
            next_commands=next_commands(path, self._settings, self._rl.steps),
            example=self._example(),
            gain_se=self._gain_se(),
            gpu_gain=GPU_GAIN if self._settings.model.device == "cpu" else None,
        )
        earlier = earlier_seconds(path, trace.worker, (*PHASES, "step"), trace.begin_s) if trace.begin_s else {}
        totals = Counter(trace.totals) + Counter(earlier)
        return summarise(read_metrics(path), totals, outcome)

    def _example(self) -> Lines:
        with suppress(ValueError, KeyError, TypeError, OSError):  # a damaged line must not fail a run that is done
            return find_example(read_events(self._folder.path, "eval"))
        return []

    def _gain_se(self) -> float | None:
        found = self._events("eval")
        return gain_error(found[0]["args"], found[-1]["args"]) if len(found) > 1 else None

    def _events(self, name: str) -> list[dict[str, Any]]:
        """The run's events of a name so far; none if a line is damaged, which must not fail a run."""
        with suppress(ValueError, OSError):
            return read_events(self._folder.path, name)
        return []


def _by_question(answers: Iterable[Answer]) -> list[tuple[Question, list[float]]]:
    found: dict[int, tuple[Question, list[float]]] = {}
    for answer in answers:
        found.setdefault(answer.question.draw, (answer.question, []))[1].append(answer.grade.score)
    return list(found.values())


def _sample(answer: Answer, advantage: Any, mask: Any) -> Sample:
    rollout = answer.rollout
    return Sample.of(
        rollout.draw,
        rollout.sample_index,
        answer.question.prompt_ids,
        rollout.token_ids,
        rollout.logprobs,
        advantage,
        mask,
    )


def _record(answer: Answer, version: int) -> dict[str, Any]:
    """A line of `rollouts/`; `version` is the number of updates the policy had had."""
    rollout = answer.rollout
    return {
        "draw": rollout.draw,
        "sample": rollout.sample_index,
        "prompt": answer.question.item.prompt,
        "text": rollout.text,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "score": answer.grade.score,
        "reward": answer.reward,
        "finish_reason": rollout.finish_reason,
        "version": version,
    }


def _spans(rollout: Rollout) -> dict[str, Any]:
    return {"draw": rollout.draw, "sample": rollout.sample_index, "spans": [list(span) for span in rollout.spans]}
