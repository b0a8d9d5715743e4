"""CELO2, a learned optimizer: a small network turns what is known of every weight into the direction of its step.

    gradient -> moments, row and column means -> 30 features, each divided by its root mean square over the matrix
             -> network -> direction -> orthogonalised (Newton-Schulz) -> root mean square 1 -> times the learning rate

The update rule is that of Moudgil and others (arXiv 2602.19142), the network's weights are read from a file
(`celo2_network.py`). It is for matrices; `optimizers.py` gives vectors and embeddings to AdamW. Kept of a matrix are
four floats per element and three per row and column.

Matrices of one shape are stacked and step together. The fast form never writes the features to memory: one pass over a
matrix advances the moments and sums up the squares of the features, the sums go into the network's first layer, and a
second pass applies it; what depends on the row or the column alone is computed once per row and column. The kernels are
`kernels/cpu/celo2.py` and `kernels/triton/celo2.py`. The plain form (`plain: true`) computes every feature as the rule
says: it is the oracle of the tests, and slow. Same state, same file; results agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.rl.celo2_network import Celo2Network, load_network

DECAYS = (0.9, 0.99, 0.999)
"""Of the momenta, and of the row and column means."""
SQUARE_DECAY = 0.95
LARGEST_GRADIENT, CLIP = 1000.0, 0.1
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
NUM_ROUNDS = 5
STACK_ELEMENTS = 2**26
"""Most elements of the matrices that step together, unless one alone has more."""
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
BY_ELEMENT = (*range(15), *range(27, 30))
"""Numbers of the features that differ from element to element."""
BY_VECTOR = tuple(range(15, 27))
"""Those that depend on the row or the column alone: means and their inverse roots, at three decays."""
STATE = ("momenta", "squares", "row_means", "column_means")


@dataclass(frozen=True, eq=False)
class Stack:
    """Matrices of one shape, and what is kept of them."""

    parameters: Sequence[Tensor]
    group: dict[str, Any]
    momenta: Tensor
    """[matrices, 3, rows, columns]"""
    squares: Tensor
    """[matrices, rows, columns]: mean squares."""
    row_means: Tensor
    """[matrices, 3, rows]: mean squares of a row."""
    column_means: Tensor
    """[matrices, 3, columns]"""

    @classmethod
    def of(cls, parameters: Sequence[Tensor], group: dict[str, Any]) -> Stack:
        rows, columns = parameters[0].shape
        count, device = len(parameters), parameters[0].device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=torch.float32, device=device)

        state = zeros(3, rows, columns), zeros(rows, columns), zeros(3, rows), zeros(3, columns)
        return cls(parameters, group, *state)

    def part(self, which: slice) -> Stack:
        """Some of the matrices, with views of their state."""
        state = (getattr(self, name)[which] for name in STATE)
        return Stack(self.parameters[which], self.group, *state)

    def state_of(self, number: int) -> dict[str, Tensor]:
        return {name: getattr(self, name)[number] for name in STATE}


Direction = Callable[[Stack, Tensor, Tensor, Celo2Network], Tensor]
"""Advances a stack's state by gradients and returns the network's directions, all [matrices, rows, columns]."""


class Celo2(torch.optim.Optimizer):
    """See the module. `ns_dtype` is the precision of the orthogonalisation: float32 as published, bf16 as in Muon."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        weights: str | Path,
        weight_decay: float = 0.0,
        plain: bool = False,
        ns_dtype: str = "float32",
    ) -> None:
        if ns_dtype not in PRECISIONS:
            raise ValueError(f"optimizer option 'ns_dtype' must be {' or '.join(PRECISIONS)}; found {ns_dtype!r}")
        network = load_network(Path(weights))
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._precision = PRECISIONS[ns_dtype]
        self._networks: dict[torch.device, Celo2Network] = {}
        self._network, self._is_plain = network, plain
        self._stacks = [Stack.of(own, group) for group in self.param_groups for own in _by_shape(group["params"])]
        for stack in self._stacks:
            for number, parameter in enumerate(stack.parameters):
                self.state[parameter] = stack.state_of(number)

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """What is kept of a parameter, for who checks a checkpoint."""
        rows, columns = parameter.shape
        return dict(zip(STATE, ((3, rows, columns), (rows, columns), (3, rows), (3, columns)), strict=True))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        for stack in self._stacks:
            has_gradient = [parameter.grad is not None for parameter in stack.parameters]
            if all(has_gradient) and not self._is_plain:
                self._step(stack)
                continue
            for number in (number for number, has in enumerate(has_gradient) if has):
                self._step(stack.part(slice(number, number + 1)))

    def _step(self, stack: Stack) -> None:
        gradients = _stacked([p.grad for p in stack.parameters if p.grad is not None])
        gradients = gradients.clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)
        weights = _stacked(stack.parameters)
        network = self._networks.setdefault(weights.device, self._network.to(weights.device))
        direction = plain_direction if self._is_plain else _fast_direction(weights)
        steps = normalised(orthogonalised(direction(stack, weights, gradients, network), self._precision))
        lr, decay = stack.group["lr"], stack.group["weight_decay"]
        for parameter, step in zip(stack.parameters, steps, strict=True):
            if decay:
                parameter.mul_(1 - lr * decay)
            parameter.sub_(step, alpha=lr)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`. The stacks keep their memory, which the state's tensors are views of."""
        kept = {parameter: self.state[parameter] for stack in self._stacks for parameter in stack.parameters}
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for number, parameter in zip(numbers, parameters, strict=True):
            own, saved = kept[parameter], state_dict["state"].get(number)
            for name, tensor in own.items():
                tensor.zero_() if saved is None else tensor.copy_(saved[name])
            self.state[parameter] = own
        self._stacks = [
            Stack(stack.parameters, groups[stack.parameters[0]], *(getattr(stack, name) for name in STATE))
            for stack in self._stacks
        ]


def _by_shape(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters that step together, in the order of the first of each kind."""
    found: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    for parameter in parameters:
        if parameter.ndim != 2:
            raise ValueError(f"celo2 is for matrices; found a parameter of shape {tuple(parameter.shape)}")
        own = found.setdefault((tuple(parameter.shape), parameter.device, parameter.dtype), [[]])
        if own[-1] and (len(own[-1]) + 1) * parameter.numel() > STACK_ELEMENTS:
            own.append([])
        own[-1].append(parameter)
    return [stack for kind in found.values() for stack in kind]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[tensors, rows, columns] in float32, never written to; one matrix alone is not copied."""
    if len(tensors) == 1:
        return tensors[0].detach()[None].float().contiguous()
    return torch.stack([tensor.detach().float() for tensor in tensors])


# --- the rule, as published -------------------------------------------------------------------------------------------


def plain_direction(stack: Stack, weights: Tensor, gradients: Tensor, network: Celo2Network) -> Tensor:
    """Every feature of every element, one after the other."""
    advance_moments(stack, gradients)
    advance_means(stack, gradients)
    features = torch.stack([normalised(one) for one in features_of(stack, weights, gradients)], dim=-1)
    hidden = torch.relu(features @ network.first.T + network.first_bias)
    hidden = torch.relu(hidden @ network.hidden.T + network.hidden_bias)
    return hidden @ network.output + network.output_bias


def features_of(stack: Stack, weights: Tensor, gradients: Tensor) -> list[Tensor]:
    """The 30 features, each [matrices, rows, columns], in the order of the network's inputs."""
    momenta = list(stack.momenta.unbind(1))
    inverse = torch.rsqrt(stack.squares + 1e-8)
    row_factors, column_factors = factors(stack)
    both = [a[:, :, None] * b[:, None, :] for a, b in zip(row_factors.unbind(1), column_factors.unbind(1), strict=True)]
    rows, columns = (
        [mean[:, :, None].expand_as(weights) for mean in stack.row_means.unbind(1)],
        [mean[:, None, :].expand_as(weights) for mean in stack.column_means.unbind(1)],
    )
    short, long = (rows, columns) if is_wide(weights) else (columns, rows)
    return [
        gradients,
        gradients.clamp(-CLIP, CLIP),
        weights,
        *momenta,
        stack.squares,
        *(momentum * inverse for momentum in momenta),
        inverse,
        *(gradients * factor for factor in both),
        gradients * inverse,
        *short,
        *long,
        *(torch.rsqrt(mean + 1e-8) for mean in (*short, *long)),
        *(momentum * factor for momentum, factor in zip(momenta, both, strict=True)),
    ]


def is_wide(matrices: Tensor) -> bool:
    """Whether rows are what the rule calls so: its row means are taken over the longer side."""
    return matrices.shape[-2] <= matrices.shape[-1]


def advance_moments(stack: Stack, gradients: Tensor) -> None:
    for number, decay in enumerate(DECAYS):
        stack.momenta[:, number].mul_(decay).add_(gradients, alpha=1 - decay)
    stack.squares.mul_(SQUARE_DECAY).addcmul_(gradients, gradients, value=1 - SQUARE_DECAY)


def advance_means(stack: Stack, gradients: Tensor) -> None:
    """The mean squares of rows and columns."""
    squares = gradients.square()
    decays = torch.tensor(DECAYS, device=gradients.device)[:, None]
    for means, now in ((stack.row_means, squares.mean(2)), (stack.column_means, squares.mean(1))):
        means.mul_(decays).add_((1 - decays) * (now[:, None, :] + 1e-30))


def factors(stack: Stack) -> tuple[Tensor, Tensor]:
    """What a row and a column contribute to an element's inverse root mean square: [matrices, 3, rows], and columns."""
    is_by_row = is_wide(stack.squares)
    short, long = (stack.row_means, stack.column_means) if is_by_row else (stack.column_means, stack.row_means)
    relative = _safe_rsqrt(short / (short.mean(-1, keepdim=True) + 1e-9))
    absolute = _safe_rsqrt(long)
    return (relative, absolute) if is_by_row else (absolute, relative)


def _safe_rsqrt(value: Tensor) -> Tensor:
    return torch.rsqrt(value.clamp(min=1e-9))


def normalised(matrices: Tensor) -> Tensor:
    """With a root mean square of 1 each."""
    return matrices * torch.rsqrt(matrices.square().mean((-2, -1), keepdim=True) + 1e-9)


def orthogonalised(matrices: Tensor, precision: torch.dtype) -> Tensor:
    """Matrices with nearly equal singular values, in the same directions."""
    a, b, c = NEWTON_SCHULZ
    is_tall = not is_wide(matrices)
    x = matrices.mT if is_tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-8)
    x = x.to(precision)
    for _ in range(NUM_ROUNDS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return (x.mT if is_tall else x).float()


# --- the same in two passes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """The network's first layer for one stack, with every feature's normalisation in it."""

    weights: Tensor
    """[matrices, WIDTH, features by element]"""
    by_row: Tensor
    """[matrices, WIDTH, rows]: what the row alone contributes, and the bias."""
    by_column: Tensor
    """[matrices, WIDTH, columns]"""


def first_layer(stack: Stack, mean_squares: Tensor, network: Celo2Network) -> FirstLayer:
    """`mean_squares` [matrices, features by element] are those of the features before normalisation."""
    weights = network.first[:, BY_ELEMENT] * torch.rsqrt(mean_squares.float() + 1e-9)[:, None, :]
    width, means = len(DECAYS), (stack.row_means, stack.column_means)
    parts = {}
    for place, own in enumerate(means if is_wide(stack.squares) else means[::-1]):
        raw = torch.cat((own, torch.rsqrt(own + 1e-8)), dim=1)
        scaled = raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + 1e-9)
        start = BY_VECTOR[0] + place * width
        chosen = [*range(start, start + width), *range(start + 2 * width, start + 3 * width)]
        parts[own.data_ptr()] = torch.einsum("uf,kfn->kun", network.first[:, chosen], scaled)
    by_row, by_column = (parts[own.data_ptr()] for own in means)
    return FirstLayer(weights.contiguous(), (by_row + network.first_bias[:, None]).contiguous(), by_column.contiguous())


def _fast_direction(weights: Tensor) -> Direction:
    return _on_gpu if weights.is_cuda else _on_cpu


def _on_gpu(stack: Stack, weights: Tensor, gradients: Tensor, network: Celo2Network) -> Tensor:
    from paceline.kernels.triton import celo2 as kernels

    return _in_two_passes(stack, weights, gradients, network, kernels)


def _on_cpu(stack: Stack, weights: Tensor, gradients: Tensor, network: Celo2Network) -> Tensor:
    from paceline.kernels.cpu import celo2 as kernels

    return _in_two_passes(stack, weights, gradients, network, kernels)


def _in_two_passes(stack: Stack, weights: Tensor, gradients: Tensor, network: Celo2Network, kernels: Any) -> Tensor:
    advance_means(stack, gradients)
    row_factors, column_factors = (own.contiguous() for own in factors(stack))
    given = weights, gradients, stack.momenta, stack.squares, row_factors, column_factors
    mean_squares = kernels.advance(*given)
    layer = first_layer(stack, mean_squares, network)
    learned = network.hidden, network.hidden_bias, network.output, network.output_bias
    found: Tensor = kernels.directions(*given, layer.weights, layer.by_row, layer.by_column, *learned)
    return found
