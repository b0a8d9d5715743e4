"""The policy loss against hand-computed numbers and gradients, a padded twin, and any other way to pack."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import tree_sum
from torch import Tensor

from paceline.rl.algorithms import ALGORITHMS, Algorithm, KlEstimator
from paceline.rl.loss import LossTokens, PackLoss, Totals, estimate_kl, metric_means, policy_loss, token_weights
from paceline.rl.packing import Pack, Sample, pack_samples

ROWS = pytest.mark.parametrize("row", ALGORITHMS.values(), ids=list(ALGORITHMS))
KL_AND_DUAL: list[tuple[KlEstimator, float | None]] = [("k3", None), ("k2", 1.5)]
WITH_KL = [
    dataclasses.replace(row, kl_coef=0.1, kl_in="loss", kl_estimator=estimator, dual_clip=dual)
    for row in ALGORITHMS.values()
    for estimator, dual in KL_AND_DUAL
]

# Two responses of 2 and 3 tokens; ratios new / old and advantages chosen so that each side of the clip is met.
RATIOS = [1.5, 0.9, 0.5, 1.1, 2.0]
ADVANTAGES = [2.0, 2.0, -1.0, -1.0, -1.0]
LENGTHS = (2, 3)


def hand_batch(mask: list[bool] | None = None) -> tuple[Pack, Tensor]:
    """The pack of the two responses, and new log-probabilities that give the ratios above."""
    old = np.log(np.array([0.1, 0.2, 0.3, 0.4, 0.25]))
    trained = np.array(mask if mask is not None else [True] * 5)
    samples = [
        Sample.of(0, 0, [1], [2, 3], old[:2], np.array(ADVANTAGES[:2]), trained[:2]),
        Sample.of(0, 1, [1], [4, 5, 6], old[2:], np.array(ADVANTAGES[2:]), trained[2:]),
    ]
    (pack,) = pack_samples(samples, 100)
    new = torch.tensor(old + np.log(RATIOS), dtype=torch.float64).float().requires_grad_()
    return pack, new


def loss_and_gradient(
    row: Algorithm, mask: list[bool] | None = None, reference: Tensor | None = None, max_length: int = 10
) -> tuple[PackLoss, list[float]]:
    pack, new = hand_batch(mask)
    tokens = LossTokens.of(pack, row, Totals.count(pack.samples, max_length), reference_logprobs=reference)
    result = policy_loss(new, tokens, row)
    result.loss.backward()
    assert new.grad is not None
    return result, new.grad.tolist()


def plain(**fields: object) -> Algorithm:
    return dataclasses.replace(ALGORITHMS["grpo"], **fields)  # type: ignore[arg-type]


# ---- by hand


# clip 0.2: 1.5 x 2 -> 1.2 x 2; 0.9 x 2; 0.5 x -1 -> 0.8 x -1; 1.1 x -1; 2 x -1 (never clipped: that is dual clip's job)
SURROGATES = [2.4, 1.8, -0.8, -1.1, -2.0]
# d(surrogate) / d(log-probability) = ratio x A, and 0 where the clip bites
SLOPES = [0.0, 1.8, 0.0, -1.1, -2.0]


@pytest.mark.parametrize(
    ("normalise", "weights"),
    [
        ("sequence", [1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6]),
        ("token", [1 / 5] * 5),
        ("constant", [1 / 20] * 5),
    ],
)
def test_clipped_surrogate_by_hand(normalise: str, weights: list[float]) -> None:
    result, gradient = loss_and_gradient(plain(normalise=normalise))
    assert result.loss.item() == pytest.approx(-sum(w * s for w, s in zip(weights, SURROGATES, strict=True)), rel=1e-6)
    assert gradient == pytest.approx([-w * s for w, s in zip(weights, SLOPES, strict=True)], rel=1e-5)


def test_clip_higher_by_hand() -> None:
    """DAPO's 0.28 on the upper side only: 1.5 x 2 -> 1.28 x 2."""
    result, _ = loss_and_gradient(ALGORITHMS["dapo"])
    assert result.loss.item() == pytest.approx(-(2.56 + 1.8 - 0.8 - 1.1 - 2.0) / 5, rel=1e-6)


