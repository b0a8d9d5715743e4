"""Drafter loss: soft cross-entropy of its guesses against the policy's own distribution, chunk by chunk.

The policy's distribution is head(norm(final hidden state)) at temperature 1, restricted to the drafter's ids. Only one
chunk's logits exist at a time, and the gradient is taken while they do: a large vocabulary never exists for a whole
pack, and nothing is computed twice. Called by `trainer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model.config import ModelConfig
from paceline.model.eagle.network import fast_rms_norm


@dataclass(frozen=True, eq=False)
class Teacher:
    """The parts of the policy that a drafter learns from."""

    embedding: Tensor
    """[policy's vocabulary, hidden]"""
    norm: Tensor
    head: Tensor
    """[draft vocabulary, hidden]: the policy's head rows for the drafter's ids."""
    eps: float
    version: int
    """Number of steps the policy had learned from."""

    @classmethod
    def of(cls, config: ModelConfig, weights: Mapping[str, Tensor], draft_ids: Tensor, version: int) -> Teacher:
        """Build from the policy's weights under their Hugging Face names.

        Float32 weights are views, so a teacher is valid until the policy learns again.
        """
        embedding = weights["model.embed_tokens.weight"].detach()
        head = embedding if config.tie_embeddings else weights["lm_head.weight"].detach()
        is_whole = len(draft_ids) == config.vocab_size
        known = head if is_whole else head.index_select(0, draft_ids.to(head.device))
        norm = weights["model.norm.weight"].detach().float()
        return cls(embedding, norm, known.float(), config.rms_norm_eps, version)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding[token_ids].float()


@dataclass(frozen=True, eq=False)
class GuessTargets:
    """The policy row each guess is compared with; sorted by row, so that a row's distribution is computed once."""

    rows: Tensor
    """[guesses]: row of the pack with the target distribution."""
    states: Tensor
    """The drafter state each guess was made from."""
    weights: Tensor
    """Share of the loss."""
    numbers: Tensor
    """Position of each guess in its chain, from 0."""
    chunks: tuple[tuple[int, int, int, int], ...]
    """First guess, end of the guesses, first row, end of the rows."""
    total: float = 1.0
    """Sum of the weights before they were scaled to sum to 1."""


def _compare(logits: Tensor, wanted: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per guess: weighted cross-entropy and entropy, and shared probability; its logits become their gradient."""
    if logits.is_cuda:
        from paceline.kernels.triton.soft_cross_entropy import compare

        return compare(logits, wanted, rows, weights)
    log_p = wanted.log_softmax(-1)[rows]
    log_q, p = logits.log_softmax(-1), log_p.exp()
    loss, entropy = (-weights * (p * log).sum(-1) for log in (log_q, log_p))
    q = log_q.exp_()
    shared = torch.minimum(p, q).sum(-1)
    logits.copy_(q.sub_(p).mul_(weights[:, None]))
    return loss, entropy, shared


class SoftCrossEntropy(torch.autograd.Function):
    """The weighted sum over guesses, with that of the policy's entropies, and the shared probability per guess."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, head: Tensor, final: Tensor, teacher: Teacher, given: GuessTargets) -> Any:
        normed_gradient, head_gradient = torch.zeros_like(normed), torch.zeros_like(head)
        loss, entropy = head.new_zeros(()), head.new_zeros(())
        shared: list[Tensor] = []
        for first, stop, first_row, stop_row in given.chunks:
            part = slice(first, stop)
            wanted = fast_rms_norm(final[first_row:stop_row], teacher.norm, teacher.eps) @ teacher.head.mT
            states, rows = given.states[part], given.rows[part] - first_row
            h = normed.index_select(0, states)
            from_logits = h @ head.mT
            own_loss, own_entropy, own_shared = _compare(from_logits, wanted, rows, given.weights[part])
            loss += own_loss.sum()
            entropy += own_entropy.sum()
            shared.append(own_shared)
            head_gradient.addmm_(from_logits.mT, h)
            normed_gradient.index_add_(0, states, from_logits @ head)
        ctx.save_for_backward(normed_gradient, head_gradient)
        found = torch.cat(shared)
        ctx.mark_non_differentiable(entropy, found)
        return loss, entropy, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normed_gradient, head_gradient = ctx.saved_tensors
        return gradient * normed_gradient, gradient * head_gradient, None, None, None
