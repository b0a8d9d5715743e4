"""Opens a run: settings in, everything that `Run` needs out, checked in the order in which a user can mend it.

Called by the commands `train` and `eval`. What can be wrong without a model is looked at before one is loaded, and
nothing is written before all of it has been found right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline.core.config import SettingsError, validate
from paceline.fleet.spot_part import SpotPart
from paceline.model.checkpoint import load_config, load_weights, resolve
from paceline.rl.learner import Learner
from paceline.rollout.engine import Engine
from paceline.run.evaluate import eval_sampling, evaluate
from paceline.run.loop import Run
from paceline.run.prompts import PromptSource
from paceline.run.recipes import check_settings, config_of, drafter_of, training_sampling
from paceline.run.run_ahead_process import RunAheadProcess
from paceline.run.scoring import Note
from paceline.run.settings import RootSettings
from paceline.run.store.checkpoints import Checkpoints
from paceline.run.store.folder import RunFolder, is_unused
from paceline.run.ui.display import Display
from paceline.run.ui.loggers import make_loggers
from paceline.run.workers import MakeFleet, crowding, open_workers
from paceline.spot.checkpoints import DrafterCheckpoints
from paceline.spot.log import LOG, MicroLog
from paceline.spot.worker import Spot
from paceline.tasks.grading import Grader

DRAFTER = "drafter"
"""Where in a run's folder the drafter is kept."""
FLEET = "fleet"
"""Where below that a fleet's is: one process and a fleet do not go on from each other's."""
PROMPT_ROOM = 1024
"""Tokens of a prompt that the cache has room for in every sequence, unless engine.kv_tokens says how much there is."""
FIXED = (
    "model.path",
    "task.name",
    "task.curriculum",
    "rl.optimizer",
    "rl.weight_decay",
    "rl.betas",
    "rl.master_precision",
)
"""What a run cannot change once it has begun: its checkpoints hold what came of it."""


def open_engine(settings: RootSettings, model: str) -> Engine:
    given = settings.engine
    if given.kv_tokens is None:
        # Room for what rollouts need, not for all the memory there is: the learner needs some too.
        kv_tokens = given.max_sequences * (settings.sampling.max_new_tokens + PROMPT_ROOM)
        given = given.model_copy(update={"kv_tokens": kv_tokens})
    engine = Engine.from_pretrained(
        model,
        device=settings.model.device,
        drafter=drafter_of(settings),
        exact=given.exact,
        settings=given,
        budget=settings.budget,
    )
    if engine.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, and tasks are texts; give a folder with a tokenizer.json")
    return engine


def driver_settings(settings: RootSettings) -> RootSettings:
    """Those of a driver whose workers generate: its own engine drafts nothing and has hardly a cache."""
    if not settings.fleet.is_many:
        return settings
    engine = settings.engine.model_copy(update={"drafter": "none", "kv_tokens": 1, "run_ahead": False})
    return settings.model_copy(update={"engine": engine})


def open_prompt_source(settings: RootSettings, engine: Engine) -> PromptSource:
    assert engine.tokenizer is not None
    return PromptSource(settings.task, engine.tokenizer, settings.model.chat, engine.decoder.config.max_context)


def open_learner(settings: RootSettings, engine: Engine, model: str) -> Learner:
    """Master weights are read from the model's files: the engine may keep them rounded."""
    folder = resolve(model)
    weights = load_weights(folder, load_config(folder))
    return Learner(engine.decoder, settings.rl, training_sampling(settings), weights)


def open_spot_part(settings: RootSettings, engine: Engine) -> SpotPart | None:
    """What a worker of a fleet has of the drafter's training; nothing where there is none."""
    if not settings.spot.enabled:
        return None

    network = None if engine.eagle is None else engine.eagle.network
    return SpotPart(Spot(engine.decoder.config, settings.spot, settings.model.device, eagle=network), engine)


