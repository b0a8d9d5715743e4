"""Texts concatenated into the rows of one forward, without padding. Built by `policy.py`, read by the rest.

A text's last token has no row, since nothing follows it. A row's logits are for the next token; only the rows before
response tokens are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.rows import Rows, SequenceRows


@dataclass(frozen=True, eq=False)
class Text:
    """One text to train on: the prompt is read, the rest is scored."""

    token_ids: NDArray[np.int32]
    prompt_length: int

    def __post_init__(self) -> None:
        assert 0 < self.prompt_length < len(self.token_ids), "a text needs a prompt and a response"

    @property
    def num_rows(self) -> int:
        """Rows of this text in a forward."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """A pack placed for the operations, with a cache for the keys and values of one layer at a time."""

    rows: Any
    """As placed by the ops; None, like `cache`, for a forward that does not use them."""
    cache: Any
    row_starts: tuple[int, ...]
    """First row of every text, then the number of rows."""
    token_ids: Tensor
    positions: Tensor
    scored_rows: Tensor
    """The rows before response tokens, in order."""
    targets: Tensor
    """The response tokens themselves."""

    @classmethod
    def build(cls, texts: Sequence[Text], decoder: Decoder, is_placed: bool = True) -> PackedTexts:
        """Lay out texts for this decoder; each must fit into its context."""
        assert texts and max(text.num_rows for text in texts) < decoder.config.max_context + 1
        ops, size, device = decoder.ops, decoder.ops.page_size, decoder.ops.device
        sequences, num_pages = [], 0
        for text in texts:
            needed = -(-text.num_rows // size)
            pages = range(num_pages, num_pages + needed)
            sequences.append(SequenceRows(text.token_ids[:-1], 0, pages))
            num_pages += needed
        rows = Rows.build(sequences, size)
        firsts = rows.row_starts[:-1]
        scored = [
            start + np.arange(text.prompt_length - 1, text.num_rows) for start, text in zip(firsts, texts, strict=True)
        ]
        targets = np.concatenate([text.token_ids[text.prompt_length :] for text in texts])
        indices = (rows.token_ids, rows.positions, np.concatenate(scored), targets)
        return cls(
            ops.place(rows, decoder.config) if is_placed else None,
            ops.allocate_cache(replace(decoder.config, num_layers=1), num_pages) if is_placed else None,
            tuple(rows.row_starts.tolist()),
            *(torch.from_numpy(index.astype(np.int64)).to(device) for index in indices),
        )
