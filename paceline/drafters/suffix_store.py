"""Where the suffix drafter keeps text: numbered texts and prompts in bounded memory, removable one by one.

Called by `suffix.py` only, with whole batches. It must never hold more than `max_tokens` token slots, and never know a
sequence, a prompt id or a window: which text is kept is its owner's policy. `suffix_tree.py` says how text is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.drafters.suffix_tree import (
    ABOVE,
    BEFORE,
    BLOCK,
    CRITICAL,
    EMPTY_TREE,
    FREE_BLOCK,
    LENGTH,
    NEWER,
    NEXT,
    NO_NODE,
    NOWHERE,
    NUM_FREE_BLOCKS,
    NUM_TOKENS,
    OLDER,
    PARENT,
    PROMPT,
    ROOT,
    TAIL,
    Arrays,
    Float32,
    Int32,
    Shape,
    append_texts,
    draft_texts,
    erase_text,
    key_side,
    read_key,
    slot_before,
)

MAX_NODES = 256
"""No draft is larger, whatever the budget: it bounds the memory of one drafting call."""


class SuffixStore:
    """Numbered texts in bounded memory. A prompt is a text of its own; responses name it when they are made."""

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self.max_blocks = max_tokens // BLOCK
        self.max_depth = max_depth
        if not 1 <= self.max_blocks <= (2**31 - 1) // BLOCK:
            raise ValueError(f"max_tokens must be between {BLOCK} and 2**31 - 1; got {max_tokens}")
        if not 1 <= max_depth <= 1024:
            raise ValueError(f"max_depth must be between 1 and 1024; got {max_depth}")
        self._arrays = _new_arrays(min(self.max_blocks, 64), num_texts=64)
        self._free_texts = list(range(63, -1, -1))

    @property
    def num_tokens(self) -> int:
        return int(self._arrays.heads[NUM_TOKENS])

    @property
    def memory_bytes(self) -> int:
        """All memory held, used or not; it grows by doubling and never beyond what `max_tokens` needs."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def bytes_per_token(self) -> float:
        """Memory of one token slot, its share of the block included."""
        a = self._arrays
        return (a.tokens.nbytes + a.links.nbytes + a.nodes.nbytes + a.blocks.nbytes) / len(a.tokens)

    def text_length(self, text: int) -> int:
        return int(self._arrays.texts[text, LENGTH])

    def can_hold(self, num_tokens: int, num_texts: int) -> bool:
        """Whether so many tokens would fit if nothing else were here."""
        return num_tokens // BLOCK + num_texts <= self.max_blocks

    def has_room(self, num_tokens: int, num_texts: int) -> bool:
        """Whether so many tokens fit, spread over so many texts in the worst way. Grows the memory if it may."""
        needed = num_tokens // BLOCK + num_texts
        missing = needed - int(self._arrays.heads[NUM_FREE_BLOCKS])
        if missing <= 0:
            return True
        num_blocks = len(self._arrays.blocks)
        if num_blocks + missing > self.max_blocks:
            return False
        self._arrays = _grown_blocks(self._arrays, min(self.max_blocks, max(2 * num_blocks, num_blocks + missing)))
        return True

    def new_text(self, prompt: int | None = None) -> int:
        """An empty text: a response to `prompt`, whose tokens are complete, or (None) a prompt with its own tree."""
        if not self._free_texts:
            self._grow_texts()
        text = self._free_texts.pop()
        tail = NOWHERE if prompt is None else self._arrays.texts[prompt, TAIL]
        self._arrays.texts[text] = (text if prompt is None else prompt, NOWHERE, tail, 0, EMPTY_TREE)
        return text

    def append(self, texts: Int32, ends: Int32, tokens: Int32) -> None:
        """The caller has asked `has_room`."""
        append_texts(self._arrays, self.max_depth, texts, ends, tokens)

    def delete_text(self, text: int) -> None:
        """A prompt must outlive its responses: they read their keys through it."""
        erase_text(self._arrays, text)
        self._arrays.texts[text, PROMPT] = NOWHERE
        self._free_texts.append(text)

    def draft(
        self, shape: Shape, texts: Sequence[int], budgets: Sequence[int]
    ) -> tuple[Int32, Int32, Float32, list[int]]:
        """Tokens, parents and scores of all drafts in a row, and where each ends."""
        assert len(texts) == len(budgets)
        limits = np.array(budgets, np.int32).clip(0, MAX_NODES)
        size = int(limits.sum())
        tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
        scores, ends = np.empty(size, np.float32), np.empty(len(texts), np.int32)
        draft_texts(
            self._arrays,
            self.max_depth,
            shape,
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

    def check_integrity(self) -> None:
        """Audits everything: trees against texts, nodes and their witnesses, lists of equal keys, the free list."""
        a = self._arrays
        num_blocks = num_tokens = 0
        for prompt in np.flatnonzero(a.texts[:, PROMPT] == np.arange(len(a.texts))).tolist():
            entries: list[int] = []
            for text in np.flatnonzero(a.texts[:, PROMPT] == prompt).tolist():
                slots, blocks = _audit_text(a, text)
                entries.extend(slots)
                num_blocks += blocks
            found, nodes = _audit_tree(a, prompt, self.max_depth)
            assert sorted(found) == sorted(entries), f"tree {prompt} and its texts hold different entries"
            has_node = [entry for entry in entries if a.nodes[entry, CRITICAL] != NO_NODE]
            assert sorted(nodes) == sorted(has_node), f"tree {prompt}: a node without its entry"
            num_tokens += len(entries)
        assert num_tokens == self.num_tokens
        free_blocks = _audit_free_list(int(a.heads[FREE_BLOCK]), a.blocks[:, NEXT])
        assert free_blocks == a.heads[NUM_FREE_BLOCKS] == len(a.blocks) - num_blocks
        assert sorted(self._free_texts) == np.flatnonzero(a.texts[:, PROMPT] == NOWHERE).tolist()
        assert len(a.blocks) <= self.max_blocks


def _new_arrays(num_blocks: int, num_texts: int) -> Arrays:
    empty = Arrays(
        tokens=np.empty(0, np.int32),
        links=np.empty((0, 4), np.int32),
        nodes=np.empty((0, 4), np.int32),
        blocks=np.empty((0, 2), np.int32),
        texts=np.full((num_texts, 5), NOWHERE, np.int32),
        heads=np.array([NOWHERE, 0, 0, 0], np.int64),
    )
    return _grown_blocks(empty, num_blocks)


def _grown_blocks(a: Arrays, num_blocks: int) -> Arrays:
    """The same content with more token slots; what is new is chained in front of the free list."""
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


def _audit_text(a: Arrays, text: int) -> tuple[list[int], int]:
    """The token slots of a text and the number of its blocks."""
    prompt, block, tail, length, _ = a.texts[text].tolist()
    before = NOWHERE if prompt == text else int(a.texts[prompt, TAIL])
    slots: list[int] = []
    num_blocks = 0
    while block >= 0:
        assert a.blocks[block, BEFORE] == before, f"text {text}: broken chain of blocks"
        used = min(BLOCK, length - len(slots))
        slots.extend(range(block * BLOCK, block * BLOCK + used))
        assert (a.tokens[block * BLOCK : (block + 1) * BLOCK] >= 0).tolist() == [i < used for i in range(BLOCK)]
        before = slots[-1]
        num_blocks += 1
        block = int(a.blocks[block, NEXT])
    assert len(slots) == length and before == tail
    return slots, num_blocks


def _audit_tree(a: Arrays, prompt: int, max_depth: int) -> tuple[list[int], list[int]]:
    """The entries and the nodes of a tree."""
    root = int(a.texts[prompt, ROOT])
    entries: list[int] = []
    nodes: list[int] = []
    # Ancestors of a child with the side it hangs on, outermost first.
    pending: list[tuple[int, list[tuple[int, int]]]] = [] if root == EMPTY_TREE else [(root, [])]
    while pending:
        child, path = pending.pop()
        parent = path[-1][0] if path else NOWHERE
        if child < 0:
            assert a.links[~child, ABOVE] == parent
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
    """The entries of a leaf: equal keys that take each turn of the path to it."""
    key = _key_of(a, entry, max_depth)
    assert all(key_side(key, int(a.nodes[node, CRITICAL])) == side for node, side in path)
    entries: list[int] = []
    newer = NOWHERE
    while entry >= 0:
        assert a.links[entry, NEWER] == newer and _key_of(a, entry, max_depth).tolist() == key.tolist()
        entries.append(entry)
        newer, entry = entry, int(a.links[entry, OLDER])
    return entries


def _audit_witnesses(a: Arrays, nodes: list[int]) -> None:
    """Every node finds itself on the way up from the entry of its number."""
    for node in nodes:
        head = node
        while a.links[head, NEWER] >= 0:
            head = int(a.links[head, NEWER])
        above = int(a.links[head, ABOVE])
        while above not in (node, NOWHERE):
            above = int(a.nodes[above, PARENT])
        assert above == node, f"entry {node} does not lie below its node"


def _key_of(a: Arrays, entry: int, max_depth: int) -> Int32:
    key = np.empty(max_depth, np.int32)
    read_key(a.tokens, a.blocks, slot_before(a.blocks, entry), key)
    return key


def _audit_free_list(head: int, following: Int32) -> int:
    seen: set[int] = set()
    while head >= 0:
        assert head not in seen, "a free list runs in a circle"
        seen.add(head)
        head = int(following[head])
    return len(seen)
