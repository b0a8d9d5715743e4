"""Optimizers by name and import path, one result for any grouping, state that survives a file, learning rates."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.rl.optimizer_state import require_fitting
from paceline.rl.optimizers import (
    OPTIMIZERS,
    JointOptimizer,
    OptimizerLike,
    Schedule,
    build_optimizer,
    check_available,
    check_optimizer,
    learning_rate,
    set_learning_rate,
    take_step,
)

EVERY_KIND = [
    ("adamw", {}),
    ("sgd", {"momentum": 0.9}),
    ("muon", {}),
    ("adamw_bf16", {}),
    ("adamw_8bit", {}),
    ("torch.optim:RMSprop", {"alpha": 0.9}),
    ("torch.optim:Adam", {"amsgrad": True}),
]
kinds = pytest.mark.parametrize(("name", "options"), EVERY_KIND, ids=[name for name, _ in EVERY_KIND])


def weights() -> dict[str, Tensor]:
    """Named like a small checkpoint: table, matrices, vectors."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (7, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.0.mlp.down_proj.weight": (4, 6),
        "model.norm.weight": (4,),
        "lm_head.weight": (7, 4),
    }
    return {name: torch.nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}


def take_steps(optimizer: OptimizerLike, parameters: dict[str, Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(*parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def is_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


# ---- numbers


def test_adamw_by_hand() -> None:
    """First step: the moments' corrections cancel, so it is lr x sign(gradient); the matrix decays first."""
    matrix, vector = torch.nn.Parameter(torch.tensor([[2.0, -2.0]])), torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer("adamw", {"m": matrix, "v": vector}, lr=0.1, weight_decay=0.5)
    matrix.grad, vector.grad = torch.tensor([[3.0, 5.0]]), torch.tensor([-7.0])
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.tensor([[2 * 0.95 - 0.1, -2 * 0.95 - 0.1]]))
    torch.testing.assert_close(vector.detach(), torch.tensor([2.1]))


def test_sgd_by_hand() -> None:
    vector = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer("sgd", {"v": vector}, lr=0.1, options={"momentum": 0.5})
    for _ in range(2):
        vector.grad = torch.tensor([1.0])
        optimizer.step()
    torch.testing.assert_close(vector.detach(), torch.tensor([2 - 0.1 - 0.15]))


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    parameters = weights()
    optimizer = build_optimizer("muon", parameters, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    assert isinstance(optimizer, JointOptimizer)
    hidden, *rest = optimizer.param_groups
    names = {id(p): name for name, p in parameters.items()}
    assert [names[id(p)] for p in hidden["params"]] == [name for name in parameters if "mlp" in name]
    assert hidden["adjust_lr_fn"] == "match_rms_adamw" and hidden["weight_decay"] == 0.1
    assert [[names[id(p)] for p in group["params"]] for group in rest] == [
        ["model.embed_tokens.weight", "lm_head.weight"],
        ["model.norm.weight"],
    ]
    assert [(group["weight_decay"], group["betas"]) for group in rest] == [(0.1, (0.8, 0.9)), (0.0, (0.8, 0.9))]


def test_muon_moves_every_weight_about_as_far_as_adamw() -> None:
    """One learning rate for both: AdamW's first step is lr everywhere, Muon's a fifth of it, as AdamW's later ones."""
    sizes = {}
    for name in ("muon", "adamw"):
        parameters, before = weights(), weights()
        take_steps(build_optimizer(name, parameters, lr=0.01), parameters, 0, 1)
        sizes[name] = {key: (p - before[key]).detach().square().mean().sqrt().item() for key, p in parameters.items()}
    assert all(size == pytest.approx(0.01, rel=1e-3) for size in sizes["adamw"].values())
    for key, size in sizes["muon"].items():
        assert size == pytest.approx(0.002 if "mlp" in key else 0.01, rel=0.25)


def test_weight_decay_of_settings_beats_an_optimizers_own_default() -> None:
    """torch's AdamW decays by 0.01 and Muon by 0.1 unless told otherwise."""
    for name in OPTIMIZERS.keys() - {"celo2"}:  # has none of its own
        optimizer = build_optimizer(name, weights(), lr=0.1)
        assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)


# ---- one result


def steps_in_parts(part_size: int, options: dict[str, Any]) -> Tensor:
    """The same 1,003 numbers as one parameter or as many."""
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(1003, generator=generator), torch.randn(5, 1003, generator=generator)
    parts = {str(i): torch.nn.Parameter(part.clone()) for i, part in enumerate(values.split(part_size))}
    optimizer = build_optimizer("adamw", parts, lr=0.01, options=options)
    for gradient in gradients:
        for parameter, part in zip(parts.values(), gradient.split(part_size), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in parts.values()])


@pytest.mark.parametrize("part_size", [100, 17, 5, 1])
def test_how_weights_are_cut_into_tensors_changes_no_bit(part_size: int) -> None:
    assert torch.equal(steps_in_parts(part_size, {}), steps_in_parts(1003, {}))


def test_fused_steps_would_show() -> None:
    """The control, and the reason why fused is off: its result depends on where a tensor ends."""
    assert not torch.equal(steps_in_parts(5, {"fused": True}), steps_in_parts(1003, {"fused": True}))


@kinds
def test_one_tensor_after_the_other_unless_asked(name: str, options: dict[str, Any]) -> None:
    for group in build_optimizer(name, weights(), lr=0.1, options=options).param_groups:
        assert all(group[key] is False for key in ("foreach", "fused") if key in group), "None is torch's own choice"


def test_foreach_can_be_asked_for() -> None:
    optimizer = build_optimizer("adamw", weights(), lr=0.1, options={"foreach": True})
    assert all(group["foreach"] is True for group in optimizer.param_groups)


@kinds
def test_state_survives_a_file_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    straight = weights()
    take_steps(build_optimizer(name, straight, lr=0.01, weight_decay=0.1, options=options), straight, 0, 6)

    stopped = weights()
    optimizer = build_optimizer(name, stopped, lr=0.01, weight_decay=0.1, options=options)
    take_steps(optimizer, stopped, 0, 3)
    file = io.BytesIO()
    torch.save({"weights": {n: p.detach() for n, p in stopped.items()}, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed: dict[str, Tensor] = {n: torch.nn.Parameter(p) for n, p in saved["weights"].items()}
    optimizer = build_optimizer(name, resumed, lr=0.5, weight_decay=0.1, options=options)
    fresh: dict[str, Tensor] = {n: torch.nn.Parameter(p.detach().clone()) for n, p in resumed.items()}
    optimizer.load_state_dict(saved["optimizer"])
    take_steps(optimizer, resumed, 3, 6)
    assert is_equal(resumed, straight)

    take_steps(build_optimizer(name, fresh, lr=0.01, weight_decay=0.1, options=options), fresh, 3, 6)
    assert not is_equal(fresh, straight), "the control: without its state the optimizer ends elsewhere"


# ---- names and errors


class Bare:
    """Looks like an optimizer until one looks closer."""

    def __init__(self, params: Any, lr: float):
        self.param_groups = params

    def step(self) -> None: ...


class Signed(torch.optim.Optimizer):
    """A user's own: lr x sign of the gradient, no weight decay."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0):
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * group["scale"] * p.grad.sign())


class Polyak(torch.optim.SGD):
    """A user's own that wants the loss: the step is as long as the loss allows."""

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * loss * p.grad)


class MayTakeLoss(Polyak):
    """As published learned optimizers do."""

    def step(self, loss: Tensor | None = None) -> None:  # type: ignore[override]
        assert loss is not None
        super().step(loss)


class Broken(torch.optim.SGD):
    def __init__(self, params: Any, lr: float):
        raise TypeError("not today")


class Groupless:
    """An optimizer whose learning rate nobody can set."""

    def __init__(self, params: Any, lr: float): ...
    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def state_dict(self) -> None: ...
    def load_state_dict(self, state: Any) -> None: ...


CALLS: list[Any] = []


def called(*given: Any, **options: Any) -> torch.optim.Optimizer:
    """As `os:system`, it does something when it is called."""
    CALLS.append((given, options))
    return torch.optim.SGD(*given, **options)


class Factory:
    """An object that can be called, and has the interface."""

    step = zero_grad = state_dict = load_state_dict = param_groups = called
    __call__ = called


FACTORY = Factory()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("os:system", "builtin_function_or_method"),
        (f"{__name__}:called", "function"),
        (f"{__name__}:FACTORY", "Factory"),
    ],
)
def test_nothing_but_a_class_of_optimizers_is_called(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"rl.optimizer: .* is a {kind}, not a class"):
        build_optimizer(name, weights(), lr=0.1)
    assert CALLS == []


