"""Embedding and decoder layers for training: the forward is the engine's, operation by operation; the backward is ours.

So a layer computes, bit for bit, what a rollout saw, and its gradient is that of the same function at the same values.
Between forward and backward a layer keeps what its backward needs (`Tape`) or, with checkpointing, only its input, from
which the engine's operations recompute the same tape: the gradient is the same to the bit. Called by `policy.py`.
Weights are only read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.backward.attention import Heads
from paceline.model.backward.packed import PackedTexts
from paceline.model.backward.products import Products
from paceline.model.backward.rowwise import RowwiseBackward, TorchRowwise
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

Gradients = dict[str, Tensor]

CHUNK_ROWS = 1024


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
        """Rows that a backward processes together: on a CPU few enough for the cache, on a GPU all of them."""
        num_rows = self.packed.row_starts[-1]
        step = CHUNK_ROWS if self.decoder.ops.device == "cpu" else num_rows
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


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
    def forward(ctx: Any, forward: Forward, weight: Tensor) -> Tensor:
        ctx.forward, ctx.shape = forward, weight.shape
        return forward.decoder.ops.embed(forward.decoder.policy.embedding, forward.packed.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        total = gradient.new_zeros(ctx.shape)
        # On a GPU this sorts by token, whereas index_add would add in whatever order threads arrive.
        return None, total.index_put_((ctx.forward.packed.token_ids,), gradient, accumulate=True)


class Layer(torch.autograd.Function):
    """(x, h) -> (x, h): the residual stream, and its norm as the engine passes it from layer to layer.

    `h` follows from `x` and carries no gradient of its own: the backward recomputes the norm. `parameters` are the
    master weights of `parameter_names(...)`, which receive the gradients; the values used are the decoder's.
    """

    @staticmethod
    def forward(ctx: Any, forward: Forward, index: int, x: Tensor, h: Tensor, *parameters: Tensor) -> Any:
        is_taped = any(ctx.needs_input_grad) and not forward.checkpointing
        new_x, new_h, tape = run_layer(forward, index, x, h, is_taped)
        ctx.forward, ctx.index = forward, index
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
        return None, None, gradient, None, *(found[name] for name in parameter_names(forward.decoder, ctx.index))


def parameter_names(decoder: Decoder, index: int) -> list[str]:
    """The weights of one layer under their Hugging Face names."""
    prefix = _prefix(index)
    return [name for name in decoder.config.weight_shapes() if name.startswith(prefix)]


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
    weights = _LayerGradients(forward, index)
    chunks = forward.row_chunks()
    between = _joined(
        [_mlp_backward(tape.x_between[part], tape.gate_up[part], gradient[part], weights) for part in chunks]
    )
    attended_gradient = weights.linear(OUT, tape.attended, between)
    pieces = [weights.heads(tape.qkv[part], part) for part in chunks]
    q, k, v = (_joined(parts) for parts in zip(*(heads for heads, _ in pieces), strict=True))
    heads_gradient = forward.rowwise.attention((q, k, v), attended_gradient, forward.packed.row_starts)
    before = []
    for part, (_, heads_back) in zip(chunks, pieces, strict=True):
        qkv_gradient = heads_back(*(values[part] for values in heads_gradient))
        h, norm_back = weights.norm(ATTENTION_NORM, tape.x[part])
        before.append(norm_back(weights.linear(QKV, h, qkv_gradient), between[part]))
    return _joined(before), weights.found


def _mlp_backward(x: Tensor, gate_up: Tensor, gradient: Tensor, weights: _LayerGradients) -> Tensor:
    """Gradient of the residual stream before the MLP, given that after it."""
    inner, swiglu_back = weights.swiglu(gate_up)
    gate_up_gradient = swiglu_back(weights.linear(DOWN, inner, gradient))
    h, norm_back = weights.norm(MLP_NORM, x)
    return norm_back(weights.linear(GATE_UP, h, gate_up_gradient), gradient)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate chunks; a single one, as on a GPU, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class _LayerGradients:
    """Gradients of a layer's weights, summed chunk by chunk, and the backward of every operation with weights."""

    def __init__(self, forward: Forward, index: int) -> None:
        self.layer = forward.decoder.policy.layers[index]
        self.found: Gradients = {}
        self._forward = forward
        self._prefix = _prefix(index)
        layer, restore = self.layer, forward.decoder.ops.restore
        linears = {QKV: layer.qkv, OUT: layer.out, GATE_UP: layer.gate_up, DOWN: layer.down}
        self._linears = {names: Linear(restore(linear.weight), linear.bias) for names, linear in linears.items()}
        self._norms = {ATTENTION_NORM: layer.attention_norm, MLP_NORM: layer.mlp_norm}

    def add(self, name: str, gradient: Tensor | None) -> None:
        """Add one chunk's gradient of a weight; None if the model has no such weight."""
        if gradient is None:
            return
        key = self._prefix + name
        if key in self.found:
            self.found[key] += gradient
        else:
            self.found[key] = gradient

    def linear(self, names: tuple[str, ...], h: Tensor, gradient: Tensor) -> Tensor:
        """Gradient of the input `h` of the linear layer with these names, given that of its product."""
        products, shapes = self._forward.products, self._forward.decoder.config.weight_shapes()
        sizes = [shapes[f"{self._prefix}{name}.weight"][0] for name in names]
        rounded = products.round(gradient)
        for name, part in zip(names, products(rounded.mT, h).split(sizes), strict=True):
            self.add(f"{name}.weight", part)
        if self._has_bias(names):
            for name, part in zip(names, gradient.sum(0).split(sizes), strict=True):
                self.add(f"{name}.bias", part)
        return products(rounded, self._linears[names].weight)

    def norm(self, name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """The norm of x, and a function from its gradient and the residual stream's to that of x."""
        eps = self._forward.decoder.config.rms_norm_eps
        h, norm_back = self._forward.rowwise.norm(x, self._norms[name], eps)

        def back(gradient: Tensor, residual: Tensor) -> Tensor:
            x_gradient, weight_gradient = norm_back(gradient, residual)
            self.add(f"{name}.weight", weight_gradient)
            return x_gradient

        return h, back

    def swiglu(self, gate_up: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """silu(gate) * up, and a function from its gradient to that of gate_up."""
        return self._forward.rowwise.swiglu(gate_up, self._has_bias(GATE_UP))

    def heads(self, qkv: Tensor, part: slice) -> tuple[Heads, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """The heads of these rows, and a function from their gradients to that of qkv."""
        forward = self._forward
        positions, rotary = forward.packed.positions[part], forward.decoder.rotary
        heads, heads_back = forward.rowwise.heads(
            qkv, self.layer.qk_norms, forward.head_sizes, rotary, positions, self._has_bias(QKV)
        )

        def back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            qkv_gradient, *norms = heads_back(q, k, v)
            for name, norm in zip(QK_NORMS, norms, strict=True):
                self.add(f"{name}.weight", norm)
            return qkv_gradient

        return heads, back

    def _has_bias(self, names: tuple[str, ...]) -> bool:
        return self._linears[names].bias is not None


def _prefix(index: int) -> str:
    return f"model.layers.{index}."
