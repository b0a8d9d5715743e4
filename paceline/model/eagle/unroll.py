"""Eagle forward over pieces of many texts, guess by guess, for training and for evaluating a drafter.

Rows of all pieces are concatenated without padding; attention stays within a piece. Some rows are bases: a chain of
guesses starts at each. Guess 0 is the forward over the text. Guess j at base t is at position t + j, takes the state of
guess j - 1 instead of the policy's, and sees what it would see while drafting: the keys that guess 0 made of the
policy's states up to t, and those of guesses 1 to j of its own chain. So each further guess costs one score per key of
its chain rather than another square of scores.

Called by `spot/trainer.py`, `integrations/check.py` and `bench/spot.py`. On a GPU it uses the attention of
`kernels/triton/chain_attention.py`. `Eagle.forward_text` is the readable twin of guess 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.types import Int64Array
from paceline.model.eagle.network import (
    EMBEDDING_NORM,
    FC,
    HIDDEN_NORM,
    QKV,
    EagleConfig,
    fast_rms_norm,
    finish_layer,
)
from paceline.model.formulas import rotate

if TYPE_CHECKING:
    from paceline.kernels.triton.chain_attention import Blocks


@dataclass(frozen=True)
class Window:
    """A piece of a text: rows `first` to `stop` are read, those from `start` on are bases."""

    first: int
    start: int
    stop: int

    @property
    def num_bases(self) -> int:
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, eq=False)
class _Group:
    """Windows of one size, whose attention is one batch of products."""

    bases: Tensor
    """[windows, bases]: index of the base in the pack."""
    rows: Tensor
    """[windows, rows]: index of the row in the pack."""
    is_hidden: Tensor
    """[bases, 1, rows]: rows that a base does not see."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the rows and bases of concatenated windows are."""

    row_starts: tuple[int, ...]
    """First row of every window, then the number of rows."""
    positions: Tensor
    """Position of every row."""
    base_rows: Tensor
    """The row of every base, ascending."""
    base_positions: Tensor
    groups: tuple[_Group, ...]
    order: Tensor
    """Index of each base in the concatenated results of the groups."""
    blocks: Blocks | None
    """On a GPU, instead of groups: the work of the kernel programs."""

    @classmethod
    def of(
        cls, windows: Sequence[Window], device: torch.device | str = "cpu", has_kernels: bool | None = None
    ) -> Layout:
        """`has_kernels`: whether to use the GPU attention kernels; None: on a GPU."""
        row_starts = np.cumsum([0, *(window.num_rows for window in windows)])
        base_starts = np.cumsum([0, *(window.num_bases for window in windows)])
        offsets = row_starts[:-1] - [window.first for window in windows]
        bases = [np.arange(window.start, window.stop) for window in windows]
        arrays = (
            np.concatenate([np.arange(window.first, window.stop) for window in windows]),
            np.concatenate([offset + own for offset, own in zip(offsets, bases, strict=True)]),
            np.concatenate(bases),
        )
        positions, base_rows, base_positions = (torch.from_numpy(a).to(device) for a in arrays)
        places = tuple(row_starts.tolist()), positions, base_rows, base_positions
        if torch.device(device).type == "cuda" if has_kernels is None else has_kernels:
            from paceline.kernels.triton.chain_attention import Blocks

            sizes = [(window.num_bases, window.num_rows) for window in windows]
            return cls(*places, (), base_rows[:0], Blocks.of(sizes, device))
        return cls(*places, *_grouped(windows, base_starts, row_starts, device), None)


def _grouped(
    windows: Sequence[Window], base_starts: Int64Array, row_starts: Int64Array, device: torch.device | str
) -> tuple[tuple[_Group, ...], Tensor]:
    """Group windows of equal size; also return where the results hold each base."""
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, window in enumerate(windows):
        members[window.num_bases, window.num_rows].append(index)
    groups, order, num_slots = [], np.empty(base_starts[-1], np.int64), 0
    for (num_bases, num_rows), own in members.items():
        groups.append(_group(base_starts[own], row_starts[own], num_bases, num_rows, device))
        for index in own:
            order[base_starts[index] : base_starts[index + 1]] = num_slots + np.arange(num_bases)
            num_slots += num_bases
    return tuple(groups), torch.from_numpy(order).to(device)


def _group(
    base_starts: Int64Array, row_starts: Int64Array, num_bases: int, num_rows: int, device: torch.device | str
) -> _Group:
    base, row = np.arange(num_bases), np.arange(num_rows)
    is_hidden = row > (num_rows - num_bases + base)[:, None, None]
    arrays = base_starts[:, None] + base, row_starts[:, None] + row, is_hidden
    return _Group(*(torch.from_numpy(values).to(device) for values in arrays))