def test_dual_clip_by_hand() -> None:
    """The ratio 2 of a bad token counts as 1.6 and has no slope; good tokens know no dual clip."""
    result, gradient = loss_and_gradient(plain(normalise="token", dual_clip=1.6))
    assert result.loss.item() == pytest.approx(-(2.4 + 1.8 - 0.8 - 1.1 - 1.6) / 5, rel=1e-6)
    assert gradient == pytest.approx([0, -1.8 / 5, 0, 1.1 / 5, 0], rel=1e-5)
    assert result.sums["clip_dual"] == 1


def test_no_clip_by_hand() -> None:
    result, gradient = loss_and_gradient(plain(normalise="token", clip_low=1.0, clip_high=math.inf))
    assert result.loss.item() == pytest.approx(-(3.0 + 1.8 - 0.5 - 1.1 - 2.0) / 5, rel=1e-6)
    assert gradient == pytest.approx([-3 / 5, -1.8 / 5, 0.5 / 5, 1.1 / 5, 2 / 5], rel=1e-5)


def test_sequence_ratio_by_hand() -> None:
    """Geometric means sqrt(1.35) and cbrt(1.1), both inside a wide clip; each token carries 1 / length of the slope."""
    first, second = math.sqrt(1.5 * 0.9), (0.5 * 1.1 * 2.0) ** (1 / 3)
    result, gradient = loss_and_gradient(plain(ratio="sequence"))
    assert result.loss.item() == pytest.approx(-(2 * first - second) / 2, rel=1e-6)
    assert gradient == pytest.approx([-2 * first / 2 / 2] * 2 + [second / 2 / 3] * 3, rel=1e-5)
    assert result.sums["ratio"].item() == pytest.approx(2 * first + 3 * second, rel=1e-6)


def test_gspo_clips_whole_sequences() -> None:
    """sqrt(1.35) is far above 1.0004 and pushed up: clipped. cbrt(1.1) is above it too, but A < 0 pulls it back."""
    second = 1.1 ** (1 / 3)
    result, gradient = loss_and_gradient(ALGORITHMS["gspo"])
    assert result.loss.item() == pytest.approx(-(2 * 1.0004 - second) / 2, rel=1e-6)
    assert gradient == pytest.approx([0, 0] + [second / 6] * 3, rel=1e-5)
    assert (result.sums["clip_high"], result.sums["clip_low"]) == (2, 0)


def test_metrics_by_hand() -> None:
    result, _ = loss_and_gradient(plain(), reference=torch.full((5,), -1.0))
    assert {name: result.sums[name].item() for name in ("num_tokens", "clip_low", "clip_high", "clip_dual")} == {
        "num_tokens": 5,
        "clip_low": 1,
        "clip_high": 1,
        "clip_dual": 0,
    }
    assert result.sums["ratio"].item() == pytest.approx(sum(RATIOS), rel=1e-6)
    assert result.sums["logp_abs_diff"].item() == pytest.approx(sum(abs(math.log(r)) for r in RATIOS), rel=1e-6)
    means = metric_means(result.sums)
    assert means["clip_low"] == 0.2 and means["num_tokens"] == 5
    assert means["loss"] == result.loss.item()


def test_a_ratio_that_is_pulled_back_is_not_clipped() -> None:
    """The same ratios with advantages of the other sign: every one outside the range is on its way back in."""
    pack, new = hand_batch()
    tokens = LossTokens.of(pack, plain(), Totals.count(pack.samples, 10))
    turned = torch.tensor([-1.0, -1.0, 2.0, 2.0, -1.0])
    sums = policy_loss(new, dataclasses.replace(tokens, advantages=turned), plain()).sums
    assert (sums["clip_low"], sums["clip_high"], sums["clip_dual"]) == (0, 0, 0)


