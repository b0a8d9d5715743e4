"""From a plan and its drafts to one sampled token per row: lays out the flat rows, runs the decoder, draws.

The rows of decoding sequences come first, so that the rows that need logits are one block. Called by `Engine.step` and
for measuring the cost curve.
"""

from __future__ import annotations

import time

import numpy as np

from paceline.engine.drafting import Proposal, Timing
from paceline.engine.scheduler import Chunk, Plan
from paceline.engine.sequence import Sequence
from paceline.engine.stats import Stats
from paceline.model.decoder import Decoder
from paceline.model.kv_cache import KVCache
from paceline.model.ops.base import Drawn
from paceline.model.rows import CHAIN, Rows, SequenceRows
from paceline.types import Sampling


class Runner:
    """Runs plans on one decoder and one cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self.last_timing: Timing = (0, 0, 0.0)
        """Rows, cached tokens and seconds of the latest forward, sampling included."""

    def forward(self, plan: Plan, proposals: list[Proposal], sampling: Sampling, stats: Stats) -> Drawn:
        """Run all rows; the result has one entry per decode and draft row, sequence by sequence."""
        if not plan.num_rows:
            self.last_timing = (0, 0, 0.0)
            return Drawn.empty(0)
        start = time.perf_counter()
        with stats.phase("forward"):
            decoding = [_decode_rows(s, p) for s, p in zip(plan.decoding, proposals, strict=True)]
            rows = Rows.build([*decoding, *map(_chunk_rows, plan.chunks)], self._cache.page_size)
            num_drawn = int(rows.row_starts[len(decoding)])
            hidden = self._decoder.forward(rows, self._cache)
            logits = self._decoder.logits(hidden[:num_drawn])
        with stats.phase("sample"):
            owner = rows.sequence_of_row[:num_drawn]
            keys = np.array([s.key for s in plan.decoding], np.uint64)[owner]
            lengths = np.array([s.prompt_length for s in plan.decoding], np.int64)[owner]
            drawn = self._decoder.ops.sample(logits, sampling, keys, rows.positions[:num_drawn] + 1 - lengths)
        stats.steps += 1
        stats.rows += len(rows)
        self.last_timing = (len(rows), rows.num_kv_tokens, time.perf_counter() - start)
        return drawn

    def time_rows(self, num_rows: int, num_kv_tokens: int) -> float:
        """Seconds for one made-up step of this many rows over this much context, in a cache of its own.

        More tokens than the model's context are cut to it: the rows then share positions, which costs the same.
        """
        num_kv_tokens = min(num_kv_tokens, self._decoder.config.max_context - 1)
        num_pages = -(-(num_rows + num_kv_tokens) // KVCache.page_size)
        cache = KVCache.allocate(self._decoder.config, num_pages)
        # Memory never written to is no real memory yet, and reading it would look free.
        cache.keys.fill(0)
        cache.values.fill(0)
        tokens = np.zeros(num_rows, np.int32)
        rows = Rows.build([SequenceRows(tokens, num_kv_tokens, range(num_pages))], KVCache.page_size)
        np.minimum(rows.positions, self._decoder.config.max_context - 1, out=rows.positions)
        start = time.perf_counter()
        logits = self._decoder.logits(self._decoder.forward(rows, cache))
        steps = np.arange(num_rows, dtype=np.int64)
        self._decoder.ops.sample(logits, Sampling(), np.zeros(num_rows, np.uint64), steps)
        return time.perf_counter() - start


def _decode_rows(sequence: Sequence, proposal: Proposal) -> SequenceRows:
    last = int(sequence.token_ids[-1])
    draft = proposal.draft
    if not len(draft):
        return SequenceRows([last], sequence.num_cached, sequence.pages)
    tokens = [last, *map(int, draft.tokens)]
    is_chain = all(parent == i - 1 for i, parent in enumerate(draft.parents))
    parents = CHAIN if is_chain else [-1, *(int(parent) + 1 for parent in draft.parents)]
    return SequenceRows(tokens, sequence.num_cached, sequence.pages, parents)


def _chunk_rows(chunk: Chunk) -> SequenceRows:
    tokens = chunk.owner.token_ids if isinstance(chunk.owner, Sequence) else chunk.owner.prompt
    return SequenceRows(tokens[chunk.start : chunk.stop], chunk.start, chunk.owner.pages)
