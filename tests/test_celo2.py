"""CELO2: the update by hand, fast forms against the plain one, its weights' file, its state, and what it learns.

The network's weights here are made by the tests: random ones, and ones whose answer is known.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from celo2_weights import momentum_tensors, network_tensors, written
from gpu_device import DEVICE
from torch import Tensor

from paceline.kernels.cpu import celo2 as cpu_kernels
from paceline.kernels.triton import celo2 as gpu_kernels
from paceline.rl import celo2
from paceline.rl.celo2 import BY_ELEMENT, Celo2, Stack, features_of, first_layer, normalised, orthogonalised
from paceline.rl.celo2_network import GROUPS, NUM_FEATURES, WIDTH, load_network
from paceline.rl.memory_plan import state_bytes
from paceline.rl.optimizers import JointOptimizer, build_optimizer, set_learning_rate, take_step

SHAPES = [(13, 37), (13, 37), (40, 17), (16, 16), (1, 5), (64, 130)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return written(tmp_path, network_tensors())


def matrices(device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((torch.randn(*shape, generator=generator) * 0.02).to(device)) for shape in SHAPES]


def take_steps(optimizer: Any, parameters: list[Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = torch.randn(*p.shape, generator=generator).to(p) * 0.05 * (1 + step)
        optimizer.step()


# ---- the rule


def test_the_features_by_hand() -> None:
    """One step on a wide matrix: momenta, mean squares and factors are a few multiplications each."""
    weight, gradient = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[0.5, -0.25, 0.0]]])
    stack = Stack.of([weight[0]], {})
    celo2.advance_moments(stack, gradient)
    celo2.advance_means(stack, gradient)
    found = torch.stack(features_of(stack, weight, gradient))[:, 0, 0].numpy()
    g, p = gradient[0, 0].numpy().astype(np.float64), weight[0, 0].numpy().astype(np.float64)
    share = 1 - np.array([0.9, 0.99, 0.999])[:, None]
    m, v = share * g, 0.05 * g**2
    inverse = 1 / np.sqrt(v + 1e-8)
    row = share * (g**2).mean() * np.ones(3)
    column = share * g**2
    factor = 1 / np.sqrt(np.maximum(row / (row[:, :1] + 1e-9), 1e-9)) / np.sqrt(np.maximum(column, 1e-9))
    expected = np.concatenate(
        [
            [g, np.clip(g, -0.1, 0.1), p], m, [v], m * inverse, [inverse], g * factor, [g * inverse],
            row, column, 1 / np.sqrt(row + 1e-8), 1 / np.sqrt(column + 1e-8), m * factor,
        ]
    )  # fmt: skip
    assert found.shape == (NUM_FEATURES, 3)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)


def test_a_tall_matrix_is_a_wide_one_on_its_side(weights: Path) -> None:
    """The rule tells rows from columns by which side is longer."""
    wide, tall = (torch.nn.Parameter(torch.linspace(-1, 1, 40).view(5, 8)) for _ in range(2))
    tall = torch.nn.Parameter(wide.detach().T.contiguous())
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    wide.grad, tall.grad = gradient, gradient.T.contiguous()
    for parameter in (wide, tall):
        Celo2([parameter], lr=0.1, weights=weights).step()
    torch.testing.assert_close(wide.detach(), tall.detach().T)


@pytest.mark.parametrize("plain", [False, True])
def test_a_step_by_hand(tmp_path: Path, plain: bool) -> None:
    """A network that answers with the momentum: its orthogonal directions, with a root mean square of 1."""
    parameter = torch.nn.Parameter(torch.full((2, 3), 2.0))
    gradient = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    parameter.grad = gradient.clone()
    Celo2([parameter], lr=0.1, weights=written(tmp_path, momentum_tensors()), weight_decay=0.5, plain=plain).step()
    orthogonal = orthogonalised(gradient[None], torch.float32)[0]
    assert torch.equal(orthogonal != 0, gradient != 0) and 0.6 < float(orthogonal.max()) < 1.3
    expected = 2 * (1 - 0.1 * 0.5) - 0.1 * normalised(orthogonal)
    torch.testing.assert_close(parameter.detach(), expected)
    assert float(normalised(orthogonal).square().mean()) == pytest.approx(1, rel=1e-5)


def test_orthogonalised_is_nearly_so() -> None:
    matrix = torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(0))
    for given in (matrix, matrix.mT):
        values = torch.linalg.svdvals(orthogonalised(given, torch.float32))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_large_gradients_are_clamped(weights: Path) -> None:
    ends = []
    for size in (1e3, 1e6):
        parameter = torch.nn.Parameter(torch.ones(4, 6))
        parameter.grad = torch.full((4, 6), size)
        Celo2([parameter], lr=0.1, weights=weights).step()
        ends.append(parameter.detach())
    assert torch.equal(*ends)


# ---- fast forms


def test_the_fast_form_is_the_plain_one(weights: Path) -> None:
    fast, plain = matrices(), matrices()
    optimizers = [Celo2(own, lr=1e-2, weights=weights, weight_decay=0.1, plain=own is plain) for own in (fast, plain)]
    for own, optimizer in zip((fast, plain), optimizers, strict=True):
        take_steps(optimizer, own, 0, 5)
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)
        for name in celo2.STATE:
            ours, theirs = (opt.state[p][name] for opt, p in zip(optimizers, (one, other), strict=True))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_fault_in_the_network_would_show(weights: Path, tmp_path: Path) -> None:
    """The control: one weight of 347, changed a little."""
    tensors = network_tensors()
    tensors["first_layer_weights.13"][3, 1] += 0.5
    (tmp_path / "other").mkdir()
    ends = []
    for file in (weights, written(tmp_path / "other", tensors)):
        own = matrices()
        take_steps(Celo2(own, lr=1e-2, weights=file), own, 0, 3)
        ends.append(own)
    assert any((a - b).detach().abs().max() > 1e-4 for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("shape", [(2, 13, 37), (1, 40, 17), (1, 20, 130)])
def test_the_kernels_of_a_gpu_are_those_of_a_cpu(weights: Path, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    network = load_network(weights)
    values, gradients = (torch.randn(*shape, generator=generator) for _ in range(2))
    stacks = [Stack.of(list(values.to(device)), {}) for device in ("cpu", DEVICE)]
    for stack in stacks:
        stack.momenta.copy_(torch.linspace(-1, 1, stack.momenta.numel()).view_as(stack.momenta))
        stack.squares.copy_(torch.linspace(0, 2, stack.squares.numel()).view_as(stack.squares))
        celo2.advance_means(stack, gradients.to(stack.squares.device))
    found = []
    for stack, kernels in zip(stacks, (cpu_kernels, gpu_kernels), strict=True):
        device = stack.squares.device
        factors = tuple(own.contiguous() for own in celo2.factors(stack))
        given = (values.to(device), gradients.to(device), stack.momenta, stack.squares, *factors)
        means = kernels.advance(*given)
        layer = first_layer(stack, means, network.to(device))
        learned = network.to(device)
        rest = learned.hidden, learned.hidden_bias, learned.output, learned.output_bias
        answer = kernels.directions(*given, layer.weights, layer.by_row, layer.by_column, *rest)
        found.append((stack.momenta, stack.squares, means, answer))
    assert found[0][2].shape == (shape[0], len(BY_ELEMENT))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-4, atol=1e-5)


def test_steps_repeat_bit_for_bit(weights: Path) -> None:
    ends = []
    for _ in range(2):
        own = matrices()
        take_steps(Celo2(own, lr=1e-2, weights=weights), own, 0, 3)
        ends.append(own)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_matrix_without_a_gradient_stays(weights: Path) -> None:
    own = matrices()
    before = [p.detach().clone() for p in own]
    optimizer = Celo2(own, lr=1e-2, weights=weights)
    for p in own[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(own[0], before[0]) and not optimizer.state[own[0]]["momenta"].any()
    assert not torch.equal(own[1], before[1]), "of the same shape, with a gradient"


def test_bf16_weights_and_bf16_rounds(weights: Path) -> None:
    own: list[Tensor] = [torch.nn.Parameter(torch.randn(16, 24).bfloat16())]
    before = own[0].detach().clone()
    take_steps(Celo2(own, lr=0.1, weights=weights, ns_dtype="bf16"), own, 0, 2)
    assert own[0].dtype == torch.bfloat16 and 0.05 < float((own[0] - before).detach().float().abs().mean()) < 0.4


# ---- state


def named() -> dict[str, Tensor]:
    shapes = {
        "model.embed_tokens.weight": (7, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.1.mlp.up_proj.weight": (6, 4),
        "model.layers.0.mlp.down_proj.weight": (4, 6),
        "model.norm.weight": (4,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}


def test_it_is_built_for_matrices_and_adamw_takes_the_rest(weights: Path) -> None:
    options = {"weights": str(weights), "adam_lr_mult": 20}
    optimizer = build_optimizer("celo2", named(), lr=1e-3, weight_decay=0.1, options=options)
    assert isinstance(optimizer, JointOptimizer)
    learned, table, norm = optimizer.param_groups
    assert [tuple(p.shape) for p in learned["params"]] == [(6, 4), (6, 4), (4, 6)] and learned["weight_decay"] == 0.1
    assert [group["weight_decay"] for group in (table, norm)] == [0.1, 0] and table["betas"] == (0.9, 0.95)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 10, 10]


@pytest.mark.parametrize("plain", [False, True])
def test_state_survives_a_file_bit_for_bit(weights: Path, plain: bool) -> None:
    def begin(parameters: dict[str, Tensor]) -> Any:
        options = {"weights": weights, "plain": plain}
        return build_optimizer("celo2", parameters, lr=0.01, weight_decay=0.1, options=options)

    straight = named()
    take_steps(begin(straight), list(straight.values()), 0, 6)
    stopped = named()
    optimizer = begin(stopped)
    take_steps(optimizer, list(stopped.values()), 0, 3)
    file = io.BytesIO()
    torch.save({"weights": {n: p.detach() for n, p in stopped.items()}, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed: dict[str, Tensor] = {n: torch.nn.Parameter(p) for n, p in saved["weights"].items()}
    fresh: dict[str, Tensor] = {n: torch.nn.Parameter(p.detach().clone()) for n, p in resumed.items()}
    optimizer = begin(resumed)
    take_steps(optimizer, [torch.nn.Parameter(p.detach().clone()) for p in resumed.values()], 0, 1)
    optimizer.load_state_dict(saved["optimizer"])
    take_steps(optimizer, list(resumed.values()), 3, 6)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    take_steps(begin(fresh), list(fresh.values()), 3, 6)
    assert not all(torch.equal(fresh[name], straight[name]) for name in straight), "the control: without its state"


def test_the_memory_plan_knows_its_state(weights: Path) -> None:
    parameters = named()
    optimizer = build_optimizer("celo2", parameters, lr=0.1, options={"weights": weights})
    take_steps(optimizer, list(parameters.values()), 0, 1)
    states = [state for part in optimizer.state_dict()["parts"] for state in part["state"].values()]
    found = sum(value.nbytes for state in states for name, value in state.items() if name != "step")
    assert found == state_bytes("celo2", {name: tuple(p.shape) for name, p in parameters.items()})


def test_a_schedule_still_reaches_it_after_a_resume(weights: Path) -> None:
    parameters = named()
    optimizer = build_optimizer("celo2", parameters, lr=0.1, options={"weights": weights})
    optimizer.load_state_dict(optimizer.state_dict())
    set_learning_rate(optimizer, 0.0)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    take_steps(optimizer, list(parameters.values()), 0, 1)
    assert all(torch.equal(before[name], p) for name, p in parameters.items())


# ---- the file


def in_columns(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same network in JAX's layout."""
    names = {
        **{f"first_layer_weights.{number}": f"w0.{number}" for number in range(len(GROUPS))},
        **{"first_layer_bias": "b0", "hidden.weight": "dense_w.0", "hidden.bias": "dense_b.0"},
        **{"output.weight": "dense_w.1", "output.bias": "dense_b.1"},
    }
    return {names[name]: tensor.T.contiguous() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}