def test_an_import_path_is_an_optimizer() -> None:
    parameters = weights()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = build_optimizer(f"{__name__}:Signed", parameters, lr=0.1, options={"scale": 2.0})
    take_steps(optimizer, parameters, 0, 1)
    assert all(((p - before[name]).abs() - 0.2).abs().max() < 1e-6 for name, p in parameters.items())


@pytest.mark.parametrize("name", ["Polyak", "MayTakeLoss", "Signed"])
def test_an_optimizer_that_wants_the_loss_gets_it(name: str) -> None:
    """One that wants nothing is called with nothing."""
    vector = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer(f"{__name__}:{name}", {"v": vector}, lr=0.1)
    vector.grad = torch.tensor([3.0])
    take_step(optimizer, 0.5)
    assert float(vector.detach()) == pytest.approx(2 - 0.1 * (1 if name == "Signed" else 0.5 * 3))


def test_a_file_of_the_users_is_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By path, and as a module beside the user, which is not on Python's path when a command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    source = "import torch\nclass Mine(torch.optim.SGD):\n    pass\n"
    (tmp_path / "my_rule.py").write_text(source)
    for name in ("my_rule.py:Mine", "my_rule:Mine"):
        check_available(check_optimizer(name), {})
        assert "my_rule" not in sys.modules or name == "my_rule:Mine", "a check imports nothing"
        assert type(build_optimizer(name, weights(), lr=0.1)).__name__ == "Mine"
    monkeypatch.delitem(sys.modules, "my_rule")
    for name, message in (
        ("my_rule.py:Mein", "rl.optimizer: my_rule.py has no class Mein: did you mean Mine"),
        ("my_rules.py:Mine", "rl.optimizer: there is no file .*did you mean my_rule.py"),
        ("my_rules:Mine", "rl.optimizer: found no module my_rules here or installed: did you mean my_rule"),
    ):
        with pytest.raises(ValueError, match=message):
            check_available(name, {})


