"""The `replay` drafter: drafts a given text for as long as the sequence follows it.

It is the oracle of the accept path (the true continuation is accepted completely) and the core of run-ahead, where the
text was generated under slightly older weights with the same noise. Called by the engine once per step. After the first
difference it never drafts for that sequence again: the rest was generated after different tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import EMPTY_DRAFT, Draft, IntArray, SequenceView, Verdict

SCORE = 0.97
"""The constant score of every node: one learning step changes few tokens, and a finer estimate would gain little."""
_SCORES = np.full(512, SCORE)
_NO_TEXT = np.zeros(0, np.int32)

BROKEN = -1

ReplayText = Sequence[int] | IntArray


class Replay:
    """`texts[draw, sample]` holds response tokens; a sequence's text is looked up when it first appears."""

    def __init__(self, texts: Mapping[tuple[int, int], ReplayText] | None = None, name: str = "replay") -> None:
        self.name = name
        self.texts: Mapping[tuple[int, int], ReplayText] = {} if texts is None else texts
        self._live: dict[int, tuple[NDArray[np.int32], int]] = {}
        self._met: set[tuple[int, int]] = set()

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.sequence_id in self._live:
                self._advance(verdict.sequence_id, list(verdict.token_ids))

    def finish(self, sequence_id: int) -> None:
        self._live.pop(sequence_id, None)

    def give(self, texts: Mapping[tuple[int, int], ReplayText]) -> None:
        """Add texts for later sequences."""
        self.texts = {**self.texts, **texts}
        self._met -= texts.keys()

    def drop(self, keys: Collection[tuple[int, int]] | None = None) -> None:
        """Drop the texts of sequences that will not appear again; None: all texts."""
        kept = {key: text for key, text in self.texts.items() if keys is not None and key not in keys}
        self.texts = kept
        self._met &= kept.keys()

    @property
    def num_unseen(self) -> int:
        """Texts whose sequences have not appeared yet."""
        return len(self.texts) - len(self._met)

    def num_left(self, sequence_id: int, key: tuple[int, int]) -> int:
        """Tokens of its text still to come, if the sequence has followed it so far; otherwise 0."""
        text, done = self._live.get(sequence_id, (self.texts.get(key, ()), 0))
        return 0 if done == BROKEN else len(text) - done

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        if view.sequence_id not in self._live:
            key = (view.draw, view.sample_index)
            text = np.asarray(self.texts.get(key, ()), np.int32)
            if key in self.texts:
                self._met.add(key)
            self._live[view.sequence_id] = (text, 0)
            self._advance(view.sequence_id, view.token_ids[view.prompt_length :].tolist())
        text, done = self._live[view.sequence_id]
        if done == BROKEN or done >= len(text) or budget <= 0:
            return EMPTY_DRAFT
        tokens = text[done : done + budget]
        scores = _SCORES[: len(tokens)] if len(tokens) <= len(_SCORES) else np.full(len(tokens), SCORE)
        return Draft(tokens, range(-1, len(tokens) - 1), scores)

    def _advance(self, sequence_id: int, token_ids: list[int]) -> None:
        text, done = self._live[sequence_id]
        if done != BROKEN:
            follows = text[done : done + len(token_ids)].tolist() == token_ids
            # A broken text is freed: it will never be read again.
            self._live[sequence_id] = (text, done + len(token_ids)) if follows else (_NO_TEXT, BROKEN)