def test_entropy_is_reported_and_changes_nothing() -> None:
    pack, new = hand_batch([True, True, True, True, False])
    tokens = LossTokens.of(pack, plain(), Totals.count(pack.samples, 10))
    result = policy_loss(new, tokens, plain(), entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert result.sums["entropy"].item() == 10
    assert result.loss.item() == policy_loss(new, tokens, plain()).loss.item()
    assert "entropy" not in policy_loss(new, tokens, plain()).sums


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda x: -x, lambda x: 1.0),
        ("k2", lambda x: x * x / 2, lambda x: -x),
        ("k3", lambda x: math.exp(x) - x - 1, lambda x: 1 - math.exp(x)),
    ],
)
def test_kl_term_by_hand(
    estimator: KlEstimator, value: Callable[[float], float], slope: Callable[[float], float]
) -> None:
    """x = log reference - log policy; the KL term's gradient is added to the surrogate's."""
    xs = [0.3, -0.2, 0.0, 1.0, -1.5]
    _, new = hand_batch()
    reference = (new + torch.tensor(xs)).detach()
    row = plain(normalise="token", kl_coef=0.5, kl_estimator=estimator)
    result, gradient = loss_and_gradient(row, reference=reference)
    assert result.sums["kl"].item() == pytest.approx(sum(map(value, xs)), rel=1e-5)
    expected = -sum(SURROGATES) / 5 + 0.5 * sum(map(value, xs)) / 5
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)
    slopes = [-s / 5 + 0.5 * slope(x) / 5 for s, x in zip(SLOPES, xs, strict=True)]
    assert gradient == pytest.approx(slopes, rel=1e-4, abs=1e-6)


def test_kl_in_the_reward_is_reported_but_no_term_of_the_loss() -> None:
    row = plain(kl_coef=0.5, kl_in="reward")
    with_reference, _ = loss_and_gradient(row, reference=torch.zeros(5))
    without, _ = loss_and_gradient(row)
    assert with_reference.loss == without.loss and with_reference.sums["kl"] != 0 and "kl" not in without.sums


def test_kl_estimators_estimate_the_kl() -> None:
    """Weighted by the policy's own probabilities, k1 and k3 give the exact KL, k2 nearly; k3 is never negative."""
    policy, reference = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.5, 0.3, 0.2], [0.4, 0.35, 0.25]))
    exact = (policy.exp() * (policy - reference)).sum().item()
    estimates: list[tuple[KlEstimator, float]] = [("k1", 1e-12), ("k3", 1e-12), ("k2", 0.1)]
    for estimator, tolerance in estimates:
        kl = estimate_kl(policy, reference, estimator)
        assert (policy.exp() * kl).sum().item() == pytest.approx(exact, rel=tolerance)
        assert estimator == "k1" or (kl >= 0).all()


# ---- exactly 1


@ROWS
def test_the_first_epoch_has_ratios_of_exactly_one(row: Algorithm) -> None:
    """Then the gradient is REINFORCE's, weight x A, to the bit (GSPO rounds its mean over the sequence)."""
    pack, _ = hand_batch()
    totals = Totals.count(pack.samples, 10)
    new = torch.from_numpy(pack.logprobs).requires_grad_()
    result = policy_loss(new, LossTokens.of(pack, row, totals), row)
    result.loss.backward()
    assert result.sums["ratio"].item() == 5.0 and result.sums["logp_abs_diff"].item() == 0.0
    assert result.sums["clip_low"] + result.sums["clip_high"] == 0
    expected = -torch.from_numpy(token_weights(row.normalise, pack, totals)) * torch.from_numpy(pack.advantages)
    assert new.grad is not None
    if row.ratio == "token":
        assert torch.equal(new.grad, expected)
    torch.testing.assert_close(new.grad, expected, rtol=1e-6, atol=0)


