"""The compiled half of the suffix store: every stored token, findable by what stands before it.

One tree per prompt. A stored token is an *entry*: its value is the token, its key the (at most `max_depth`) tokens
before it, read backwards. Keys sit in a binary radix tree (PATRICIA): a node names the first bit in which the keys
below it differ, so entries that share the last m tokens are one subtree, and the longest suffix of a text that occurs
anywhere in the store is one descent away. Entries with equal keys form a list behind one leaf, newest first; its head
stands for all.

Node r exists because entry r once split a leaf off, and entry r stays somewhere below it: entries and nodes share their
numbers, every node has a witness for free, and an entry that goes hands its node to one that has none.

What is found depends on the texts and their order alone, never on the order in which their tokens came: a tree has one
shape for one set of keys, and lists are sorted. So a tree that is dropped and built again drafts as before.

Against a suffix automaton: text can be removed again in constant time per token (the window slides), the occurrences
are at hand instead of propagated counts, a token costs 29 bytes, and no look-up state can be made stale by siblings.

Text lives in blocks of `BLOCK` token slots. A response's first block points back to its prompt's last token, so all
samples of all uses share one copy of the prompt.

Called by `suffix_store.py` only, which owns the memory, with whole batches: everything per token happens here. Nothing
here may allocate slots: who appends has made room. Numba caches by file, so no compiled function may live elsewhere;
and functions take arrays one by one, as a tuple of arrays handed down costs more in reference counts than the work.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from paceline.core.types import Float32Array, Int32Array, Int64Array

BLOCK_BITS = 5
BLOCK = 1 << BLOCK_BITS
NO_TOKEN = -1
"""In a token slot: nothing written yet. In a key: before the first token."""
NOWHERE = -1
NO_NODE = -1
EMPTY_TREE = -(2**31)
LAST = 2**31 - 1
"""The use that a prompt belongs to, and the rank of what wins every tie: none is newer."""
FULL_VOTE = 1024
"""What an occurrence of this use counts for. Votes are whole numbers: their sums depend on no order."""
UNBROKEN = 2**30
"""The run of a text that has nowhere differed from its twin, less its own length."""
MAX_STEPS_TO_HEAD = 8
"""A descent costs more than so many steps along a list, and less than many more."""

# Columns of `nodes`. A child is a node (>= 0) or the head of a list of entries (its bitwise complement: < 0); columns 0
# and 1 are children. CRITICAL is NO_NODE in the row of an entry without a node.
CRITICAL, PARENT = 2, 3
# Columns of `links`, per entry: its neighbours in the list of equal keys. The head has none newer, and holds there the
# node above it as `turned`, which is negative.
OLDER, NEWER = 0, 1
# Columns of `blocks`: the next block (of the text, or of the free list), the token slot before the first one here; of
# its text the rank (order of the prompt's texts, the prompt itself 0) and the use; how many blocks it has before.
NEXT, BEFORE, RANK, USE, ORDINAL = 0, 1, 2, 3, 4
# Columns of `texts`: the prompt's text (itself for a prompt), first block, last token slot, tokens, root of the tree;
# rank and use; while it grows the text written with the same noise, the slot there at this text's own length, and the
# run: how many tokens up to here are the same in both. Then an entry whose key is the text's end, if one is known, and
# how many texts of the prompt had been removed by then, or (of a prompt) have been: a removed one may have held it.
PROMPT, FIRST, TAIL, LENGTH, ROOT, TEXT_RANK, TEXT_USE, TWIN, FOLLOWED, RUN = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
EQUAL, REMOVALS = 10, 11
NUM_BLOCK_COLUMNS, NUM_TEXT_COLUMNS = 5, 12
# Cells of `heads`.
FREE_BLOCK, NUM_FREE_BLOCKS, NUM_TOKENS = 0, 1, 2
# Columns of `plan` and `odds`, the memory of a draft being grown. Row i + 1 is node i and row 0 the root: which votes
# are its own, its match length, how likely its path is. The columns after them are a list of pending nodes.
START, END, MATCH, TOKEN, PENDING_PARENT = 0, 1, 2, 3, 4
PATH, PENDING_PATH, PENDING_SCORE = 0, 1, 2


class Arrays(NamedTuple):
    """All memory of a store."""

    tokens: Int32Array
    links: Int32Array
    nodes: Int32Array
    blocks: Int32Array
    texts: Int32Array
    heads: Int64Array


class TreeShape(NamedTuple):
    """How drafts are grown; see `Suffix` for what each means."""

    width: int
    min_match: int
    max_votes: int
    min_path: float
    doubt: float


class VoteWeights(NamedTuple):
    """What votes count for: an occurrence by the age of its text in uses, the twin's own place by its run."""

    by_age: Int32Array
    by_run: Int32Array


