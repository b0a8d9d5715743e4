"""Verification, the only place that decides tokens: walks down the draft while the policy's own samples agree.

Every row of the step has been sampled with the noise of its own position. The walk emits the token sampled at the last
emitted one; if a child in the draft holds that token, it continues at the child's row, and so on. The result is what
decoding one token at a time would have given, so a draft can only save steps. The walk ends where the response ends,
even inside an accepted draft.

`walk` does this for all sequences of a step at once, whoever drafted, and `write` adds what it found to the table.
`verify` is the readable twin for one sequence, against which tests hold both.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Draft, FinishReason, Rollout, Verdict
from paceline.kernels.cpu.jit import host_loop
from paceline.model.ops.base import Sampled
from paceline.rollout.proposal import Proposal
from paceline.rollout.sequence import Sequence
from paceline.rollout.table import SequenceTable

FindEnd = Callable[[Sequence], FinishReason | None]

GOES_ON, STOP, LENGTH, NOT_FINITE = range(4)
"""How a sequence leaves a step."""
REASONS: dict[int, FinishReason] = {STOP: "stop", LENGTH: "length"}
_compiled: Any = host_loop


class NonFiniteLogits(ValueError):
    """The model produced NaN or infinite logits; the message names the sequence."""

    rollouts: list[Rollout]
    """The rollouts that had finished."""

    @classmethod
    def of(cls, sequence: Sequence) -> NonFiniteLogits:
        """The error of a sequence whose next token could not be sampled."""
        return cls(
            f"the model gave NaN or infinite logits for {sequence.describe()} at response token "
            f"{sequence.length - sequence.prompt_length}; check the weights"
        )


class Walked(NamedTuple):
    """What a step found, one entry per decoding sequence."""

    counts: NDArray[np.int64]
    """Emitted tokens; 0 if the sequence had finished before."""
    ends: NDArray[np.int64]
    """GOES_ON, STOP, LENGTH or NOT_FINITE."""
    path: NDArray[np.int64]
    """[rows]: from a sequence's first row on, the rows of its emitted tokens, counted from that row."""

    def path_of(self, start: int, entry: int) -> list[int]:
        """The accepted draft nodes of one entry, whose first row is `start`."""
        found: list[int] = (self.path[start + 1 : start + self.counts[entry]] - 1).tolist()
        return found


@_compiled
def walk(
    is_live: Any,
    starts: Any,
    counts: Any,
    parents: Any,
    inputs: Any,
    sampled: Any,
    is_finite: Any,
    is_end: Any,
    kinds: Any,
    num_left: Any,
) -> Any:
    """Walk down all drafts of a step; `parents` counts from a sequence's first row. Returns the fields of `Walked`.

    `is_end` [kinds, vocabulary] says which tokens end a response, `kinds` which of its rows is a sequence's.
    """
    num_emitted, ends = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    path = np.zeros(len(inputs), np.int64)
    for i in range(len(starts)):
        row, start, end = 0, starts[i], counts[i]
        while is_live[i]:
            at = start + row
            if not is_finite[at]:
                ends[i] = 3
                break
            token = sampled[at]
            path[start + num_emitted[i]] = row
            num_emitted[i] += 1
            if is_end[kinds[i], token]:
                ends[i] = 1
                break
            if num_emitted[i] == num_left[i]:
                ends[i] = 2
                break
            child = row + 1
            while child < end and not (parents[start + child] == row and inputs[start + child] == token):
                child += 1  # the first of equal siblings counts
            if child >= end:
                break
            row = child
    return num_emitted, ends, path


@_compiled
def disagrees(is_live: Any, ends: Any, counts: Any, num_accepted: Any) -> bool:
    """Whether the device itself accepted another number of drafted tokens for a sequence that goes on."""
    found = False
    for i in range(len(counts)):
        found = found or (is_live[i] and ends[i] == 0 and num_accepted[i] != counts[i] - 1)
    return found


