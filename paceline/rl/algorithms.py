"""The table of algorithms: GRPO, DAPO and the others, one row each.

`RlSettings.build` takes a row and applies the user's overrides; filters, advantages and loss read the result and never
an algorithm's name. A new algorithm is one row in `ALGORITHMS` (and a function in `advantage.py` if it values responses
in a new way); a user's own is a row in a file, `path/to/file.py:NAME`. Never import torch here: `--help` lists the
rows.

All rows maximise   sum over trained tokens of  weight x min(ratio x A, clip(ratio, 1 - low, 1 + high) x A)
with ratio = new probability / old probability of the token, A its advantage, and weights chosen by `normalise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.config import nearest
from paceline.core.plugins import call_own, load_own, names_file
from paceline.core.types import BoolArray, Float64Array, IntArray
from paceline.rl.advantage import ADVANTAGES, Advantage, subtract_cost_to_go, value_responses, whiten

Ratio = Literal["token", "sequence"]
Normalise = Literal["sequence", "token", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Filter = Literal["none", "spread"]


@dataclass(frozen=True)
class Algorithm:
    """One way to turn rewards into a gradient. Plain data; the `rl` section can override every field."""

    name: str
    advantage: str | Advantage
    """The function of `advantage.py` that values a response, or a function like those."""
    normalise: Normalise
    """Weight of a token: 1 / (sequences x tokens of its sequence), 1 / tokens, or 1 / (sequences x length limit),
    counted over the whole batch."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Upper bound on the ratio where A < 0 (arXiv 1912.09729); None: unbounded."""
    ratio: Ratio = "token"
    """Each token's own ratio, or one per sequence: the geometric mean of its tokens' ratios."""
    whiten: bool = False
    """Normalise advantages over all tokens of the batch."""
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    """As a term of the loss, or as a cost of each token that its advantage includes."""
    filter: Filter = "none"
    """spread: train only on groups whose scores differ."""
    overlong_share: float = 0.0
    """Last part of the length limit, over which the reward falls linearly by `rl.overlong_penalty`."""


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        # arXiv 2402.03300: mean over responses of the mean over their tokens.
        Algorithm("grpo", "group_standardised", "sequence"),
        # arXiv 2503.20783: divides by the length limit, not by the deviation or the response's own length.
        Algorithm("dr_grpo", "group_centred", "constant"),
        # arXiv 2503.14476: clip-higher, dynamic sampling, every token weighs the same, overlong shaping (their 4,096 of
        # 20,480 tokens). The paper counts tokens per group; like verl and TRL this counts them over the batch.
        Algorithm(
            "dapo", "group_standardised", "token", clip_low=0.2, clip_high=0.28, filter="spread", overlong_share=0.2
        ),
        # arXiv 2402.14740: the log-probability of a whole response, so its tokens are summed. Dividing by the length
        # limit scales everything alike and keeps gradient norms comparable with the other rows.
        Algorithm("rloo", "leave_one_out", "constant"),
        # arXiv 2501.03262: no groups, the batch is the baseline, KL (if any) is a cost inside the reward.
        Algorithm("reinforce++", "raw_reward", "token", whiten=True, kl_estimator="k1", kl_in="reward"),
        # Same paper, for groups: centred in the group, scaled over the batch, KL (if any) as a loss with k2.
        Algorithm("reinforce++-baseline", "group_centred", "token", whiten=True, kl_estimator="k2"),
        # arXiv 2507.18071: one ratio per sequence, hence the narrow clip range of its section 5.1.
        Algorithm("gspo", "group_standardised", "sequence", clip_low=3e-4, clip_high=4e-4, ratio="sequence"),
    )
}


def find_algorithm(name: str) -> Algorithm:
    """The row with this name, or in this file."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if names_file(name):
        row: Algorithm = load_own(name, "rl.algorithm", "Algorithm", lambda value: isinstance(value, Algorithm))
        return row
    raise ValueError(unknown("algorithm", name, list(ALGORITHMS)) + ", or a row of your own: file.py:NAME")


def check_advantage(name: str) -> str:
    """Return the name if there is such an advantage."""
    if name in ADVANTAGES:
        return name
    raise ValueError(unknown("advantage", name, list(ADVANTAGES)))


def unknown(noun: str, name: str, known: Sequence[str]) -> str:
    """Error text for an unknown name, with a suggestion."""
    guess = nearest(name, known)
    return f"unknown {noun} {name!r}: " + (f"did you mean {guess!r}? " if guess else "") + f"(use {', '.join(known)})"


def assign_advantages(
    algorithm: Algorithm,
    rewards: Float64Array,
    draws: IntArray,
    masks: Sequence[BoolArray],
    kl: Sequence[Float64Array] | None = None,
) -> list[Float64Array]:
    """One advantage per token of every response, in the given order. `masks` mark the trained tokens.

    A masked response still counts in its group's mean: its score is known, only its text is not used. `kl` holds
    estimates per token under the policy that sampled it; needed if KL is part of the reward.
    """
    own = f"the advantage of {algorithm.name}"
    values = call_own(lambda: value_responses(algorithm.advantage, rewards, draws), own, "rl.algorithm")
    advantages = [np.full(len(mask), value) for value, mask in zip(values, masks, strict=True)]
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        assert kl is not None, "KL in the reward needs the reference's log-probabilities before the advantages"
        advantages = subtract_cost_to_go(advantages, [algorithm.kl_coef * tokens for tokens in kl])
    return whiten(advantages, masks) if algorithm.whiten else advantages
