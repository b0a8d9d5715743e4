"""Builds the parts of runs and workers from a run's settings: policy, engine, learner, prompts, drafter trainer.

Called by `open.py` and the backends, by the entry points of worker processes, and by the commands. Nothing here opens a
run or writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from paceline.core.cores import auto_threads
from paceline.fleet.spot_part import SpotPart
from paceline.model.checkpoint import load_weights
from paceline.model.folder import load_config, resolve
from paceline.model.lora.files import AdapterFolder, load_adapter
from paceline.model.lora.merged import MergedPolicy
from paceline.model.policy import Policy
from paceline.model.tokenizer import Tokenizer
from paceline.rl.learner import Learner
from paceline.rl.lora import LoraLearner, make_adapter
from paceline.rollout.engine import Engine
from paceline.run.prompts import PromptSource
from paceline.run.recipes import drafter_of, kv_tokens_of, training_sampling
from paceline.run.settings import RootSettings
from paceline.spot.worker import Spot


def load_policy(settings: RootSettings, model: str) -> Policy:
    policy = Policy.load(model, settings.model.device, settings.engine.exact, settings.engine.precision)
    require_tokenizer(policy, model)
    return policy


def require_tokenizer(policy: Policy, model: str) -> Tokenizer:
    if policy.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, and tasks are text; give a folder with a tokenizer.json")
    return policy.tokenizer


def open_engine(settings: RootSettings, policy: Policy) -> Engine:
    given = settings.engine.model_copy(update={"kv_tokens": kv_tokens_of(settings), "threads": threads_of(settings)})
    return Engine(policy.decoder, policy.tokenizer, drafter_of(settings), given, settings.budget)


def threads_of(settings: RootSettings) -> int:
    """Threads of each of a run's processes that generate or learn."""
    if settings.engine.threads != "auto":
        return settings.engine.threads
    fleet = settings.fleet
    if fleet.is_many and fleet.address is not None:
        return 1  # a core each is what we ask of a cluster
    are_workers = fleet.is_many and not fleet.in_process
    return auto_threads(fleet.workers if are_workers else 1 + settings.run.ahead_worker)


def with_threads(settings: RootSettings) -> RootSettings:
    """Settings for another process of this run, which cannot tell how many there are."""
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"threads": threads_of(settings)})})


def open_prompt_source(settings: RootSettings, policy: Policy) -> PromptSource:
    assert policy.tokenizer is not None
    return PromptSource(settings.task, policy.tokenizer, settings.model.chat, policy.decoder.config.max_context)


def open_learner(settings: RootSettings, policy: Policy, model: str) -> Learner:
    """Read master weights from the model's files: the decoder may hold rounded ones."""
    sampling, weights = training_sampling(settings), _weights(model)
    if settings.rl.lora.is_on:
        return LoraLearner(policy.decoder, settings.rl, sampling, weights, _first_adapter(settings, policy))
    return Learner(policy.decoder, settings.rl, sampling, weights)


def open_loader(settings: RootSettings, policy: Policy, model: str) -> Callable[[Mapping[str, Tensor]], object]:
    """For a worker without a learner: loads what a learner's `weights` are into its decoder."""
    if not settings.rl.lora.is_on:
        return policy.decoder.load_weights
    lora, decoder = settings.rl.lora, policy.decoder
    adapter = make_adapter(lora, decoder.config, _first_adapter(settings, policy))
    return MergedPolicy(decoder, adapter, _weights(model), lora.base).load


def _weights(model: str) -> dict[str, Tensor]:
    folder = resolve(model)
    return load_weights(folder, load_config(folder))


def _first_adapter(settings: RootSettings, policy: Policy) -> AdapterFolder | None:
    """The adapter that a run begins with, if not a fresh one."""
    given = settings.rl.lora.adapter
    return None if given is None else load_adapter(Path(given).expanduser(), policy.decoder.config)


def open_spot_part(settings: RootSettings, engine: Engine) -> SpotPart | None:
    """A fleet worker's part of the drafter's training; None if no drafter is trained."""
    if not settings.spot.enabled:
        return None
    network = None if engine.eagle is None else engine.eagle.network
    return SpotPart(Spot(engine.decoder.config, settings.spot, settings.model.device, eagle=network), engine)