@_compiled
def _write(
    slots: Any,
    starts: Any,
    counts: Any,
    path: Any,
    sources: Any,
    sampled: Any,
    logprobs: Any,
    truncated: Any,
    lengths: Any,
    cached: Any,
    last: Any,
    tokens: Any,
    kept: Any,
    num_recent: Any,
    spans: Any,
    num_spans: Any,
    prompt_lengths: Any,
) -> None:
    for i in range(len(slots)):
        slot, count = slots[i], counts[i]
        if count == 0:
            continue
        at = num_recent[slot]
        for nth in range(count):
            row = starts[i] + path[starts[i] + nth]
            tokens[slot, at + nth] = sampled[row]
            kept[0, slot, at + nth] = logprobs[row]
            kept[1, slot, at + nth] = truncated[row]
        num_recent[slot] = at + count
        if count > 1:
            first, nth = lengths[slot] - prompt_lengths[slot], num_spans[slot]
            spans[slot, nth, 0], spans[slot, nth, 1] = first, first + count - 1
            spans[slot, nth, 2] = sources[i]
            num_spans[slot] = nth + 1
        lengths[slot] += count
        cached[slot] += count
        last[slot] = tokens[slot, at + count - 1]


def write(
    table: SequenceTable,
    slots: NDArray[np.int64],
    starts: NDArray[np.int32],
    walked: Walked,
    sources: NDArray[np.int64],
    sampled: Sampled,
) -> None:
    """Add the emitted tokens of a step to its sequences; their rows, and those of accepted nodes, are cached now."""
    table.make_room(slots)
    columns = (sampled.tokens, sampled.logprobs, sampled.truncated_logprobs)
    _write(slots, starts, walked.counts, walked.path, sources, *columns, *table.arrays)


def verify(sequence: Sequence, proposal: Proposal, sampled: Sampled, first: int, find_end: FindEnd) -> Verdict:
    """The slow twin: emit tokens of one sequence.

    Row `first` of `sampled` is its last emitted token, `first + 1 + i` draft node i.
    """
    path: list[int] = []
    emitted: list[int] = []
    children = _children(proposal.draft)
    node = -1
    while True:
        row = first + 1 + node
        if not sampled.is_finite[row]:
            raise NonFiniteLogits.of(sequence)
        token = int(sampled.tokens[row])
        sequence.append(token, float(sampled.logprobs[row]), float(sampled.truncated_logprobs[row]))
        emitted.append(token)
        sequence.finish_reason = find_end(sequence)
        following = children.get((node, token))
        if following is None or sequence.finish_reason is not None:
            own_path = proposal.to_own(path)
            return Verdict(sequence.sequence_id, proposal.source, len(proposal.whole), tuple(own_path), tuple(emitted))
        path.append(following)
        node = following


def _children(draft: Draft) -> dict[tuple[int, int], int]:
    """Maps a node and a token to the node's first child with that token."""
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(draft.parents, np.asarray(draft.tokens).tolist(), strict=True)):
        children.setdefault((int(parent), token), node)
    return children


def cut_at_stops(
    walked: Walked,
    decoding: SequenceOf[Sequence],
    starts: NDArray[np.int32],
    sampled: Sampled,
    has_stop: Callable[[Sequence, list[int]], int],
) -> None:
    """Shorten what is emitted to where a stop string ends the response. `has_stop` says after how many tokens; 0: not.

    The walk does not know text, so this is the only part of verification that decodes, and only if there are stops.
    """
    for i in np.flatnonzero(walked.counts).tolist():
        rows = starts[i] + walked.path[starts[i] : starts[i] + walked.counts[i]]
        count = has_stop(decoding[i], sampled.tokens[rows].tolist())
        if count and (count < walked.counts[i] or walked.ends[i] != STOP):
            walked.counts[i], walked.ends[i] = count, STOP
