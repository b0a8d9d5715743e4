"""`PacelineGRPOTrainer` and `PacelineRLOOTrainer`: TRL's trainers, with completions from the engine.

`EngineTrainer` is what they share, and `online_dpo.py` too. The engine gets the trainer's weights before every batch of
completions, so they are always those of the last optimizer step. Nothing here may touch rewards, losses or optimizers.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trl import GRPOTrainer, RLOOTrainer

from paceline.integrations.trl.completions import (
    Completions,
    EnginePlan,
    TrainerSettings,
    fit,
    precision_of,
    read_settings,
)
from paceline.integrations.trl.refusals import refuse_arguments, refuse_images, refuse_stops, refuse_trainer
from paceline.integrations.trl.rewards import guard_rewards
from paceline.integrations.trl.sampling import sampling_of
from paceline.integrations.trl.weights import TrainedWeights, weights_of
from paceline.model.config import ModelConfig
from paceline.model.folder import resolve
from paceline.model.shipped import SHIPPED
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings


class EngineTrainer:
    """Comes before TRL's trainer in a class: takes its arguments, and those of the engine."""

    # TRL's constructors set these.
    accelerator: Any
    args: Any
    generation_kwargs: dict[str, Any]
    model: Any
    reward_func_names: list[str]
    reward_funcs: list[Any]
    state: Any
    _is_vlm: bool
    _metrics: dict[str, Any]
    _tokenizer: Any

    def __init__(
        self,
        *args: Any,
        engine: Mapping[str, Any] | EngineSettings | None = None,
        budget: Mapping[str, Any] | BudgetSettings | None = None,
        log_engine: bool = False,
        **kwargs: Any,
    ) -> None:
        """`engine` and `budget` are settings as in docs/commands.md, without their section; `log_engine` logs all that
        the engine counts."""
        settings = read_settings(engine, budget)
        drafters = make_drafters(settings.engine.drafter)
        trainer: Any = super()
        given = inspect.signature(trainer.__init__).bind(*args, **kwargs).arguments
        refuse_arguments(given)
        if isinstance(given.get("model"), str) and given["model"].startswith(SHIPPED):
            given["model"] = str(resolve(given["model"]))
        trainer.__init__(**given)
        refuse_trainer(self, self._reads_images)
        self._weights()  # refuses an adapter of other layers
        self.reward_funcs = guard_rewards(self.reward_funcs, self.reward_func_names)
        self._log_engine = log_engine
        self._completions = self._open(settings, drafters)

    def _open(self, settings: TrainerSettings, drafters: DrafterSet | None) -> Completions:
        model = self._bare_model
        defaults = model.generation_config.to_dict()
        sampling = sampling_of(self.generation_kwargs, defaults, self.args.seed)
        is_masking = getattr(self.args, "mask_truncated_completions", False)
        refuse_stops(sampling, self._tokenizer.all_special_tokens, is_masking)
        plan = EnginePlan(
            policy=ModelConfig.from_hf(model.config.to_dict(), defaults),
            settings=fit(settings.engine, self._most_completions, sampling.max_new_tokens),
            budget=settings.budget,
            drafters=drafters,
            precision=precision_of(settings.engine, model.dtype, self.accelerator.mixed_precision),
            device=self._device,
            tokenizer=Tokenizer(self._tokenizer) if sampling.stop else None,
        )
        return Completions(plan, sampling)

    @property
    def engine(self) -> Engine | None:
        """The engine; None until the first completions."""
        return self._completions.engine

    @property
    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _device(self) -> str:
        """Without the number that a CPU gets among several processes."""
        device = self.accelerator.device
        return "cpu" if device.type == "cpu" else str(device)

    @property
    def _reads_images(self) -> bool:
        return self._is_vlm

    @property
    def _most_completions(self) -> int:
        """How many completions are asked for at once."""
        batch = self.args.per_device_train_batch_size * self.args.steps_per_generation
        return int(max(batch, self.args.per_device_eval_batch_size))

    def _weights(self) -> TrainedWeights:
        """The trainer's live weights."""
        return weights_of(self._bare_model)

    def _complete(self, prompt_ids: Sequence[Sequence[int]], group_size: int) -> list[list[int]]:
        """One completion per prompt; equal neighbours are samples of a group."""
        mode = "train" if self.model.training else "eval"
        place = f"{self.state.global_step}/{self.accelerator.process_index}"
        start = time.perf_counter()
        found = self._completions.complete(self._weights(), prompt_ids, group_size, mode, place)
        seconds = time.perf_counter() - start
        self._log_generation(mode, {"rollout/seconds": seconds} | self._completions.metrics(self._log_engine))
        return found

    def _log_generation(self, mode: str, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self._metrics[mode][name].append(value)


class PacelineGRPOTrainer(EngineTrainer, GRPOTrainer):
    """Takes the arguments of `trl.GRPOTrainer`, and `engine`, `budget` and `log_engine`."""

    def _generate_single_turn(
        self,
        prompt_ids: Sequence[Sequence[int]],
        images: Any,
        multimodal_fields: Mapping[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], None]:
        """TRL's hook: maps prompt token ids, each repeated once per completion of its group, to completion token ids.

        It returns no log-probabilities: TRL reads them only from vLLM, and computes its own.
        """
        refuse_images(images, multimodal_fields, has_tool_images)
        return self._complete(prompt_ids, num_generations), None


class PacelineRLOOTrainer(EngineTrainer, RLOOTrainer):
    """Takes the arguments of `trl.RLOOTrainer`, and `engine`, `budget` and `log_engine`."""

    def _generate_single_turn(
        self, prompt_ids: Sequence[Sequence[int]], images: Any, multimodal_fields: Mapping[str, Any]
    ) -> list[list[int]]:
        """As in GRPO; the group's size is the trainer's."""
        refuse_images(images, multimodal_fields)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        return self._complete(prompt_ids, group_size)