def test_both_layouts_are_the_same_network(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tensors = network_tensors()
    found = [
        load_network(written(tmp_path / "a", tensors)),
        load_network(written(tmp_path / "b", in_columns(tensors))),
    ]
    for name in vars(found[0]):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))
    assert found[0].first.shape == (WIDTH, NUM_FEATURES)
    assert torch.equal(found[0].output, tensors["output.weight"][0])


def changed(**given: Tensor | None) -> dict[str, Tensor]:
    tensors = network_tensors() | {name.replace("__", "."): value for name, value in given.items() if value is not None}
    return {name: tensor for name, tensor in tensors.items() if given.get(name.replace(".", "__"), tensor) is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(hidden__bias=None), "lacks hidden.bias"),
        ({"model.norm.weight": torch.ones(3)}, "lacks w0.0"),
        (changed(extra=torch.ones(1)), "also holds extra"),
        (changed(hidden__weight=torch.ones(8, 9)), r"hidden.weight has shape \(8, 9\), not \(8, 8\)"),
        (changed(hidden__weight=torch.full((8, 8), torch.nan)), "hidden.weight must hold finite floats"),
        (changed(hidden__weight=torch.ones(8, 8, dtype=torch.int32)), "hidden.weight must hold finite floats"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=rf"weights of celo2: .*celo2.safetensors.*{message}"):
        build_optimizer("celo2", named(), lr=0.1, options={"weights": written(tmp_path, tensors)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"rl.optimizer: celo2 is a learned optimizer and needs its weights: set rl.optimizer_options"),
        ({"weights": 3}, "needs its weights"),
        ({"weights": "nowhere.safetensors"}, "rl.optimizer_options.weights: there is no file 'nowhere.safetensors"),
        ({"weights": __file__}, "test_celo2.py is truncated or damaged"),
        ({"adam_lr_mult": 0}, "'adam_lr_mult' must be a number above 0; found 0"),
        ({"ns_dtype": "int8"}, "'ns_dtype' must be float32 or bf16; found 'int8'"),
        ({"plane": True}, "optimizer 'celo2' does not accept 'plane'; did you mean 'plain'"),
    ],
)
def test_bad_options_name_the_fix(weights: Path, options: dict[str, Any], message: str) -> None:
    given = options if not options or "weights" in options else {"weights": weights, **options}
    with pytest.raises(ValueError, match=message):
        build_optimizer("celo2", named(), lr=0.1, options=given)


