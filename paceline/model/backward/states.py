"""Hidden states tapped from a forward over packed texts, for training a drafter. `policy.py` collects them on request.

Nothing is computed twice: a tap keeps references to the residual stream as it passes. Never write to the states, and
copy those to be kept beyond the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.backward.packed import PackedTexts
from paceline.model.eagle.network import tap_layers


@dataclass(frozen=True, eq=False)
class States:
    """States of one pack; all without gradients."""

    taps: Tensor
    """[rows, 3 hidden]: the residual stream at the three layers of `tap_layers`, concatenated."""
    final: Tensor
    """[rows, hidden]: the residual stream before the final norm."""
    row_starts: tuple[int, ...]
    """First row of every text, then the number of rows; a text's last token has no row."""
    token_ids: Tensor
    """Token of every row."""


class StateTap:
    """Collects the states of one forward, which passes it the residual stream before every layer and after the last."""

    def __init__(self, wanted: tuple[int, ...] = ()) -> None:
        """`wanted`: layer counts after which to tap; none by default."""
        self._wanted = wanted
        self._seen: dict[int, Tensor] = {}

    @classmethod
    def of(cls, num_layers: int) -> StateTap:
        """A tap for the `States` of a policy."""
        return cls((*tap_layers(num_layers), num_layers))

    def look(self, index: int, x: Tensor) -> None:
        """`x` is the residual stream after `index` layers."""
        if index in self._wanted:
            self._seen[index] = x.detach()

    def states(self, packed: PackedTexts) -> States:
        *taps, final = (self._seen[index] for index in self._wanted)
        return States(torch.cat(taps, dim=1), final, packed.row_starts, packed.token_ids)
