"""Optimizers by name or import path, and learning rates as pure functions of the step.

The learner builds one optimizer from its named master weights. AdamW, SGD and Muon have names; `module:Class` is a
class with the interface of `torch.optim.Optimizer`, and nothing else is ever called. torch is imported only when an
optimizer is built, so that settings can check a name for free. No option is dropped silently: one that an optimizer
does not accept is an error.

`foreach` and `fused` are off by default. Fused AdamW on a CPU gives the last few elements of a tensor other bits than
the rest, so its result depends on how weights are split into tensors; and by default torch chooses one of the three by
device. One tensor at a time gives every element the same bits in any grouping (a test checks both).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.core.config import nearest
from paceline.rl.algorithms import unknown

if TYPE_CHECKING:
    from torch import Tensor

Schedule = Literal["constant", "linear", "cosine"]
Parameters = Mapping[str, "Tensor"]

SINGLE_TENSOR = {"foreach": False, "fused": False}
OWN_SETTINGS = ("lr", "weight_decay", "betas")
"""Options with their own setting, which would otherwise have two values."""
NOT_HIDDEN = ("embed_tokens", "lm_head")
"""Matrices that are tables of tokens rather than maps between hidden states."""


class OptimizerLike(Protocol):
    """The part of `torch.optim.Optimizer` that the learner uses."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class JointOptimizer:
    """Several optimizers, each with its own parameters, that step together."""

    def __init__(self, parts: list[OptimizerLike]):
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def build_optimizer(
    name: str,
    parameters: Parameters,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> OptimizerLike:
    """The optimizer called `name` (or `module:Class`) over these parameters, whose order must not change on resume.

    Weight decay applies to matrices, not to norms and biases. `betas` None keeps the optimizer's default.
    """
    check_optimizer(name)
    options = dict(options or {})
    for key in OWN_SETTINGS:
        if key in options:
            raise ValueError(f"optimizer option {key!r} has its own setting: set rl.{key}")
    if name == "muon":
        return _build_muon(parameters, lr, weight_decay, betas, options)
    return _build(_find_class(name), name, parameters, lr, weight_decay, betas, options)


def check_optimizer(name: str) -> str:
    """Return the name if it is one of ours or looks like an import path."""
    module, colon, attribute = name.partition(":")
    if name in OPTIMIZERS or (colon and module and attribute):
        return name
    raise ValueError(f"{unknown('optimizer', name, list(OPTIMIZERS))}, or an import path like torch.optim:RMSprop")


def check_installed(name: str) -> None:
    """Raise a ValueError if the package that an optimizer's import path begins with is not there. Imports nothing."""
    top = name.partition(":")[0].partition(".")[0]
    if name not in OPTIMIZERS and top and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ValueError(f"optimizer {name!r}: there is no module {top!r}; install it or fix the path")


def _adamw() -> Any:
    import torch

    return torch.optim.AdamW


def _sgd() -> Any:
    import torch

    return torch.optim.SGD


def _muon() -> Any:
    import torch

    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no Muon; use torch 2.9 or newer, or rl.optimizer=adamw")
    return torch.optim.Muon


OPTIMIZERS: dict[str, Callable[[], Any]] = {"adamw": _adamw, "sgd": _sgd, "muon": _muon}


def _find_class(name: str) -> Any:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]()
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"optimizer {name!r}: cannot import {module_name!r} ({error}); install it or fix the path"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        guess = nearest(attribute, classes)
        raise ValueError(f"optimizer {name!r}: {module_name} has no class {attribute!r}" + _hint(guess))
    _check_class(found, name)
    return found


def _check_class(found: Any, name: str) -> None:
    """Reject anything but a class of optimizers before it is called: calling `os:system` would already do harm."""
    if not inspect.isclass(found):
        kind = "function" if inspect.isroutine(found) else type(found).__name__
        raise ValueError(f"optimizer {name!r} is a {kind}, not a class; name a class like torch.optim:RMSprop")
    for member in ("step", "zero_grad", "state_dict", "load_state_dict"):
        if not callable(getattr(found, member, None)):
            raise ValueError(f"optimizer {name!r} has no {member!r}: it needs the interface of torch.optim.Optimizer")


def _build_muon(
    parameters: Parameters,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] | None,
    options: dict[str, Any],
) -> OptimizerLike:
    """Muon for the matrices between hidden states, AdamW for embeddings, head, norms and biases.

    Muon's steps are scaled to the size of AdamW's by default, so that one learning rate serves both.
    """
    hidden = {key: p for key, p in parameters.items() if p.ndim == 2 and not any(word in key for word in NOT_HIDDEN)}
    others = {key: p for key, p in parameters.items() if key not in hidden}
    if not hidden:
        raise ValueError("optimizer 'muon' is for 2-D weight matrices, and there are none here; use adamw")
    scaled = {"adjust_lr_fn": "match_rms_adamw"} | options
    parts = [_build(_muon(), "muon", hidden, lr, weight_decay, None, scaled)]
    if others:
        parts.append(_build(_adamw(), "adamw", others, lr, weight_decay, betas, {}))
    return JointOptimizer(parts)


def _build(
    cls: Any,
    name: str,
    parameters: Parameters,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] | None,
    options: dict[str, Any],
) -> OptimizerLike:
    accepted = inspect.signature(cls).parameters
    takes_anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    wanted = dict(options)
    if betas is not None:
        wanted["betas"] = tuple(betas)
    if weight_decay:
        wanted["weight_decay"] = weight_decay
    for key in wanted:
        if key not in accepted and not takes_anything:
            raise ValueError(f"optimizer {name!r} does not accept {key!r}" + _hint(nearest(key, list(accepted))))
    wanted = {key: value for key, value in SINGLE_TENSOR.items() if key in accepted} | wanted
    has_decay = "weight_decay" in accepted or "weight_decay" in wanted
    groups = _decay_groups(parameters, weight_decay) if has_decay else [{"params": list(parameters.values())}]
    optimizer: OptimizerLike = cls(groups, lr=lr, **wanted)
    if not hasattr(optimizer, "param_groups"):  # usually set by the constructor
        raise ValueError(f"optimizer {name!r} has no 'param_groups': it needs the interface of torch.optim.Optimizer")
    return optimizer


def _decay_groups(parameters: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, everything else without; explicit for both, as an optimizer's default may differ."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _hint(guess: str | None) -> str:
    return f"; did you mean {guess!r}?" if guess else ""


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, num_steps: int, floor: float = 0.0
) -> float:
    """Learning rate of a step (from 0): rising in equal steps to `peak`, then following the schedule to `floor` x peak.

    It is never 0 at either end: the first step of a warm-up and the last of a run both learn something.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    return peak * (floor + (1 - floor) * _SHAPES[schedule](progress))


_SHAPES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


def set_learning_rate(optimizer: OptimizerLike, lr: float) -> None:
    """Set this learning rate on every parameter group before a step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
