"""An adapter as plain data: which linear layers it changes, of what rank, and how W' is rounded.

`rl/lora.py` makes one from the settings, `files.py` reads one from a folder, the memory plan counts its bytes. Nothing
here imports torch or opens a file of weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.config import nearest
from paceline.core.documents import brief
from paceline.model.config import ModelConfig

Rounding = Literal["dither", "nearest"]
BasePlace = Literal["auto", "device", "host"]
"""Where the base stays."""
ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer of the decoder layers, as in PEFT."""
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
A, B = "lora_A.weight", "lora_B.weight"
"""The two tensors of a module, as PEFT names them: [rank, in] and [out, rank]."""
MAX_RANK = 4096


@dataclass(frozen=True)
class Adapter:
    """One adapter of one model."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Full names of the linear layers, such as `model.layers.0.self_attn.q_proj`, in the order of the forward pass."""
    rounding: Rounding = "dither"
    """How W' becomes bfloat16; without effect where weights are float32."""

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / self.rank

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Shape of every tensor by name; ValueError if the model has no such layer."""
        whole, found = config.weight_shapes(), dict[str, tuple[int, int]]()
        for module in self.modules:
            shape = whole.get(f"{module}.weight")
            if shape is None or not is_linear(module):
                raise ValueError(f"the model has no linear layer {brief(module)}, so the adapter is another model's")
            found |= {f"{module}.{A}": (self.rank, shape[1]), f"{module}.{B}": (shape[0], self.rank)}
        return found

    def num_parameters(self, config: ModelConfig) -> int:
        """Numbers that are trained."""
        return sum(math.prod(shape) for shape in self.shapes(config).values())

    def num_adapted(self, config: ModelConfig) -> int:
        """Numbers of the weights that it changes, whose base is kept beside W'."""
        shapes = config.weight_shapes()
        return sum(math.prod(shapes[f"{module}.weight"]) for module in self.modules)


def is_linear(module: str) -> bool:
    """Whether a name is that of a linear layer inside a decoder layer."""
    return module.startswith("model.layers.") and module.rpartition(".")[2] in LINEAR_NAMES


def linear_modules(config: ModelConfig) -> Iterator[str]:
    """Every linear layer of the decoder layers, in the order of the forward pass."""
    for name in config.weight_shapes():
        module = name.removesuffix(".weight")
        if name != module and is_linear(module):
            yield module


def find_modules(targets: Sequence[str], config: ModelConfig) -> tuple[str, ...]:
    """The linear layers that targets name: `all-linear`, or ends of names such as `q_proj` and `mlp.up_proj`.

    Every target must match something: one that matches nothing is a mistake, not a smaller adapter.
    """
    known = list(linear_modules(config))
    if not targets:
        raise ValueError(f"there is nothing to adapt; name linear layers such as q_proj, or {ALL_LINEAR}")
    found: set[str] = set()
    for target in targets:
        matching = [module for module in known if _matches(module, target)]
        if not matching:
            guess = nearest(target, [ALL_LINEAR, *LINEAR_NAMES])
            hint = f"did you mean {guess}? " if guess else ""
            raise ValueError(
                f"{brief(target)} matches no linear layer of the model; {hint}use {ALL_LINEAR}, "
                f"{', '.join(LINEAR_NAMES)}, or longer ends of their names"
            )
        found.update(matching)
    return tuple(module for module in known if module in found)


def threshold_seed(module: str) -> int:
    """32 bits that set a module's rounding thresholds apart from another's; they depend on nothing but its name."""
    return int.from_bytes(hashlib.blake2b(module.encode(), digest_size=4, person=b"paceline-dither").digest(), "little")


def _matches(module: str, target: str) -> bool:
    return target == ALL_LINEAR or module == target or module.endswith(f".{target}")
