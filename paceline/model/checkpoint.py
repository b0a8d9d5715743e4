"""The weights of model folders in the Hugging Face layout: read them, write a folder (`folder.py` finds one).

The engine and the commands load through it, checkpoints save through it. An adapter's folder (`lora/files.py`) loads as
the merged model. Weights are safetensors only: a pickle can run code and is never opened. A folder is checked against
its config before a tensor is used, and an existing folder is replaced atomically, so that old and new weights never
mix.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.documents import plain
from paceline.core.files import replaced_folder
from paceline.model.config import ModelConfig
from paceline.model.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    GENERATION_CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    base_folder,
    is_adapter,
    shards,
    tokenizer_files,
)
from paceline.model.lora.adapter import Adapter
from paceline.model.lora.files import load_adapter, merge_all, save_adapter
from paceline.model.tensor_files import read_tensors, tensor_names

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All weights by Hugging Face name, in the dtype on disk; without a tied head.

    The tensors are views of memory-mapped files: they cost memory only when touched, and must not be written to. Files
    are opened one after another, so peak memory is that of the largest copy the caller makes. An adapter's folder gives
    merged weights, in `dtype`, which is the engine's: they are those that a run trained with.
    """
    if is_adapter(folder):
        return merge_all(load_weights(base_folder(folder), config), load_adapter(folder, config), dtype)
    expected = config.weight_shapes()
    weights: dict[str, Tensor] = {}
    origins: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, tensor in read_tensors(file):
            if name in origins:
                raise ValueError(f"{file} holds {plain(name)}, and so does {origins[name].name}; keep one of the two")
            weights[name], origins[name] = tensor, file
    _drop_derived(weights, config, folder)
    for name, tensor in weights.items():
        _check_tensor(name, tensor, expected, origins[name])
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors that {CONFIG} requires, the first is {missing[0]}")
    return {name: weights[name] for name in expected}


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    add_files: Callable[[Path], None] | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write a folder that `AutoModelForCausalLM` can load; it appears complete or not at all.

    `add_files` adds other files, such as a tokenizer. An existing folder is replaced atomically; files in it that are
    not part of the checkpoint are kept.
    """
    expected = config.weight_shapes()
    for name, tensor in weights.items():
        _check_tensor(name, tensor, expected, folder)
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ValueError(f"cannot save {folder}: {len(missing)} weights are missing, the first is {missing[0]}")
    with replaced_folder(folder, is_kept) as new:
        _write_shards(new, {name: weights[name] for name in expected}, max_shard_bytes)
        write_json(new / CONFIG, _saved_config(config, weights["model.embed_tokens.weight"].dtype))
        write_json(new / GENERATION_CONFIG, _saved_generation_config(config))
        if add_files is not None:
            add_files(new)


def save_adapter_folder(
    folder: Path,
    config: ModelConfig,
    adapter: Adapter,
    tensors: Mapping[str, Tensor],
    base: str,
    add_files: Callable[[Path], None],
) -> None:
    """Write a folder that PEFT can load, and `load_weights` merged: an adapter with its model's config.

    `base` names the model as in `adapter_config.json`. It appears complete or not at all.
    """
    with replaced_folder(folder) as new:
        save_adapter(new, adapter, tensors, config, base)
        write_json(new / CONFIG, dict(config.hf))
        write_json(new / GENERATION_CONFIG, _saved_generation_config(config))
        add_files(new)


def is_kept(name: str) -> bool:
    """Whether a model's new folder keeps a file of the one it replaces: everything but weights, which would mix."""
    is_weight = name.startswith("model") and ".safetensors" in name
    return not is_weight and name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a model folder's tokenizer files unchanged."""
    for file in tokenizer_files(source):
        shutil.copyfile(file, target / file.name)


def model_files(folder: Path) -> list[Path]:
    """Every file of a model folder that is read: config, tokenizer and weights."""
    named = (folder / name for name in (CONFIG, GENERATION_CONFIG, WEIGHTS_INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    return [*filter(Path.is_file, named), *tokenizer_files(folder), *weight_files(folder)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all of them present and with the tensors that the index says they hold."""
    found = shards(folder)
    for file, tensors in found.items():
        held = set(tensor_names(file)) if tensors else set()
        if missing := [tensor for tensor in tensors if tensor not in held]:
            raise ValueError(f"weight file {file} lacks {plain(missing[0])}, though {WEIGHTS_INDEX} says it holds it")
    return list(found)


def _drop_derived(weights: dict[str, Tensor], config: ModelConfig, folder: Path) -> None:
    """Remove redundant tensors that some folders store: rotary frequencies and a tied head."""
    for name in [name for name in weights if name.endswith(".rotary_emb.inv_freq")]:
        del weights[name]
    if not config.tie_embeddings:
        return
    head, embedding = weights.pop("lm_head.weight", None), weights.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: {CONFIG} ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
            'set "tie_word_embeddings" to false to use both'
        )


def _check_tensor(name: str, tensor: Tensor, expected: Mapping[str, tuple[int, ...]], origin: Path) -> None:
    if name not in expected:
        raise ValueError(f"{origin} holds {plain(name)}, which is not part of the model that {CONFIG} describes")
    if tuple(tensor.shape) != expected[name]:
        shape = tuple(tensor.shape)
        raise ValueError(f"{origin}: {name} has shape {shape}, but {CONFIG} requires {expected[name]}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{origin}: {name} is stored as {tensor.dtype}; supported are {', '.join(map(str, DTYPES))}")


def _write_shards(folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: float) -> None:
    shards = _split(weights, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        # Copies let weights be slices of a fused tensor or transposed; one shard at a time bounds their memory.
        copies = {name: weights[name].detach().to("cpu", copy=True).contiguous() for name in names}
        save_file(copies, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total_size = sum(tensor.nbytes for tensor in weights.values())
        write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _split(weights: Mapping[str, Tensor], max_shard_bytes: float) -> list[list[str]]:
    """Names by shard, in order; a tensor above the limit gets its own shard."""
    shards: list[list[str]] = [[]]
    num_bytes = 0
    for name, tensor in weights.items():
        if shards[-1] and num_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += tensor.nbytes
    return shards


def _saved_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as it was read, with the weights' current dtype under the key it already uses."""
    key = "torch_dtype" if "torch_dtype" in config.hf else "dtype"
    return {**config.hf, key: str(dtype).removeprefix("torch.")}


def _saved_generation_config(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json as it was read; its end ids always include those of config.json."""
    return {**config.hf_generation, "eos_token_id": list(config.eos_token_ids) or None}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
