"""TRL's `GRPOTrainer` with Paceline's engine for generation: `PacelineGRPOTrainer`, same arguments, same results.

    dataset -> GRPOTrainer -> _generate_single_turn -> Engine.serve -> completion ids -> rewards, loss, optimizer: TRL's

Only generation is replaced. The engine loads the trainer's weights before every batch of completions, so they are
always those of the last optimizer step. What the engine cannot do like transformers (penalties, images, adapters,
sharded weights) is refused when the trainer is constructed, never ignored silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.extras import how_to_install
from paceline.core.types import Request, Sampling
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings
from paceline.run.metrics import engine_metrics
from paceline.run.parts import PROMPT_ROOM

try:
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError(f"paceline.integrations.trl needs TRL ({error}); install it: {how_to_install('trl')}") from error

MOST_SEQUENCES = 256
"""The most completions decoded at the same time, unless the engine settings say otherwise."""
SPECULATION = "rollout/spec_"
READ_SETTINGS = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "eos_token_id")
IDLE_SETTINGS = ("pad_token_id", "bos_token_id", "cache_implementation")
"""TRL's generation settings that change tokens, and those that do not."""
NEUTRAL = {"repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1}
"""Values that change nothing."""


class PacelineGRPOTrainer(GRPOTrainer):
    """Takes the arguments of `trl.GRPOTrainer`, and engine settings if the defaults do not fit."""

    def __init__(
        self,
        *args: Any,
        engine_settings: EngineSettings | None = None,
        budget_settings: BudgetSettings | None = None,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments
        refuse_other_generators(given.get("args"), given.get("rollout_func"))
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)
        model = self.accelerator.unwrap_model(self.model)
        self._policy_config = ModelConfig.from_hf(model.config.to_dict(), model.generation_config.to_dict())
        self._sampling = sampling_of(self.generation_kwargs, self.args.seed)
        self._engine_settings, self._budget_settings = engine_settings, budget_settings
        self._engine: Engine | None = None
        self._stream, self._next_draw = "", 0

    @property
    def engine(self) -> Engine:
        """The engine, created on first use with the current weights."""
        if self._engine is None:
            settings = self._engine_settings or self._fitting_settings()
            device, model = str(self.accelerator.device), self.accelerator.unwrap_model(self.model)
            with _one_thread(device):
                decoder = Decoder(
                    self._policy_config,
                    self._weights(),
                    exact=settings.exact,
                    device=device,
                    precision=precision_of(settings, model.dtype, self.accelerator.mixed_precision),
                )
                self._engine = Engine(decoder, settings=settings, budget=self._budget_settings)
        return self._engine

    def _fitting_settings(self) -> EngineSettings:
        """Room for one batch of completions and no more: the trainer needs memory too."""
        batch = self.args.per_device_train_batch_size * self.args.steps_per_generation
        num_sequences = min(max(batch, self.args.per_device_eval_batch_size), MOST_SEQUENCES)
        kv_tokens = num_sequences * (self._sampling.max_new_tokens + PROMPT_ROOM)
        return EngineSettings(max_sequences=num_sequences, kv_tokens=kv_tokens)

    def _weights(self) -> dict[str, Tensor]:
        """The trainer's live weights under their Hugging Face names."""
        model = self.accelerator.unwrap_model(self.model)
        return {name: weight.detach() for name, weight in model.state_dict().items()}

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
        if images is not None or multimodal_fields or has_tool_images:
            raise ValueError("Paceline's engine reads text only; use trl.GRPOTrainer for prompts with images")
        mode = "train" if self.model.training else "eval"
        engine = self.engine
        with _one_thread(engine.decoder.ops.device):
            engine.decoder.load_weights(self._weights())
            completions = self._complete(engine, prompt_ids, num_generations, mode)
        for name, value in engine_metrics(engine.stats).items():
            if name.startswith(SPECULATION):
                self._metrics[mode][name].append(value)
        return completions, None

    def _complete(
        self, engine: Engine, prompt_ids: Sequence[Sequence[int]], num_generations: int, mode: str
    ) -> list[list[int]]:
        requests = list(group_requests(prompt_ids, num_generations, self._first_draw(mode)))
        self._next_draw = requests[-1].draw + 1
        found: dict[tuple[int, int], list[int]] = {}
        with engine.serve(replace(self._sampling, stream=self._stream)) as serving:
            serving.add(requests)
            while serving.has_work:
                found |= {(rollout.draw, rollout.sample_index): rollout.token_ids for rollout in serving.step()}
        return [found[request.draw, request.sample_index] for request in requests]

    def _first_draw(self, mode: str) -> int:
        """Draws are counted within a step, so a resumed run draws like one that was never stopped."""
        stream = f"{mode}/{self.state.global_step}/{self.accelerator.process_index}"
        if stream != self._stream:
            self._stream, self._next_draw = stream, 0
        return self._next_draw


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


def sampling_of(generation: Mapping[str, Any], seed: int) -> Sampling:
    """TRL's generation settings as `Sampling`; ValueError for one that the engine does not support."""
    for name, value in generation.items():
        if name not in (*READ_SETTINGS, *IDLE_SETTINGS) and value not in (None, NEUTRAL.get(name)):
            raise ValueError(
                f"{name}={value!r} is not supported by Paceline's engine; leave it out, or use trl.GRPOTrainer"
            )
    is_sampled = generation["do_sample"]
    return Sampling(
        temperature=generation["temperature"] if is_sampled else 0.0,
        top_k=generation["top_k"] or 0,
        top_p=1.0 if generation["top_p"] is None else generation["top_p"],
        min_p=generation["min_p"] or 0.0,
        max_new_tokens=generation["max_new_tokens"],
        seed=seed,
        stop_token_ids=generation["eos_token_id"],
        ignore_eos=True,  # TRL names every id that ends a completion
    )


def precision_of(settings: EngineSettings, dtype: torch.dtype, mixed_precision: str) -> str:
    """The engine's precision: the configured one, or by default the one TRL itself would generate in."""
    if settings.precision == "auto" and dtype == torch.float32 and mixed_precision == "no":
        return "float32"
    return settings.precision


def refuse_other_generators(args: Any, rollout_func: Any) -> None:
    """ValueError if something else is to generate; raised before TRL starts to look for it."""
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name, False):
            raise ValueError(f"{name}=True: Paceline's engine generates here; leave it out, or use trl.GRPOTrainer")
    if rollout_func is not None:
        raise ValueError("rollout_func would generate in place of Paceline's engine; use trl.GRPOTrainer for that")


def refuse_unsupported(trainer: GRPOTrainer) -> None:
    """ValueError for models that transformers can generate with and the engine cannot."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    refused = {
        "a model with adapters": (hasattr(model, "peft_config"), "merge them first, or use trl.GRPOTrainer"),
        "a model that reads images": (trainer._is_vlm, "use trl.GRPOTrainer"),
        "a model sharded by DeepSpeed or FSDP": (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
            "use plain data parallelism",
        ),
    }
    for what, (is_there, advice) in refused.items():
        if is_there:
            raise ValueError(f"PacelineGRPOTrainer does not support {what}: {advice}")


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Run with one torch thread, as exact mode needs on a CPU, then restore the trainer's number."""
    num_threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
