"""`suffix`: drafts what followed the same words elsewhere in this prompt's own world.

That world is the prompt, the sequence's own response, its siblings' responses as they are emitted, and the responses of
the last `window` uses of the same prompt. The longest suffix of the sequence that occurs there is looked up, its
occurrences vote for the next token, the voters for the winner vote for the one after it, and so on.

A node's score is votes / (voters + doubt / (1 + match length) ** 1.5): the share of occurrences, trusted the less the
fewer they are and the shorter the match is. A drafted token lengthens the match of those after it. The constants were
fitted to prose and source code, where scores then agree with the share of right guesses.

Called by the engine once per step with the whole batch: one compiled call per `propose` and one per `observe`. This
file decides which text is kept; it must never hold more than `max_tokens`, nor keep anything per token in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.drafters.base import UNKNOWN, drafts_of, emitted
from paceline.drafters.suffix_store import SuffixStore
from paceline.drafters.suffix_tree import Int32, Shape
from paceline.types import Draft, SequenceView, Verdict


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt with its tree, and the texts of its last uses. `uses` is ordered, oldest first."""

    prompt_id: int
    text: int
    num_live: int = 0
    uses: dict[int, set[int]] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        return self.num_live > 0 or any(self.uses.values())


class Suffix:
    """The suffix drafter.

    `width` 1 drafts chains; more lets a node have so many children where they are the likeliest nodes left. Matches
    shorter than `min_match` tokens and nodes whose path is less likely than `min_path` are not drafted; matches longer
    than `max_depth` are taken as that long. All occurrences of the match vote, or `max_votes` of them in contexts as
    different as can be. `max_tokens` bounds the memory: the oldest finished texts go first.
    """

    name = "suffix"

    def __init__(
        self,
        width: int = 1,
        window: int = 16,
        max_tokens: int = 2**22,
        max_depth: int = 32,
        min_match: int = 1,
        max_votes: int = 8,
        min_path: float = 0.05,
        doubt: float = 12.0,
    ) -> None:
        for name, value in (("width", width), ("window", window), ("min_match", min_match), ("max_votes", max_votes)):
            if value < 1:
                raise ValueError(f"suffix drafter: {name} must be 1 or more; got {value}")
        self.window = window
        self._shape = Shape(width, min_match, max_votes, float(min_path), float(doubt))
        self._store = SuffixStore(max_tokens, max_depth)
        self._live: dict[int, int] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._owners: dict[int, tuple[_Prompt, int]] = {}
        self._finished: dict[int, None] = {}

    @property
    def num_tokens(self) -> int:
        return self._store.num_tokens

    @property
    def memory_bytes(self) -> int:
        return self._store.memory_bytes

    @property
    def bytes_per_token(self) -> float:
        return self._store.bytes_per_token

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        if not views:
            return []
        live = self._live
        try:
            texts = [live[view.sequence_id] for view in views]
        except KeyError:
            texts = [self._text_of(view) for view in views]
        tokens, parents, scores, ends = self._store.draft(self._shape, texts, budgets)
        return drafts_of(tokens, None if self._shape.width == 1 else parents, scores, ends)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        texts, ends, tokens = emitted(self._live, verdicts)
        while texts and not self._make_room(len(tokens), len(texts)):
            self._mute_longest()
            texts, ends, tokens = emitted(self._live, verdicts)
        if texts:
            self._store.append(np.array(texts, np.int32), np.array(ends, np.int32), np.array(tokens, np.int32))

    def finish(self, sequence_id: int) -> None:
        text = self._live.pop(sequence_id, UNKNOWN)
        if text == UNKNOWN:
            return
        prompt, group_id = self._owners[text]
        prompt.num_live -= 1
        if group_id in prompt.uses and self._store.text_length(text):
            self._finished[text] = None
        else:
            self._delete(text)

    def check_integrity(self) -> None:
        """Audits the store and that every text in it has exactly one owner."""
        self._store.check_integrity()
        live = [text for text in self._live.values() if text != UNKNOWN]
        assert sorted([*live, *self._finished]) == sorted(self._owners)
        for prompt in self._prompts.values():
            owned = [text for text, (owner, _) in self._owners.items() if owner is prompt]
            assert set().union(*prompt.uses.values()) <= set(owned)
            assert prompt.num_live == len(set(owned) & set(live)) and prompt.is_needed
            assert len(prompt.uses) <= self.window

    def _text_of(self, view: SequenceView) -> int:
        text = self._live.get(view.sequence_id)
        if text is None:
            text = self._live[view.sequence_id] = self._register(view)
        return text

    def _register(self, view: SequenceView) -> int:
        """Stores what a sequence has so far, under this use of its prompt; UNKNOWN where it finds no room, for good."""
        token_ids = np.array(view.token_ids, np.int32)
        prompt = self._prompts.get(view.prompt_id)
        if prompt is None:
            prompt = self._prompts[view.prompt_id] = _Prompt(view.prompt_id, self._store.new_text())
        prompt.num_live += 1
        if not self._make_room(len(token_ids), 2):
            prompt.num_live -= 1
            self._forget_if_unused(prompt)
            return UNKNOWN
        if not self._store.text_length(prompt.text):
            self._append(prompt.text, token_ids[: view.prompt_length])
        text = self._store.new_text(prompt.text)
        self._append(text, token_ids[view.prompt_length :])
        self._owners[text] = (prompt, view.group_id)
        self._open_use(prompt, view.group_id).add(text)
        return text

    def _append(self, text: int, token_ids: Int32) -> None:
        self._store.append(np.array([text], np.int32), np.array([len(token_ids)], np.int32), token_ids)

    def _open_use(self, prompt: _Prompt, group_id: int) -> set[int]:
        """The texts of this use; a new one pushes the oldest out of the window."""
        if group_id not in prompt.uses:
            prompt.uses[group_id] = set()
            if len(prompt.uses) > self.window:
                for text in prompt.uses.pop(next(iter(prompt.uses))):
                    # What is still being written goes when it is finished.
                    if text in self._finished:
                        self._delete(text)
        return prompt.uses[group_id]

    def _make_room(self, num_tokens: int, num_texts: int) -> bool:
        """Deletes finished texts, oldest first, until so many tokens fit; False if that was not enough."""
        while not self._store.has_room(num_tokens, num_texts):
            # What cannot be held at all must not cost the others their place.
            if not self._finished or not self._store.can_hold(num_tokens, num_texts):
                return False
            self._delete(next(iter(self._finished)))
        return True

    def _mute_longest(self) -> None:
        """Live texts alone fill the memory: the one that frees most goes, the others go on drafting."""
        sequence_id, text = max(
            ((id_, text) for id_, text in self._live.items() if text != UNKNOWN),
            key=lambda item: self._store.text_length(item[1]),
        )
        self._live[sequence_id] = UNKNOWN
        self._owners[text][0].num_live -= 1
        self._delete(text)

    def _delete(self, text: int) -> None:
        prompt, group_id = self._owners.pop(text)
        self._finished.pop(text, None)
        prompt.uses.get(group_id, set()).discard(text)
        self._store.delete_text(text)
        self._forget_if_unused(prompt)

    def _forget_if_unused(self, prompt: _Prompt) -> None:
        if not prompt.is_needed:
            self._store.delete_text(prompt.text)
            del self._prompts[prompt.prompt_id]
