"""The engine of one trainer: prompt ids in, completion ids out, with the weights it is given each time.

Called by `trainers.py` and `online_dpo.py` for every batch. It never keeps weights from one batch to the next without
loading the new ones, and knows no trainer: TRL's names end before this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.config import Settings, SettingsError, validate
from paceline.core.types import Request, Sampling
from paceline.integrations.trl.weights import TrainedWeights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.run.metrics import engine_metrics
from paceline.run.recipes import PROMPT_ROOM

MOST_SEQUENCES = 256
"""The most completions decoded at the same time, unless the settings say otherwise."""


class TrainerSettings(Settings):
    """What a trainer takes as `engine=` and `budget=`."""

    engine: EngineSettings = EngineSettings()
    budget: BudgetSettings = BudgetSettings()


def read_settings(
    engine: Mapping[str, Any] | EngineSettings | None, budget: Mapping[str, Any] | BudgetSettings | None
) -> TrainerSettings:
    """The settings from dicts or objects; a SettingsError names what is wrong with them."""
    given = {"engine": engine, "budget": budget}
    for name, value in given.items():
        if isinstance(value, EngineSettings | BudgetSettings):
            given[name] = value.model_dump(exclude_unset=True)
        elif value is not None and not isinstance(value, Mapping):
            raise SettingsError(f'{name}= takes a dict, such as engine={{"drafter": "suffix"}}, not {value!r:.200}')
    settings = validate(TrainerSettings, {name: dict(value) for name, value in given.items() if value is not None})
    if settings.engine.run_ahead:
        raise SettingsError("engine.run_ahead: TRL does not say which prompts come next; leave it out")
    if "eagle" in map(str.strip, settings.engine.drafter.split(",")):
        raise SettingsError("engine.drafter: eagle is trained by `paceline train`; name a trained one as eagle:FOLDER")
    return settings


def fit(settings: EngineSettings, batch: int, max_new_tokens: int) -> EngineSettings:
    """Room for one batch and no more, as the trainer needs memory too; what is set stays."""
    is_set = "max_sequences" in settings.model_fields_set
    num_sequences = settings.max_sequences if is_set else min(batch, MOST_SEQUENCES)
    kv_tokens = settings.kv_tokens or num_sequences * (max_new_tokens + PROMPT_ROOM)
    return settings.model_copy(update={"max_sequences": num_sequences, "kv_tokens": kv_tokens})


def precision_of(settings: EngineSettings, dtype: torch.dtype, mixed_precision: str) -> str:
    """The engine's precision: the configured one, or by default the one TRL itself would generate in."""
    if settings.precision == "auto" and dtype == torch.float32 and mixed_precision == "no":
        return "float32"
    return settings.precision


@dataclass(frozen=True)
class EnginePlan:
    """What an engine is made of, except the weights."""

    policy: ModelConfig
    settings: EngineSettings
    budget: BudgetSettings
    drafters: DrafterSet | None
    precision: str
    device: str
    tokenizer: Tokenizer | None
    """Only for stop strings: without one, nothing is decoded."""

    def build(self, weights: Mapping[str, Tensor]) -> Engine:
        settings = self.settings
        decoder = Decoder(self.policy, weights, exact=settings.exact, device=self.device, precision=self.precision)
        return Engine(decoder, self.tokenizer, self.drafters, settings, self.budget)


class Completions:
    """Completes batches of prompts; creates its engine for the first one."""

    def __init__(self, plan: EnginePlan, sampling: Sampling) -> None:
        self._plan, self._sampling = plan, sampling
        self._engine: Engine | None = None
        self._next_draw: dict[str, tuple[str, int]] = {}
        """By mode: the place that draws are counted from, and the next one."""

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def complete(
        self, weights: TrainedWeights, prompt_ids: Sequence[Sequence[int]], group_size: int, mode: str, place: str
    ) -> list[list[int]]:
        """One completion per prompt, in their order. Mode and place (the step and the process) keep randomness apart:
        draws are counted within them, so a resumed run draws like one that was never stopped."""
        requests = list(group_requests(prompt_ids, group_size, self._first_draw(mode, place)))
        with one_thread(self._plan.device):
            engine = self._load(weights)
            found = generate(engine, requests, replace(self._sampling, stream=f"{mode}/{place}"))
        self._next_draw[mode] = place, requests[-1].draw + 1
        return found

    def _load(self, weights: TrainedWeights) -> Engine:
        if self._engine is None:
            self._engine = self._plan.build(weights.base())
        weights.load_into(self._engine.decoder)
        return self._engine

    def _first_draw(self, mode: str, place: str) -> int:
        counted, draw = self._next_draw.get(mode, (place, 0))
        return draw if counted == place else 0

    def metrics(self, has_all: bool) -> dict[str, float]:
        """What the last batch took of speculation: the accept length, or everything the engine counts."""
        assert self._engine is not None, "nothing has been completed"
        stats = self._engine.stats
        return engine_metrics(stats) if has_all else {"rollout/spec_accept_length": stats.accept_length}


def generate(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> list[list[int]]:
    """The token ids of every request, in their order."""
    found: dict[tuple[int, int], list[int]] = {}
    with engine.serve(sampling) as serving:
        serving.add(requests)
        while serving.has_work:
            found |= {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in serving.step()}
    return [found[request.draw, request.sample_index] for request in requests]


def group_requests(prompt_ids: Sequence[Sequence[int]], group_size: int, first_draw: int) -> Iterator[Request]:
    """One request per prompt, in order. Equal neighbours, up to a group's size, are one draw with several samples: they
    share their prompt's KV cache, and the drafter learns from each for the others."""
    draw, sample, before = first_draw - 1, 0, None
    for ids in prompt_ids:
        if before is not None and list(ids) == before and sample + 1 < group_size:
            sample += 1
        else:
            draw, sample, before = draw + 1, 0, list(ids)
        yield Request(before, draw, sample)


@contextmanager
def one_thread(device: str) -> Iterator[None]:
    """Run with one torch thread, as exact mode needs on a CPU, then restore the trainer's number."""
    num_threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