# ---- learning


def test_it_learns(tmp_path: Path) -> None:
    """A small regression, with the network that answers with the momentum: the loss falls by far more than half."""
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(64, 16, generator=generator), torch.randn(16, 8, generator=generator)
    layer: dict[str, Tensor] = {"model.layers.0.weight": torch.nn.Parameter(torch.zeros(8, 16))}
    options = {"weights": written(tmp_path, momentum_tensors())}
    optimizer = build_optimizer("celo2", layer, lr=0.05, options=options)
    losses = []
    for step in range(60):
        set_learning_rate(optimizer, 0.05 * (1 - step / 60))
        loss = (inputs @ layer["model.layers.0.weight"].T - inputs @ target).square().mean()
        loss.backward()
        take_step(optimizer, float(loss.detach()))
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.gpu
def test_a_gpu_repeats_and_agrees_with_the_plain_form(weights: Path) -> None:
    ends = []
    for plain in (False, False, True):
        own = matrices("cuda")
        optimizer = Celo2(own, lr=1e-2, weights=weights, weight_decay=0.1, plain=plain)
        take_steps(optimizer, own, 0, 3)
        state = {"state": {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}}
        resumed = Celo2(own, lr=0.5, weights=weights, plain=plain)
        resumed.load_state_dict({**optimizer.state_dict(), **state})
        take_steps(resumed, own, 3, 5)
        ends.append([p.detach().cpu() for p in own])
    assert all(torch.equal(one, other) for one, other in zip(ends[0], ends[1], strict=True))
    for one, other in zip(ends[0], ends[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
