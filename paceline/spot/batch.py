"""Layout of one micro-step: concatenated rows of text pieces, the input of each chain of guesses, and its targets.

The hidden state of row t and the embedding of token t + 1 guess token t + 2, whose distribution is the policy's at row
t + 1. Guess j of the chain that starts at t reads token t + 1 + j and is compared with row t + 1 + j. Called by
`trainer.py`. There is no padding, and no text sees another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.types import Int64Array
from paceline.model.eagle.unroll import Layout, Window
from paceline.spot.loss import GuessTargets
from paceline.spot.ring import StoredText


class Piece(NamedTuple):
    """Chains from every row of a text between `start` and `stop`; rows from `first` on are read."""

    serial: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-step's input on its device."""

    layout: Layout
    taps: Tensor
    """[rows, 3 * hidden]"""
    next_ids: Tensor
    """[rows]: the token after every row."""
    chain_ids: Tensor
    """[guesses but the first, bases]: the token that each guess reads."""
    final: Tensor
    """Final hidden states of the policy's rows that guesses are compared with, piece by piece."""
    guesses: GuessTargets


def build_batch(
    texts: Mapping[int, StoredText],
    pieces: Sequence[Piece],
    num_guesses: int,
    decay: float,
    chunk_rows: int = 1024,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Lay out the pieces. Guess j of a chain weighs decay^j times its text's weight; weights sum to 1."""
    parts = [(texts[piece.serial], Window(*piece[1:])) for piece in pieces]
    windows = [window for _, window in parts]
    layout = Layout.of(windows, device)
    chains = np.zeros((num_guesses - 1, len(layout.base_rows)), np.int64)
    for number in range(1, num_guesses):
        read = [_tokens(text, window.start + 1 + number, window.num_bases) for text, window in parts]
        chains[number - 1] = np.concatenate(read)
    next_ids = np.concatenate([_tokens(text, window.first + 1, window.num_rows) for text, window in parts])
    taps = [text.taps[window.first : window.stop] for text, window in parts]
    final = [text.final[window.start + 1 : window.stop + num_guesses] for text, window in parts]
    return MicroBatch(
        layout,
        torch.cat(taps).to(device).float(),
        torch.from_numpy(next_ids).to(device),
        torch.from_numpy(chains).to(device),
        torch.cat(final).to(device).float(),
        _guesses(parts, num_guesses, decay, chunk_rows, device),
    )


def _tokens(text: StoredText, first: int, count: int) -> Int64Array:
    """Tokens from `first` on, zeros past the end of the text: guesses that read those have no target."""
    found = np.zeros(count, np.int64)
    known = text.token_ids[first : first + count]
    found[: len(known)] = known
    return found


def _guesses(
    parts: Sequence[tuple[StoredText, Window]],
    num_guesses: int,
    decay: float,
    chunk_rows: int,
    device: torch.device | str,
) -> GuessTargets:
    """Every guess whose target row the policy has computed."""
    num_bases = sum(window.num_bases for _, window in parts)
    found: list[tuple[NDArray[Any], ...]] = []
    first_row = first_base = 0
    for text, window in parts:
        base, number = (a.ravel() for a in np.meshgrid(np.arange(window.num_bases), np.arange(num_guesses)))
        num_rows = min(window.stop + num_guesses, text.num_rows) - window.start - 1
        is_known = base + number < num_rows
        base, number = base[is_known], number[is_known]
        weight = text.weight * decay**number
        found.append((first_row + base + number, number * num_bases + first_base + base, weight, number))
        first_row, first_base = first_row + num_rows, first_base + window.num_bases
    joined = [np.concatenate(values) for values in zip(*found, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    row, state, weight, number = (values[order] for values in joined)
    total = float(weight.sum())
    weight = (weight / (total or 1.0)).astype(np.float32)
    stops = [*range(chunk_rows, len(row), chunk_rows), len(row)]
    chunks = [
        (first, stop, int(row[first]), int(row[stop - 1]) + 1)
        for first, stop in zip([0, *stops], stops, strict=False)
        if stop > first
    ]
    rows, states, weights, numbers = (torch.from_numpy(values).to(device) for values in (row, state, weight, number))
    return GuessTargets(rows, states, weights, numbers, tuple(chunks), total)
