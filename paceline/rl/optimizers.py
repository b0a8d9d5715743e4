"""Optimizers by name or import path, and learning rates as pure functions of the step.

The learner builds one optimizer from its named master weights. Those in `OPTIMIZERS` have names; `module:Class` or
`path/to/file.py:Class` is a class of the user's with the interface of `torch.optim.Optimizer`, and nothing else is ever
called. torch is imported only when an optimizer is built, so that settings can check a name for free. No option is
dropped silently: one that an optimizer does not accept is an error.

`foreach` and `fused` are off by default. Fused AdamW on a CPU gives the last few elements of a tensor other bits than
the rest, so its result depends on how weights are split into tensors; and by default torch chooses one of the three by
device. One tensor at a time gives every element the same bits in any grouping (a test checks both).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.core.config import nearest
from paceline.core.documents import brief
from paceline.core.plugins import call_own, find_own, load_own
from paceline.rl.algorithms import unknown

if TYPE_CHECKING:
    from torch import Tensor

Schedule = Literal["constant", "linear", "cosine"]
Parameters = Mapping[str, "Tensor"]

SETTING = "rl.optimizer"
SINGLE_TENSOR = {"foreach": False, "fused": False}
OWN_SETTINGS = ("lr", "weight_decay", "betas")
"""Options with their own setting, which would otherwise have two values."""
NOT_HIDDEN = ("embed_tokens", "lm_head")
"""Matrices that are tables of tokens rather than maps between hidden states."""
LR_SCALE = "lr_scale"
"""Key of a parameter group whose learning rate is a multiple of the schedule's."""
CELO2_BETAS = (0.9, 0.95)
"""AdamW's decay rates beside CELO2, as published."""
WHOLE_TENSORS = ("muon", "celo2", "adamw_bf16", "adamw_8bit")
"""Optimizers whose step needs all of a tensor, where ranks of a sharded learner hold parts."""


