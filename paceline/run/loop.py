"""One training run, from its settings to its last checkpoint.

    draws -> course (questions) -> engine (rollouts) -> grader (scores) -> advantages -> learner (weights) -> engine ...

A step generates the next draws, grades them, takes the first groups that pass in draw order, learns, and writes one row
of metrics. Called by `paceline train`. All that decides a token or a weight is in the checkpoint: a run that is
killed and resumed has the rows of one that was not. A run that Ctrl-C ends saves its last finished step. Nothing here
may let time, drafts or the order of completion decide what is trained on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.noise import prompt_hash
from paceline.core.trace import Trace
from paceline.core.types import Rollout
from paceline.fleet.driver import Fleet
from paceline.model.backward.states import States
from paceline.rl.algorithms import assign_advantages
from paceline.rl.filters import ScoredGroup, Selection, select, shape_rewards, trained_mask
from paceline.rl.learner import Learner
from paceline.rl.packing import Pack, Sample
from paceline.rollout.compare import first_difference
from paceline.rollout.engine import Engine
from paceline.rollout.run_ahead.store import RunAheadStore
from paceline.run.evaluate import eval_sampling, evaluate
from paceline.run.metrics import Answer, Work, length_metrics, reward_metrics, timing_metrics
from paceline.run.prompts import PromptSource, Question
from paceline.run.recipes import training_sampling
from paceline.run.run_ahead_process import RunAheadProcess
from paceline.run.scoring import grader_metrics, score_rollouts
from paceline.run.settings import RootSettings
from paceline.run.store.checkpoints import Checkpoints
from paceline.run.store.folder import RunFolder, read_metrics, step_name
from paceline.run.ui.display import Display
from paceline.run.ui.interrupts import Interrupts
from paceline.run.ui.loggers import Logger
from paceline.run.ui.summary import Outcome, SpeedCheck, summarise
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.trainer import TrainerState
from paceline.spot.worker import Spot
from paceline.tasks.grading import Grader

EMPTY_STEPS = 3
"""Steps from the beginning with nothing to learn from, after which a run says so."""
RARELY = 4
"""Steps that a micro-step of the drafter has to wait for, from which on that is said."""
COMPARED_ROUNDS = 3
"""Steps' worth of rollouts that speculation is timed on at the end of a run."""