@contextmanager
def open_run(
    settings: RootSettings, model: str, path: Path, display: Display, is_resumed: bool = False
) -> Iterator[Run]:
    """A run in its folder, at its first step or where it was left."""
    settings = settings.resolved()
    check_settings(settings)
    crowded = crowding(settings)
    if crowded is not None:
        display.note(crowded)
    with ExitStack() as stack:
        make_fleet = _open_workers(settings, model, stack)
        grader = stack.enter_context(Grader(settings.task))
        engine = open_engine(driver_settings(settings), model)
        prompt_source = open_prompt_source(settings, engine)
        learner = open_learner(settings, engine, model)
        tree = settings.model_dump(mode="json")
        is_used_again = not is_resumed and is_unused(path)
        folder = stack.enter_context(RunFolder.open(path) if is_resumed else RunFolder.create(path, tree))
        if is_used_again:
            display.note(f"{path} is used again: a run began there and left no step; its settings are replaced")
        checkpoints = stack.enter_context(
            Checkpoints(path / "checkpoints", settings.run.keep, resolve(model), settings.model.device)
        )
        fleet = None if make_fleet is None else make_fleet(learner, display.note)
        run = Run(settings, engine, learner, prompt_source, grader, folder, checkpoints, display, fleet)
        if settings.run.ahead_worker and engine.ahead is not None:
            run.ahead_worker = RunAheadProcess(settings, str(resolve(model)), display.note)
            stack.callback(run.ahead_worker.close)
        if settings.spot.enabled and fleet is not None:
            run.drafters = DrafterCheckpoints(path / DRAFTER / FLEET)
            fleet.drafter_log = MicroLog(path / DRAFTER / FLEET / LOG)
            stack.callback(run.drafters.close)
        elif settings.spot.enabled:
            given = None if engine.eagle is None else engine.eagle.network
            run.spot = Spot(
                engine.decoder.config, settings.spot, settings.model.device, path / DRAFTER, given, display.note
            )
            learner.observer = run.observe
            stack.callback(run.spot.close)
        if is_resumed:
            _refuse_changes(folder, settings)
            display.note(f"resumed after step {run.resume()}")
            for key in folder.update_config(tree):
                display.note(f"{key} differs from what the run began with")
        loggers = make_loggers(
            settings.run.loggers, path, tree, first_step=run.num_steps + is_resumed, warn=display.note
        )
        for logger in loggers:
            stack.callback(logger.close)
        run.loggers = loggers
        yield run


def _open_workers(settings: RootSettings, model: str, stack: ExitStack) -> MakeFleet | None:
    """Start those who share the run's work, if anybody does; they load their models meanwhile."""
    if not settings.fleet.is_many:
        return None

    def make_parts() -> tuple[Engine, Learner, SpotPart | None]:
        engine = open_engine(settings, model)
        return engine, open_learner(settings, engine, model), open_spot_part(settings, engine)

    return stack.enter_context(open_workers(settings, model, make_parts))


def _refuse_changes(folder: RunFolder, settings: RootSettings) -> None:
    """A run goes on with the state it has, whatever the settings now say it should have been."""
    before = validate(RootSettings, folder.read_config())
    for key in FIXED:
        section, name = key.split(".")
        old, new = (getattr(getattr(tree, section), name) for tree in (before, settings))
        if old != new:
            raise SettingsError(
                f"{key}: the run began with {old!r} and cannot change to {new!r}; begin a new run for that"
            )


def newest_policy(run: Path) -> Path:
    """The policy in the newest good checkpoint of a run."""
    config_of(run)  # or there is none
    return Checkpoints(run / "checkpoints", keep=1).newest_policy()


def evaluate_model(settings: RootSettings, model: str, note: Note) -> dict[str, float]:
    """A model's figures on held-out items."""
    if not settings.eval.items:
        raise SettingsError("eval.items: 0 items are none to measure on; give a number")
    with Grader(settings.task) as grader:
        engine = open_engine(settings, model)
        questions = open_prompt_source(settings, engine).test_questions(settings.eval.items)
        found = evaluate(engine, grader, questions, eval_sampling(settings.eval, training_sampling(settings)), note)
    return found.metrics(settings.eval.pass_at)