_compiled: Any = njit(cache=True, nogil=True)


# --- walking text -----------------------------------------------------------------------------------------------------


@_compiled
def slot_before(blocks: Int32Array, slot: int) -> int:
    return slot - 1 if slot & (BLOCK - 1) else blocks[slot >> BLOCK_BITS, BEFORE]


@_compiled
def slot_after(tokens: Int32Array, blocks: Int32Array, slot: int) -> int:
    """The next token slot of the same text, NOWHERE at its end."""
    slot += 1
    if slot & (BLOCK - 1) == 0:
        block = blocks[(slot >> BLOCK_BITS) - 1, NEXT]
        slot = block * BLOCK if block >= 0 else NOWHERE
    return slot if slot >= 0 and tokens[slot] >= 0 else NOWHERE


@_compiled
def read_key(tokens: Int32Array, blocks: Int32Array, slot: int, key: Int32Array) -> None:
    """The text that ends at `slot`, backwards."""
    i = 0
    while i < key.shape[0] and slot >= 0:
        first = slot & ~(BLOCK - 1)
        for _ in range(min(slot - first + 1, key.shape[0] - i)):
            key[i] = tokens[slot]
            i, slot = i + 1, slot - 1
        slot = blocks[first >> BLOCK_BITS, BEFORE]
    for j in range(i, key.shape[0]):
        key[j] = NO_TOKEN


@_compiled
def _push_key(key: Int32Array, token: int) -> None:
    for i in range(key.shape[0] - 1, 0, -1):
        key[i] = key[i - 1]
    key[0] = token


# --- the tree ---------------------------------------------------------------------------------------------------------


@_compiled
def key_side(key: Int32Array, critical: int) -> int:
    return (key[critical >> 5] >> (critical & 31)) & 1


@_compiled
def _find_head(nodes: Int32Array, child: int, key: Int32Array) -> int:
    """The list below a child whose key agrees with `key` as far as any does."""
    while child >= 0:
        child = nodes[child, key_side(key, nodes[child, CRITICAL])]
    return ~child


@_compiled
def _first_difference(tokens: Int32Array, blocks: Int32Array, slot: int, key: Int32Array) -> int:
    """The first bit (32 per token, lowest first) in which the text ending at `slot` differs from `key`.

    Equal ones differ first behind their end.
    """
    for i in range(key.shape[0]):
        token = tokens[slot] if slot >= 0 else NO_TOKEN
        if token != key[i]:
            bits, bit = token ^ key[i], 0
            while not (bits >> bit) & 1:
                bit += 1
            return i * 32 + bit
        if slot < 0:
            return 32 * key.shape[0]
        slot = slot_before(blocks, slot)
    return 32 * key.shape[0]


@_compiled
def turned(above: int) -> int:
    """The node above a list as its head holds it, in place of a newer entry; its own inverse."""
    return -2 - above


@_compiled
def _replace_child(nodes: Int32Array, texts: Int32Array, prompt: int, parent: int, old: int, new: int) -> None:
    if parent < 0:
        texts[prompt, ROOT] = new
    else:
        nodes[parent, 0 if nodes[parent, 0] == old else 1] = new


