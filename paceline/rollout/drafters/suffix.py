"""The `suffix` drafter: drafts what followed the same tokens elsewhere in texts of the same prompt.

These texts are the prompt, the sequence's own response, its siblings' responses as they are emitted, run-ahead
responses for this draw, and those of the last `window` draws of the prompt. The drafter looks up the longest suffix of
the sequence that occurs there. Its occurrences vote for the next token, the voters for the winner vote for the token
after it, and so on. Votes of older draws weigh less.

A text generated earlier with the same noise (same draw and sample: run-ahead, or an earlier call with the same draws)
is the sequence's *twin*. Noise belongs to a position, so the twin's token at the sequence's own length is the best
predictor, even after the two have diverged: as soon as they agree again, that position votes, with a weight that grows
with the number of agreeing tokens, and the twin wins ties. Other positions of the twin vote like other text.

A node's score is its share of the votes, times n / (n + doubt / (1 + match length) ** 1.5) for n occurrences: few
occurrences and short matches are trusted less. A drafted token lengthens the match of those after it. The constants
were fitted to prose and source code, where scores then agree with the acceptance rate; those for twins and age were
fitted to responses of the shipped model during training.

Called by the engine once per step with the whole batch: one compiled call per `propose` and one per `observe`. This
file decides which text is kept; it must never hold more than `max_tokens`, nor keep anything per token in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import BoolArray, Draft, Int32Array, Int64Array, SequenceView, UInt64Array, Verdict
from paceline.rollout.drafters.base import UNKNOWN, drafts_of, emitted
from paceline.rollout.drafters.suffix_store import SuffixStore, num_blocks_of
from paceline.rollout.drafters.suffix_tree import FULL_VOTE, LAST, NOWHERE, TreeShape, VoteWeights

TWIN_VOTES = tuple(run**2 / 4 for run in range(9))
"""The vote of the twin's position by its run, the number of agreeing tokens up to it. The last is for all longer runs.

Such a vote was right in 51, 67 and 82 % of cases after runs of 1 to 3, in 94 % after 6, in 98 % from 8 on.
"""
FORMAT = 1
"""Format version of the state in a checkpoint."""

Identity = tuple[int, int, int]
"""Draw, sample and key; texts with the same identity were sampled with the same noise."""


@dataclass(eq=False, slots=True)
class _Use:
    """One draw of a prompt: its run-ahead texts and its requested ones."""

    number: int
    draw: int
    is_waiting: bool
    """Whether it has only run-ahead texts so far."""
    texts: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt with its tree, and the texts of its last draws."""

    prompt_id: int
    text: int
    num_live: int = 0
    next_rank: int = 1
    next_use: int = 0
    uses: dict[int, _Use] = field(default_factory=dict)
    """By number, oldest first."""
    groups: dict[int, _Use] = field(default_factory=dict)
    """By group id; a run-ahead group and the requested group of the same draw share a use."""
    texts: dict[int, None] = field(default_factory=dict)
    """Ordered by rank."""
    twins: dict[Identity, int] = field(default_factory=dict)
    """The last finished text of each identity."""

    @property
    def is_needed(self) -> bool:
        return self.num_live > 0 or bool(self.texts)


@dataclass(eq=False, slots=True, frozen=True)
class _Owner:
    """What a text belongs to."""

    prompt: _Prompt
    use: _Use
    identity: Identity
    is_ahead: bool

    @property
    def is_in_window(self) -> bool:
        return self.use.number in self.prompt.uses


@dataclass(eq=False, frozen=True)
class _Saved:
    """A validated state: columns with one entry per prompt, and columns with one per text, by prompt and rank."""

    tokens: Int32Array
    prompt_ids: UInt64Array
    prompt_lengths: Int64Array
    num_texts: Int64Array
    next_uses: Int64Array
    lengths: Int64Array
    uses: Int64Array
    draws: Int64Array
    samples: Int64Array
    keys: UInt64Array
    is_ahead: Int64Array
    is_waiting: Int64Array
    """Whether the use of each text is waiting."""
    order: Int64Array

    @cached_property
    def prompts(self) -> Int64Array:
        """The prompt of each text."""
        return np.repeat(np.arange(len(self.prompt_ids)), self.num_texts)

    @cached_property
    def first_texts(self) -> Int64Array:
        return self.num_texts.cumsum() - self.num_texts

    def texts_of(self, prompt: int) -> range:
        first = int(self.first_texts[prompt])
        return range(first, first + int(self.num_texts[prompt]))

    @cached_property
    def starts(self) -> Int64Array:
        """Where the tokens of each text begin: after those of all earlier prompts and texts."""
        return self.prompt_lengths.cumsum()[self.prompts] + self.lengths.cumsum() - self.lengths

    def tokens_of(self, text: int) -> Int32Array:
        start = int(self.starts[text])
        return self.tokens[start : start + int(self.lengths[text])]

    def prompt_tokens(self, prompt: int) -> Int32Array:
        """The prompt's tokens, stored right before those of its first text."""
        end = int(self.starts[self.first_texts[prompt]])
        return self.tokens[end - int(self.prompt_lengths[prompt]) : end]


