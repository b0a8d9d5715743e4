"""Policy loss of one pack: log-probabilities of its response tokens in, a scalar with a graph and metric sums out.

The learner calls `Totals.count` once per batch, and `LossTokens.of` and `policy_loss` per pack. Every token's weight
comes from the totals of the whole batch and every ratio from its own sequence, so the gradient at a log-probability has
the same bits in any pack; never take a mean over a pack here. The loss reads rows of the algorithm table, never an
algorithm's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import Float32Array
from paceline.rl.algorithms import Algorithm, KlEstimator, Normalise
from paceline.rl.packing import Pack, Sample

MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 only says that the policy is broken; unbounded, one token could make the loss infinite."""


@dataclass(frozen=True)
class Totals:
    """Counts over the whole batch: all that a pack needs to know about the others."""

    num_sequences: int
    """Responses with at least one trained token: masked ones do not change the weight of the others."""
    num_tokens: int
    max_length: int
    """The length limit of a response, for the constant normaliser."""

    @classmethod
    def count(cls, samples: Iterable[Sample], max_length: int) -> Totals:
        """Count over all samples of one optimizer step, on whatever worker they are trained."""
        trained = [sample.num_trained for sample in samples]
        return cls(sum(count > 0 for count in trained), sum(trained), max_length)


@dataclass(frozen=True)
class LossTokens:
    """Inputs of the loss for a pack's response tokens, besides their new log-probabilities; all [T]."""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    """Each token's share of the batch's loss; 0 outside the mask."""
    mask: Tensor
    lengths: tuple[int, ...]
    """Response tokens of each sequence, in order."""
    reference_logprobs: Tensor | None = None

    @classmethod
    def of(
        cls,
        pack: Pack,
        algorithm: Algorithm,
        totals: Totals,
        *,
        old_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> LossTokens:
        """Inputs for one pack. `old_logprobs` default to the engine's.

        A learner that does not reproduce those bit for bit passes its own from before the first epoch, so that ratios
        start at exactly 1.
        """
        return cls(
            torch.from_numpy(pack.logprobs).to(device) if old_logprobs is None else old_logprobs,
            torch.from_numpy(pack.advantages).to(device),
            torch.from_numpy(token_weights(algorithm.normalise, pack, totals)).to(device),
            torch.from_numpy(pack.mask).to(device),
            pack.response_lengths,
            reference_logprobs,
        )


@dataclass(frozen=True)
class PackLoss:
    """`loss.backward()` adds this pack's share of the batch's gradient; `sums` are detached, see `metric_means`."""

    loss: Tensor
    sums: dict[str, Tensor]


def token_weights(normalise: Normalise, pack: Pack, totals: Totals) -> Float32Array:
    """[T] Weight of each trained token of a pack in the loss of the whole batch."""

    def divisor(sample: Sample) -> int:
        if normalise == "token":
            return totals.num_tokens
        return totals.num_sequences * (sample.num_trained if normalise == "sequence" else totals.max_length)

    weights = [np.where(sample.mask, 1 / max(divisor(sample), 1), 0.0) for sample in pack.samples]
    return np.concatenate(weights).astype(np.float32)


def policy_loss(logprobs: Tensor, tokens: LossTokens, algorithm: Algorithm, entropy: Tensor | None = None) -> PackLoss:
    """The pack's share of  sum of weight x (coefficient x KL - clipped surrogate), and sums over its trained tokens.

    If `logprobs` equal the old ones bit for bit, every ratio is exactly 1. `entropy` [T] is only reported.
    """
    log_ratios = _log_ratios(logprobs, tokens, algorithm)
    ratios = log_ratios.exp()
    objective = _clipped(ratios, tokens.advantages, algorithm)
    sums = _ratio_sums(ratios.detach(), tokens, algorithm)
    sums["logp_abs_diff"] = _total((logprobs.detach() - tokens.old_logprobs).abs(), tokens.mask)
    if tokens.reference_logprobs is not None:
        kl = estimate_kl(logprobs, tokens.reference_logprobs, algorithm.kl_estimator)
        sums["kl"] = _total(kl.detach(), tokens.mask)
        if algorithm.kl_in == "loss" and algorithm.kl_coef:
            objective = objective - algorithm.kl_coef * kl
    if entropy is not None:
        sums["entropy"] = _total(entropy.detach(), tokens.mask)
    loss = -_total(tokens.weights * objective, tokens.mask)
    return PackLoss(loss, sums | {"loss": loss.detach()})


def _log_ratios(logprobs: Tensor, tokens: LossTokens, algorithm: Algorithm) -> Tensor:
    """[T] log of new over old probability: per token, or the mean over its sequence's trained tokens (GSPO)."""
    differences = torch.where(tokens.mask, logprobs - tokens.old_logprobs, 0.0)
    if algorithm.ratio == "sequence":
        differences = _spread_means(differences, tokens)
    return differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _spread_means(values: Tensor, tokens: LossTokens) -> Tensor:
    """Each sequence's mean over its trained tokens, at every one of its tokens.

    Split by sequence rather than scattered by index: an indexed sum has no fixed order on a GPU.
    """
    means = [
        (part.sum() / mask.sum().clamp(min=1)).expand(len(part))
        for part, mask in zip(values.split(tokens.lengths), tokens.mask.split(tokens.lengths), strict=True)
    ]
    return torch.cat(means)


def _clipped(ratios: Tensor, advantages: Tensor, algorithm: Algorithm) -> Tensor:
    """[T] PPO's pessimistic surrogate: min(ratio A, clip(ratio) A), and with dual clip at least c A where A < 0."""
    bounded = ratios.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    surrogate = torch.minimum(ratios * advantages, bounded * advantages)
    if algorithm.dual_clip is None:
        return surrogate
    return torch.where(advantages < 0, torch.maximum(surrogate, algorithm.dual_clip * advantages), surrogate)


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp() - log_ratio - 1


_KL_ESTIMATORS: Mapping[KlEstimator, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """[T] Estimates of KL(policy || reference) from the sampled tokens, with x = log reference - log policy.

    k1 = -x is unbiased; k2 = x^2 / 2 has low variance and is positive; k3 = e^x - x - 1 is both unbiased and positive.
    As a loss term k1 does not pull towards the reference (its gradient is 0 on average); k2's gradient is the KL's own.
    """
    return _KL_ESTIMATORS[estimator](reference - logprobs)


def _ratio_sums(ratios: Tensor, tokens: LossTokens, algorithm: Algorithm) -> dict[str, Tensor]:
    """Clip counts per trained token: a ratio outside the range counts only if A pushes it further out."""
    is_up, is_down = tokens.advantages > 0, tokens.advantages < 0
    bound = math.inf if algorithm.dual_clip is None else algorithm.dual_clip
    values = {
        "num_tokens": torch.ones_like(ratios),
        "ratio": ratios,
        "clip_low": (ratios < 1 - algorithm.clip_low) & is_down,
        "clip_high": (ratios > 1 + algorithm.clip_high) & is_up,
        "clip_dual": (ratios > bound) & is_down,
    }
    return {name: _total(value, tokens.mask) for name, value in values.items()}


def _total(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens in double precision, so that metrics of long batches keep their digits."""
    return torch.where(mask, values, torch.zeros_like(values)).double().sum()


def metric_means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Means per trained token from the sums of a whole batch; `loss` is the batch's own, `num_tokens` a count."""
    num_tokens = float(sums["num_tokens"])
    means = {name: float(total) / max(num_tokens, 1.0) for name, total in sums.items()}
    return means | {"loss": float(sums["loss"]), "num_tokens": num_tokens}
