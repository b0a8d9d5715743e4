"""The text store of the suffix drafter: numbered texts and prompts in bounded memory, removable one by one.

A prompt with its responses is either *indexed*, so that its text can be searched and drafted from, or *bare*: a flat
array of tokens. `release` makes all prompts bare; `index` indexes one again, which then drafts as if it had never been
bare.

Only `suffix.py` calls it, with whole batches. It must never hold more than `max_tokens` token slots, and knows no
sequence, prompt id or window: its owner decides which text is kept. `suffix_tree.py` does the searching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Float32Array, Int32Array
from paceline.rollout.drafters.suffix_tree import (
    BEFORE,
    BLOCK,
    CRITICAL,
    EMPTY_TREE,
    EQUAL,
    FIRST,
    FOLLOWED,
    FREE_BLOCK,
    LAST,
    LENGTH,
    NEWER,
    NEXT,
    NO_NODE,
    NOWHERE,
    NUM_BLOCK_COLUMNS,
    NUM_FREE_BLOCKS,
    NUM_TEXT_COLUMNS,
    NUM_TOKENS,
    OLDER,
    ORDINAL,
    PARENT,
    PROMPT,
    RANK,
    REMOVALS,
    ROOT,
    RUN,
    TAIL,
    TEXT_RANK,
    TEXT_USE,
    TWIN,
    UNBROKEN,
    USE,
    Arrays,
    TreeShape,
    VoteWeights,
    append_texts,
    draft_texts,
    erase_text,
    key_side,
    read_key,
    read_texts,
    slot_before,
    turned,
)

MAX_NODES = 256
"""The largest draft, whatever the budget: it bounds the memory of one drafting call."""

FIRST_BLOCKS, FIRST_TEXTS = 64, 64
"""Initial capacity of an empty store."""


@dataclass(slots=True, eq=False)
class _Bare:
    """A prompt and its responses in order of rank, and their concatenated tokens."""

    texts: list[int]
    tokens: NDArray[np.integer[Any]]


class SuffixStore:
    """Numbered texts in bounded memory. A prompt is a text of its own; responses name it when they are made."""

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self.max_blocks = max_tokens // BLOCK
        self.max_depth = max_depth
        if not 1 <= self.max_blocks <= (2**31 - 1) // BLOCK:
            raise ValueError(f"max_tokens must be between {BLOCK} and 2**31 - 1; got {max_tokens}")
        if not 1 <= max_depth <= 1024:
            raise ValueError(f"max_depth must be between 1 and 1024; got {max_depth}")
        texts = np.full((FIRST_TEXTS, NUM_TEXT_COLUMNS), NOWHERE, np.int32)
        self._arrays = _new_arrays(min(self.max_blocks, FIRST_BLOCKS), texts)
        self._free_texts = list(range(FIRST_TEXTS - 1, -1, -1))
        self._bare: dict[int, _Bare] = {}
        self._num_bare_tokens = 0
        self._num_bare_blocks = 0

    @property
    def num_tokens(self) -> int:
        return int(self._arrays.heads[NUM_TOKENS]) + self._num_bare_tokens

    @property
    def num_indexed_tokens(self) -> int:
        return int(self._arrays.heads[NUM_TOKENS])

    @property
    def memory_bytes(self) -> int:
        """All allocated memory, used or not; it grows by doubling and never beyond what `max_tokens` needs."""
        return sum(array.nbytes for array in self._arrays) + sum(bare.tokens.nbytes for bare in self._bare.values())

    @property
    def bytes_per_token(self) -> float:
        """Memory of one token slot of an indexed text, its share of the block included."""
        a = self._arrays
        per_slot = sum(math.prod(array.shape[1:]) for array in (a.tokens, a.links, a.nodes))
        return a.tokens.itemsize * (per_slot + NUM_BLOCK_COLUMNS / BLOCK)

    def text_length(self, text: int) -> int:
        return int(self._arrays.texts[text, LENGTH])

    def can_hold(self, num_tokens: int, num_texts: int) -> bool:
        """Whether so many tokens would fit into an empty store."""
        return num_tokens // BLOCK + num_texts <= self.max_blocks

    def has_room(self, num_tokens: int, num_texts: int) -> bool:
        """Whether so many tokens fit, in the worst distribution over so many texts. Grows the memory if allowed.

        The room that bare texts need to be indexed stays reserved.
        """
        return self._has_blocks(num_tokens // BLOCK + num_texts)

    def _has_blocks(self, needed: int) -> bool:
        missing = needed - int(self._arrays.heads[NUM_FREE_BLOCKS])
        if missing <= 0:
            return True
        num_blocks, most = len(self._arrays.blocks), self.max_blocks - self._num_bare_blocks
        if num_blocks + missing > most:
            return False
        self._arrays = _grown_blocks(self._arrays, min(most, max(2 * num_blocks, num_blocks + missing)))
        return True

    def new_text(self, prompt: int | None = None, rank: int = 0, use: int = LAST, twin: int = NOWHERE) -> int:
        """Make an empty text: a response to a complete `prompt`, or (None) a prompt with its own tree.

        Every new response of a prompt must have a higher rank than those before. A twin must be complete.
        """
        if not self._free_texts:
            self._grow_texts()
        text = self._free_texts.pop()
        tail = NOWHERE if prompt is None else self._arrays.texts[prompt, TAIL]
        owner = text if prompt is None else prompt
        self._arrays.texts[text] = (owner, NOWHERE, tail, 0, EMPTY_TREE, rank, use, twin, NOWHERE, 0, NOWHERE, 0)
        return text

    def append(self, texts: Int32Array, ends: Int32Array, tokens: Int32Array) -> None:
        """Append tokens to indexed texts; the caller must have checked `has_room`."""
        append_texts(self._arrays, self.max_depth, texts, ends, tokens)

    def end_text(self, text: int) -> None:
        """Mark a text as finished: it gets no more tokens or drafts, so it needs no twin."""
        self._arrays.texts[text, TWIN] = NOWHERE

    def delete_text(self, text: int) -> None:
        """Delete a text. A prompt must outlive its responses: their keys extend into it."""
        table = self._arrays.texts
        bare = self._bare.get(int(table[text, PROMPT]))
        if bare is None:
            erase_text(self._arrays, text)
        else:
            self._delete_bare(bare, text)
        # Texts that had it as their twin lose it.
        table[table[:, TWIN] == text, TWIN] = NOWHERE
        table[text] = NOWHERE
        self._free_texts.append(text)

    def draft(
        self, shape: TreeShape, weights: VoteWeights, texts: Sequence[int], budgets: Sequence[int]
    ) -> tuple[Int32Array, Int32Array, Float32Array, list[int]]:
        """The concatenated tokens, parents and scores of all drafts, and where each ends. The texts must be indexed."""
        assert len(texts) == len(budgets)
        limits = np.array(budgets, np.int32).clip(0, MAX_NODES)
        size = int(limits.sum())
        tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
        scores, ends = np.empty(size, np.float32), np.empty(len(texts), np.int32)
        draft_texts(
            self._arrays,
            self.max_depth,
            shape,
            weights,
            np.array(texts, np.int32),
            limits,
            tokens,
            parents,
            scores,
            ends,
        )
        return tokens, parents, scores, ends.tolist()

    def _grow_texts(self) -> None:
        num_texts = len(self._arrays.texts)
        texts = np.concatenate([self._arrays.texts, np.full_like(self._arrays.texts, NOWHERE)])
        self._arrays = self._arrays._replace(texts=texts)
        self._free_texts.extend(range(2 * num_texts - 1, num_texts - 1, -1))

    # --- bare texts ---------------------------------------------------------------------------------------------------

    def is_bare(self, prompt: int) -> bool:
        return prompt in self._bare

    def tokens_of(self, prompt: int, texts: Sequence[int]) -> Int32Array:
        """The concatenated tokens of some of a prompt's texts, which may include the prompt itself."""
        a, which = self._arrays, np.array(texts, np.int32)
        bare = self._bare.get(prompt)
        if bare is not None:
            ends = a.texts[bare.texts, LENGTH].cumsum()
            pieces = dict(zip(bare.texts, np.split(bare.tokens, ends[:-1]), strict=True))
            return np.concatenate([pieces[text] for text in texts]).astype(np.int32)
        tokens = np.empty(int(a.texts[which, LENGTH].sum()), np.int32)
        read_texts(a.tokens, a.blocks, a.texts, which, tokens)
        return tokens

    def release(self) -> None:
        """Free everything but the tokens themselves."""
        table = self._arrays.texts
        used = np.flatnonzero(table[:, PROMPT] != NOWHERE)
        ranked = used[np.lexsort((table[used, TEXT_RANK], table[used, PROMPT]))]
        starts = np.flatnonzero(np.diff(table[ranked, PROMPT], prepend=NOWHERE))
        for texts in np.split(ranked, starts[1:]) if len(starts) else ():
            prompt = int(texts[0])
            if prompt not in self._bare:
                self._keep_bare(texts.tolist(), self.tokens_of(prompt, texts.tolist()))
        num_blocks = min(self.max_blocks - self._num_bare_blocks, FIRST_BLOCKS)
        self._arrays = _new_arrays(num_blocks, table)

    def add_bare(self, texts: Sequence[int], lengths: Sequence[int], tokens: Int32Array) -> None:
        """Set the tokens of new texts, a prompt and its responses by rank.

        The caller must make sure that they fit, and release the store once all are added.
        """
        self._arrays.texts[np.array(texts, np.int32), LENGTH] = lengths
        self._keep_bare(list(texts), tokens)

    def _keep_bare(self, texts: list[int], tokens: Int32Array) -> None:
        is_small = len(tokens) == 0 or int(tokens.max()) < 2**16
        self._bare[texts[0]] = _Bare(texts, tokens.astype(np.uint16 if is_small else np.int32))
        self._arrays.texts[np.array(texts, np.int32)[:, None], [FIRST, TAIL, EQUAL]] = NOWHERE
        self._count_bare(texts, 1)

    def _count_bare(self, texts: Sequence[int], sign: int) -> None:
        lengths = self._arrays.texts[np.array(texts, np.int32), LENGTH]
        self._num_bare_tokens += sign * int(lengths.sum())
        self._num_bare_blocks += sign * int(num_blocks_of(lengths).sum())

    def _delete_bare(self, bare: _Bare, text: int) -> None:
        place = bare.texts.index(text)
        lengths = self._arrays.texts[np.array(bare.texts, np.int32), LENGTH]
        start = int(lengths[:place].sum())
        self._count_bare([text], -1)
        if place == 0:
            assert len(bare.texts) == 1, "responses outlive their prompt"
            del self._bare[text]
            return
        bare.tokens = np.delete(bare.tokens, np.s_[start : start + int(lengths[place])])
        del bare.texts[place]

    def index(self, prompt: int) -> None:
        """Index a bare prompt and its responses; their room was reserved."""
        bare = self._bare.pop(prompt)
        self._count_bare(bare.texts, -1)
        which, tokens = np.array(bare.texts, np.int32), bare.tokens.astype(np.int32)
        table = self._arrays.texts
        ends = table[which, LENGTH].cumsum(dtype=np.int32)
        has_room = self._has_blocks(int(num_blocks_of(table[which, LENGTH]).sum()))
        assert has_room, "bare texts have lost their room"
        table[which, LENGTH], table[prompt, ROOT] = 0, EMPTY_TREE
        self.append(which[:1], ends[:1], tokens[: ends[0]])
        table[which[1:], TAIL] = table[prompt, TAIL]
        self.append(which[1:], ends[1:] - ends[0], tokens[ends[0] :])

    def check_integrity(self) -> None:
        """Audit everything: trees against texts, nodes and their witnesses, lists of equal keys, the free list."""
        a = self._arrays
        num_blocks = num_tokens = 0
        for prompt in np.flatnonzero(a.texts[:, PROMPT] == np.arange(len(a.texts))).tolist():
            texts = np.flatnonzero(a.texts[:, PROMPT] == prompt).tolist()
            if prompt in self._bare:
                _audit_bare(a, self._bare[prompt], texts)
                continue
            entries: list[int] = []
            for text in texts:
                slots, blocks = _audit_text(a, text, self.max_depth)
                entries.extend(slots)
                num_blocks += blocks
            found, nodes = _audit_tree(a, prompt, self.max_depth)
            assert sorted(found) == sorted(entries), f"tree {prompt} and its texts hold different entries"
            has_node = [entry for entry in entries if a.nodes[entry, CRITICAL] != NO_NODE]
            assert sorted(nodes) == sorted(has_node), f"tree {prompt}: a node without its entry"
            num_tokens += len(entries)
        assert num_tokens == self.num_indexed_tokens
        free_blocks = _audit_free_list(int(a.heads[FREE_BLOCK]), a.blocks[:, NEXT])
        assert free_blocks == a.heads[NUM_FREE_BLOCKS] == len(a.blocks) - num_blocks
        assert sorted(self._free_texts) == np.flatnonzero(a.texts[:, PROMPT] == NOWHERE).tolist()
        lengths = [self.text_length(text) for bare in self._bare.values() for text in bare.texts]
        assert (sum(lengths), sum(-(-n // BLOCK) for n in lengths)) == (self._num_bare_tokens, self._num_bare_blocks)
        assert len(a.blocks) + self._num_bare_blocks <= self.max_blocks


def num_blocks_of(lengths: NDArray[Any]) -> NDArray[Any]:
    """How many blocks texts of these lengths need."""
    return -(-lengths // BLOCK)


def _new_arrays(num_blocks: int, texts: Int32Array) -> Arrays:
    empty = Arrays(
        tokens=np.empty(0, np.int32),
        links=np.empty((0, 2), np.int32),
        nodes=np.empty((0, 4), np.int32),
        blocks=np.empty((0, NUM_BLOCK_COLUMNS), np.int32),
        texts=texts,
        heads=np.array([NOWHERE, 0, 0], np.int64),
    )
    return _grown_blocks(empty, num_blocks) if num_blocks else empty


def _grown_blocks(a: Arrays, num_blocks: int) -> Arrays:
    """The same content with more token slots; the new blocks are prepended to the free list."""
    old_blocks, num_slots = len(a.blocks), num_blocks * BLOCK
    tokens, links, nodes, blocks = (
        np.concatenate([old, np.full((size - len(old), *old.shape[1:]), NOWHERE, np.int32)])
        for old, size in ((a.tokens, num_slots), (a.links, num_slots), (a.nodes, num_slots), (a.blocks, num_blocks))
    )
    blocks[old_blocks:-1, NEXT] = np.arange(old_blocks + 1, num_blocks)
    blocks[-1, NEXT] = a.heads[FREE_BLOCK]
    heads = a.heads.copy()
    heads[FREE_BLOCK] = old_blocks
    heads[NUM_FREE_BLOCKS] += num_blocks - old_blocks
    return Arrays(tokens, links, nodes, blocks, a.texts, heads)


# --- the audit --------------------------------------------------------------------------------------------------------


def _audit_text(a: Arrays, text: int, max_depth: int) -> tuple[list[int], int]:
    """The token slots of a text, and its number of blocks."""
    prompt, block, tail, length = a.texts[text, [PROMPT, FIRST, TAIL, LENGTH]].tolist()
    before = NOWHERE if prompt == text else int(a.texts[prompt, TAIL])
    slots: list[int] = []
    num_blocks = 0
    while block >= 0:
        assert a.blocks[block, BEFORE] == before, f"text {text}: broken chain of blocks"
        assert a.blocks[block, ORDINAL] == num_blocks
        assert a.blocks[block, [RANK, USE]].tolist() == a.texts[text, [TEXT_RANK, TEXT_USE]].tolist()
        used = min(BLOCK, length - len(slots))
        slots.extend(range(block * BLOCK, block * BLOCK + used))
        assert (a.tokens[block * BLOCK : (block + 1) * BLOCK] >= 0).tolist() == [i < used for i in range(BLOCK)]
        before = slots[-1]
        num_blocks += 1
        block = int(a.blocks[block, NEXT])
    assert len(slots) == length and before == tail
    equal = int(a.texts[text, EQUAL])
    if equal >= 0 and a.texts[text, REMOVALS] == a.texts[prompt, REMOVALS]:
        assert _key_of(a, equal, max_depth).tolist() == _key_after(a, tail, max_depth).tolist()
    if a.texts[text, TWIN] >= 0:
        _audit_twin(a, text, slots)
    return slots, num_blocks


def _audit_twin(a: Arrays, text: int, slots: list[int]) -> None:
    """Check a text's position in its twin against the tokens of both."""
    twin = int(a.texts[text, TWIN])
    assert a.texts[twin, PROMPT] == a.texts[text, PROMPT] and a.texts[twin, TEXT_RANK] < a.texts[text, TEXT_RANK]
    theirs: list[int] = []
    block = int(a.texts[twin, FIRST])
    while block >= 0:
        theirs.extend(slot for slot in range(block * BLOCK, (block + 1) * BLOCK) if a.tokens[slot] >= 0)
        block = int(a.blocks[block, NEXT])
    run = UNBROKEN
    for mine, other in zip(slots, theirs, strict=False):
        run = run + 1 if a.tokens[mine] == a.tokens[other] else 0
    followed = theirs[len(slots)] if len(slots) < len(theirs) else NOWHERE
    assert (followed, run) == (a.texts[text, FOLLOWED], a.texts[text, RUN])


def _audit_bare(a: Arrays, bare: _Bare, texts: list[int]) -> None:
    assert sorted(bare.texts) == texts
    ranks, lengths = a.texts[bare.texts, TEXT_RANK].tolist(), a.texts[bare.texts, LENGTH].tolist()
    assert ranks == sorted(set(ranks)) and sum(lengths) == len(bare.tokens)
    assert (a.texts[texts, FIRST] == NOWHERE).all()


def _audit_tree(a: Arrays, prompt: int, max_depth: int) -> tuple[list[int], list[int]]:
    """The entries and the nodes of a tree."""
    root = int(a.texts[prompt, ROOT])
    entries: list[int] = []
    nodes: list[int] = []
    # The ancestors of a child and the side taken at each, outermost first.
    pending: list[tuple[int, list[tuple[int, int]]]] = [] if root == EMPTY_TREE else [(root, [])]
    while pending:
        child, path = pending.pop()
        parent = path[-1][0] if path else NOWHERE
        if child < 0:
            assert a.links[~child, NEWER] == turned(parent)
            entries.extend(_audit_list(a, ~child, path, max_depth))
            continue
        left, right, critical, above = a.nodes[child].tolist()
        assert above == parent
        assert (a.nodes[parent, CRITICAL] if path else -1) < critical < 32 * max_depth, "bits must grow downwards"
        nodes.append(child)
        pending += [(left, [*path, (child, 0)]), (right, [*path, (child, 1)])]
    _audit_witnesses(a, nodes)
    return entries, nodes


def _audit_list(a: Arrays, entry: int, path: list[tuple[int, int]], max_depth: int) -> list[int]:
    """The entries of a leaf: their keys are equal and match each turn of the path to it."""
    key = _key_of(a, entry, max_depth)
    assert all(key_side(key, int(a.nodes[node, CRITICAL])) == side for node, side in path)
    entries = [entry]
    while (older := int(a.links[entry, OLDER])) >= 0:
        assert a.links[older, NEWER] == entry and _key_of(a, older, max_depth).tolist() == key.tolist()
        assert _order(a, older) < _order(a, entry), "the newest must come first"
        entries.append(older)
        entry = older
    return entries


def _order(a: Arrays, entry: int) -> tuple[int, int]:
    """Rank and position; newer entries compare greater."""
    block = entry // BLOCK
    return int(a.blocks[block, RANK]), int(a.blocks[block, ORDINAL]) * BLOCK + entry % BLOCK


def _audit_witnesses(a: Arrays, nodes: list[int]) -> None:
    """Check that every node is an ancestor of the entry with its number."""
    for node in nodes:
        head = node
        while a.links[head, NEWER] >= 0:
            head = int(a.links[head, NEWER])
        above = turned(int(a.links[head, NEWER]))
        while above not in (node, NOWHERE):
            above = int(a.nodes[above, PARENT])
        assert above == node, f"entry {node} does not lie below its node"


def _key_of(a: Arrays, entry: int, max_depth: int) -> Int32Array:
    return _key_after(a, slot_before(a.blocks, entry), max_depth)


def _key_after(a: Arrays, slot: int, max_depth: int) -> Int32Array:
    key = np.empty(max_depth, np.int32)
    read_key(a.tokens, a.blocks, slot, key)
    return key


def _audit_free_list(head: int, following: Int32Array) -> int:
    seen: set[int] = set()
    while head >= 0:
        assert head not in seen, "the free list has a cycle"
        seen.add(head)
        head = int(following[head])
    return len(seen)