@_compiled
def _set_above(links: Int32Array, nodes: Int32Array, child: int, parent: int) -> None:
    if child >= 0:
        nodes[child, PARENT] = parent
    else:
        links[~child, NEWER] = turned(parent)


@_compiled
def _join_list(
    links: Int32Array, nodes: Int32Array, blocks: Int32Array, texts: Int32Array, prompt: int, entry: int, neighbour: int
) -> None:
    """Puts an entry, the last of its text, to its place in the list that a neighbour is in.

    It is newer than all of its own text and of texts of lower rank. Who appends makes sure that its place is near.
    """
    rank = blocks[entry >> BLOCK_BITS, RANK]
    older, newer = neighbour, links[neighbour, NEWER]
    while newer >= 0 and blocks[newer >> BLOCK_BITS, RANK] <= rank:
        older, newer = newer, links[newer, NEWER]
    while older >= 0 and blocks[older >> BLOCK_BITS, RANK] > rank:
        older, newer = links[older, OLDER], older
    links[entry, OLDER], links[entry, NEWER] = older, newer
    if older >= 0:
        links[older, NEWER] = entry
    if newer >= 0:
        links[newer, OLDER] = entry
    else:
        _replace_child(nodes, texts, prompt, turned(newer), ~older, ~entry)


@_compiled
def _split_off(
    links: Int32Array,
    nodes: Int32Array,
    texts: Int32Array,
    prompt: int,
    entry: int,
    head: int,
    critical: int,
    side: int,
) -> None:
    """Puts a new leaf, and a node for it, where the path to `head` passes the critical bit."""
    child, parent = ~head, turned(links[head, NEWER])
    while parent >= 0 and nodes[parent, CRITICAL] > critical:
        child, parent = parent, nodes[parent, PARENT]
    nodes[entry, side], nodes[entry, 1 - side] = ~entry, child
    nodes[entry, CRITICAL], nodes[entry, PARENT] = critical, parent
    links[entry, OLDER], links[entry, NEWER] = NOWHERE, turned(entry)
    _set_above(links, nodes, child, entry)
    _replace_child(nodes, texts, prompt, parent, child, entry)


@_compiled
def _head_nearby(links: Int32Array, entry: int) -> int:
    """The head of an entry's list, NOWHERE if a descent finds it sooner."""
    for _ in range(MAX_STEPS_TO_HEAD):
        if links[entry, NEWER] < 0:
            return entry
        entry = links[entry, NEWER]
    return NOWHERE


@_compiled
def _insert(
    tokens: Int32Array,
    links: Int32Array,
    nodes: Int32Array,
    blocks: Int32Array,
    texts: Int32Array,
    prompt: int,
    entry: int,
    key: Int32Array,
    nearest: int,
    critical: int,
) -> tuple[int, int]:
    """Adds an entry; returns an entry of the list nearest to it and the first bit in which their keys differ.

    The caller passes them if it knows them (else nearest < 0). It does where a text goes on as the nearest text went
    on: nearest to the next key is then the next entry there, and 32 bits more agree. For a nearer one would follow an
    entry that had been nearer before.
    """
    is_equal = 32 * key.shape[0]
    head = nearest
    if nearest >= 0 and critical < is_equal:
        head = _head_nearby(links, nearest)
    if head < 0:
        nearest = head = _find_head(nodes, texts[prompt, ROOT], key)
        critical = _first_difference(tokens, blocks, slot_before(blocks, head), key)
    if critical == is_equal:
        _join_list(links, nodes, blocks, texts, prompt, entry, nearest)
        # A neighbour by rank: if both go on alike they will be neighbours again.
        nearest = links[entry, OLDER] if links[entry, OLDER] >= 0 else links[entry, NEWER]
    else:
        _split_off(links, nodes, texts, prompt, entry, head, critical, key_side(key, critical))
    return nearest, critical