class OptimizerLike(Protocol):
    """The part of `torch.optim.Optimizer` that the learner uses."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def step(self) -> Callable[..., Any]:
        """Called without arguments, or with `loss` if it has a parameter of that name."""

    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class JointOptimizer:
    """Several optimizers, each with its own parameters, that step together."""

    def __init__(self, parts: list[OptimizerLike]):
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


@dataclass(frozen=True)
class _Order:
    """What the settings ask for."""

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float] | None
    options: Mapping[str, Any]
    setting: str


def build_optimizer(
    name: str,
    parameters: Parameters,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | None = None,
    options: Mapping[str, Any] | None = None,
    setting: str = SETTING,
) -> OptimizerLike:
    """The optimizer called `name` (or an import path) over these parameters, whose order must not change on resume.

    Weight decay applies to matrices, not to norms and biases. `betas` None keeps the optimizer's default. `setting` is
    where the user named it.
    """
    check_optimizer(name)
    order = _Order(name, lr, weight_decay, betas, dict(options or {}), setting)
    for key in OWN_SETTINGS:
        if key in order.options:
            raise ValueError(f"optimizer option {key!r} has its own setting: set {setting.rpartition('.')[0]}.{key}")
    if name in HIDDEN_ONLY:
        return _build_joint(parameters, order)
    return _build(parameters, order)


def check_optimizer(name: str) -> str:
    """Return the name if it is one of ours or looks like an import path."""
    module, colon, attribute = name.partition(":")
    if name in OPTIMIZERS or (colon and module and attribute):
        return name
    raise ValueError(f"{unknown('optimizer', name, list(OPTIMIZERS))}, or an import path like torch.optim:RMSprop")


def check_available(name: str, options: Mapping[str, Any], setting: str = SETTING) -> None:
    """Raise a ValueError if a module or file that an optimizer is made from is not there. Imports and opens nothing."""
    if name == "celo2":
        check_weights_file(options, setting)
    elif name not in OPTIMIZERS:
        find_own(name, setting, "class")


def check_weights_file(options: Mapping[str, Any], setting: str = SETTING) -> Path:
    """The file with CELO2's weights, which only the user's options name; a ValueError if it is not there."""
    given = options.get("weights")
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError(
            f"{setting}: celo2 is a learned optimizer and needs its weights: set {setting}_options.weights=FILE"
        )
    file = Path(given).expanduser()
    if not file.is_file():
        raise ValueError(f"{setting}_options.weights: there is no file {brief(str(file))}; name one in safetensors")
    return file


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


def _adamw_bf16() -> Any:
    from paceline.rl.small_adamw import AdamWBf16

    return AdamWBf16


def _adamw_8bit() -> Any:
    from paceline.rl.small_adamw import AdamW8bit

    return AdamW8bit


def _celo2() -> Any:
    from paceline.rl.celo2 import Celo2

    return Celo2


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": _adamw,
    "adamw_bf16": _adamw_bf16,
    "adamw_8bit": _adamw_8bit,
    "sgd": _sgd,
    "muon": _muon,
    "celo2": _celo2,
}
HIDDEN_ONLY = ("muon", "celo2")
"""Optimizers for the matrices between hidden states; AdamW takes the rest."""


def _find_class(name: str, setting: str) -> Any:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]()
    found = load_own(name, setting, "class", inspect.isclass)  # calling anything else, say `os:system`, could do harm
    for member in ("step", "zero_grad", "state_dict", "load_state_dict"):
        if not callable(getattr(found, member, None)):
            raise ValueError(f"optimizer {name!r} has no {member!r}: it needs the interface of torch.optim.Optimizer")
    _check_step(found, name)
    return found


def _check_step(found: Any, name: str) -> None:
    """Reject an optimizer that wants more for a step than the loss, such as a closure that evaluates it again."""
    _, *parameters = inspect.signature(found.step).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for one in parameters:
        if one.default is one.empty and one.kind not in optional and one.name != "loss":
            raise ValueError(
                f"optimizer {name!r} cannot step without {one.name!r}; a step gets the loss, as step(loss=...), or "
                "nothing"
            )


def take_step(optimizer: OptimizerLike, loss: float) -> None:
    """Take a step on the gradients that the parameters hold. An optimizer whose `step` takes a loss gets this one."""
    found = inspect.signature(optimizer.step).parameters.get("loss")
    if found is None:
        optimizer.step()
        return
    import torch

    optimizer.step(loss=torch.tensor(loss))


def _build_joint(parameters: Parameters, order: _Order) -> OptimizerLike:
    """Muon or CELO2 for the matrices between hidden states, AdamW for embeddings, head, norms and biases.

    Muon's steps are scaled to the size of AdamW's by default, so that one learning rate serves both. Those of CELO2
    have a root mean square of 1, as AdamW's first; `adam_lr_mult` raises AdamW's rate above its own.
    """
    hidden = {key: p for key, p in parameters.items() if is_hidden(key, p.ndim)}
    others = {key: p for key, p in parameters.items() if key not in hidden}
    if not hidden:
        raise ValueError(f"optimizer {order.name!r} is for 2-D weight matrices, and there are none here; use adamw")
    options, betas, scale = dict(order.options), order.betas, 1.0
    if order.name == "muon":
        options = {"adjust_lr_fn": "match_rms_adamw"} | options
    else:
        options["weights"] = check_weights_file(options, order.setting)
        scale, betas = _positive("adam_lr_mult", options.pop("adam_lr_mult", scale)), betas or CELO2_BETAS
    parts = [_build(hidden, replace(order, betas=None, options=options))]
    if others:
        parts.append(_build(others, replace(order, name="adamw", betas=betas, options={})))
        if scale != 1:
            for group in parts[-1].param_groups:
                group[LR_SCALE] = scale
    return JointOptimizer(parts)


def is_hidden(name: str, num_dims: int) -> bool:
    """Whether a parameter is a matrix between hidden states."""
    return num_dims == 2 and not any(word in name for word in NOT_HIDDEN)


def _positive(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"optimizer option {key!r} must be a number above 0; found {brief(value)}")
    return float(value)


def _build(parameters: Parameters, order: _Order) -> OptimizerLike:
    name, cls = order.name, _find_class(order.name, order.setting)
    accepted = inspect.signature(cls).parameters
    takes_anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    wanted = dict(order.options)
    if order.betas is not None:
        wanted["betas"] = tuple(order.betas)
    if order.weight_decay:
        wanted["weight_decay"] = order.weight_decay
    for key in wanted:
        if key not in accepted and not takes_anything:
            raise ValueError(f"optimizer {name!r} does not accept {key!r}" + _hint(nearest(key, list(accepted))))
    wanted = {key: value for key, value in SINGLE_TENSOR.items() if key in accepted} | wanted
    has_decay = "weight_decay" in accepted or "weight_decay" in wanted
    groups = _decay_groups(parameters, order.weight_decay) if has_decay else [{"params": list(parameters.values())}]
    optimizer: OptimizerLike = call_own(lambda: cls(groups, lr=order.lr, **wanted), name, order.setting)
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
        group["lr"] = lr * group.get(LR_SCALE, 1.0)