class Run:
    """A run that is open: `train` takes it from wherever it is to its last step."""

    def __init__(
        self,
        settings: RootSettings,
        engine: Engine,
        learner: Learner,
        prompt_source: PromptSource,
        grader: Grader,
        folder: RunFolder,
        checkpoints: Checkpoints,
        display: Display,
        fleet: Fleet | None = None,
    ) -> None:
        """With a fleet, its workers generate and learn; the engine given is that of the driver."""
        self._settings, self._rl = settings, settings.rl
        self.engine, self.learner, self._prompt_source, self._grader = engine, learner, prompt_source, grader
        self._folder, self._checkpoints, self._display = folder, checkpoints, display
        self.loggers: Sequence[Logger] = ()
        """Who else is told of metrics."""
        self.ahead_worker: RunAheadProcess | None = None
        """Who runs ahead while this process learns."""
        self.spot: Spot | None = None
        """Who trains the drafter."""
        self.drafters: DrafterCheckpoints | None = None
        """Where a fleet's drafter is kept."""
        self.interrupts = Interrupts()
        """Who takes Ctrl-C."""
        self._is_whole = True
        """Whether all that a checkpoint holds is of the last finished step."""
        self._saved_step = 0
        self._num_empty = 0
        """Steps from the run's first on that had nothing to learn from."""
        self._spot_seconds = 0.0
        """What it may still take of the time that steps have taken so far."""
        self._has_said_spot = False
        self._sampling = training_sampling(settings)
        self._trace = Trace(begin_s=folder.elapsed_s())
        self.fleet = fleet
        if fleet is not None:
            fleet.attendance.trace = self._trace
        self._begun = time.perf_counter()
        self.num_steps = 0
        """Steps done."""
        self._next_draw = 0
        self._prompt_ids: dict[int, int] = {}

    def train(self) -> SpeedCheck | None:
        """Every step that is left; evaluation before the first and after the last. Ctrl-C costs no finished step."""
        try:
            return self._train()
        except KeyboardInterrupt:
            self._save_finished()
            raise

    def _train(self) -> SpeedCheck | None:
        if self.num_steps == 0 and self._settings.eval.items:
            self._write({"step": 0} | self._evaluate(0))
        while self.num_steps < self._rl.steps:
            self.step()
        self._checkpoints.wait()
        self._folder.append_events(self._trace.drain())
        if self._settings.run.compare and self.fleet is not None:
            self._display.note("run.compare is left out: it times one engine, and this run has several workers")
            return None
        if not self._settings.run.compare:
            return None
        with self._trace.span("compare") as args:
            comparison = self._check_speed()
            args |= asdict(comparison)
        self._folder.append_events(self._trace.drain())
        return comparison

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The next step, and a checkpoint where one is due."""
        step = self.num_steps + 1
        self._trace.step = step
        work, begun = Work(), time.perf_counter()
        if self.fleet is not None:
            self.fleet.attendance.begin()
        with self._trace.span("step"):
            self._begin_ahead(step, self._next_draw + self._rl.prompts_per_step)
            selection = self._gather(step, work)
            # From here until its row is written a step changes what a checkpoint holds.
            self.interrupts.hold()
            self._is_whole = False
            self._judge_drafter(work)
            answers = [answer for group in selection.kept for answer in group.members]
            self.engine.release_drafts()
            self._display.phase(step, "learn")
            with self._trace.span("update"):
                learned = self._learn(self._samples(answers))
                self._end_ahead()
            drafter = self._train_drafter(step, time.perf_counter() - begun)
        shares = {} if self.fleet is None else self.fleet.shares()
        self._next_draw, self.num_steps = selection.next_draw, step
        # All that was drawn: what dynamic sampling leaves out is part of how good the policy is, and of what is hard.
        groups = sorted((*selection.kept, *selection.dropped), key=lambda group: group.draw)
        drawn = [answer for group in groups for answer in group.members]
        rewards = self._rewards(drawn)
        self._prompt_source.record(step, _by_question(drawn), selection.next_draw)
        row: dict[str, Any] = {"step": step} | reward_metrics(rewards, drawn)
        row |= length_metrics(answer.rollout for answer in drawn) | learned | self._draw_metrics(selection)
        self._watch_rewards(step, rewards, row)
        if self._is_due(step, self._settings.eval.every) and self._settings.eval.items:
            row |= self._evaluate(step)
        self._trace.add(self._trace.worker, "budget", time.perf_counter(), 0.0, work.budget())
        row |= work.metrics() | drafter | shares | timing_metrics(self._trace.seconds(step), work.tokens)
        self._write(row, [_record(*pair, version=step - 1) for pair in zip(drawn, rewards, strict=True)], drawn)
        if self._is_due(step, self._settings.run.checkpoint_every) or self.interrupts.came:
            self._save(step)
        self._is_whole = True
        self.interrupts.release()

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._rl.steps or bool(every and step % every == 0)

    def _gather(self, step: int, work: Work) -> Selection[Answer]:
        """Generate and grade draws until the step's groups are decided."""
        groups: list[ScoredGroup[Answer]] = []
        decide = functools.partial(
            select,
            first_draw=self._next_draw,
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

    def _make_groups(self, step: int, draws: Sequence[int], work: Work) -> list[ScoredGroup[Answer]]:
        questions = [self._prompt_source.question(step, draw) for draw in draws]
        self._display.phase(step, "generate")
        with self._trace.span("gen", draws=len(draws)):
            rollouts = self._generate(questions, self._next_questions(step, draws))
        for stats in [self.engine.stats] if self.fleet is None else self.fleet.take_stats():
            work.add(stats)
        self._display.phase(step, "score")
        with self._trace.span("score"):
            grades = score_rollouts(self._grader, questions, rollouts, self._display.note)
        answers = [
            Answer(questions[rollout.prompt_index], rollout, grade)
            for rollout, grade in zip(rollouts, grades, strict=True)
        ]
        size = self._sampling.n
        members = (tuple(answers[first : first + size]) for first in range(0, len(answers), size))
        return [
            ScoredGroup(question.draw, tuple(answer.grade.score for answer in own), own)
            for question, own in zip(questions, members, strict=True)
        ]

    def _next_questions(self, step: int, draws: Sequence[int]) -> list[Question]:
        """What the next steps will ask, for rows or workers that are left over; it does not depend on them."""
        if self._ahead_texts is None or self.ahead_worker is not None:
            return []
        found, first = [], draws[-1] + 1
        for later in range(step + 1, min(step + self._settings.engine.ahead_calls, self._rl.steps) + 1):
            if self._prompt_source.is_planned(later):
                found += self._foresee(later, first)
                first += self._rl.prompts_per_step
        return found

    @property
    def _ahead_texts(self) -> RunAheadStore | None:
        """What was made ahead, by whoever does."""
        return self.engine.ahead if self.fleet is None else self.fleet.ahead

    def _foresee(self, step: int, first: int) -> list[Question]:
        found = []
        with suppress(ValueError):  # an item that cannot be asked is an error of the step that asks for it
            for draw in range(first, first + self._rl.prompts_per_step):
                found.append(self._prompt_source.foresee(step, draw))
        return found

    def _begin_ahead(self, step: int, next_draw: int) -> None:
        """Let another process write the next step's rollouts with the weights of this one.

        Where dynamic sampling will take more draws than a step has prompts, some of it is not asked for.
        """
        if self.ahead_worker is not None and self.engine.ahead is not None and step < self._rl.steps:
            questions = self._foresee(step + 1, next_draw)
            self.ahead_worker.begin(self.learner.weights, questions, self._sampling)
            self._prompt_ids = {q.draw: prompt_hash(np.array(q.prompt_ids, np.int32)) for q in questions}

    def _end_ahead(self) -> None:
        """Keep what it has written by now."""
        if self.ahead_worker is not None and self.engine.ahead is not None:
            for key, (tokens, is_whole) in self.ahead_worker.end().items():
                prompt_id, text = self._prompt_ids[key[0]], np.array(tokens, np.int32)
                self.engine.ahead.put(self._sampling, key, prompt_id, text, is_whole)

    def _learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self.learner.step(samples) if self.fleet is None else self.fleet.learn(samples)

    def _generate(
        self, questions: Sequence[Question], next_questions: Sequence[Question] = (), engine: Engine | None = None
    ) -> list[Rollout]:
        """With the engine given, or else with whoever generates in this run."""
        total, num_done, num_tokens = len(questions) * self._sampling.n, 0, 0

        def report(rollout: Rollout) -> None:
            nonlocal num_done, num_tokens
            num_done, num_tokens = num_done + 1, num_tokens + len(rollout.token_ids)
            self._display.progress(num_done, total, num_tokens)

        prompts = [question.prompt_ids for question in questions]
        draws = [question.draw for question in questions]
        ahead = [(question.prompt_ids, question.draw) for question in next_questions]
        if engine is None and self.fleet is not None:
            self.fleet.plan_ahead(ahead, self._sampling)
            return self.fleet.generate(prompts, self._sampling, draws, report)
        return (engine or self.engine).generate(prompts, self._sampling, draws, report, ahead=ahead)

    def _train_drafter(self, step: int, seconds: float) -> dict[str, float]:
        """Let the drafter learn for its share of the `seconds` that the step has taken, and of what it left before.

        In a fleet whoever is idle trains it.
        """
        if self.fleet is not None:
            return self.fleet.take_drafter_metrics()
        if self.spot is None:
            return {}
        with self._trace.span("spot"):
            start = time.perf_counter()
            self._spot_seconds += self._settings.spot.open_share * seconds
            try:
                metrics = self.spot.work(self.learner.weights, step, self._spot_seconds)
                self._use_drafter()
            except Exception as error:
                self._give_up_drafter(error)
                return {}
            self._spot_seconds -= time.perf_counter() - start - self.spot.take_once_seconds()
        if not metrics.get("drafter/micro_steps"):
            self._say_spot_is_slow(self.spot.micro_seconds, seconds)
        return metrics

    def _say_spot_is_slow(self, micro_seconds: float, seconds: float) -> None:
        """Once, where steps are so short that their share is hardly ever enough for the drafter to learn."""
        share = self._settings.spot.open_share
        if not self._has_said_spot and micro_seconds > RARELY * share * seconds:
            self._has_said_spot = True
            self._display.note(
                f"the drafter learns in few of the steps: a micro-step takes {micro_seconds:.2f} s, and "
                f"{share:.0%} of a step {share * seconds:.2f} s (spot.open_share)"
            )

    def observe(self, pack: Pack, states: States) -> None:
        """For the learner: what passes by in its forward is what the drafter learns from."""
        if self.spot is not None:
            start = time.perf_counter()
            try:
                self.spot.observe(pack, states)
            except Exception as error:
                self._give_up_drafter(error)
            self._spot_seconds -= time.perf_counter() - start

    def _give_up_drafter(self, error: Exception) -> None:
        """No number of the run depends on the drafter, so none of its troubles, a full GPU above all, ends the run."""
        self.spot = None
        self._display.note(
            f"training the drafter failed ({type(error).__name__}: {error}); the run goes on without training it"
        )

    def _use_drafter(self) -> None:
        """Let the engine draft with the trainer's latest version, if it has a drafter that learns."""
        if self.spot is not None and self.spot.eagle is not None and self.engine.eagle is not None:
            self.engine.eagle.use(self.spot.eagle)

    def _judge_drafter(self, work: Work) -> None:
        """Tell the trainer what became of the guesses; a version that is much worse than the one before is replaced."""
        eagle = self.engine.eagle
        if self.spot is not None and eagle is not None and eagle.version is not None and eagle.name in work.drafts:
            found = work.drafts[eagle.name]
            if self.spot.report(eagle.version, found.firsts, found.drafts) is not None:
                self._use_drafter()

    def _rewards(self, answers: Sequence[Answer]) -> list[float]:
        algorithm = self.learner.algorithm
        shaped = shape_rewards(
            [answer.grade.score for answer in answers],
            [len(answer.rollout.token_ids) for answer in answers],
            limit=self._sampling.max_new_tokens,
            share=algorithm.overlong_share,
            penalty=self._rl.overlong_penalty,
        )
        return [float(reward) for reward in shaped]

    def _samples(self, answers: Sequence[Answer]) -> list[Sample]:
        """What the learner gets: texts, log-probabilities and an advantage for every token."""
        if not answers:
            return []
        algorithm, learner, rewards = self.learner.algorithm, self.learner, self._rewards(answers)
        masks = [trained_mask(len(a.rollout.token_ids), a.rollout.finish_reason, self._rl.truncated) for a in answers]
        bare = [_sample(answer, 0.0, mask) for answer, mask in zip(answers, masks, strict=True)]
        has_cost = algorithm.kl_coef and algorithm.kl_in == "reward"
        kl = learner.reference_kl(bare) if has_cost else None
        draws = [answer.question.draw for answer in answers]
        advantages = assign_advantages(algorithm, np.asarray(rewards), np.asarray(draws), masks, kl)
        return [_sample(*given) for given in zip(answers, advantages, masks, strict=True)]

    def _watch_rewards(self, step: int, rewards: Sequence[float], row: Mapping[str, Any]) -> None:
        """Say once that nothing was learned since the run began; one that has learned may be done with its task."""
        # Groups that differ from each other teach some algorithms, and a KL term trains without any reward.
        is_empty = row["frac_reward_zero_std"] == 1 and (min(rewards) == max(rewards) or not row["num_tokens"])
        if not is_empty or self._num_empty != step - 1:
            return
        self._num_empty = step
        if step == EMPTY_STEPS:
            self._display.note(
                f"nothing was learned in {step} steps: in every group all responses had the same reward (on average "
                f"{sum(rewards) / len(rewards):.3g}). Look at texts (paceline report {self._folder.path}) and at the "
                "reward; take easier or harder items, a larger rl.group_size, or a reward with part marks"
            )

    def _draw_metrics(self, selection: Selection[Answer]) -> dict[str, float]:
        looked_at = [*selection.kept, *selection.dropped]
        return {
            "frac_reward_zero_std": selection.num_uniform / len(looked_at) if looked_at else 0.0,
            "draws": float(len(looked_at)),
            "next_draw": float(selection.next_draw),
        } | grader_metrics(answer.grade for group in looked_at for answer in group.members)

    # --- beside the steps ---------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> dict[str, float]:
        given = self._settings.eval
        self._display.phase(step, "evaluate")
        questions = self._prompt_source.test_questions(given.items)
        if len(questions) < given.items and step == 0:
            self._display.note(f"the data holds {len(questions)} items back, fewer than eval.items={given.items}")
        with self._trace.span("eval"):
            found = evaluate(
                self.fleet or self.engine,
                self._grader,
                questions,
                eval_sampling(given, self._sampling),
                self._display.note,
            )
        return found.metrics(given.pass_at)

    def _check_speed(self) -> SpeedCheck:
        """Time the rollouts of the next draws, which the drafter has not seen, as they are and without a drafter.

        Several rounds in turns, each with draws of its own: after one round a drafter would know its texts by heart.
        """
        engine, size = self.engine, self._rl.prompts_per_step
        self._display.phase(self.num_steps, "compare")
        plain = Engine(engine.decoder, engine.tokenizer, None, engine.settings)
        seconds, is_equal = {engine: 0.0, plain: 0.0}, True
        for turn in range(-1, COMPARED_ROUNDS):
            first = self._next_draw + (turn + 1) * size
            questions = [self._prompt_source.question(self.num_steps + 1, draw) for draw in range(first, first + size)]
            made = {}
            for each in (engine, plain) if turn % 2 else (plain, engine):
                start = time.perf_counter()
                made[each] = self._generate(questions, engine=each)
                if turn >= 0:  # the first round pays for what is made at first use
                    seconds[each] += time.perf_counter() - start
            is_equal &= first_difference(made[plain], made[engine]) is None
        plain.release_memory()
        return SpeedCheck(seconds[plain], seconds[engine], is_equal)

    # --- the folder ---------------------------------------------------------------------------------------------------

    def _write(
        self, row: dict[str, Any], records: Sequence[dict[str, Any]] = (), answers: Sequence[Answer] = ()
    ) -> None:
        step = row["step"]
        if self._settings.run.rollouts and step:
            self._folder.write_rollouts(step, records, [_spans(answer.rollout) for answer in answers])
        self._folder.append_metrics(row)
        self._folder.append_events(self._trace.drain())
        for logger in self.loggers:
            logger.log(step, row)
        self._display.step(step, row)

    def _save_finished(self) -> None:
        """Keep the last finished step, whatever the next one has made so far; say where, or why not."""
        if not self._is_whole:
            self._display.note(f"step {self._trace.step} was being learned from: nothing of it is kept")
        elif self.num_steps:
            if self.num_steps != self._saved_step:
                self._save(self.num_steps, has_memories=False)
            self._checkpoints.wait()
            self._display.note(f"step {self.num_steps} is saved in {self._checkpoint_of(self.num_steps)}")

    def _checkpoint_of(self, step: int) -> Path:
        return self._folder.path / "checkpoints" / step_name(step)

    def _save(self, step: int, has_memories: bool = True) -> None:
        """`has_memories`: whether what drafts are made of is whole; in the middle of generation it may not be."""
        self._display.phase(step, "checkpoint")
        with self._trace.span("checkpoint"):
            state = self.learner.state_dict()
            weights = state.pop("weights")
            run = {"next_draw": self._next_draw, "course": self._prompt_source.state()}
            if has_memories:  # for the sake of time: a resumed run makes the same tokens without
                ahead = self._ahead_texts.state() if self._ahead_texts is not None else None
                run |= {"ahead": _with_tensors(ahead), "drafter": _with_tensors(self.engine.drafter_state())}
            self._checkpoints.save(step, weights, {"learner": state, "run": run})
            if self.spot is not None:
                self.spot.save(step)
            self._save_drafter(step)
        self._saved_step = step

    def _save_drafter(self, step: int) -> None:
        """That of a fleet, once there is a version."""
        if self.drafters is None or self.fleet is None or self.fleet.drafter is None:
            return
        eagle, log = self.fleet.drafter, self.fleet.drafter_log
        stage = self.fleet.stage or TrainerState(eagle, {}, {})
        log.flush()
        self.drafters.save(step, eagle, stage.tensors, {**stage.counts, "num_entries": log.num_entries})

    def _resume_drafter(self, step: int) -> None:
        """That of a fleet; where there is none yet, its log begins anew."""
        if self.drafters is None or self.fleet is None:
            return
        self.drafters.cut_after(step)
        saved = self.drafters.load(step)
        self.fleet.drafter_log.cut_after(0 if saved is None else saved.counts.get("num_entries", 0))
        if saved is not None:
            self.fleet.drafter = saved.eagle
            self.fleet.stage = TrainerState(saved.eagle, saved.tensors, saved.counts) if saved.tensors else None

    def resume(self) -> int:
        """Go on from the newest good checkpoint; what was written after it is cut off. Returns its step."""
        if not self._checkpoints.steps():
            self._folder.cut_after(-1)
            if self.spot is not None:
                self.spot.resume(0)
            self._resume_drafter(0)
            return 0
        found = self._checkpoints.load()
        state = found.state
        self.learner.load_state_dict({**state["learner"], "weights": found.weights})
        self._next_draw = int(state["run"]["next_draw"])
        self._prompt_source.restore(state["run"]["course"])
        ahead = state["run"].get("ahead")
        if ahead is not None and self._ahead_texts is not None:
            self._ahead_texts.restore(_with_arrays(ahead))
        drafter = state["run"].get("drafter")
        if drafter is not None:
            self.engine.restore_drafter(_with_arrays(drafter))
        if self.spot is not None:
            self.spot.resume(found.step)
            self._use_drafter()
        self._resume_drafter(found.step)
        self.num_steps = self._saved_step = found.step
        self._folder.cut_after(found.step)
        self._checkpoints.cut_after(found.step)
        return found.step

    def summary(self, comparison: SpeedCheck | None = None) -> list[str]:
        """How the run went, in lines of text."""
        path = self._folder.path
        outcome = Outcome(
            num_steps=self._rl.steps,
            seconds=time.perf_counter() - self._begun,
            comparison=comparison,
            folder=path,
            checkpoints=[self._checkpoint_of(step) for step in self._checkpoints.steps()],
            next_command=f"paceline eval {path}",
        )
        return summarise(read_metrics(path), self._trace.totals, outcome)


def _with_tensors(state: Any) -> Any:
    """A tree of numbers and arrays as a checkpoint takes it."""
    if isinstance(state, dict):
        return {key: _with_tensors(value) for key, value in state.items()}
    return torch.from_numpy(np.array(state)) if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    """The way back."""
    if isinstance(state, dict):
        return {key: _with_arrays(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state


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


def _record(answer: Answer, reward: float, version: int) -> dict[str, Any]:
    """A line of `rollouts/`; `version` is the number of steps the policy had learned from."""
    rollout = answer.rollout
    return {
        "draw": rollout.draw,
        "sample": rollout.sample_index,
        "prompt": answer.question.item.prompt,
        "text": rollout.text,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "score": answer.grade.score,
        "reward": reward,
        "finish_reason": rollout.finish_reason,
        "version": version,
    }


def _spans(rollout: Rollout) -> dict[str, Any]:
    return {"draw": rollout.draw, "sample": rollout.sample_index, "spans": [list(span) for span in rollout.spans]}
