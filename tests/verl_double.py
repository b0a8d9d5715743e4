"""A double of verl and Ray, as far as `paceline/integrations/verl` imports them, for tests without either."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

INTERFACE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "verl-interface.json").read_text())
"""What verl 0.9.1 calls and offers: the arguments it passes, by class; base signatures; options of its config."""
OPTIONS: dict[str, Any] = {
    "name": "paceline", "mode": "async", "tensor_model_parallel_size": 1, "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1, "expert_parallel_size": 1, "dtype": "float32", "load_format": "dummy",
    "logprobs_mode": "processed_logprobs", "repetition_penalty": 1.0, "quantization": None,
    "quantization_config_file": None, "qat": None, "enable_rollout_routing_replay": False, "engine_kwargs": {},
    "max_model_len": None, "prompt_length": 8, "response_length": 32, "max_num_seqs": 8, "enforce_eager": False,
    "gpu_memory_utilization": 0.5, "seed": 42, "ignore_eos": False, "full_determinism": False,
    "free_cache_engine": True, "skip_tokenizer_init": True,
}  # fmt: skip


def rollout_config(**options: Any) -> SimpleNamespace:
    """verl's rollout config with one device, and short prompts and responses."""
    return SimpleNamespace(**OPTIONS | options)


@dataclass
class TokenDouble:
    """As verl's `TokenOutput`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ReplicaDouble:
    """As verl's `RolloutReplica`: keeps what it is given."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *others: Any) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config

    async def _pass_on(self, **options: Any) -> None:
        """Stands for the methods that call the same one of every server."""

    wake_up = sleep = resume_generation = clear_kv_cache = release_kv_cache = resume_kv_cache = _pass_on
    abort_all_requests = start_profile = stop_profile = _pass_on


class AdapterDouble:
    """As verl's `BaseRollout`."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


class RegistryDouble:
    """As verl's `RolloutReplicaRegistry`."""

    _registry: ClassVar[dict[str, Callable[[], type[Any]]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[Any]]) -> None:
        cls._registry[name] = loader

    @classmethod
    def get(cls, name: str) -> type[Any]:
        return cls._registry[name]()


def _keep(config: Any, dataclass_type: Any = None) -> Any:
    return config


def install_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the double where imports find it, as version 0.9.1."""
    base = {"BaseRollout": AdapterDouble, "_ROLLOUT_REGISTRY": {}}
    modes = SimpleNamespace(HYBRID="hybrid", COLOCATED="colocated", STANDALONE="standalone")
    replica = {
        "RolloutReplica": ReplicaDouble,
        "RolloutReplicaRegistry": RegistryDouble,
        "RolloutMode": modes,
        "TokenOutput": TokenDouble,
    }
    contents: dict[str, dict[str, Any]] = {
        "ray": {},
        "verl": {},
        "verl.utils": {},
        "verl.utils.config": {"omega_conf_to_dataclass": _keep},
        "verl.utils.device": {"get_resource_name": lambda: "GPU"},
        "verl.workers": {},
        "verl.workers.config": {"HFModelConfig": object},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": base,
        "verl.workers.rollout.replica": replica,
        "verl.workers.rollout.utils": {"ensure_async_iterator": iter},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr("paceline.integrations.verl.release.version", lambda name: "0.9.1")
    for name in ("plugin", "adapter", "replica", "server"):
        monkeypatch.delitem(sys.modules, f"paceline.integrations.verl.{name}", raising=False)
