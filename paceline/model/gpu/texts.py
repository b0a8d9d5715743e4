"""Texts on the GPU, in which steps look for drafts: one table of tokens, written by row, and what was found there.

`rollout/text_sources.py` decides what stands in which row and sends it here when a sequence starts; after that the GPU
continues a sequence's own text itself. Only `graphs.py` passes the buffers to kernels. It never waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.text_ranks import BRANCHES, MEMBERS
from paceline.kernels.triton.cursor import Texts
from paceline.kernels.triton.launch import IS_INTERPRETED
from paceline.kernels.triton.text_search import FOUND, PICKED
from paceline.model.gpu.staging import Staging


class GpuTexts:
    """See `executor.TextTable`."""

    def __init__(self, num_texts: int, most_tokens: int, most_entries: int, staging: Staging, device: str) -> None:
        """`staging` brings the members of every step's sequences."""
        self.num_texts, self.most_tokens = num_texts, most_tokens
        # The tokens that the GPU samples after a sequence has ended, and before the host knows, need room as well.
        self._tokens = torch.zeros(num_texts, most_tokens + 2 * MARGIN, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_texts, dtype=torch.int32, device=device)
        found = torch.zeros(most_entries, MEMBERS, FOUND, dtype=torch.int32, device=device)
        picked = torch.zeros(most_entries, BRANCHES, PICKED, dtype=torch.int32, device=device)
        self.buffers = Texts(self._tokens, self._lengths, staging.rows(most_entries).members, found, picked)
        self._device, self._is_pinned = device, device != "cpu" and not IS_INTERPRETED

    @property
    def num_bytes(self) -> int:
        """GPU memory."""
        return self._tokens.nbytes + self._lengths.nbytes + self.buffers.found.nbytes

    def write(self, rows: Sequence[int], texts: Sequence[NDArray[np.int32]]) -> None:
        """Replace the texts of some rows, for the steps launched from now on."""
        lengths = [min(len(text), self.most_tokens) for text in texts]
        block = np.zeros((len(rows), max(lengths)), np.int32)
        for own, text, length in zip(block, texts, lengths, strict=True):
            own[:length] = text[:length]
        at = self._send(np.array(rows, np.int64))
        self._tokens[:, : block.shape[1]].index_copy_(0, at, self._send(block))
        self._lengths.index_copy_(0, at, self._send(np.array(lengths, np.int32)))

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._is_pinned else tensor


MARGIN = 128
"""At least the most tokens that a step can add to a text."""
