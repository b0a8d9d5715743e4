"""The CPU executor: a step is computed when it is launched, so nothing overlaps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.model.decoder import Decoder
from paceline.model.eagle.layer import Tapped
from paceline.model.executor import Keeper, StepInput
from paceline.model.ops.base import Sampled


class HostExecutor:
    """See `executor.Executor`."""

    can_overlap = False
    moves_nodes = False
    num_bytes = 0
    capture_seconds = 0.0
    texts = None

    def __init__(self, decoder: Decoder, cache: Any, keeper: Keeper | None = None) -> None:
        self._decoder = decoder
        self._cache = cache
        self.keeper = keeper

    def launch(self, step: StepInput) -> tuple[Sampled, float]:
        start = time.perf_counter()
        layer = self.keeper.layer if self.keeper is not None else None
        config = self._decoder.config
        tapped = None if layer is None else Tapped(config.num_layers, len(step.rows), config.hidden_size, "cpu")
        hidden = self._decoder.forward(step.rows, self._cache, tapped)
        logits = self._decoder.logits(hidden[: len(step.keys)])
        sampled = self._decoder.ops.sample(logits, step.sampling, step.keys, step.steps)
        if layer is not None and tapped is not None:
            next_ids = sampled.tokens if step.next_ids is None else np.concatenate([sampled.tokens, step.next_ids])
            ids = torch.from_numpy(next_ids.astype(np.int64))
            sampled = replace(sampled, states=layer.keep(tapped.states, ids, step.rows, self._cache))
        return sampled, time.perf_counter() - start

    def guesses(self, ticket: tuple[Sampled, float]) -> None:
        return None

    def seconds_between(self, before: tuple[Sampled, float], ticket: tuple[Sampled, float]) -> float:
        return 0.0

    def collect(self, ticket: tuple[Sampled, float]) -> tuple[Sampled, float]:
        return ticket

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def release(self) -> None:
        """Do nothing: the operating system allocates memory only for written pages, and may swap them out."""

    def for_timing(self, num_pages: int) -> tuple[HostExecutor, Sequence[int]]:
        cache = self._decoder.allocate_cache(num_pages)
        # Memory that was never written is not allocated yet, and reading it would look free.
        cache.keys.fill(0)
        cache.values.fill(0)
        return HostExecutor(self._decoder, cache), range(num_pages)