@_compiled
def _going_on(tokens: Int32Array, blocks: Int32Array, links: Int32Array, entry: int, token: int) -> int:
    """Where an entry's text, or a neighbour's in the list, goes on with `token`: the entry after it, or NOWHERE."""
    if tokens[entry] != token:
        older, newer = links[entry, OLDER], links[entry, NEWER]
        if older >= 0 and tokens[older] == token:
            entry = older
        elif newer >= 0 and tokens[newer] == token:
            entry = newer
        else:
            return NOWHERE
    return slot_after(tokens, blocks, entry)


@_compiled
def _move_node(links: Int32Array, nodes: Int32Array, texts: Int32Array, prompt: int, old: int, new: int) -> None:
    """Gives node `old`, if there is one, the number `new`: an entry below it that has no node."""
    if nodes[old, CRITICAL] == NO_NODE:
        return
    for column in range(4):
        nodes[new, column] = nodes[old, column]
    _replace_child(nodes, texts, prompt, nodes[new, PARENT], old, new)
    for side in range(2):
        _set_above(links, nodes, nodes[new, side], new)


@_compiled
def _remove(links: Int32Array, nodes: Int32Array, texts: Int32Array, prompt: int, entry: int) -> None:
    older, newer = links[entry, OLDER], links[entry, NEWER]
    if newer >= 0:
        links[newer, OLDER] = older
        if older >= 0:
            links[older, NEWER] = newer
        _move_node(links, nodes, texts, prompt, entry, newer)
        return
    above = turned(newer)
    if older >= 0:
        links[older, NEWER] = newer
        _replace_child(nodes, texts, prompt, above, ~entry, ~older)
        _move_node(links, nodes, texts, prompt, entry, older)
    elif above >= 0:
        # The leaf goes and the node above it; the entry that was its witness takes over the node of the one that goes.
        sibling = nodes[above, 1 if nodes[above, 0] == ~entry else 0]
        _replace_child(nodes, texts, prompt, nodes[above, PARENT], above, sibling)
        _set_above(links, nodes, sibling, nodes[above, PARENT])
        nodes[above, CRITICAL] = NO_NODE
        _move_node(links, nodes, texts, prompt, entry, above)
    else:
        texts[prompt, ROOT] = EMPTY_TREE


# --- adding, reading and removing text --------------------------------------------------------------------------------


@_compiled
def _new_block(tokens: Int32Array, blocks: Int32Array, texts: Int32Array, heads: Int64Array, text: int) -> int:
    """Chains a free block behind a text; returns its first slot. The caller has made sure that one is free."""
    block, tail, length = heads[FREE_BLOCK], texts[text, TAIL], texts[text, LENGTH]
    heads[FREE_BLOCK] = blocks[block, NEXT]
    heads[NUM_FREE_BLOCKS] -= 1
    blocks[block, NEXT], blocks[block, BEFORE] = NOWHERE, tail
    blocks[block, RANK], blocks[block, USE] = texts[text, TEXT_RANK], texts[text, TEXT_USE]
    blocks[block, ORDINAL] = length >> BLOCK_BITS
    if length == 0:
        texts[text, FIRST] = block
    else:
        blocks[tail >> BLOCK_BITS, NEXT] = block
    for slot in range(block * BLOCK, (block + 1) * BLOCK):
        tokens[slot] = NO_TOKEN
    return block * BLOCK


@_compiled
def _place(tokens: Int32Array, blocks: Int32Array, texts: Int32Array, heads: Int64Array, text: int, token: int) -> int:
    """Writes one token behind a text; returns its slot."""
    slot = texts[text, TAIL] + 1
    if texts[text, LENGTH] == 0 or slot & (BLOCK - 1) == 0:
        slot = _new_block(tokens, blocks, texts, heads, text)
    tokens[slot] = token
    texts[text, TAIL] = slot
    texts[text, LENGTH] += 1
    heads[NUM_TOKENS] += 1
    return slot