class Suffix:
    """The suffix drafter.

    `width` 1 drafts chains; with more, a node may have that many children if they are the likeliest nodes left. Matches
    shorter than `min_match` tokens and nodes with a path probability below `min_path` are not drafted; longer matches
    count as `max_depth` tokens. All occurrences of the match vote, or `max_votes` of them in the most diverse contexts;
    each later draw multiplies a vote's weight by `decay`. `max_tokens` bounds the memory: the oldest finished texts are
    dropped first.
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
        decay: float = 0.9,
    ) -> None:
        for name, value in (("width", width), ("window", window), ("min_match", min_match), ("max_votes", max_votes)):
            if value < 1:
                raise ValueError(f"suffix drafter: {name} must be 1 or more; got {value}")
        if not 0 < decay <= 1:
            raise ValueError(f"suffix drafter: decay must be above 0 and at most 1 (no decay); got {decay}")
        self.window = window
        self._shape = TreeShape(width, min_match, max_votes, float(min_path), float(doubt))
        self._weights = VoteWeights(
            by_age=_votes(decay**age for age in range(window)),
            by_run=_votes(TWIN_VOTES),
        )
        self._max_tokens, self._max_depth = max_tokens, max_depth
        self._clear()

    def _clear(self) -> None:
        self._store = SuffixStore(self._max_tokens, self._max_depth)
        self._live: dict[int, int] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._owners: dict[int, _Owner] = {}
        self._finished: dict[int, None] = {}
        self._asleep: set[int] = set()
        """Prompts (as texts) that were released while they had live sequences."""

    @property
    def num_tokens(self) -> int:
        return self._store.num_tokens

    @property
    def num_indexed_tokens(self) -> int:
        """Tokens of prompts that were used since the last `release`."""
        return self._store.num_indexed_tokens

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
        if self._asleep:
            self._wake(texts)
        tokens, parents, scores, ends = self._store.draft(self._shape, self._weights, texts, budgets)
        return drafts_of(tokens, None if self._shape.width == 1 else parents, scores, ends)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        texts, ends, tokens = emitted(self._live, verdicts)
        if self._asleep:
            self._wake(texts)
        while texts and not self._make_room(len(tokens), len(texts)):
            self._mute_longest()
            texts, ends, tokens = emitted(self._live, verdicts)
        if texts:
            self._store.append(np.array(texts, np.int32), np.array(ends, np.int32), np.array(tokens, np.int32))

    def finish(self, sequence_id: int) -> None:
        text = self._live.pop(sequence_id, UNKNOWN)
        if text == UNKNOWN:
            return
        owner = self._owners[text]
        owner.prompt.num_live -= 1
        if not self._is_worth_keeping(text):
            self._delete(text)
            return
        twin = owner.prompt.twins.get(owner.identity)
        self._store.end_text(text)
        self._keep(text)
        if twin is not None and self._is_outdated(twin, text):
            self._delete(twin)

    def release(self) -> None:
        """Free everything but the bare tokens; a prompt is indexed again when it is next used."""
        self._store.release()
        self._asleep = {prompt.text for prompt in self._prompts.values() if prompt.num_live}

    def check_integrity(self) -> None:
        """Audit the store, and check that every text in it has exactly one owner."""
        self._store.check_integrity()
        live = [text for text in self._live.values() if text != UNKNOWN]
        assert sorted([*live, *self._finished]) == sorted(self._owners)
        for prompt in self._prompts.values():
            owned = [text for text, owner in self._owners.items() if owner.prompt is prompt]
            assert sorted(prompt.texts) == sorted(owned)
            assert set().union(*(use.texts for use in prompt.uses.values())) <= set(owned)
            assert prompt.num_live == len(set(owned) & set(live)) and prompt.is_needed
            assert all(prompt.next_use - self.window <= number < prompt.next_use for number in prompt.uses)
            assert list(prompt.uses) == sorted(prompt.uses)
            assert all(use.number in prompt.uses for use in prompt.groups.values())
            assert set(prompt.twins.values()) <= set(owned) & set(self._finished)
            assert not (prompt.num_live and self._store.is_bare(prompt.text)) or prompt.text in self._asleep

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that new sequences are drafted from, as if the live ones finished now, as numbers and arrays."""
        order = {text: place for place, text in enumerate(self._finished_now())}
        kept = {prompt: [text for text in prompt.texts if text in order] for prompt in self._prompts.values()}
        kept = {prompt: texts for prompt, texts in kept.items() if texts}
        texts = [text for own in kept.values() for text in own]
        owners = [self._owners[text] for text in texts]
        tokens = [self._store.tokens_of(prompt.text, [prompt.text, *own]) for prompt, own in kept.items()]
        return {
            "format": FORMAT,
            "tokens": np.concatenate(tokens) if tokens else np.empty(0, np.int32),
            "prompt_ids": _hashes(prompt.prompt_id for prompt in kept),
            "prompt_lengths": _numbers(self._store.text_length(prompt.text) for prompt in kept),
            "num_texts": _numbers(len(own) for own in kept.values()),
            "next_uses": _numbers(prompt.next_use for prompt in kept),
            "lengths": _numbers(self._store.text_length(text) for text in texts),
            "uses": _numbers(owner.use.number for owner in owners),
            "draws": _numbers(owner.identity[0] for owner in owners),
            "samples": _numbers(owner.identity[1] for owner in owners),
            "keys": _hashes(owner.identity[2] for owner in owners),
            "is_ahead": _numbers(owner.is_ahead for owner in owners),
            "is_waiting": _numbers(owner.use.is_waiting for owner in owners),
            "order": _numbers(order[text] for text in texts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; texts beyond this drafter's window and memory are dropped, oldest first.

        Raises a ValueError if it is not a state, and then changes nothing.
        """
        saved = _read_state(state)
        self._clear()
        is_kept = self._choose(saved)
        restored: dict[int, int] = {}
        for i in range(len(saved.prompt_ids)):
            kept = [k for k in saved.texts_of(i) if is_kept[k]]
            if kept:
                texts = self._restore_prompt(saved, i, kept)
                restored |= zip(saved.order[kept].tolist(), texts, strict=True)
        self._store.release()
        for place in sorted(restored):
            self._keep(restored[place])

    def _choose(self, saved: _Saved) -> BoolArray:
        """Which texts of a state fit into this drafter's window and memory."""
        prompts = saved.prompts
        is_kept: BoolArray = saved.uses >= saved.next_uses[prompts] - self.window
        num_blocks, prompt_blocks = num_blocks_of(saved.lengths), num_blocks_of(saved.prompt_lengths)
        num_kept = np.bincount(prompts[is_kept], minlength=len(prompt_blocks))
        total = int(num_blocks[is_kept].sum() + prompt_blocks[num_kept > 0].sum())
        for text in np.argsort(saved.order).tolist():
            if total <= self._store.max_blocks:
                break
            if is_kept[text]:
                is_kept[text] = False
                num_kept[prompts[text]] -= 1
                total -= int(num_blocks[text] + (prompt_blocks[prompts[text]] if not num_kept[prompts[text]] else 0))
        return is_kept

    def _restore_prompt(self, saved: _Saved, i: int, kept: list[int]) -> list[int]:
        """Add a prompt and some of its texts; returns those, by rank."""
        prompt = _Prompt(int(saved.prompt_ids[i]), self._store.new_text(), next_use=int(saved.next_uses[i]))
        self._prompts[prompt.prompt_id] = prompt
        for number in sorted(set(saved.uses[kept].tolist())):
            texts = [k for k in kept if saved.uses[k] == number]
            prompt.uses[number] = _Use(number, int(saved.draws[texts[0]]), bool(saved.is_waiting[texts].all()))
        for k in kept:
            identity = int(saved.draws[k]), int(saved.samples[k]), int(saved.keys[k])
            self._own(_Owner(prompt, prompt.uses[int(saved.uses[k])], identity, bool(saved.is_ahead[k])))
        pieces = [saved.prompt_tokens(i), *map(saved.tokens_of, kept)]
        self._store.add_bare([prompt.text, *prompt.texts], list(map(len, pieces)), np.concatenate(pieces))
        return list(prompt.texts)

    def _finished_now(self) -> list[int]:
        """Texts in the order in which they would be dropped if all live ones finished now."""
        finished = dict(self._finished)
        twins: dict[tuple[_Prompt, Identity], int] = {}
        for text in self._live.values():
            if text != UNKNOWN and self._is_worth_keeping(text):
                owner = self._owners[text]
                twin = twins.get((owner.prompt, owner.identity), owner.prompt.twins.get(owner.identity))
                if twin is not None and self._is_outdated(twin, text):
                    del finished[twin]
                finished[text] = None
                twins[owner.prompt, owner.identity] = text
        return list(finished)

    # --- which text is kept -------------------------------------------------------------------------------------------

    def _text_of(self, view: SequenceView) -> int:
        text = self._live.get(view.sequence_id)
        if text is None:
            text = self._live[view.sequence_id] = self._register(view)
        return text

    def _register(self, view: SequenceView) -> int:
        """Store a sequence's text so far under its draw of the prompt; if there is no room, UNKNOWN, permanently."""
        token_ids = np.array(view.token_ids, np.int32)
        prompt = self._prompts.get(view.prompt_id)
        if prompt is None:
            prompt = self._prompts[view.prompt_id] = _Prompt(view.prompt_id, self._store.new_text())
        elif self._store.is_bare(prompt.text):
            self._index(prompt)
        prompt.num_live += 1
        if not self._make_room(len(token_ids), 2):
            prompt.num_live -= 1
            self._forget_if_unused(prompt)
            return UNKNOWN
        if not self._store.text_length(prompt.text):
            self._append(prompt.text, token_ids[: view.prompt_length])
        owner = _Owner(prompt, self._open_use(prompt, view), _identity(view), view.is_run_ahead)
        text = self._own(owner)
        self._append(text, token_ids[view.prompt_length :])
        return text

    def _own(self, owner: _Owner) -> int:
        """Make a new text of this owner, the newest of its prompt."""
        prompt = owner.prompt
        twin = prompt.twins.get(owner.identity, NOWHERE)
        text = self._store.new_text(prompt.text, prompt.next_rank, owner.use.number, twin)
        prompt.next_rank += 1
        prompt.texts[text] = None
        owner.use.texts.add(text)
        self._owners[text] = owner
        return text

    def _append(self, text: int, token_ids: Int32Array) -> None:
        self._store.append(np.array([text], np.int32), np.array([len(token_ids)], np.int32), token_ids)

    def _index(self, prompt: _Prompt) -> None:
        self._store.index(prompt.text)
        self._asleep.discard(prompt.text)

    def _wake(self, texts: Sequence[int]) -> None:
        for text in texts:
            if text != UNKNOWN and self._owners[text].prompt.text in self._asleep:
                self._index(self._owners[text].prompt)

    def _open_use(self, prompt: _Prompt, view: SequenceView) -> _Use:
        """The use that a sequence belongs to; a new use pushes the oldest out of the window."""
        use = prompt.groups.get(view.group_id)
        if use is None:
            waiting = (use for use in prompt.uses.values() if use.is_waiting and use.draw == view.draw)
            use = prompt.groups[view.group_id] = next(waiting, None) or self._new_use(prompt, view.draw)
        use.is_waiting &= view.is_run_ahead
        return use

    def _new_use(self, prompt: _Prompt, draw: int) -> _Use:
        use = prompt.uses[prompt.next_use] = _Use(prompt.next_use, draw, is_waiting=True)
        prompt.next_use += 1
        for number in [number for number in prompt.uses if number < prompt.next_use - self.window]:
            gone = prompt.uses.pop(number)
            prompt.groups = {group_id: use for group_id, use in prompt.groups.items() if use is not gone}
            # Live texts are dropped when they finish.
            for text in gone.texts & self._finished.keys():
                self._delete(text)
        return use

    def _keep(self, text: int) -> None:
        owner = self._owners[text]
        self._finished[text] = None
        owner.prompt.twins[owner.identity] = text

    def _is_worth_keeping(self, text: int) -> bool:
        return self._owners[text].is_in_window and self._store.text_length(text) > 0

    def _is_outdated(self, twin: int, text: int) -> bool:
        """Whether a finished text makes its twin useless: the twin is run-ahead and no longer than the text."""
        return self._owners[twin].is_ahead and self._store.text_length(twin) <= self._store.text_length(text)

    def _make_room(self, num_tokens: int, num_texts: int) -> bool:
        """Delete finished texts, oldest first, until so many tokens fit; False if that is not enough."""
        while not self._store.has_room(num_tokens, num_texts):
            # Text that can never fit must not evict the others.
            if not self._finished or not self._store.can_hold(num_tokens, num_texts):
                return False
            self._delete(next(iter(self._finished)))
        return True

    def _mute_longest(self) -> None:
        """Drop the longest live text, so that the others can be drafted for: live texts alone fill the memory."""
        sequence_id, text = max(
            ((id_, text) for id_, text in self._live.items() if text != UNKNOWN),
            key=lambda item: self._store.text_length(item[1]),
        )
        self._live[sequence_id] = UNKNOWN
        self._owners[text].prompt.num_live -= 1
        self._delete(text)

    def _delete(self, text: int) -> None:
        owner = self._owners.pop(text)
        prompt = owner.prompt
        self._finished.pop(text, None)
        owner.use.texts.discard(text)
        del prompt.texts[text]
        if prompt.twins.get(owner.identity) == text:
            del prompt.twins[owner.identity]
        self._store.delete_text(text)
        self._forget_if_unused(prompt)

    def _forget_if_unused(self, prompt: _Prompt) -> None:
        if not prompt.is_needed:
            self._store.delete_text(prompt.text)
            self._asleep.discard(prompt.text)
            del self._prompts[prompt.prompt_id]


def _votes(weights: Iterable[float]) -> Int32Array:
    return np.array([max(1, round(FULL_VOTE * weight)) for weight in weights], np.int32)


def _identity(view: SequenceView) -> Identity:
    return view.draw, view.sample_index, view.key


def _numbers(values: Iterable[int]) -> Int64Array:
    return np.array(list(values), np.int64)


def _hashes(values: Iterable[int]) -> Int64Array:
    """Unsigned numbers as signed ones with the same bits, which every format supports."""
    return np.array(list(values), np.uint64).view(np.int64)


def _read_state(state: Mapping[str, Any]) -> _Saved:
    """The arrays of a state; raises a ValueError if it is not a state."""
    try:
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']!r}, not {FORMAT}")
        columns = {name: _read_column(name, state[name]) for name in (field.name for field in fields(_Saved))}
        problem = _find_problem(columns)
        if problem:
            raise ValueError(problem)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"suffix drafter: this is not a state of this drafter ({what}); start without it") from None
    for name in ("prompt_ids", "keys"):
        columns[name] = columns[name].view(np.uint64)
    return _Saved(**columns | {"tokens": columns["tokens"].astype(np.int32)})


def _read_column(name: str, values: Any) -> NDArray[Any]:
    column = np.asarray(values)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise ValueError(f"{name} is not a flat list of integers")
    return column.astype(np.int64)


def _find_problem(c: Mapping[str, Int64Array]) -> str | None:
    """Why columns are not a valid state, or None."""
    num_prompts, num_texts, num_tokens = len(c["prompt_ids"]), len(c["lengths"]), len(c["tokens"])
    if any(len(c[name]) != num_prompts for name in ("prompt_lengths", "num_texts", "next_uses")):
        return "the prompt columns differ in length"
    if any(
        len(c[name]) != num_texts for name in ("uses", "draws", "samples", "keys", "is_ahead", "is_waiting", "order")
    ):
        return "the text columns differ in length"
    if not _lies_between(c["num_texts"], 1, num_texts) or c["num_texts"].sum() != num_texts:
        return "num_texts does not match the number of texts"
    if not _lies_between(c["lengths"], 1, num_tokens) or not _lies_between(c["prompt_lengths"], 0, num_tokens):
        return "a text is empty or longer than all tokens"
    if c["lengths"].sum() + c["prompt_lengths"].sum() != num_tokens:
        return "lengths do not add up to the number of tokens"
    if not _lies_between(c["tokens"], 0, LAST):
        return "a token id is out of range"
    if len(np.unique(c["prompt_ids"])) != num_prompts:
        return "a prompt appears twice"
    if (np.sort(c["order"]) != np.arange(num_texts)).any():
        return "order is not a permutation of the texts"
    if not _lies_between(c["next_uses"], 1, LAST - 1) or not _lies_between(c["uses"], 0, LAST):
        return "a use number is out of range"
    if (c["uses"] >= np.repeat(c["next_uses"], c["num_texts"])).any():
        return "a text belongs to a use that does not exist yet"
    if not _lies_between(c["is_ahead"], 0, 1) or not _lies_between(c["is_waiting"], 0, 1):
        return "a flag is neither 0 nor 1"
    return None


def _lies_between(values: Int64Array, least: int, most: int) -> bool:
    return bool(((values >= least) & (values <= most)).all())
