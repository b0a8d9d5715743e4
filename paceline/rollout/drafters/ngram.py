"""The `ngram` drafter: drafts what followed the same few tokens earlier in the sequence's own text (prompt look-up).

It looks for the last 2 to `max_n` tokens in prompt and response. The longest match wins, the most recent one in a tie,
and what followed it is drafted as a chain. A match that reaches the end wraps around, so a loop is drafted on.

Each sequence has a ring of its last `window` tokens and a hash table from token pairs to their last position, chained
to earlier ones. Called by the engine once per step with the whole batch: one compiled call per `propose` and one per
`observe`. It must never read another sequence's text; that is what `suffix` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.core.types import Draft, Float32Array, Int32Array, SequenceView, Verdict
from paceline.kernels.cpu.jit import host_loop
from paceline.rollout.drafters.base import drafts_of, emitted

NUM_BUCKETS = 4096
MAX_TRIES = 32
"""How many earlier positions of the last two tokens are tried, newest first."""
MAX_NODES = 256
DOUBT = 12.0
"""A node's score is 1 / (1 + DOUBT / (1 + match length) ** 1.5), as `suffix` scores a single occurrence."""

_compiled: Any = host_loop


class Rings(NamedTuple):
    """All memory, one row per sequence. Positions count from 0 and are stored plus one, so that 0 means "none"."""

    tokens: Int32Array
    earlier: Int32Array
    buckets: Int32Array
    lengths: Int32Array


@_compiled
def _bucket(first: int, second: int) -> int:
    mixed = (first * 0x9E3779B1 + second) * 0x85EBCA6B
    return (mixed >> 15) & (NUM_BUCKETS - 1)


@_compiled
def _append(rings: Rings, which: Int32Array, ends: Int32Array, new_tokens: Int32Array) -> None:
    tokens, earlier, buckets, lengths = rings
    mask = tokens.shape[1] - 1
    start = 0
    for i in range(which.shape[0]):
        row = which[i]
        for j in range(start, ends[i]):
            place = lengths[row]
            tokens[row, place & mask] = new_tokens[j]
            if place > 0:
                bucket = _bucket(tokens[row, (place - 1) & mask], new_tokens[j])
                earlier[row, place & mask] = buckets[row, bucket]
                buckets[row, bucket] = place + 1
            lengths[row] = place + 1
        start = ends[i]


@_compiled
def _find(tokens: Int32Array, earlier: Int32Array, row: int, length: int, max_n: int) -> tuple[int, int]:
    """Where the longest match ends, and how long it is."""
    mask = tokens.shape[1] - 1
    oldest = max(0, length - tokens.shape[1])
    last, best, most = length - 1, 0, 0
    place = earlier[row, last & mask] - 1
    for _ in range(MAX_TRIES):
        if place <= oldest:
            break
        n = 0
        while n < max_n and place - n >= oldest and tokens[row, (place - n) & mask] == tokens[row, (last - n) & mask]:
            n += 1
        if n > most:
            best, most = place, n
        if n == max_n:
            break
        place = earlier[row, place & mask] - 1
    return best, most


@_compiled
def _draft(
    rings: Rings,
    which: Int32Array,
    budgets: Int32Array,
    max_n: int,
    min_path: float,
    new_tokens: Int32Array,
    scores: Float32Array,
    ends: Int32Array,
) -> None:
    tokens, earlier, _, lengths = rings
    mask = tokens.shape[1] - 1
    end = 0
    for i in range(which.shape[0]):
        row, length, place, match = which[i], lengths[which[i]], 0, 0
        if length > 2:
            place, match = _find(tokens, earlier, row, length, max_n)
        start, path = end, 1.0
        while match >= 2 and end - start < budgets[i]:
            score = 1 / (1 + DOUBT / (1 + match) ** 1.5)
            path *= score
            if path < min_path:
                break
            scores[end] = score
            place += 1
            new_tokens[end] = tokens[row, place & mask] if place < length else new_tokens[start + place - length]
            match, end = match + 1, end + 1
        ends[i] = end


class Ngram:
    """The n-gram drafter. `window` is a power of two; chains end where the path probability falls below `min_path`."""

    name = "ngram"

    def __init__(self, max_n: int = 5, window: int = 8192, min_path: float = 0.05) -> None:
        if max_n < 2:
            raise ValueError(f"ngram drafter: max_n must be 2 or more; got {max_n}")
        if window <= max_n or window & (window - 1):
            raise ValueError(f"ngram drafter: window must be a power of two above max_n; got {window}")
        self.max_n = max_n
        self.min_path = float(min_path)
        self._live: dict[int, int] = {}
        self._free: list[int] = []
        self._rings = Rings(
            tokens=np.empty((0, window), np.int32),
            earlier=np.empty((0, window), np.int32),
            buckets=np.empty((0, NUM_BUCKETS), np.int32),
            lengths=np.empty(0, np.int32),
        )

    @property
    def memory_bytes(self) -> int:
        return sum(array.nbytes for array in self._rings)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        if not views:
            return []
        live = self._live
        try:
            rows = [live[view.sequence_id] for view in views]
        except KeyError:
            rows = [self._row_of(view) for view in views]
        assert len(rows) == len(budgets)
        limits = np.array(budgets, np.int32).clip(0, MAX_NODES)
        size = int(limits.sum())
        tokens, scores, ends = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(len(rows), np.int32)
        _draft(self._rings, np.array(rows, np.int32), limits, self.max_n, self.min_path, tokens, scores, ends)
        return drafts_of(tokens, None, scores, ends.tolist())

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        rows, ends, tokens = emitted(self._live, verdicts)
        if rows:
            _append(self._rings, np.array(rows, np.int32), np.array(ends, np.int32), np.array(tokens, np.int32))

    def finish(self, sequence_id: int) -> None:
        row = self._live.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)

    def _row_of(self, view: SequenceView) -> int:
        row = self._live.get(view.sequence_id)
        return self._register(view) if row is None else row

    def _register(self, view: SequenceView) -> int:
        if not self._free:
            self._grow()
        row = self._live[view.sequence_id] = self._free.pop()
        self._rings.buckets[row] = 0
        self._rings.lengths[row] = 0
        token_ids = np.array(view.token_ids[-self._rings.tokens.shape[1] :], np.int32)
        _append(self._rings, np.array([row], np.int32), np.array([len(token_ids)], np.int32), token_ids)
        return row

    def _grow(self) -> None:
        num_rows = len(self._rings.lengths)
        more = max(16, num_rows)
        self._rings = Rings(*(np.concatenate([old, np.zeros((more, *old.shape[1:]), np.int32)]) for old in self._rings))
        self._free.extend(range(num_rows + more - 1, num_rows - 1, -1))
