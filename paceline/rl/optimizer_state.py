"""Whether the state in a checkpoint is that of the optimizer which is to continue from it.

The learner and the drafter's trainer ask before they load anything, so that a checkpoint of another optimizer leaves
weights and state as they were. torch itself would load AdamW's moments into SGD, which ignores them. Nothing here
changes an optimizer or a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core.documents import plain
from paceline.rl.optimizers import JointOptimizer, OptimizerLike

StateShapes = Mapping[str, tuple[int, ...]]
"""What an optimizer keeps of a parameter, by name."""

_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)


@runtime_checkable
class KnowsItsState(Protocol):
    """Our own optimizers say what they keep."""

    def state_shapes(self, parameter: Tensor) -> StateShapes: ...


def require_fitting(optimizer: OptimizerLike, state: Any, setting: str) -> None:
    """Raise a ValueError unless `state` is a state of this kind of optimizer over parameters of these shapes."""
    if isinstance(optimizer, JointOptimizer):
        parts = state.get("parts") if isinstance(state, Mapping) and state.keys() == {"parts"} else None
        if not isinstance(parts, list) or len(parts) != len(optimizer.parts):
            raise _other_kind(setting, "one optimizer" if parts is None else "another number of parts", "several parts")
        for part, own in zip(optimizer.parts, parts, strict=True):
            require_fitting(part, own, setting)
        return
    if not isinstance(state, Mapping) or not {"param_groups", "state"} <= state.keys() or "parts" in state:
        found = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise _other_kind(setting, found, type(optimizer).__name__)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state["param_groups"]]
    if ours != theirs:
        raise _other_kind(setting, f"groups of {theirs} parameters", f"groups of {ours}")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        _require_own(optimizer, parameter, state["state"].get(number, {}), setting)


def _require_own(optimizer: OptimizerLike, parameter: Tensor, values: Mapping[str, Any], setting: str) -> None:
    """What one parameter has in the state must be what this optimizer keeps of it."""
    expected = _expected(optimizer, parameter)
    if expected is None:  # a class of the user's
        return
    if not values.keys() <= expected.keys():
        raise _other_kind(setting, ", ".join(values), ", ".join(expected))
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim and tuple(value.shape) != expected[name]:
            raise _other_kind(setting, f"{name} of shape {tuple(value.shape)}", str(expected[name]))


def _expected(optimizer: OptimizerLike, parameter: Tensor) -> StateShapes | None:
    if isinstance(optimizer, KnowsItsState):
        return optimizer.state_shapes(parameter)
    shape = tuple(parameter.shape)
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return {"step": ()} | dict.fromkeys(_ADAM, shape)
    if type(optimizer) in (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD)):
        return dict.fromkeys(_MOMENTUM, shape)
    return None


def _other_kind(setting: str, found: str, expected: str) -> ValueError:
    return ValueError(
        f"{setting}: the checkpoint holds the state of another optimizer ({plain(found, 200)} instead of {expected}); "
        "continue with the optimizer that the run began with, or begin a new run"
    )
