"""Planner of micro-steps: which pieces of which texts the next one takes. Called by `worker.py`; plans are logged.

Texts are cut into pieces of at most a micro-step's tokens and shuffled by (seed, round); a micro-step takes pieces from
the front until its tokens are spent. A new round begins when all pieces are used or the ring has new texts, so that
even a few micro-steps between two policy steps see the newest text. Nothing here knows a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.spot.batch import Piece
from paceline.spot.ring import Ring, StoredText


@dataclass(frozen=True)
class MicroStep:
    """Everything that the weights after a micro-step depend on, besides those before it."""

    pieces: tuple[Piece, ...]
    lr: float
    teacher: int
    """Version of the policy whose embedding and head were used."""

    @property
    def num_bases(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    def to_json(self) -> dict[str, Any]:
        return {"do": "train", "pieces": [list(piece) for piece in self.pieces], "lr": self.lr, "teacher": self.teacher}


class Planner:
    """Distributes the texts of a ring over micro-steps."""

    def __init__(self, micro_tokens: int, context_tokens: int, seed: int) -> None:
        self._micro_tokens, self._context_tokens, self._seed = micro_tokens, context_tokens, seed
        self._queue: deque[Piece] = deque()
        self._num_rounds = 0
        self._seen = -1
        """Texts put into the ring by the time the round began."""

    def next(self, ring: Ring, lr: float, teacher: int) -> MicroStep | None:
        """The next micro-step; None if no text has a token to guess."""
        if ring.next_serial != self._seen:
            self._begin_round(ring)
        pieces: list[Piece] = []
        room = self._micro_tokens
        while room > 0:
            if not self._queue:
                if pieces:
                    break
                self._begin_round(ring)
                if not self._queue:
                    return None
            piece = self._queue[0]
            if pieces and piece.stop - piece.start > room:
                break
            pieces.append(self._queue.popleft())
            room -= piece.stop - piece.start
        return MicroStep(tuple(pieces), lr, teacher)

    def _begin_round(self, ring: Ring) -> None:
        self._seen = ring.next_serial
        pieces = [piece for text in ring.values() for piece in self.cut(text)]
        order = np.random.default_rng((self._seed, self._num_rounds)).permutation(len(pieces))
        self._num_rounds += 1
        self._queue = deque(pieces[index] for index in order)

    def cut(self, text: StoredText) -> list[Piece]:
        """Cut a text into pieces. The first guess comes from the prompt's last row and the response's first token."""
        first, last = text.prompt_length - 1, text.num_rows - 1
        starts = range(first, last, self._micro_tokens)
        return [
            Piece(text.serial, max(0, start - self._context_tokens), start, min(start + self._micro_tokens, last))
            for start in starts
        ]