# ---- a state of another kind


def other_states() -> list[tuple[str, str, str]]:
    return [
        ("sgd", "adamw", "step, exp_avg, exp_avg_sq instead of momentum_buffer"),
        ("adamw", "sgd", "momentum_buffer instead of step, exp_avg"),
        ("adamw", "adamw_bf16", "exp_avg_bf16"),
        ("adamw_8bit", "adamw_bf16", "exp_avg_sq_bf16 instead of step, exp_avg_8bit"),
        ("adamw", "muon", "parts instead of AdamW"),
        ("muon", "adamw", "one optimizer instead of several parts"),
    ]


@pytest.mark.parametrize(("ours", "theirs", "message"), other_states())
def test_a_state_of_another_optimizer_is_refused(ours: str, theirs: str, message: str) -> None:
    def begin(name: str) -> tuple[OptimizerLike, dict[str, Tensor]]:
        parameters = weights()
        options = {"momentum": 0.9} if name == "sgd" else {}
        optimizer = build_optimizer(name, parameters, lr=0.1, options=options)
        take_steps(optimizer, parameters, 0, 1)
        return optimizer, parameters

    other, own = begin(theirs)[0].state_dict(), begin(ours)
    with pytest.raises(ValueError, match=rf"rl.optimizer: the checkpoint holds the state of another .*{message}"):
        require_fitting(own[0], other, "rl.optimizer")
    require_fitting(own[0], own[0].state_dict(), "rl.optimizer")