@_compiled
def _follow_twin(tokens: Int32Array, blocks: Int32Array, texts: Int32Array, text: int, new_tokens: Int32Array) -> None:
    """Moves on in the twin by as many tokens as a text is about to grow, and counts how many are the same."""
    followed, run = texts[text, FOLLOWED], texts[text, RUN]
    if texts[text, LENGTH] == 0:
        followed, run = texts[texts[text, TWIN], FIRST] * BLOCK, UNBROKEN
    for token in new_tokens:
        if followed < 0:
            break
        run = run + 1 if tokens[followed] == token else 0
        followed = slot_after(tokens, blocks, followed)
    texts[text, FOLLOWED], texts[text, RUN] = followed, run


@_compiled
def append_texts(a: Arrays, max_depth: int, which: Int32Array, ends: Int32Array, new_tokens: Int32Array) -> None:
    """Appends `new_tokens[ends[i - 1]:ends[i]]` to text `which[i]`, visible to all texts of its prompt at once."""
    tokens, links, nodes, blocks, texts, heads = a
    key = np.empty(max_depth, np.int32)
    start = 0
    for i in range(which.shape[0]):
        text, prompt, nearest, critical = which[i], texts[which[i], PROMPT], NOWHERE, 32 * max_depth
        if texts[text, REMOVALS] == texts[prompt, REMOVALS]:
            # Siblings that are caught in the same loop make long lists: none may search its place there at every call.
            nearest = texts[text, EQUAL]
        if texts[text, TWIN] >= 0:
            _follow_twin(tokens, blocks, texts, text, new_tokens[start : ends[i]])
        read_key(tokens, blocks, texts[text, TAIL], key)
        for j in range(start, ends[i]):
            entry = _place(tokens, blocks, texts, heads, text, new_tokens[j])
            nodes[entry, CRITICAL] = NO_NODE
            if texts[prompt, ROOT] == EMPTY_TREE:
                links[entry, OLDER], links[entry, NEWER] = NOWHERE, turned(NOWHERE)
                texts[prompt, ROOT] = ~entry
            else:
                nearest, critical = _insert(tokens, links, nodes, blocks, texts, prompt, entry, key, nearest, critical)
                nearest = _going_on(tokens, blocks, links, nearest, new_tokens[j])
                critical = min(critical + 32, 32 * max_depth)
            _push_key(key, new_tokens[j])
        texts[text, EQUAL] = nearest if critical == 32 * max_depth else NOWHERE
        texts[text, REMOVALS] = texts[prompt, REMOVALS]
        start = ends[i]


@_compiled
def read_texts(tokens: Int32Array, blocks: Int32Array, texts: Int32Array, which: Int32Array, out: Int32Array) -> None:
    """Copies the tokens of texts into `out`, one text after the other."""
    i = 0
    for text in which:
        left, block = texts[text, LENGTH], texts[text, FIRST]
        while left > 0:
            count = min(left, BLOCK)
            for slot in range(block * BLOCK, block * BLOCK + count):
                out[i] = tokens[slot]
                i += 1
            left -= count
            block = blocks[block, NEXT]


@_compiled
def erase_text(a: Arrays, text: int) -> None:
    """Takes all entries of a text out of its tree and frees its blocks."""
    _, links, nodes, blocks, texts, heads = a
    slot = texts[text, TAIL]
    for _ in range(texts[text, LENGTH]):
        _remove(links, nodes, texts, texts[text, PROMPT], slot)
        slot = slot_before(blocks, slot)
    block = texts[text, FIRST]
    while block >= 0:
        following = blocks[block, NEXT]
        blocks[block, NEXT] = heads[FREE_BLOCK]
        heads[FREE_BLOCK] = block
        heads[NUM_FREE_BLOCKS] += 1
        block = following
    heads[NUM_TOKENS] -= texts[text, LENGTH]
    texts[texts[text, PROMPT], REMOVALS] += 1


# --- drafting ---------------------------------------------------------------------------------------------------------


