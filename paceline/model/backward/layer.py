"""Embedding and decoder layers for training: the forward is the engine's, operation by operation; the backward is ours.

So a layer computes, bit for bit, what a rollout saw, and its gradient is that of the same function at the same values.
Between forward and backward a layer keeps what its backward needs (`Tape`) or, with checkpointing, only its input, from
which the engine's operations recompute the same tape: the gradient is the same to the bit. Called by `policy.py`.
Weights are only read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.backward.attention import Heads
from paceline.model.backward.low_rank import LowRanks
from paceline.model.backward.packed import PackedTexts
from paceline.model.backward.products import Products
from paceline.model.backward.rowwise import HeadsBack, RowwiseBackward, TorchRowwise
from paceline.model.decoder import (
    ATTENTION_NORM,
    DOWN,
    GATE_UP,
    MLP_NORM,
    OUT,
    QK_NORMS,
    QKV,
    Decoder,
    Linear,
)
from paceline.model.lora.adapter import A, B
from paceline.model.task_threads import each, each_in_order

Gradients = dict[str, Tensor]

CHUNK_ROWS, MOST_CHUNKS, MOST_CHUNK_ROWS = 128, 16, 256
"""Rows that one thread takes through a backward on a CPU; more of them if that makes too many chunks, up to a limit."""
BLOCK_OUTPUTS = 256
"""Outputs of a linear layer for which one thread computes the gradient of the weight on a CPU."""


def choose_rowwise(products: Products, device: str) -> RowwiseBackward:
    """The GPU kernels for products rounded to bfloat16, the only precision they support; torch otherwise."""
    if device != "cpu" and products.dtype == torch.bfloat16:
        from paceline.model.backward.rowwise_gpu import KernelRowwise  # needs Triton, which CPU installs lack

        return KernelRowwise()
    return TorchRowwise(products)


@dataclass(frozen=True, eq=False)
class Forward:
    """State shared by all layers of one forward."""

    decoder: Decoder
    packed: PackedTexts
    products: Products
    checkpointing: bool
    low_ranks: LowRanks | None = None
    """The adapter that gets the gradients; None: the weights themselves do."""

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Query heads, kv heads, head dim."""
        config = self.decoder.config
        return config.num_heads, config.num_kv_heads, config.head_dim

    @functools.cached_property
    def rowwise(self) -> RowwiseBackward:
        """Backward of the row-wise operations between matrix products."""
        return choose_rowwise(self.products, self.decoder.ops.device)

    def turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every row, [rows, 1, head dim / 2]."""
        rotary, positions = self.decoder.rotary, self.packed.positions
        return rotary.cos[positions, None], rotary.sin[positions, None]

    def row_chunks(self) -> list[slice]:
        """Rows that a backward processes together: on a CPU a thread's share, on a GPU all of them."""
        num_rows = self.packed.row_starts[-1]
        count = 1
        if self.is_divided:
            count = max(min(round(num_rows / CHUNK_ROWS), MOST_CHUNKS), -(-num_rows // MOST_CHUNK_ROWS), 1)
        return [slice(i * num_rows // count, (i + 1) * num_rows // count) for i in range(count)]

    @property
    def is_divided(self) -> bool:
        """Whether threads share a backward."""
        return self.decoder.ops.device == "cpu"


class Tape(NamedTuple):
    """Inputs of a layer's backward: the residual stream before attention and before the MLP, and the products.

    Norms and the SwiGLU product are cheap to recompute.
    """

    x: Tensor
    qkv: Tensor
    attended: Tensor
    x_between: Tensor
    gate_up: Tensor


class Embedding(torch.autograd.Function):
    """The initial residual stream; the gradient is summed per token in row order."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, weight: Tensor | None) -> Tensor:
        """`weight` is None if it gets no gradient."""
        ctx.forward, ctx.shape = forward, None if weight is None else weight.shape
        return forward.decoder.ops.embed(forward.decoder.policy.embedding, forward.packed.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        total = gradient.new_zeros(ctx.shape)
        # On a GPU this sorts by token, whereas index_add would add in whatever order threads arrive.
        return None, total.index_put_((ctx.forward.packed.token_ids,), gradient, accumulate=True)


class Layer(torch.autograd.Function):
    """(x, h) -> (x, h): the residual stream, and its norm as the engine passes it from layer to layer.

    `h` follows from `x` and carries no gradient of its own: the backward recomputes the norm. `parameters` are those of
    `names`, master weights or an adapter's, which receive the gradients; the values used are the decoder's.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, index: int, names: Sequence[str], x: Tensor, h: Tensor, *parameters: Tensor
    ) -> Any:
        is_taped = any(ctx.needs_input_grad) and not forward.checkpointing
        new_x, new_h, tape = run_layer(forward, index, x, h, is_taped)
        ctx.forward, ctx.index, ctx.names = forward, index, names
        ctx.save_for_backward(*(tape or (x, h)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(new_h)
        return new_x, new_h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        forward: Forward = ctx.forward
        if forward.checkpointing:
            x, h = ctx.saved_tensors
            tape = run_layer(forward, ctx.index, x, h, is_taped=True)[2]
        else:
            tape = Tape(*ctx.saved_tensors)
        assert tape is not None
        gradient, found = layer_backward(forward, ctx.index, tape, gradient)
        return None, None, None, gradient, None, *(found[name] for name in ctx.names)


def parameter_names(names: Iterable[str], index: int) -> list[str]:
    """Those of one layer, in their order."""
    prefix = _prefix(index)
    return [name for name in names if name.startswith(prefix)]


def run_layer(forward: Forward, index: int, x: Tensor, h: Any, is_taped: bool) -> tuple[Tensor, Any, Tape | None]:
    """One iteration of the loop in `Decoder.forward_placed`, with a tape if requested. `x` is preserved."""
    decoder, packed = forward.decoder, forward.packed
    ops, policy, eps = decoder.ops, decoder.policy, decoder.config.rms_norm_eps
    layer = policy.layers[index]
    is_last = index + 1 == len(policy.layers)
    next_norm = policy.norm if is_last else policy.layers[index + 1].attention_norm
    qkv = ops.linear(h, layer.qkv.weight, layer.qkv.bias)
    attended = ops.attention(
        qkv, decoder.config.num_heads, layer.qk_norms, decoder.rotary, packed.rows, packed.cache, 0
    )
    between, h = ops.residual(x.clone(), attended, layer.out.weight, layer.out.bias, layer.mlp_norm, eps)
    gate_up = ops.linear(h, layer.gate_up.weight, layer.gate_up.bias)
    tape = None
    if is_taped:  # now, because the next line overwrites `between`
        tape = Tape(x, ops.as_tensor(qkv), ops.as_rows(attended), between.clone(), ops.as_tensor(gate_up))
    after, h = ops.residual(between, ops.swiglu(gate_up), layer.down.weight, layer.down.bias, next_norm, eps)
    return after, h, tape


def layer_backward(forward: Forward, index: int, tape: Tape, gradient: Tensor) -> tuple[Tensor, Gradients]:
    """Gradients of the residual stream before the layer, given that after it, and of the layer's weights."""
    weights = _LayerWeights(forward, index)
    found: Gradients = {}
    uppers: list[_Upper] = []
    lowers: list[Tensor] = []

    def upper(at: int) -> tuple[_Upper, Gradients]:
        own, part = _ChunkGradients(weights, at), chunks[at]
        return _upper_backward(tape, part, gradient[part], own), own.found

    def lower(at: int) -> tuple[Tensor, Gradients]:
        own, part, given = _ChunkGradients(weights, at), chunks[at], uppers[at]
        qkv_gradient = own.heads_back(given.heads_back, *(values[part] for values in heads_gradient))
        h, norm_back = own.norm(ATTENTION_NORM, tape.x[part])
        return norm_back(own.linear(QKV, h, qkv_gradient), given.between), own.found

    def keep_upper(result: tuple[_Upper, Gradients]) -> None:
        uppers.append(result[0])
        _add_into(found, result[1])

    def keep_lower(result: tuple[Tensor, Gradients]) -> None:
        lowers.append(result[0])
        _add_into(found, result[1])

    chunks = forward.row_chunks()
    each_in_order(upper, range(len(chunks)), keep_upper)
    q, k, v = (joined(parts) for parts in zip(*(part.heads for part in uppers), strict=True))
    attended_gradient = joined([part.attended_gradient for part in uppers])
    heads_gradient = forward.rowwise.attention((q, k, v), attended_gradient, forward.packed.row_starts)
    each_in_order(lower, range(len(chunks)), keep_lower)
    if forward.is_divided and forward.low_ranks is None:
        found |= weights.gradients()
    return joined(lowers), found


class _Upper(NamedTuple):
    """A chunk's part of the backward above attention, and what the part below takes from it."""

    between: Tensor
    """Gradient of the residual stream between attention and MLP."""
    attended_gradient: Tensor
    heads: Heads
    heads_back: HeadsBack


def _upper_backward(tape: Tape, part: slice, gradient: Tensor, own: _ChunkGradients) -> _Upper:
    inner, swiglu_back = own.swiglu(tape.gate_up[part])
    gate_up_gradient = swiglu_back(own.linear(DOWN, inner, gradient))
    h, norm_back = own.norm(MLP_NORM, tape.x_between[part])
    between = norm_back(own.linear(GATE_UP, h, gate_up_gradient), gradient)
    attended_gradient = own.linear(OUT, tape.attended[part], between)
    return _Upper(between, attended_gradient, *own.heads(tape.qkv[part], part))


def _add_into(found: Gradients, chunk: Gradients) -> None:
    """Add one chunk's gradients of the weights."""
    for key, gradient in chunk.items():
        if key in found:
            found[key] += gradient
        else:
            found[key] = gradient


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate chunks; a single one, as on a GPU, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def blocks(count: int, size: int) -> list[slice]:
    """`count` things in blocks of `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _LayerWeights:
    """A layer's weights as its backward takes them; all chunks share them."""

    def __init__(self, forward: Forward, index: int) -> None:
        self.layer = forward.decoder.policy.layers[index]
        self.forward = forward
        self.prefix = _prefix(index)
        layer, restore = self.layer, forward.decoder.ops.restore
        linears: dict[tuple[str, ...], Linear] = {
            QKV: layer.qkv,
            OUT: layer.out,
            GATE_UP: layer.gate_up,
            DOWN: layer.down,
        }
        # On a CPU they are unpacked, which takes a few percent of the backward.
        weights = [linear.weight for linear in linears.values()]
        restored = each(restore, weights) if forward.is_divided else list(map(restore, weights))
        self.linears = {
            names: Linear(weight, linear.bias)
            for (names, linear), weight in zip(linears.items(), restored, strict=True)
        }
        self.norms = {ATTENTION_NORM: layer.attention_norm, MLP_NORM: layer.mlp_norm}
        shapes = forward.decoder.config.weight_shapes()
        self.operands: dict[tuple[tuple[str, ...], int], tuple[Tensor, Tensor]] = {}
        """By linear layer and chunk: gradient of its product, and its input."""
        self.sizes = {names: [shapes[f"{self.prefix}{name}.weight"][0] for name in names] for names in linears}

    def gradients(self) -> Gradients:
        """Gradients of the linear layers: a thread takes a block of outputs through all chunks, in order."""
        totals = {
            names: torch.zeros(sum(sizes), self.linears[names].weight.shape[1], dtype=torch.float32, device="cpu")
            for names, sizes in self.sizes.items()
        }
        num_chunks = len(self.operands) // len(self.linears)

        def add_up(block: tuple[tuple[str, ...], slice]) -> None:
            names, outputs = block
            for at in range(num_chunks):
                gradient, h = self.operands[names, at]
                totals[names][outputs] += self.forward.products(gradient[:, outputs].mT, h)

        each(add_up, [(names, block) for names, total in totals.items() for block in blocks(len(total), BLOCK_OUTPUTS)])
        found: Gradients = {}
        for names, total in totals.items():
            found |= zip([f"{self.prefix}{name}.weight" for name in names], total.split(self.sizes[names]), strict=True)
        return found


class _ChunkGradients:
    """Gradients of a layer's weights from one chunk of rows, and the backward of every operation with weights.

    If threads share the backward, those of linear layers come last (`_LayerWeights.gradients`). With an adapter, linear
    layers have none of their own.
    """

    def __init__(self, weights: _LayerWeights, chunk: int) -> None:
        self.found: Gradients = {}
        self._weights, self._chunk = weights, chunk
        self._forward = weights.forward

    def _keep(self, name: str, gradient: Tensor | None) -> None:
        """None if the model has no such weight."""
        if gradient is not None:
            self.found[self._weights.prefix + name] = gradient

    def linear(self, names: tuple[str, ...], h: Tensor, gradient: Tensor) -> Tensor:
        """Gradient of the input `h` of the linear layer with these names, given that of its product."""
        products, sizes = self._forward.products, self._weights.sizes[names]
        rounded = products.round(gradient)
        if self._forward.low_ranks is not None:
            self._keep_low_ranks(self._forward.low_ranks, names, products.round(h), rounded)
            return products(rounded, self._weights.linears[names].weight)
        if self._forward.is_divided:
            self._weights.operands[names, self._chunk] = rounded, products.round(h)
        else:
            for name, part in zip(names, products(rounded.mT, h).split(sizes), strict=True):
                self._keep(f"{name}.weight", part)
        if self._has_bias(names):
            for name, part in zip(names, gradient.sum(0).split(sizes), strict=True):
                self._keep(f"{name}.bias", part)
        return products(rounded, self._weights.linears[names].weight)

    def _keep_low_ranks(self, layers: LowRanks, names: tuple[str, ...], h: Tensor, gradient: Tensor) -> None:
        """Gradients of the adapters of these linear layers."""
        for name, part in zip(names, gradient.split(self._weights.sizes[names], dim=1), strict=True):
            own = layers.get(self._weights.prefix + name)
            if own is not None:
                for kind, found in zip((A, B), own.gradients(self._forward.products, h, part), strict=True):
                    self._keep(f"{name}.{kind}", found)

    def norm(self, name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """The norm of x, and a function from its gradient and the residual stream's to that of x."""
        eps = self._forward.decoder.config.rms_norm_eps
        h, norm_back = self._forward.rowwise.norm(x, self._weights.norms[name], eps)

        def back(gradient: Tensor, residual: Tensor) -> Tensor:
            x_gradient, weight_gradient = norm_back(gradient, residual)
            self._keep(f"{name}.weight", weight_gradient)
            return x_gradient

        return h, back

    def swiglu(self, gate_up: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """silu(gate) * up, and a function from its gradient to that of gate_up."""
        return self._forward.rowwise.swiglu(gate_up, self._has_bias(GATE_UP))

    def heads(self, qkv: Tensor, part: slice) -> tuple[Heads, HeadsBack]:
        """The heads of these rows, and what `heads_back` takes."""
        forward = self._forward
        positions, rotary = forward.packed.positions[part], forward.decoder.rotary
        return forward.rowwise.heads(
            qkv, self._weights.layer.qk_norms, forward.head_sizes, rotary, positions, self._has_bias(QKV)
        )

    def heads_back(self, back: HeadsBack, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Gradient of qkv, given those of the heads."""
        qkv_gradient, *norms = back(q, k, v)
        for name, norm in zip(QK_NORMS, norms, strict=True):
            self._keep(f"{name}.weight", norm)
        return qkv_gradient

    def _has_bias(self, names: tuple[str, ...]) -> bool:
        return self._weights.linears[names].bias is not None


def _prefix(index: int) -> str:
    return f"model.layers.{index}."