def test_own_old_logprobs_replace_the_engines() -> None:
    pack, new = hand_batch()
    tokens = LossTokens.of(pack, plain(), Totals.count(pack.samples, 10), old_logprobs=new.detach())
    assert policy_loss(new, tokens, plain()).sums["ratio"].item() == 5.0


def test_later_epochs_stop_where_the_clip_bites() -> None:
    """Gradient ascent on one batch: once every ratio has left the range on the side it is pushed to, nothing moves."""
    pack, _ = hand_batch()
    tokens = LossTokens.of(pack, plain(), Totals.count(pack.samples, 10))
    logprobs = torch.from_numpy(pack.logprobs.copy()).requires_grad_()
    optimizer = torch.optim.SGD([logprobs], lr=0.2)
    fractions = []
    for _ in range(12):
        optimizer.zero_grad()
        result = policy_loss(logprobs, tokens, plain())
        result.loss.backward()
        optimizer.step()
        fractions.append(metric_means(result.sums)["clip_low"] + metric_means(result.sums)["clip_high"])
    assert fractions[0] == 0 and fractions[-1] == 1
    assert logprobs.grad is not None and not logprobs.grad.any()


# ---- masks and extremes


def test_masked_tokens_count_for_nothing() -> None:
    result, gradient = loss_and_gradient(plain(), mask=[True, False, True, True, True])
    assert gradient[1] == 0 and result.sums["num_tokens"] == 4
    assert result.loss.item() == pytest.approx(-(2.4 / 2 + (-0.8 - 1.1 - 2.0) / 6), rel=1e-6)


def test_a_masked_token_stays_out_of_the_sequence_ratio() -> None:
    result, gradient = loss_and_gradient(plain(ratio="sequence"), mask=[False, True, True, True, True])
    assert gradient[0] == 0
    assert result.loss.item() == pytest.approx(-(2 * 0.9 - 1.1 ** (1 / 3)) / 2, rel=1e-6)


@ROWS
def test_a_masked_response_leaves_the_others_as_if_it_were_not_there(row: Algorithm) -> None:
    pack, new = hand_batch([True, True, False, False, False])
    totals = Totals.count(pack.samples, 10)
    assert totals == Totals(1, 2, 10) == Totals.count(pack.samples[:1], 10)
    masked = policy_loss(new, LossTokens.of(pack, row, totals), row)
    (alone,) = pack_samples(pack.samples[:1], 100)
    assert masked.loss == policy_loss(new[:2], LossTokens.of(alone, row, totals), row).loss


@ROWS
def test_a_batch_with_nothing_to_train_on_is_a_loss_of_zero(row: Algorithm) -> None:
    result, gradient = loss_and_gradient(row, mask=[False] * 5)
    assert result.loss.item() == 0 and gradient == [0] * 5
    assert metric_means(result.sums)["ratio"] == 0


@ROWS
def test_a_ratio_beyond_all_bounds_stays_finite(row: Algorithm) -> None:
    pack, new = hand_batch()
    tokens = LossTokens.of(pack, row, Totals.count(pack.samples, 10), reference_logprobs=new.detach() + 1000)
    far = (new.detach() + torch.tensor([0.0, 0.0, 500.0, 500.0, 500.0])).requires_grad_()
    result = policy_loss(far, tokens, dataclasses.replace(row, kl_coef=0.1, kl_in="loss"))
    result.loss.backward()
    assert far.grad is not None and result.loss.isfinite() and far.grad.isfinite().all()


# ---- packed, padded and any other way