class Unroll:
    """One pass over a pack. `begin` makes guess 0 of every base, `advance` the next one."""

    def __init__(
        self, config: EagleConfig, weights: Mapping[str, Tensor], layout: Layout, turns: tuple[Tensor, Tensor]
    ) -> None:
        """`turns` are cos and sin of every position, on the device of the weights."""
        self._config, self._weights, self._layout = config, weights, layout
        self._cos, self._sin = turns
        self._qkv = torch.cat([weights[name] for name in QKV])
        self._text: tuple[Tensor, Tensor]
        """Keys and values of guess 0, [rows, kv heads, dim]."""
        self._text_keys: list[tuple[Tensor, Tensor]] = []
        """The same by group: [windows, kv heads, dim, rows] and [..., rows, dim]."""
        self._chain: list[tuple[Tensor, Tensor]] = []
        """Keys and values of guesses 1, 2, ... [bases, kv heads, dim]."""

    def begin(self, taps: Tensor, embedded: Tensor) -> Tensor:
        """States [bases, hidden] of guess 0, from the policy's states and the embedding of the token after each row."""
        config, layout = self._config, self._layout
        x = F.linear(taps, self._weights[FC])
        y = self._input(x, embedded)
        base_rows = layout.base_rows
        q_size = config.num_heads * config.head_dim
        q = F.linear(y.index_select(0, base_rows), self._qkv[:q_size])
        q = self._turned(q.unflatten(1, (config.num_heads, -1)), layout.base_positions)
        kv = F.linear(y, self._qkv[q_size:])
        k, v = kv.unflatten(1, (2, config.num_kv_heads, -1)).unbind(1)
        k = self._turned(k, layout.positions)
        self._text = k, v
        self._group_text()
        return finish_layer(config, self._weights, x.index_select(0, base_rows), self._attend(q))

    def _group_text(self) -> None:
        k, v = self._text
        for group in self._layout.groups:
            self._text_keys.append((k[group.rows].permute(0, 2, 3, 1), v[group.rows].permute(0, 2, 1, 3)))

    def advance(self, states: Tensor, embedded: Tensor) -> Tensor:
        """States of the next guess, from those of the last and the embedding of the token it guessed."""
        config = self._config
        positions = self._layout.base_positions + len(self._chain) + 1
        qkv = F.linear(self._input(states, embedded), self._qkv)
        heads = qkv.unflatten(1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        q, k = self._turned(torch.cat((q, k), dim=1), positions).split([config.num_heads, config.num_kv_heads], dim=1)
        self._chain.append((k, v))
        return finish_layer(config, self._weights, states, self._attend(q))

    def _input(self, x: Tensor, embedded: Tensor) -> Tensor:
        weights, eps = self._weights, self._config.rms_norm_eps
        normed = fast_rms_norm(embedded, weights[EMBEDDING_NORM], eps), fast_rms_norm(x, weights[HIDDEN_NORM], eps)
        return torch.cat(normed, dim=-1)

    def _turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        return rotate(heads, self._cos[positions, None], self._sin[positions, None])

    def _attend(self, q: Tensor) -> Tensor:
        """Attention output of every base, [bases, heads * dim]."""
        config = self._config
        q = q / math.sqrt(config.head_dim)
        if self._layout.blocks is not None:
            from paceline.kernels.triton.chain_attention import attend

            return attend(self._layout.blocks, q, *self._text, self._chain).flatten(1)
        q = q.unflatten(1, (config.num_kv_heads, -1))
        own = [(q * k[:, :, None]).sum(-1) for k, _ in self._chain]
        parts = []
        for group, (k, v) in zip(self._layout.groups, self._text_keys, strict=True):
            parts.append(self._attend_group(group, q, own, k, v))
        found = torch.cat(parts)
        return found.index_select(0, self._layout.order)

    def _attend_group(self, group: _Group, q: Tensor, own: Sequence[Tensor], k: Tensor, v: Tensor) -> Tensor:
        """[windows * bases, heads * dim]"""
        num_rows, bases = k.shape[-1], group.bases
        # [windows, kv heads, bases, heads of a group, dim]: heads that share keys are rows of one product.
        mine = q[bases].transpose(1, 2)
        sizes = mine.shape[2:4]
        scores = (mine.flatten(2, 3) @ k).unflatten(2, sizes).masked_fill(group.is_hidden, -torch.inf)
        if own:
            chain = torch.stack([scores_of[bases].transpose(1, 2) for scores_of in own], dim=-1)
            scores = torch.cat((scores, chain), dim=-1)
        shares = scores.softmax(-1)
        gathered = (shares[..., :num_rows].flatten(2, 3) @ v).unflatten(2, sizes)
        for index, (_, chain_v) in enumerate(self._chain):
            gathered = gathered + shares[..., num_rows + index, None] * chain_v[bases].transpose(1, 2)[:, :, :, None]
        return gathered.transpose(1, 2).flatten(2).flatten(0, 1)
