"""Checks how many of a checkpoint's weights fit bfloat16, and makes a copy that needs all of float32.

Paceline keeps a weight in bfloat16 where that loses nothing, and so reads half the bytes per token that a float32 peer
reads. That is a fair gain on a checkpoint published in bfloat16 and no gain on any other: a speed measured on the one
must not be quoted for the other. The benches that compare engines call it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def share_in_bfloat16(model: Path) -> float:
    """Share of the weights that bfloat16 represents exactly."""
    num_exact = num_all = 0
    for path in model.glob("*.safetensors"):
        for weight in load_file(path).values():
            num_exact += int((weight.bfloat16().float() == weight.float()).sum())
            num_all += weight.numel()
    assert num_all, f"{model} holds no safetensors file"
    return round(num_exact / num_all, 4)


def fill_float32(model: Path, target: Path) -> Path:
    """A float32 copy with every weight moved by up to 0.1 %: nearly the same model, but no matrix fits bfloat16."""
    shutil.copytree(model, target)
    generator = torch.Generator().manual_seed(0)
    for path in target.glob("*.safetensors"):
        moved = {name: _moved(weight, generator) for name, weight in load_file(path).items()}
        path.chmod(0o644)
        save_file(moved, path, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    return target


def _moved(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return weight.float() * (1 + 1e-3 * (torch.rand(weight.shape, generator=generator) - 0.5))
