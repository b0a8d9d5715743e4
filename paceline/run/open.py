"""Opens a run: settings in, everything that `Run` needs out, checked in the order in which a user can fix mistakes.

Called by the commands `train` and `eval`, and by `api.py`. Settings come from `recipes.prepare`: resolved, and checked
as far as possible without a model. Nothing is written before everything has been checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.core.config import SettingsError
from paceline.core.trace import Trace
from paceline.core.types import Rollout, Sampling
from paceline.model.folder import lasting_name, resolve
from paceline.rl.learner import Learner
from paceline.rollout.engine import Engine, OnFinish
from paceline.run.backend import RunContext
from paceline.run.evaluate import eval_sampling, evaluate
from paceline.run.inputs import input_files
from paceline.run.local import open_local
from paceline.run.loop import Run
from paceline.run.memory import memory_cautions
from paceline.run.open_fleet import cautions, open_fleet
from paceline.run.parts import load_policy, open_engine, open_learner, open_prompt_source
from paceline.run.recipes import kv_tokens_of, training_sampling
from paceline.run.resume import (
    check_inputs,
    find_checkpoint,
    known_inputs,
    policy_folder,
    refuse_changed_settings,
    restore_history,
)
from paceline.run.scoring import Note
from paceline.run.settings import RootSettings
from paceline.run.state import RunState
from paceline.run.store.checkpoints import AdapterOf, Checkpoints
from paceline.run.store.folder import CHECKPOINTS, RunFolder, is_unused
from paceline.run.store.inputs import InputReader
from paceline.run.store.sealed import FoundCheckpoint
from paceline.run.ui.display import Display
from paceline.run.ui.interrupts import Interrupts
from paceline.run.ui.loggers import make_loggers
from paceline.run.ui.summary import counted
from paceline.tasks.grading import Grader


@contextmanager
def open_run(
    settings: RootSettings,
    model: str,
    path: Path,
    display: Display,
    is_resumed: bool = False,
    interrupts: Interrupts | None = None,
    *,
    accepts_changes: bool = False,
    starts_over: bool = False,
) -> Iterator[Run]:
    """Open a run in its folder, at its first step or where it stopped.

    A resumed run that `accepts_changes` continues with changed inputs; one that `starts_over` begins again, beside its
    old records.
    """
    open_backend = open_fleet if settings.fleet.is_many else open_local
    for caution in (*cautions(settings), *memory_cautions(settings, model)):
        display.note(caution)
    with ExitStack() as stack:
        folder = found = None
        if is_resumed:
            folder = stack.enter_context(RunFolder.open(path))
            found = None if starts_over else find_checkpoint(folder, display.note)
        known = known_inputs(found) if found is not None else None
        if folder is not None:
            refuse_changed_settings(folder, settings, known, accepts_changes)
        base = resolve(model)
        inputs = InputReader(settings.model_dump(mode="json"), input_files(settings, base), known)
        stack.callback(inputs.close)
        if folder is not None and found is not None:
            model = str(_check_checkpoint(folder, found, inputs, base, accepts_changes, display.note) or model)
        grader = stack.enter_context(Grader(settings.task))
        opened = stack.enter_context(open_backend(settings, model))
        policy = opened.policy
        prompt_source = open_prompt_source(settings, policy)
        prompt_source.check_longest(settings.sampling.max_new_tokens, kv_tokens_of(settings))
        learner = open_learner(settings, policy, model)
        if folder is None:
            folder = stack.enter_context(_create_folder(settings, path, display))
        if starts_over:
            aside = folder.start_over()
            display.note(f"starting over{f'; the earlier records are in {aside}' if aside else ''}")
        checkpoints = stack.enter_context(_open_checkpoints(settings, model, folder, learner))
        trace = Trace(begin_s=folder.elapsed_s())
        backend = opened.make(learner, RunContext(path, trace, display.note))
        stack.callback(backend.close)
        state = RunState(learner, prompt_source, backend, checkpoints, folder, inputs)
        if is_resumed:
            display.note(f"resumed after step {state.resume(found)}")
            for key in folder.update_config(settings.model_dump(mode="json")):
                display.note(f"{key} differs from the run's earlier settings")
        loggers = make_loggers(
            settings.run.loggers,
            path,
            settings.model_dump(mode="json"),
            first_step=state.num_steps + is_resumed,
            warn=display.note,
        )
        for logger in loggers:
            stack.callback(logger.close)
        yield Run(
            settings,
            backend,
            learner,
            prompt_source,
            grader,
            folder,
            state,
            trace,
            display,
            loggers,
            interrupts or Interrupts(),
        )


def _check_checkpoint(
    folder: RunFolder, found: FoundCheckpoint, inputs: InputReader, base: Path, accepts_changes: bool, note: Note
) -> Path | None:
    """Raise if inputs have changed since the checkpoint; returns the model folder to use if not the base model's."""
    known = known_inputs(found)
    if known is None:
        note(f"{found.path.name} is of an older version and holds no hashes: changed inputs and lost rows go unnoticed")
    else:
        check_inputs(known, inputs, accepts_changes, note)
    restore_history(folder, found, note)
    return policy_folder(folder, found, base, note)


def _open_checkpoints(settings: RootSettings, model: str, folder: RunFolder, learner: Learner) -> Checkpoints:
    adapter = None if learner.adapter is None else AdapterOf(learner.adapter, lasting_name(model))
    place, device = folder.path / CHECKPOINTS, settings.model.device
    return Checkpoints(place, settings.run.keep, resolve(model), device, folder.note_saved, adapter)


def _create_folder(settings: RootSettings, path: Path, display: Display) -> RunFolder:
    is_used_again = is_unused(path)
    folder = RunFolder.create(path, settings.model_dump(mode="json"))
    if is_used_again:
        display.note(f"reusing {path}: a run began there but finished no step; its settings are replaced")
    return folder


def evaluate_model(settings: RootSettings, model: str, note: Note) -> dict[str, float]:
    """A model's metrics on held-out items."""
    if not settings.eval.items:
        raise SettingsError("eval.items: there is nothing to evaluate with 0 items; set it to 1 or more")
    with Grader(settings.task) as grader:
        policy = load_policy(settings, model)
        engine = _WithProgress(open_engine(settings, policy))
        questions = open_prompt_source(settings, policy).test_questions(settings.eval.items)
        answers = counted(settings.eval.samples, "answer")
        note(f"evaluating {counted(len(questions), 'held-out item')} with {answers} each")
        found = evaluate(engine, grader, questions, eval_sampling(settings.eval, training_sampling(settings)), note)
    return found.metrics(settings.eval.pass_at)


@dataclass(frozen=True)
class _WithProgress:
    """An engine that shows a progress bar on a terminal."""

    engine: Engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[int],
        on_finish: OnFinish | None = None,
    ) -> list[Rollout]:
        return self.engine.generate(prompts, sampling, draws, on_finish, progress=True)