@_compiled
def _find_heads(
    tokens: Int32Array, nodes: Int32Array, blocks: Int32Array, texts: Int32Array, which: Int32Array, keys: Int32Array
) -> Int32Array:
    """For each text (NOWHERE: none) the list nearest to its end, as a child; its key is left in `keys`.

    All descend in step: each waits for memory at every level, and so they wait together.
    """
    children = np.full(which.shape[0], EMPTY_TREE, np.int32)
    for i in range(which.shape[0]):
        if which[i] >= 0:
            children[i] = texts[texts[which[i], PROMPT], ROOT]
            read_key(tokens, blocks, texts[which[i], TAIL], keys[i])
    is_descending = True
    while is_descending:
        is_descending = False
        for i in range(which.shape[0]):
            child = children[i]
            if child >= 0:
                critical = nodes[child, CRITICAL]
                children[i] = nodes[child, (keys[i, critical >> 5] >> (critical & 31)) & 1]
                is_descending = True
    return children


@_compiled
def _match_length(tokens: Int32Array, blocks: Int32Array, head: int, key: Int32Array) -> int:
    """How many of the last tokens also stand before an entry, at most `max_depth`."""
    slot = slot_before(blocks, head)
    length = 0
    while length < key.shape[0] and slot >= 0 and tokens[slot] == key[length]:
        length += 1
        slot = slot_before(blocks, slot)
    return length


@_compiled
def _collect(links: Int32Array, nodes: Int32Array, head: int, match: int, max_votes: int, votes: Int32Array) -> int:
    """Entries that share the `match` tokens before them with `head`: all of them, or `max_votes`.

    Where there are more, the subtree is cut as near to its top as possible and each part sends one: contexts that
    differ early have a vote each, however often each was seen. Equal contexts send in turn their newest that are left.
    """
    child, parent = ~head, turned(links[head, NEWER])
    while parent >= 0 and nodes[parent, CRITICAL] >= 32 * match:
        child, parent = parent, nodes[parent, PARENT]
    votes[0] = child
    size, was_size = 1, 0
    while was_size < size < max_votes:
        was_size = size
        for i in range(was_size):
            if votes[i] >= 0 and size < max_votes:
                votes[size] = nodes[votes[i], 1]
                votes[i] = nodes[votes[i], 0]
                size += 1
    is_descending = True
    while is_descending:
        is_descending = False
        for i in range(size):
            if votes[i] >= 0:
                votes[i] = nodes[votes[i], 0]
                is_descending = True
    for i in range(size):
        votes[i] = ~votes[i]
    i = 0
    while i < size < max_votes:
        if links[votes[i], OLDER] >= 0:
            votes[size] = links[votes[i], OLDER]
            size += 1
        i += 1
    return size


@_compiled
def _weigh(blocks: Int32Array, by_age: Int32Array, use: int, votes: Int32Array, size: int, weights: Int32Array) -> None:
    """What each vote counts for in a text of this use. What was written for a later one is as new as can be."""
    for i in range(size):
        age = max(use - blocks[votes[i] >> BLOCK_BITS, USE], 0)
        weights[i] = by_age[min(age, by_age.shape[0] - 1)]


@_compiled
def _add_vote(votes: Int32Array, weights: Int32Array, size: int, entry: int, weight: int) -> int:
    """Gives an entry, which may have a vote already, a vote that counts so much; returns how many have one."""
    i = 0
    while i < size and votes[i] != entry:
        i += 1
    votes[i], weights[i] = entry, weight
    return max(size, i + 1)


@_compiled
def _tally(
    tokens: Int32Array, votes: Int32Array, weights: Int32Array, start: int, end: int, seen: Int32Array
) -> tuple[int, int, int]:
    """Adds votes up per token into `seen` (token, sum); returns how many tokens were voted for, and all votes' sum.

    The last number returned is that sum were no text older than another: how much has been seen, new or old.
    """
    num_seen = total = evidence = 0
    for vote in range(start, end):
        token = tokens[votes[vote]]
        i = 0
        while i < num_seen and seen[i, 0] != token:
            i += 1
        if i == num_seen:
            seen[i, 0], seen[i, 1] = token, 0
            num_seen += 1
        seen[i, 1] += weights[vote]
        total += weights[vote]
        evidence += max(weights[vote], FULL_VOTE)
    return num_seen, total, evidence


