"""verl's rollout settings as ours, and what the engine cannot do: a ValueError with the reason before anything starts.

`refuse` runs when a replica is constructed, `read_plan` in its server. docs/verl-options.md lists every option of
verl's rollout config; its test tries them. Nothing here imports verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.core.config import Settings, SettingsError, validate
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.drafters import make_drafters
from paceline.rollout.drafters.drafter_set import DrafterSet
from paceline.rollout.engine import Engine
from paceline.rollout.memory_plan import plan_memory
from paceline.rollout.settings import EngineSettings
from paceline.rollout.speculation.settings import BudgetSettings

OWN = "paceline"
"""Our section of verl's `rollout.engine_kwargs`."""
DUMMY = "dummy"
FROM_FOLDER = ("auto", "hf", "safetensors")
PRECISIONS = {"bfloat16": "auto", "auto": "auto", "float32": "float32"}
"""The engine's precision for verl's `dtype`; auto computes in bfloat16 on a GPU, in float32 on a CPU."""
ONE_DEVICE = "Paceline's engine runs a replica on one device; set it to 1, and verl starts a replica per device"


class ReplicaSettings(Settings):
    """What `rollout.engine_kwargs.paceline` takes."""

    engine: EngineSettings = EngineSettings()
    budget: BudgetSettings = BudgetSettings()


@dataclass(frozen=True)
class ReplicaPlan:
    """What a replica's engine is made of, except the weights."""

    policy: ModelConfig
    settings: EngineSettings
    budget: BudgetSettings
    drafters: DrafterSet | None
    device: str
    tokenizer: Tokenizer | None
    """Only for stop strings: without one, nothing is decoded."""

    def build(self, weights: Mapping[str, Tensor]) -> Engine:
        exact, precision = self.settings.exact, self.settings.precision
        decoder = Decoder(self.policy, weights, exact=exact, device=self.device, precision=precision)
        return Engine(decoder, self.tokenizer, self.drafters, self.settings, self.budget)


def _is_on(section: Any, name: str) -> bool:
    return bool(section.get(name) if isinstance(section, Mapping) else getattr(section, name, False))


REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tensor_model_parallel_size": (lambda size: (size or 1) > 1, ONE_DEVICE),
    "data_parallel_size": (lambda size: (size or 1) > 1, ONE_DEVICE),
    "pipeline_model_parallel_size": (lambda size: (size or 1) > 1, ONE_DEVICE),
    "expert_parallel_size": (lambda size: (size or 1) > 1, ONE_DEVICE),
    "dtype": (lambda dtype: dtype not in PRECISIONS, "the engine computes in bfloat16 or float32"),
    "load_format": (
        lambda name: name not in (DUMMY, *FROM_FOLDER),
        f"the engine takes {DUMMY} (weights come from the trainer) or {', '.join(FROM_FOLDER)} (from model.path first)",
    ),
    "logprobs_mode": (
        lambda mode: mode not in (None, "processed_logprobs"),
        "the engine returns the log-probabilities of the distribution it samples from: processed_logprobs",
    ),
    "repetition_penalty": (lambda value: value not in (None, 1.0), "the engine has no penalties; set it to 1"),
    "quantization": (bool, "the engine reads the weights as they are; leave it out"),
    "quantization_config_file": (bool, "the engine reads the weights as they are; leave it out"),
    "qat": (lambda section: _is_on(section, "enable"), "the engine does not quantize; turn it off"),
    "mtp": (lambda section: _is_on(section, "enable_rollout"), "the engine drafts by other means; turn it off"),
    "disaggregation": (lambda section: _is_on(section, "enabled"), "the engine prefills and decodes in one place"),
    "enable_rollout_routing_replay": (bool, "the engine computes dense models only"),
    "prometheus": (lambda section: _is_on(section, "enable"), "a replica has no HTTP address; turn it off"),
}
"""Options of verl's rollout config that cannot work: when, and why."""


def refuse(config: Any) -> None:
    """ValueError for settings of `actor_rollout_ref.rollout` that cannot work."""
    for name, (is_refused, why) in REFUSED.items():
        value = getattr(config, name, None)
        if is_refused(value):
            raise ValueError(f"actor_rollout_ref.rollout.{name}={value!r}: {why}")
    read_settings(config)


def refuse_adapters(model: Any) -> None:
    """ValueError for LoRA whose adapters verl would send by themselves."""
    lora = model.get("lora") or {}
    if (model.get("lora_rank") or lora.get("rank") or 0) > 0 and not lora.get("merge", False):
        raise ValueError(
            "the engine takes whole weights, not adapters; set actor_rollout_ref.model.lora.merge=True, and verl "
            "merges them before it sends"
        )


def read_settings(config: Any) -> ReplicaSettings:
    """Our own section; a SettingsError names what is wrong with it."""
    given = (getattr(config, "engine_kwargs", None) or {}).get(OWN) or {}
    settings = validate(ReplicaSettings, {name: dict(value) for name, value in given.items()})
    if settings.engine.run_ahead:
        raise SettingsError("engine.run_ahead: verl does not say which prompts come next; leave it out")
    if "eagle" in map(str.strip, settings.engine.drafter.split(",")):
        raise SettingsError("engine.drafter: eagle is trained by `paceline train`; name a trained one as eagle:FOLDER")
    return settings


def most_context(config: Any, policy: ModelConfig) -> int:
    """Tokens of prompt and response together."""
    length = config.max_model_len or config.prompt_length + config.response_length
    return min(int(length), policy.max_context)


def read_plan(config: Any, policy: ModelConfig, tokenizer: Tokenizer | None, device: str, memory: int) -> ReplicaPlan:
    """What our section sets stays; the rest follows from verl's. `memory`: bytes of the device."""
    settings = read_settings(config)
    is_set, engine = settings.engine.model_fields_set, settings.engine
    found: dict[str, Any] = {}
    if "max_sequences" not in is_set:
        found["max_sequences"] = config.max_num_seqs
    if "precision" not in is_set:
        found["precision"] = PRECISIONS[config.dtype]
    if config.enforce_eager:
        found["graphs"] = False
    engine = engine.model_copy(update=found)
    if engine.kv_tokens is None:
        engine = engine.model_copy(update={"kv_tokens": _kv_tokens(config, policy, engine, device, memory)})
    return ReplicaPlan(
        policy=policy,
        settings=engine,
        budget=settings.budget,
        drafters=make_drafters(engine.drafter),
        device=device,
        tokenizer=tokenizer,
    )


def _kv_tokens(config: Any, policy: ModelConfig, engine: EngineSettings, device: str, memory: int) -> int:
    """Room for every sequence at its longest, within verl's share of the device and behind the weights."""
    length = most_context(config, policy)
    plan = plan_memory(policy, device, engine.precision, kv_tokens=length)
    free = int(memory * config.gpu_memory_utilization) - plan.weights
    most = free // (plan.cache // plan.cache_tokens)
    if most < length:
        raise ValueError(
            f"rollout.gpu_memory_utilization={config.gpu_memory_utilization} of {memory / 2**30:.1f} GiB leaves "
            f"no room for one sequence of {length} tokens; raise it"
        )
    return min(engine.max_sequences * length, most)
