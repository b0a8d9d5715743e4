"""A drafter on disk in the EAGLE-3 layout that other engines load: config.json and model.safetensors in a folder.

    save_eagle(folder, eagle)      complete or not at all
    load_eagle(folder)             checked against its config before a tensor is used

`spot/checkpoints.py` writes these folders, and drafters start from them. Weights are safetensors only: a pickle is
never opened. The drafter reads the layers of `tap_layers`, which other engines assume; the config does not list them,
since engines disagree about how to count explicit ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.documents import brief, plain, read_json
from paceline.core.files import replaced_folder
from paceline.core.schema import Schema, check, number, whole
from paceline.model.checkpoint import DTYPES, is_kept, write_json
from paceline.model.config import MAX_CONTEXT, MAX_ID, MAX_VOCAB, MAX_WIDTH, read_end_ids, rope_from_hf, rope_to_hf
from paceline.model.eagle.network import Eagle, EagleConfig
from paceline.model.folder import CONFIG, WEIGHTS
from paceline.model.tensor_files import read_metadata, read_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"
OFFSETS, IS_DRAFTED, EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_context": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
}
"""Fields of `EagleConfig` and their names in config.json."""
FIXED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Values that this layout requires."""


def save_eagle(folder: Path, eagle: Eagle, dtype: torch.dtype = torch.float32) -> None:
    """Write the folder, complete or not at all; its name should contain `eagle3`, which other engines look for.

    The version goes into the weights' metadata.
    """
    weights = {name: weight.detach().to("cpu", dtype, copy=True).contiguous() for name, weight in eagle.weights.items()}
    ids, config = eagle.draft_ids.cpu(), eagle.config
    weights[OFFSETS] = ids - torch.arange(len(ids))
    weights[IS_DRAFTED] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    with replaced_folder(folder, is_kept) as new:
        save_file(weights, new / WEIGHTS, metadata={"format": "pt", "version": str(eagle.version)})
        write_json(new / CONFIG, config_to_hf(config, dtype))


def load_eagle(folder: Path) -> Eagle:
    """The drafter in a folder; ValueError if anything is missing, truncated or not of this layout."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}, so it is not a drafter folder")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}, the drafter's weights; copy it again")
    try:
        config = config_from_hf(read_json(folder / CONFIG))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    tensors = dict(read_tensors(folder / WEIGHTS))
    tensors.pop(EMBEDDING, None)  # the policy's is used
    try:
        ids = _draft_ids(config, tensors.pop(OFFSETS, None), tensors.pop(IS_DRAFTED, None))
        _check_values(tensors)
        weights = {name: tensor.float().clone() for name, tensor in tensors.items()}
        version = read_metadata(folder / WEIGHTS).get("version", "0")
        return Eagle(config, weights, ids, int(version) if version.isdecimal() else 0)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS}: {error}") from error


def config_to_hf(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The contents of config.json."""
    eos = list(config.eos_token_ids)
    is_same = config.target_hidden_size == config.hidden_size
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **FIXED,
        **{key: getattr(config, name) for name, key in SIZES.items()},
        **({} if is_same else {"target_hidden_size": config.target_hidden_size}),
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_hf(config.rope),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def config_from_hf(content: Mapping[str, Any]) -> EagleConfig:
    """The sizes in the contents of config.json."""
    given = check(_EagleKeys, content, CONFIG)
    if ARCHITECTURE not in (given.architectures or ()):
        raise ValueError(f"architectures must name {ARCHITECTURE}; it is {brief(given.architectures)}")
    for key, value in FIXED.items():
        if content.get(key, value) != value:
            found = brief(content[key])
            raise ValueError(f"{key} must be {value!r} for other engines to load the drafter; it is {found}")
    sizes = {name: getattr(given, key) for name, key in SIZES.items()}
    if sizes["draft_vocab_size"] > sizes["vocab_size"] or sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ValueError("draft_vocab_size must be at most vocab_size, and query heads a multiple of key/value heads")
    return EagleConfig(
        target_hidden_size=given.target_hidden_size or given.hidden_size,
        rms_norm_eps=given.rms_norm_eps,
        rope=rope_from_hf(content, sizes["max_context"]),
        eos_token_ids=read_end_ids(content, {}),
        bos_token_id=given.bos_token_id,
        **sizes,
    )


class _EagleKeys(Schema):
    """config.json without its rotary settings and end tokens, which `model/config.py` reads."""

    architectures: list[str] | None = Field(None, description="a list of names")
    hidden_size: int = whole(1, MAX_WIDTH)
    intermediate_size: int = whole(1, MAX_WIDTH)
    num_attention_heads: int = whole(1, MAX_WIDTH)
    num_key_value_heads: int = whole(1, MAX_WIDTH)
    head_dim: int = whole(1, MAX_WIDTH)
    max_position_embeddings: int = whole(1, MAX_CONTEXT)
    vocab_size: int = whole(1, MAX_VOCAB)
    draft_vocab_size: int = whole(1, MAX_VOCAB)
    target_hidden_size: int | None = whole(1, MAX_WIDTH, None)
    rms_norm_eps: float = number(0.999, ...)
    bos_token_id: int | None = whole(-1, MAX_ID, None)


def _draft_ids(config: EagleConfig, offsets: Tensor | None, is_drafted: Tensor | None) -> Tensor:
    """The policy's ids by draft id; without a map, the drafter must draft every id."""
    size = config.draft_vocab_size
    if offsets is None:
        if size != config.vocab_size:
            raise ValueError(f"{OFFSETS} is missing, though only {size} of {config.vocab_size} ids are drafted")
        return torch.arange(size)
    if tuple(offsets.shape) != (size,) or offsets.dtype != torch.int64:
        raise ValueError(f"{OFFSETS} must be {size} 64-bit integers; it is {tuple(offsets.shape)} {offsets.dtype}")
    ids = offsets + torch.arange(size)
    if is_drafted is not None and (
        is_drafted.dtype.is_floating_point or not torch.equal(is_drafted.nonzero().flatten(), ids)
    ):
        raise ValueError(f"{OFFSETS} and {IS_DRAFTED} do not name the same ids")
    return ids


def _check_values(weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        if weight.dtype not in DTYPES:
            raise ValueError(f"{plain(name)} is stored as {weight.dtype}; supported are {', '.join(map(str, DTYPES))}")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{plain(name)} holds numbers that are not finite")
