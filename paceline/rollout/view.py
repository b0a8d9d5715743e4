"""What a drafter may read of a sequence: a copy that the engine writes and never reads.

Each sequence has one `ReadOnlyView` for the package's own drafters. Every user's drafter gets a further copy of its own
(`Mirror`, kept by `drafters/guest.py`): whatever it does to it, not even another drafter notices. Nothing here may ever
lead to a sequence.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Sampling


@dataclass(slots=True, eq=False)
class ShownText:
    """The text behind a view: a copy, so that not even memory tricks reach the engine's own tokens."""

    token_ids: NDArray[np.int32]
    length: int


@dataclass(frozen=True, eq=False, repr=False)
class ReadOnlyView:
    """See `types.SequenceView`."""

    # Written by hand: with `slots=True`, some refused writes raise a confusing TypeError instead.
    __slots__ = (
        "__weakref__", "_shown", "draw", "group_id", "is_run_ahead", "key", "prompt_id", "prompt_length",
        "sample_index", "sampling", "sequence_id",
    )  # fmt: skip

    sequence_id: int
    prompt_id: int
    group_id: int
    draw: int
    sample_index: int
    prompt_length: int
    key: int
    sampling: Sampling
    is_run_ahead: bool
    _shown: ShownText

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self._shown.token_ids[: self._shown.length]


class Mirror:
    """One drafter's own copy of a view; `catch_up` copies the tokens that are new."""

    def __init__(self, original: ReadOnlyView) -> None:
        self._text = np.empty(len(original._shown.token_ids), np.int32)
        self._length = 0
        # An array over a read-only buffer cannot be made writable again.
        self._shown = ShownText(np.frombuffer(self._text.data.toreadonly(), np.int32), 0)
        self.view = ReadOnlyView(
            sequence_id=original.sequence_id,
            prompt_id=original.prompt_id,
            group_id=original.group_id,
            draw=original.draw,
            sample_index=original.sample_index,
            prompt_length=original.prompt_length,
            key=original.key,
            sampling=copy(original.sampling),
            is_run_ahead=original.is_run_ahead,
            _shown=self._shown,
        )

    def catch_up(self, original: ReadOnlyView) -> ReadOnlyView:
        """The copy, grown to the original's length."""
        length, shown = self._length, original._shown
        if length != shown.length:
            self._text[length : shown.length] = shown.token_ids[length : shown.length]
            self._length = self._shown.length = shown.length
        return self.view
