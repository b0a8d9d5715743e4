"""Verification, the only place that decides tokens: walks down the draft while the policy's own samples agree.

Every row of the step has been sampled with the noise of its own position. The walk emits the token sampled at the last
emitted one; if a child in the draft holds that token, it continues at the child's row, and so on. The result is what
decoding one token at a time would have given, so a draft can only save steps. The walk ends where the response ends,
even inside an accepted draft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from paceline.core.types import Draft, FinishReason, Rollout, Verdict
from paceline.model.ops.base import Sampled
from paceline.rollout.proposer import Proposal
from paceline.rollout.sequence import Sequence

FindEnd = Callable[[Sequence], FinishReason | None]


class SampledRows(NamedTuple):
    """`Sampled` as lists: the walk reads single numbers, several times faster from lists than from arrays."""

    tokens: list[int]
    logprobs: list[float]
    truncated_logprobs: list[float]
    is_finite: list[bool]

    @classmethod
    def of(cls, sampled: Sampled) -> SampledRows:
        arrays = (sampled.tokens, sampled.logprobs, sampled.truncated_logprobs, sampled.is_finite)
        return cls(*(array.tolist() for array in arrays))


class NonFiniteLogits(ValueError):
    """The model produced NaN or infinite logits; the message names the sequence."""

    rollouts: list[Rollout]
    """The rollouts that had finished."""


def verify(sequence: Sequence, proposal: Proposal, sampled: SampledRows, first: int, find_end: FindEnd) -> Verdict:
    """Emit tokens of one sequence. Row `first` of `sampled` is its last emitted token, `first + 1 + i` draft node i."""
    path: list[int] = []
    emitted: list[int] = []
    find_child = _finder(proposal.draft) if proposal.kept else _no_child
    node = -1
    while True:
        row = first + 1 + node
        if not sampled.is_finite[row]:
            raise NonFiniteLogits(
                f"the model gave NaN or infinite logits for {sequence.describe()} at response token "
                f"{sequence.length - sequence.prompt_length}; check the weights"
            )
        token = sampled.tokens[row]
        sequence.append(token, sampled.logprobs[row], sampled.truncated_logprobs[row])
        emitted.append(token)
        sequence.finish_reason = find_end(sequence)
        following = find_child(node, token)
        if following is None or sequence.finish_reason is not None:
            own_path = proposal.to_own(path)
            return Verdict(sequence.sequence_id, proposal.source, len(proposal.whole), tuple(own_path), tuple(emitted))
        path.append(following)
        node = following


def emit(sequences: SequenceOf[Sequence], sampled: SampledRows, end_tokens: Collection[int]) -> list[Sequence]:
    """Emit one token of every unfinished sequence of a step without drafts; returns those that end with it.

    The same as `verify` without a draft, for finite rows in order and without stop strings, but several times faster.
    """
    ended = []
    columns = (sampled.tokens, sampled.logprobs, sampled.truncated_logprobs)
    for sequence, token, logprob, truncated_logprob in zip(sequences, *columns, strict=True):
        if sequence.finish_reason is None:
            sequence.append(token, logprob, truncated_logprob)
            if token in end_tokens:
                sequence.finish_reason = "stop"
                ended.append(sequence)
            elif sequence.length == sequence.max_length:
                sequence.finish_reason = "length"
                ended.append(sequence)
    return ended


FindChild = Callable[[int, int], int | None]
"""Maps a node and a token to the node's child with that token."""


def _no_child(node: int, token: int) -> int | None:
    return None


def _finder(draft: Draft) -> FindChild:
    tokens = np.asarray(draft.tokens).tolist()
    if draft.has_plain_parents:

        def find(node: int, token: int) -> int | None:
            child = node + 1
            return child if child < len(tokens) and tokens[child] == token else None

        return find
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(draft.parents, tokens, strict=True)):
        children.setdefault((int(parent), token), node)  # the first of equal siblings counts
    return lambda node, token: children.get((node, token))