@_compiled
def _newest(
    tokens: Int32Array,
    blocks: Int32Array,
    votes: Int32Array,
    start: int,
    end: int,
    token: int,
    twin_rank: int,
    own_rank: int,
) -> np.int64:
    """Of the voters for a token the newest, as a number that grows with its text's rank and then its place there.

    The twin passes for the newest text of all, and after it the text itself.
    """
    newest = np.int64(-1)
    for vote in range(start, end):
        if tokens[votes[vote]] == token:
            block = votes[vote] >> BLOCK_BITS
            rank = np.int64(blocks[block, RANK])
            if rank == own_rank:
                rank = np.int64(LAST - 1)
            elif rank == twin_rank:
                rank = np.int64(LAST)
            place = blocks[block, ORDINAL] * BLOCK + (votes[vote] & (BLOCK - 1))
            newest = max(newest, rank * 2**32 + place)
    return newest


@_compiled
def _favourite(
    tokens: Int32Array,
    blocks: Int32Array,
    votes: Int32Array,
    start: int,
    end: int,
    seen: Int32Array,
    num_seen: int,
    twin_rank: int,
    own_rank: int,
) -> int:
    """Row of `seen` with the most votes; between equals the token with the newest voter."""
    best, most = 0, 0
    for i in range(num_seen):
        if seen[i, 1] > most:
            best, most = i, seen[i, 1]
    best_newest = np.int64(-1)
    for i in range(best + 1, num_seen):
        if seen[i, 1] == most:
            if best_newest < 0:
                best_newest = _newest(tokens, blocks, votes, start, end, seen[best, 0], twin_rank, own_rank)
            newest = _newest(tokens, blocks, votes, start, end, seen[i, 0], twin_rank, own_rank)
            if newest > best_newest:
                best, best_newest = i, newest
    return best


@_compiled
def _branch(
    tokens: Int32Array,
    blocks: Int32Array,
    shape: TreeShape,
    votes: Int32Array,
    weights: Int32Array,
    seen: Int32Array,
    plan: Int32Array,
    odds: Float32Array,
    twin_rank: int,
    own_rank: int,
    node: int,
    num_pending: int,
) -> int:
    """Makes the likeliest continuations of a node pending; returns how many are pending now."""
    start, end = plan[node + 1, START], plan[node + 1, END]
    num_seen, total, evidence = _tally(tokens, votes, weights, start, end, seen)
    length = 1 + plan[node + 1, MATCH]
    trust = evidence / (evidence + FULL_VOTE * shape.doubt / (length * math.sqrt(length)))
    for _ in range(min(shape.width, num_seen)):
        best = _favourite(tokens, blocks, votes, start, end, seen, num_seen, twin_rank, own_rank)
        score = trust * seen[best, 1] / total
        if odds[node + 1, PATH] * score < shape.min_path:
            break
        plan[num_pending, TOKEN], plan[num_pending, PENDING_PARENT] = seen[best, 0], node
        odds[num_pending, PENDING_PATH], odds[num_pending, PENDING_SCORE] = odds[node + 1, PATH] * score, score
        num_pending += 1
        seen[best, 1] = 0
    return num_pending


@_compiled
def _follow(
    tokens: Int32Array,
    blocks: Int32Array,
    votes: Int32Array,
    weights: Int32Array,
    plan: Int32Array,
    node: int,
    parent: int,
    token: int,
) -> None:
    """The votes of a node are its parent's votes for its token, moved on by one."""
    end = start = plan[node, END]
    for vote in range(plan[parent + 1, START], plan[parent + 1, END]):
        if tokens[votes[vote]] == token:
            entry = slot_after(tokens, blocks, votes[vote])
            if entry >= 0:
                votes[end], weights[end] = entry, weights[vote]
                end += 1
    plan[node + 1, START], plan[node + 1, END], plan[node + 1, MATCH] = start, end, plan[parent + 1, MATCH] + 1