def test_a_state_of_other_shapes_is_refused() -> None:
    states = []
    for shape in ((4, 6), (6, 4)):
        parameter = torch.nn.Parameter(torch.ones(shape))
        optimizer = build_optimizer("adamw", {"m": parameter}, lr=0.1)
        take_steps(optimizer, {"m": parameter}, 0, 1)
        states.append((optimizer, optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"exp_avg of shape \(6, 4\) instead of \(4, 6\)"):
        require_fitting(states[0][0], states[1][1], "rl.optimizer")
    two = build_optimizer("adamw", weights(), lr=0.1)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters instead of groups of \[4, 1\]"):
        require_fitting(two, states[0][1], "rl.optimizer")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamv", {}, r"unknown optimizer 'adamv': did you mean 'adamw'\? .*torch.optim:RMSprop"),
        (":Adam", {}, "unknown optimizer"),
        ("torch.optim:AdamV", {}, r"torch.optim has no class AdamV: did you mean Adam"),
        ("no.such.module:Adam", {}, "rl.optimizer: found no module no here or installed: name a file"),
        ("adamw", {"options": {"momentm": 1}}, "optimizer 'adamw' does not accept 'momentm'"),
        ("sgd", {"options": {"momentm": 1}}, r"does not accept 'momentm'; did you mean 'momentum'\?"),
        ("sgd", {"betas": (0.9, 0.99)}, "optimizer 'sgd' does not accept 'betas'"),
        (f"{__name__}:Signed", {"weight_decay": 0.1}, "does not accept 'weight_decay'"),
        ("adamw", {"options": {"lr": 1.0}}, "set rl.lr"),
        ("adamw", {"options": {"weight_decay": 1.0}}, "set rl.weight_decay"),
        ("torch.optim:LBFGS", {}, "'torch.optim:LBFGS' cannot step without 'closure'; a step gets the loss"),
        (f"{__name__}:Broken", {}, r"Broken raised TypeError: .* \(test_optimizers.py:[0-9]+, in __init__\)"),
        (f"{__name__}:Bare", {}, "has no 'zero_grad': it needs the interface of torch.optim"),
        ("torch.nn:Module", {}, "has no 'step': it needs the interface of torch.optim"),
        (f"{__name__}:Groupless", {}, "has no 'param_groups': it needs the interface of torch.optim"),
    ],
)
def test_bad_requests_name_the_fix(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, weights(), lr=0.1, **arguments)


def test_muon_needs_matrices_and_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2-D weight matrices"):
        build_optimizer("muon", {"model.norm.weight": weights()["model.norm.weight"]}, lr=0.1)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"has no Muon; use torch 2.9 or newer, or rl.optimizer=adamw"):
        build_optimizer("muon", weights(), lr=0.1)
    build_optimizer("adamw", weights(), lr=0.1)


def test_names_are_checked_without_building() -> None:
    assert check_optimizer("muon") == "muon" and check_optimizer("my.module:Class") == "my.module:Class"


# ---- learning rates


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
    ],
)
def test_schedules_by_hand(schedule: Schedule, rates: list[float]) -> None:
    """Two steps of warm-up, four of the schedule; a step after the last one stays at the floor."""
    found = [learning_rate(s, peak=2.0, schedule=schedule, warmup_steps=2, num_steps=6) for s in range(7)]
    assert found == pytest.approx([2 * rate for rate in rates], abs=1e-12)
    floor = [learning_rate(s, peak=2.0, schedule=schedule, warmup_steps=2, num_steps=6, floor=0.1) for s in (2, 6, 60)]
    assert floor == pytest.approx([2.0] + [2.0 if schedule == "constant" else 0.2] * 2)


def test_schedules_at_the_edges() -> None:
    assert learning_rate(0, peak=1.0, schedule="cosine", warmup_steps=0, num_steps=1) == 1.0
    assert learning_rate(4, peak=1.0, schedule="linear", warmup_steps=9, num_steps=5) == pytest.approx(5 / 9)
    assert all(learning_rate(s, peak=1.0, schedule="linear", warmup_steps=3, num_steps=20) > 0 for s in range(20))


def test_every_group_gets_the_learning_rate() -> None:
    parameters = weights()
    optimizer = build_optimizer("muon", parameters, lr=0.1)
    set_learning_rate(optimizer, 0.0)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    take_steps(optimizer, parameters, 0, 1)
    assert is_equal(parameters, before)
