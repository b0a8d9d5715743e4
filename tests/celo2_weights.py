"""Files with weights for CELO2, for tests: random ones, and ones whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.rl.celo2_network import GROUPS, NUM_OUTPUTS, WIDTH


def network_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random weights in torch's layout, as large as those of a trained network."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    return {
        **{f"first_layer_weights.{number}": random(WIDTH, size) / 2 for number, size in enumerate(GROUPS)},
        "first_layer_bias": random(WIDTH),
        "hidden.weight": random(WIDTH, WIDTH),
        "hidden.bias": random(WIDTH),
        "output.weight": random(NUM_OUTPUTS, WIDTH),
        "output.bias": random(NUM_OUTPUTS),
    }


def momentum_tensors() -> dict[str, Tensor]:
    """Weights whose answer is the fastest momentum: two units carry it and its negative through both layers."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in network_tensors().items()}
    tensors["first_layer_weights.3"][:2, 0] = torch.tensor([1.0, -1.0])
    tensors["hidden.weight"][:2, :2] = torch.eye(2)
    tensors["output.weight"][0, :2] = torch.tensor([1.0, -1.0])
    return tensors


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "celo2.safetensors")
    return folder / "celo2.safetensors"
