"""The network inside CELO2: 347 numbers, read from a file that the user names.

A small perceptron turns 30 features of every weight, its gradient and its history into the direction of its step. Two
layouts of the published file are known: with matrices as torch keeps them (`first_layer_weights.N`, `hidden`, `output`;
one row per output), and as JAX does (`w0.N`, `dense_w.N`; one column per output). `celo2.py` uses it. Nothing here
ever fetches a file, trains the network or runs code from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.documents import plain
from paceline.model.tensor_files import read_tensors

GROUPS = (1, 1, 1, 3, 1, 3, 1, 3, 1, 3, 3, 3, 3, 3)
"""Features by kind, in the file's order: see `Celo2.features` for what they are."""
NUM_FEATURES, WIDTH, NUM_OUTPUTS = sum(GROUPS), 8, 3

_TORCH = {
    **{f"first_layer_weights.{number}": (WIDTH, size) for number, size in enumerate(GROUPS)},
    "first_layer_bias": (WIDTH,),
    "hidden.weight": (WIDTH, WIDTH),
    "hidden.bias": (WIDTH,),
    "output.weight": (NUM_OUTPUTS, WIDTH),
    "output.bias": (NUM_OUTPUTS,),
}
_JAX = {
    **{f"w0.{number}": (size, WIDTH) for number, size in enumerate(GROUPS)},
    "b0": (WIDTH,),
    "dense_w.0": (WIDTH, WIDTH),
    "dense_b.0": (WIDTH,),
    "dense_w.1": (WIDTH, NUM_OUTPUTS),
    "dense_b.1": (NUM_OUTPUTS,),
}


@dataclass(frozen=True, eq=False)
class Celo2Network:
    """float32; of the three outputs only the first, the direction, is ever used."""

    first: Tensor
    """[WIDTH, NUM_FEATURES]"""
    first_bias: Tensor
    hidden: Tensor
    """[WIDTH, WIDTH], one row per output."""
    hidden_bias: Tensor
    output: Tensor
    """[WIDTH]"""
    output_bias: Tensor
    """A single number."""

    def to(self, device: torch.device) -> Celo2Network:
        return Celo2Network(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def load_network(file: Path) -> Celo2Network:
    """Read the weights; a ValueError that names the file says what is wrong with it."""
    found = dict(read_tensors(file))
    shapes = _TORCH if "first_layer_bias" in found else _JAX
    _check(file, found, shapes)
    values = {name: found[name].to(torch.float32, copy=True) for name in shapes}
    if shapes is _JAX:
        values = {
            ours: values[theirs].T.contiguous() if values[theirs].ndim == 2 else values[theirs]
            for ours, theirs in zip(_TORCH, _JAX, strict=True)
        }
    return Celo2Network(
        torch.cat([values[f"first_layer_weights.{number}"] for number in range(len(GROUPS))], dim=1),
        values["first_layer_bias"],
        values["hidden.weight"],
        values["hidden.bias"],
        values["output.weight"][0].contiguous(),
        values["output.bias"][0].contiguous(),
    )


def _check(file: Path, found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    advice = "name the weights of CELO2, converted to safetensors"
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ValueError(f"weights of celo2: {file} lacks {missing[0]}; {advice}")
    unknown = [name for name in found if name not in shapes]
    if unknown:
        raise ValueError(f"weights of celo2: {file} also holds {plain(unknown[0])}; {advice}")
    for name, shape in shapes.items():
        tensor = found[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"weights of celo2: {file}: {name} has shape {tuple(tensor.shape)}, not {shape}; {advice}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(f"weights of celo2: {file}: {name} must hold finite floats; {advice}")
