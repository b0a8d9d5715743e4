"""From the residual stream to the log-probabilities of given tokens: final norm, head and log-softmax, chunk by chunk.

Only scored rows pass through, and only one chunk's logits are in memory at a time, also in the backward, which
recomputes them: a large vocabulary never exists for a whole pack. The forward is the engine's head and the sampler's
own formula, so a response's log-probabilities equal those its rollout reported, bit for bit. Called by `policy.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.backward.layer import Forward, blocks, joined
from paceline.model.task_threads import each

BLOCK_ROWS, BLOCK_TOKENS = 64, 1024
"""Rows of a chunk's logits, and columns of the vocabulary, that one thread takes on a CPU."""


class Head(torch.autograd.Function):
    """Log-probability of every target under log_softmax(logits / temperature)."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Forward,
        chunk: int,
        temperature: float,
        x: Tensor,
        norm: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:
        """`norm` and `weight` are None if they get no gradient."""
        packed, decoder = forward.packed, forward.decoder
        hidden = x[packed.scored_rows]
        ctx.forward, ctx.chunk, ctx.temperature, ctx.num_rows = forward, chunk, temperature, len(x)
        ctx.save_for_backward(hidden)
        pieces = zip(hidden.split(chunk), packed.targets.split(chunk), strict=True)
        return torch.cat([decoder.ops.log_probs(decoder.head(rows), t, temperature) for rows, t in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        forward: Forward = ctx.forward
        (hidden,) = ctx.saved_tensors
        decoder, packed, products, back = forward.decoder, forward.packed, forward.products, forward.rowwise
        head = decoder.ops.restore(decoder.policy.head)
        norm_gradient = torch.zeros_like(decoder.policy.norm)
        is_trained = ctx.needs_input_grad[5]
        head_gradient = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if is_trained else None
        hidden_gradient = torch.empty_like(hidden)
        scale = 1.0 if ctx.temperature == 0 else 1 / ctx.temperature
        is_cpu = decoder.ops.device == "cpu"

        def through_rows(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            """The gradient of these rows' logits, their norm, and what they add to the gradient of its weight."""
            at = slice(start + rows.start, start + rows.stop)
            from_logits = products.round(back.logits(logits[rows], packed.targets[at], gradient[at], scale))
            h, norm_back = back.norm(hidden[at], decoder.policy.norm, decoder.config.rms_norm_eps)
            hidden_gradient[at], through = norm_back(products(from_logits, head))
            return from_logits, h, through

        def add_tokens(tokens: slice) -> None:
            assert head_gradient is not None
            head_gradient[tokens] += products(from_logits[:, tokens].mT, h)

        for start in range(0, len(hidden), ctx.chunk):
            logits = decoder.logits(hidden[start : start + ctx.chunk])
            pieces = each(through_rows, blocks(len(logits), BLOCK_ROWS if is_cpu else len(logits)))
            for _, _, through in pieces:
                norm_gradient += through
            from_logits, h = joined([piece[0] for piece in pieces]), joined([piece[1] for piece in pieces])
            if is_trained:
                each(add_tokens, blocks(len(head), BLOCK_TOKENS if is_cpu else len(head)))
        x_gradient = hidden.new_zeros(ctx.num_rows, hidden.shape[1])
        x_gradient[packed.scored_rows] = hidden_gradient
        return None, None, None, x_gradient, norm_gradient if ctx.needs_input_grad[4] else None, head_gradient