class TinyPolicy(torch.nn.Module):
    """Next-token logits from the mean of the embeddings so far: the smallest model in which sequences could leak."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11)

    def packed(self, pack: Pack) -> Tensor:
        """[T] Log-probabilities of the response tokens, flat."""
        embedded = self.embedding(torch.from_numpy(pack.token_ids).long())
        parts = embedded.split(np.diff(pack.starts).tolist())
        means = torch.cat([part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None] for part in parts])
        # The row that predicts a token is the one before it.
        ends = zip(pack.samples, pack.starts[1:], strict=True)
        rows = torch.cat([torch.arange(end - len(sample.response_ids), end) for sample, end in ends])
        logprobs = self.head(means[rows - 1]).log_softmax(-1)
        return logprobs.gather(1, torch.from_numpy(pack.token_ids).long()[rows, None]).squeeze(1)

    def padded(self, token_ids: Tensor) -> Tensor:
        """[B, L - 1] Log-probabilities of every token but the first."""
        means = self.embedding(token_ids).cumsum(1) / torch.arange(1, token_ids.shape[1] + 1)[:, None]
        logprobs = self.head(means[:, :-1]).log_softmax(-1)
        return logprobs.gather(2, token_ids[:, 1:, None]).squeeze(2)


def random_samples(seed: int = 0, num: int = 7) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num):
        length = int(rng.integers(1, 9))
        prompt, response = rng.integers(0, 11, rng.integers(1, 5)), rng.integers(0, 11, length)
        logprobs, advantages = rng.uniform(-3, -1.5, length), np.full(length, rng.normal())
        samples.append(Sample.of(i // 2, i % 2, prompt, response, logprobs, advantages, rng.random(length) < 0.8))
    return samples


def references(samples: list[Sample]) -> dict[tuple[int, int], Tensor]:
    """Log-probabilities of some other policy."""
    return {(s.draw, s.sample): torch.from_numpy(s.logprobs * 0.9 - 0.1) for s in samples}


def packed_gradients(row: Algorithm, samples: list[Sample], max_rows: int) -> tuple[float, dict[str, Tensor]]:
    policy, totals, reference = TinyPolicy(), Totals.count(samples, 12), references(samples)
    loss = 0.0
    for pack in pack_samples(samples, max_rows):
        kept = torch.cat([reference[s.draw, s.sample] for s in pack.samples])
        tokens = LossTokens.of(pack, row, totals, reference_logprobs=kept)
        result = policy_loss(policy.packed(pack), tokens, row)
        result.loss.backward()
        loss += result.loss.item()
    return loss, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def pad(samples: list[Sample], values: Callable[[Sample], np.ndarray]) -> Tensor:
    """[B, L - 1] One value per response token, 0 at prompt and padding."""
    length = max(s.num_rows for s in samples) - 1
    padded = torch.zeros(len(samples), length)
    for row, s in enumerate(samples):
        start = len(s.prompt_ids) - 1
        padded[row, start : start + len(s.response_ids)] = torch.from_numpy(np.array(values(s), dtype=np.float32))
    return padded


def padded_gradients(row: Algorithm, samples: list[Sample]) -> tuple[float, dict[str, Tensor]]:
    """The twin: one rectangle with padding, one backward, each formula written out as a paper has it."""
    policy, reference = TinyPolicy(), references(samples)
    ids = torch.zeros(len(samples), max(s.num_rows for s in samples), dtype=torch.long)
    for i, s in enumerate(samples):
        ids[i, : s.num_rows] = torch.tensor([*s.prompt_ids, *s.response_ids])
    mask, old = pad(samples, lambda s: s.mask), pad(samples, lambda s: s.logprobs)
    advantages = pad(samples, lambda s: s.advantages)
    counts = mask.sum(1, keepdim=True)
    new = policy.padded(ids)
    ratio = ((new - old) * mask).exp()
    if row.ratio == "sequence":
        ratio = (((new - old) * mask).sum(1, keepdim=True) / counts.clamp(min=1)).exp().expand_as(mask)
    objective = torch.min(ratio * advantages, ratio.clip(1 - row.clip_low, 1 + row.clip_high) * advantages)
    if row.dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, row.dual_clip * advantages), objective)
    away = pad(samples, lambda s: reference[s.draw, s.sample].numpy()) - new
    kl = {"k1": -away, "k2": away**2 / 2, "k3": away.exp() - away - 1}[row.kl_estimator]
    per_token = (objective - row.kl_coef * kl) * mask
    num_sequences = (counts > 0).sum()
    means = {
        "sequence": (per_token.sum(1, keepdim=True) / counts.clamp(min=1)).sum() / num_sequences,
        "token": per_token.sum() / mask.sum(),
        "constant": per_token.sum() / num_sequences / 12,
    }
    loss = -means[row.normalise]
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("row", WITH_KL, ids=lambda row: f"{row.name}-{row.kl_estimator}")
def test_packed_gradients_equal_padded_ones(row: Algorithm) -> None:
    samples = random_samples()
    loss, gradients = padded_gradients(row, samples)
    for max_rows in (1, 25, 1000):
        packed_loss, packed = packed_gradients(row, samples, max_rows)
        assert packed_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(packed[name], gradient, rtol=1e-4, atol=1e-7)


def gradients_at_logprobs(
    row: Algorithm, samples: list[Sample], max_rows: int, seed: int
) -> dict[tuple[int, int], Tensor]:
    """What each sample's log-probabilities receive, the policy having moved a little from the one that sampled."""
    totals = Totals.count(samples, 12)
    received: dict[tuple[int, int], Tensor] = {}
    for pack in pack_samples(samples, max_rows):
        moves = [np.random.default_rng([seed, s.draw, s.sample]).normal(0, 0.2, len(s.logprobs)) for s in pack.samples]
        new = torch.from_numpy(pack.logprobs + np.concatenate(moves).astype(np.float32)).requires_grad_()
        reference = torch.from_numpy(pack.logprobs) * 0.9
        policy_loss(new, LossTokens.of(pack, row, totals, reference_logprobs=reference), row).loss.backward()
        assert new.grad is not None
        received |= {
            (s.draw, s.sample): part
            for s, part in zip(pack.samples, new.grad.split(pack.response_lengths), strict=True)
        }
    return received


