"""What of a user's drafter may go into a checkpoint: a copy of its state, made of plain values only.

Called by `guest.py`. A state that a checkpoint could not hold must fail here, where only the drafter's memory is lost,
never while a run saves its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 16


def copy_state(state: Any) -> dict[str, Any]:
    """A copy; raises a TypeError or a ValueError that says where something else than a plain value is."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state() returned a {type(state).__name__}, not a dict")
    copied: dict[str, Any] = _copy_mapping(state, "state()", 0)
    return copied


def _copy(value: Any, place: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{place} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return _copy_mapping(value, place, depth)
    if isinstance(value, list | tuple):
        return [_copy(one, f"{place}[{i}]", depth + 1) for i, one in enumerate(value)]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value)).numpy()  # raises for what a tensor cannot hold
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, np.generic):
        return _copy(value.item(), place, depth + 1)
    return _copy_scalar(value, place)


def _copy_mapping(state: Mapping[Any, Any], place: str, depth: int) -> dict[str, Any]:
    for key in state:
        if not isinstance(key, str):
            raise TypeError(f"{place} has the key {key!r:.80}, which is not a string")
    return {str(key): _copy(value, f"{place}[{key!r:.80}]", depth + 1) for key, value in state.items()}


def _copy_scalar(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str):
        value.encode()  # a checkpoint is UTF-8
        return str(value)
    raise TypeError(f"{place} is {value!r:.80}, not a finite number, string, array, list or dict")
