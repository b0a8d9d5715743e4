"""Advantages: how much better a response is than expected for its prompt, or for the batch.

`algorithms.py` calls these; all are pure functions on float64 arrays, in sample order. A group is identified by its
draw and may have any size; groups never mix, except in `whiten`, which says so. Equal rewards are worth exactly 0: the
rounding of a mean must never look like a signal that a division by a tiny deviation then amplifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.types import BoolArray, Float64Array, IntArray

Advantage = Callable[[Float64Array, IntArray], Float64Array]
"""Rewards and the draw of each (equal within a group) -> the value of each response."""

GROUP_EPS = 1e-6
"""Added to a group's deviation; small compared with any real spread of rewards."""
WHITEN_EPS = 1e-8
"""Added to a batch's variance."""


def group_standardised(rewards: Float64Array, draws: IntArray) -> Float64Array:
    """(r - mean of the group) / (deviation of the group + eps): GRPO, arXiv 2402.03300.

    Uses the sample deviation (n - 1), as in TRL and verl; the paper does not say.
    """
    return _per_group(rewards, draws, lambda r: (r - r.mean()) / (r.std(ddof=1) + GROUP_EPS))


def group_centred(rewards: Float64Array, draws: IntArray) -> Float64Array:
    """r - mean of the group: Dr.GRPO, arXiv 2503.20783, which shows that the deviation favours very easy prompts."""
    return _per_group(rewards, draws, lambda r: r - r.mean())


def leave_one_out(rewards: Float64Array, draws: IntArray) -> Float64Array:
    """r - mean of the *other* responses of the group: RLOO, arXiv 2402.14740; the baseline does not depend on r."""
    return _per_group(rewards, draws, lambda r: r - (r.sum() - r) / (len(r) - 1))


def raw_reward(rewards: Float64Array, draws: IntArray) -> Float64Array:
    """The reward itself: REINFORCE++, arXiv 2501.03262, has no baseline but the mean that `whiten` subtracts."""
    _check(rewards, draws)
    return np.array(rewards, dtype=np.float64)


ADVANTAGES: dict[str, Advantage] = {
    "group_standardised": group_standardised,
    "group_centred": group_centred,
    "leave_one_out": leave_one_out,
    "raw_reward": raw_reward,
}
"""Allowed values of `rl.advantage`."""


def value_responses(advantage: str | Advantage, rewards: Float64Array, draws: IntArray) -> Float64Array:
    """Value of each response, by one of ours or by a user's function, whose result is checked."""
    if isinstance(advantage, str):
        return ADVANTAGES[advantage](rewards, draws)
    _check(rewards, draws)
    name = getattr(advantage, "__name__", str(advantage))
    try:
        values = np.asarray(advantage(rewards.copy(), draws.copy()), dtype=np.float64)
    except Exception as error:
        raise ValueError(f"rl.algorithm: the advantage {name} raised {type(error).__name__}: {error}") from error
    if values.shape != rewards.shape or not np.isfinite(values).all():
        what = f"{np.sum(~np.isfinite(values))} that are not" if values.shape == rewards.shape else f"{values.shape}"
        raise ValueError(
            f"rl.algorithm: the advantage {name} must return a finite number for each of {len(rewards)} rewards, "
            f"got {what}: {values.tolist()!r:.80}"
        )
    return values


def subtract_cost_to_go(advantages: Sequence[Float64Array], costs: Sequence[Float64Array]) -> list[Float64Array]:
    """Token advantages minus the costs from that token to the end: A[t] - sum of costs[i] over i >= t.

    With costs = coefficient x KL to the reference at each token, this makes KL part of the reward. A token is not
    charged for what came before it, which it could not change.
    """
    return [values - np.cumsum(cost[::-1])[::-1] for values, cost in zip(advantages, costs, strict=True)]


def whiten(advantages: Sequence[Float64Array], masks: Sequence[BoolArray]) -> list[Float64Array]:
    """(A - mean) / deviation over all trained tokens of the batch, so long responses weigh by their length.

    As in REINFORCE++, regardless of groups and packs. Tokens outside the masks get 0 and enter no mean.
    """
    trained = [values[mask] for values, mask in zip(advantages, masks, strict=True)]
    flat = np.concatenate(trained) if trained else np.zeros(0)
    if not len(flat) or flat.max() == flat.min():
        return [np.zeros(len(values)) for values in advantages]
    mean, scale = flat.mean(), 1 / np.sqrt(flat.var(ddof=1) + WHITEN_EPS)
    return [np.where(mask, (values - mean) * scale, 0.0) for values, mask in zip(advantages, masks, strict=True)]


def _per_group(
    rewards: Float64Array, draws: IntArray, advantage: Callable[[Float64Array], Float64Array]
) -> Float64Array:
    """`advantage` of each group on its own; 0 if all its rewards are equal, as in a group of one."""
    _check(rewards, draws)
    result = np.zeros(len(rewards))
    for draw in np.unique(draws):
        members = draws == draw
        group = np.asarray(rewards, dtype=np.float64)[members]
        if group.max() > group.min():
            result[members] = advantage(group)
    return result


def _check(rewards: Float64Array, draws: IntArray) -> None:
    assert len(rewards) == len(draws), "one draw per reward"
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise ValueError(
            f"reward {float(rewards[bad[0]])} of draw {int(draws[bad[0]])} is not a finite number; "
            "make the reward function return a float for every response"
        )