@settings(max_examples=25)
@given(st.sampled_from(WITH_KL), st.integers(0, 1000), st.integers(1, 80))
def test_packing_changes_no_bit_at_the_log_probabilities(row: Algorithm, seed: int, max_rows: int) -> None:
    samples = random_samples(seed, num=9)
    whole = gradients_at_logprobs(row, samples, 10_000, seed)
    for key, gradient in gradients_at_logprobs(row, samples, max_rows, seed).items():
        assert torch.equal(gradient, whole[key])


def test_a_mean_over_each_pack_would_show() -> None:
    """The control: totals counted per pack, as a mean over a micro-batch does it, change the gradient."""
    samples, row = random_samples(), ALGORITHMS["grpo"]
    whole = gradients_at_logprobs(row, samples, 10_000, 0)
    parts = gradients_at_logprobs(row, samples[:4], 10_000, 0)
    assert not torch.equal(parts[0, 0], whole[0, 0])


def test_metric_sums_of_packs_add_up_to_those_of_the_batch() -> None:
    samples, row = random_samples(), ALGORITHMS["dapo"]
    totals = Totals.count(samples, 12)

    def sums(max_rows: int) -> dict[str, float]:
        parts = []
        for pack in pack_samples(samples, max_rows):
            new = torch.from_numpy(pack.logprobs) + 0.3 * torch.from_numpy(np.sign(pack.advantages))
            parts.append(policy_loss(new, LossTokens.of(pack, row, totals), row).sums)
        total = tree_sum(parts)
        assert total is not None
        return metric_means(total)

    assert sums(1) == pytest.approx(sums(10_000), rel=1e-9)
    assert sums(1)["num_tokens"] == sum(s.num_trained for s in samples)