@_compiled
def _take_likeliest(plan: Int32Array, odds: Float32Array, num_pending: int) -> tuple[int, int, float, float]:
    """Removes the pending node with the likeliest path; returns its token, parent, path and score."""
    best, last = 0, num_pending - 1
    for i in range(1, num_pending):
        if odds[i, PENDING_PATH] > odds[best, PENDING_PATH]:
            best = i
    taken = plan[best, TOKEN], plan[best, PENDING_PARENT], odds[best, PENDING_PATH], odds[best, PENDING_SCORE]
    plan[best, TOKEN], plan[best, PENDING_PARENT] = plan[last, TOKEN], plan[last, PENDING_PARENT]
    odds[best, PENDING_PATH], odds[best, PENDING_SCORE] = odds[last, PENDING_PATH], odds[last, PENDING_SCORE]
    return taken


@_compiled
def draft_texts(
    a: Arrays,
    max_depth: int,
    shape: TreeShape,
    weighing: VoteWeights,
    which: Int32Array,
    budgets: Int32Array,
    new_tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    ends: Int32Array,
) -> None:
    """Drafts for each text (NOWHERE: none) at most `budgets[i]` nodes, packed one after the other up to `ends[i]`."""
    tokens, links, nodes, blocks, texts, _ = a
    by_age, by_run = weighing
    max_nodes, max_votes = budgets.max() + 1, shape.max_votes + 1
    keys = np.empty((which.shape[0], max_depth), np.int32)
    seen = np.empty((max_votes, 2), np.int32)
    votes = np.empty(max_votes * max_nodes, np.int32)
    weights = np.empty(max_votes * max_nodes, np.int32)
    plan = np.empty((shape.width * max_nodes, 5), np.int32)
    odds = np.empty((shape.width * max_nodes, 3), np.float32)
    odds[0, PATH] = 1.0
    children = _find_heads(tokens, nodes, blocks, texts, which, keys)
    end = 0
    for i in range(which.shape[0]):
        ends[i] = end
        if children[i] == EMPTY_TREE or budgets[i] == 0:
            continue
        text, size, twin_rank = which[i], 0, NOWHERE
        match = _match_length(tokens, blocks, ~children[i], keys[i])
        twin, own_rank = texts[text, TWIN], texts[text, TEXT_RANK]
        if twin >= 0:
            twin_rank = texts[twin, TEXT_RANK]
        if match >= shape.min_match:
            size = _collect(links, nodes, ~children[i], match, shape.max_votes, votes)
            _weigh(blocks, by_age, texts[text, TEXT_USE], votes, size, weights)
        if twin >= 0 and texts[text, FOLLOWED] >= 0 and texts[text, RUN] > 0:
            run_vote = by_run[min(texts[text, RUN], by_run.shape[0] - 1)]
            size = _add_vote(votes, weights, size, texts[text, FOLLOWED], run_vote)
        if size == 0:
            continue
        plan[0, START], plan[0, END], plan[0, MATCH] = 0, size, match
        num_pending = _branch(tokens, blocks, shape, votes, weights, seen, plan, odds, twin_rank, own_rank, -1, 0)
        node = 0
        while num_pending and node < budgets[i]:
            token, parent, odds[node + 1, PATH], scores[end + node] = _take_likeliest(plan, odds, num_pending)
            new_tokens[end + node], parents[end + node] = token, parent
            _follow(tokens, blocks, votes, weights, plan, node, parent, token)
            num_pending = _branch(
                tokens, blocks, shape, votes, weights, seen, plan, odds, twin_rank, own_rank, node, num_pending - 1
            )
            node += 1
        end = ends[i] = end + node
