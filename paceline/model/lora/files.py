"""Adapters on disk in PEFT's layout: adapter_config.json and adapter_model.safetensors in a folder.

    save_adapter(folder, ...)     what `PeftModel.from_pretrained` loads; complete or not at all
    load_adapter(folder, config)  checked against the model before a tensor is used

Checkpoints and exports write these folders; a run or a model can begin with one. How W' is rounded goes into the
tensors' metadata, where PEFT does not look. What PEFT can train and this package cannot is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.documents import brief, plain, read_json
from paceline.core.schema import Schema, check, number, whole
from paceline.model.config import ModelConfig
from paceline.model.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from paceline.model.lora.adapter import (
    LINEAR_NAMES,
    MAX_RANK,
    A,
    Adapter,
    B,
    Rounding,
    find_modules,
    linear_modules,
)
from paceline.model.lora.merge import merge
from paceline.model.lora.merged import check_tensors
from paceline.model.task_threads import each
from paceline.model.tensor_files import read_metadata, read_tensors

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's layers."""
ROUNDING = "paceline_rounding"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFUSED: dict[str, Any] = {
    "use_dora": False,
    "use_rslora": False,
    "use_qalora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""Keys whose other values change what an adapter computes, in a way that only PEFT does."""


@dataclass(frozen=True, eq=False)
class AdapterFolder:
    """An adapter that was read."""

    path: Path
    adapter: Adapter
    tensors: dict[str, Tensor]
    """By name, in the dtype on disk."""


class AdapterKeys(Schema):
    """The keys of adapter_config.json that are used."""

    peft_type: str = Field("LORA", description='"LORA"')
    base_model_name_or_path: str | None = Field(None, description="the name of a model")
    r: int = whole(1, MAX_RANK)
    lora_alpha: float = number(1e6, ...)


def save_adapter(folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor], config: ModelConfig, base: str) -> None:
    """Write the two files into an existing folder. `base` names the model as `PeftModel` and `resolve` find it."""
    check_tensors(adapter, tensors, config)
    copies = {
        f"{PREFIX}{name}": tensors[name].detach().to("cpu", copy=True).contiguous() for name in adapter.shapes(config)
    }
    save_file(copies, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", ROUNDING: adapter.rounding})
    _save_config(folder, adapter, config, base)


def load_adapter(folder: Path, config: ModelConfig) -> AdapterFolder:
    """The adapter in a folder; ValueError if it is damaged, another model's, or of a kind that is not supported."""
    keys = read_keys(folder)
    named = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(folder / ADAPTER_WEIGHTS)}
    held = {name.removesuffix(f".{A}").removesuffix(f".{B}") for name in named}
    modules = tuple(module for module in linear_modules(config) if module in held)
    if foreign := sorted(held - set(modules)):
        raise ValueError(f"{folder}: the model has no linear layer {plain(foreign[0])}: the adapter is another model's")
    adapter = Adapter(keys.r, keys.lora_alpha, modules, _rounding(folder))
    try:
        check_tensors(adapter, named, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    for name, tensor in named.items():
        if tensor.dtype not in DTYPES or not tensor.isfinite().all():
            raise ValueError(f"{folder}: {name} must hold finite numbers; it is damaged or {tensor.dtype}")
    return AdapterFolder(folder, adapter, named)


def merge_all(base: Mapping[str, Tensor], found: AdapterFolder, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a model with its adapter merged into them, in `dtype` as an engine would have them."""
    adapter, tensors = found.adapter, found.tensors

    def merged(module: str) -> Tensor:
        weight = base[f"{module}.weight"]
        own = weight.to(dtype) if dtype == torch.bfloat16 else weight
        a, b = tensors[f"{module}.{A}"], tensors[f"{module}.{B}"]
        return merge(module, own, a, b, adapter.scale, adapter.rounding, dtype)[0]

    changed = dict(zip(adapter.modules, each(merged, adapter.modules), strict=True))
    return {name: changed.get(name.removesuffix(".weight"), weight) for name, weight in base.items()}


def read_keys(folder: Path) -> AdapterKeys:
    """What adapter_config.json says, as far as it is used."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{folder} has no {ADAPTER_CONFIG}, so it is not an adapter's folder")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}, the adapter's weights; copy it again")
    content, file = read_json(folder / ADAPTER_CONFIG), str(folder / ADAPTER_CONFIG)
    found = check(AdapterKeys, content, file)
    if found.peft_type != "LORA":
        raise ValueError(f"{file}: peft_type {brief(found.peft_type)} is not supported; only LORA is")
    refuse_unsupported(content, file)
    return found


def refuse_unsupported(content: Mapping[str, Any], document: str) -> None:
    """Raise a ValueError for a kind of LoRA that is not B @ A alone."""
    for key, plain_value in REFUSED.items():
        if content.get(key, plain_value) not in (plain_value, None):
            raise ValueError(f"{document}: {key}={brief(content[key])} is not supported; merge the adapter with peft")


def _save_config(folder: Path, adapter: Adapter, config: ModelConfig, base: str) -> None:
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "target_modules": _targets(adapter, config),
        "lora_dropout": 0.0,
        "inference_mode": True,
        **{key: value for key, value in REFUSED.items() if value is not None},
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _targets(adapter: Adapter, config: ModelConfig) -> list[str]:
    """Last names where they say it all, full ones otherwise: PEFT knows both."""
    short = [name for name in LINEAR_NAMES if any(module.endswith(f".{name}") for module in adapter.modules)]
    return short if find_modules(short, config) == adapter.modules else list(adapter.modules)


def _rounding(folder: Path) -> Rounding:
    """How the run that wrote the adapter rounded W'."""
    found = read_metadata(folder / ADAPTER_WEIGHTS).get(ROUNDING)
    return "nearest" if found == "nearest" else "dither"
