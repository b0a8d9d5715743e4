"""The compiled half of the suffix store: a search tree that finds stored tokens by the tokens before them.

One tree per prompt. A stored token is an *entry*: its value is the token, its key the (at most `max_depth`) tokens
before it, read backwards. Keys sit in a binary radix tree (PATRICIA): a node names the first bit in which the keys
below it differ. Entries that share the last m tokens are therefore one subtree, and one descent finds the longest
suffix of a text that occurs anywhere in the store. Entries with equal keys form a list at one leaf, newest first; its
head represents them all.

Node r exists because entry r once split off a leaf, and entry r stays somewhere below it. So entries and nodes share
numbers, every node has a witness for free, and a removed entry passes its node to one that has none.

Results depend only on the texts and their order, never on the order in which their tokens arrived: a set of keys has
one tree shape, and lists are sorted. So a tree that is dropped and rebuilt drafts as before.

Compared to a suffix automaton: text can be removed in constant time per token (the window slides), occurrences are at
hand instead of propagated counts, a token costs 29 bytes, and siblings cannot make any look-up state stale.

Text lives in blocks of `BLOCK` token slots. A response's first block points back to its prompt's last token, so all
samples of all draws share one copy of the prompt.

Only `suffix_store.py` calls it, which owns the memory, with whole batches: all per-token work happens here. Nothing
here may allocate slots: the caller makes room before it appends. Numba caches by file, so no compiled function may live
elsewhere; and functions take arrays one by one, because passing a tuple of arrays costs more in reference counting than
the work itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from paceline.core.types import Float32Array, Int32Array, Int64Array
from paceline.kernels.cpu.jit import host_loop

BLOCK_BITS = 5
BLOCK = 1 << BLOCK_BITS
NO_TOKEN = -1
"""In a token slot: not written yet. In a key: before the first token."""
NOWHERE = -1
NO_NODE = -1
EMPTY_TREE = -(2**31)
LAST = 2**31 - 1
"""The use of a prompt's own text, and the rank that wins every tie: nothing is newer."""
FULL_VOTE = 1024
"""The weight of an occurrence in the current use. Votes are integers, so their sums do not depend on the order."""
UNBROKEN = 2**30
"""The initial run of a text; one that has never differed from its twin has this plus its own length."""
MAX_STEPS_TO_HEAD = 8
"""A descent costs more than this many steps along a list, but less than many more."""

# Columns of `nodes`. A child is a node (>= 0) or the head of a list of entries (its bitwise complement: < 0); columns 0
# and 1 are children. CRITICAL is NO_NODE in the row of an entry without a node.
CRITICAL, PARENT = 2, 3
# Columns of `links`, per entry: its neighbours in the list of equal keys. The head has no newer one; its NEWER holds
# the node above it, made negative by `turned`.
OLDER, NEWER = 0, 1
# Columns of `blocks`: the next block (of the text, or of the free list); the token slot before its first one; its
# text's rank (order of the prompt's texts, the prompt itself 0) and use; how many blocks of the text come before it.
NEXT, BEFORE, RANK, USE, ORDINAL = 0, 1, 2, 3, 4
# Columns of `texts`: the prompt's text (itself for a prompt), first block, last token slot, length, root of the tree;
# rank and use; while it grows: its twin, the twin's slot at this text's own length, and the run, the number of tokens
# up to here that agree with the twin. Then an entry whose key is the text's end, if one is known, and how many texts of
# the prompt had been removed by then (for a prompt: so far), because a removed text may have held that entry.
PROMPT, FIRST, TAIL, LENGTH, ROOT, TEXT_RANK, TEXT_USE, TWIN, FOLLOWED, RUN = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
EQUAL, REMOVALS = 10, 11
NUM_BLOCK_COLUMNS, NUM_TEXT_COLUMNS = 5, 12
# Cells of `heads`.
FREE_BLOCK, NUM_FREE_BLOCKS, NUM_TOKENS = 0, 1, 2
# Columns of `plan` and `odds`, the working memory of a draft. Row i + 1 is node i and row 0 the root: the range of its
# votes, its match length, its path probability. The other columns are a list of pending nodes.
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
    """The weights of votes: an occurrence by the age of its text in uses, the twin's position by its run."""

    by_age: Int32Array
    by_run: Int32Array


_compiled: Any = host_loop


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
    """Read the text that ends at `slot` into `key`, backwards."""
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

    Equal ones give the bit after the last.
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
    """Encode the node above a list for the NEWER column of its head; its own inverse."""
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
    """Insert an entry, the last of its text, into the sorted list that contains `neighbour`.

    It is newer than all of its own text and of texts of lower rank. The caller passes a neighbour close to its place.
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
    """Insert a new leaf, with a node above it, where the path to `head` passes the critical bit."""
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
    """The head of an entry's list; NOWHERE if a descent finds it sooner."""
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
    """Add an entry; returns an entry of the list nearest to it and the first bit in which their keys differ.

    The caller passes both if it knows them (otherwise nearest < 0). It does when a text continues like the text nearest
    to it: the next entry there is then nearest to the next key, and 32 more bits agree. Any nearer entry would follow
    one that had been nearer before.
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
        # A neighbour by rank: if both continue alike, they will be neighbours again.
        nearest = links[entry, OLDER] if links[entry, OLDER] >= 0 else links[entry, NEWER]
    else:
        _split_off(links, nodes, texts, prompt, entry, head, critical, key_side(key, critical))
    return nearest, critical


@_compiled
def _going_on(tokens: Int32Array, blocks: Int32Array, links: Int32Array, entry: int, token: int) -> int:
    """The entry after `entry`, or after a neighbour in its list, whichever holds `token`; NOWHERE if none does."""
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
    """Renumber node `old`, if it exists, to `new`, an entry below it that has no node."""
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
        # Remove the leaf and the node above it; that node's witness takes over the removed entry's own node.
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
    """Append a free block to a text; returns its first slot. The caller has made sure that one is free."""
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
    """Append one token to a text; returns its slot."""
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
    """Advance in the twin by as many tokens as a text is about to grow, and count how many agree."""
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
    """Append `new_tokens[ends[i - 1]:ends[i]]` to text `which[i]`, visible to all texts of its prompt at once."""
    tokens, links, nodes, blocks, texts, heads = a
    key = np.empty(max_depth, np.int32)
    start = 0
    for i in range(which.shape[0]):
        text, prompt, nearest, critical = which[i], texts[which[i], PROMPT], NOWHERE, 32 * max_depth
        if texts[text, REMOVALS] == texts[prompt, REMOVALS]:
            # Siblings caught in the same loop make long lists; no call may search for its place in them from scratch.
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
    """Copy the tokens of texts into `out`, one text after the other."""
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
    """Remove all entries of a text from its tree and free its blocks."""
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
    """For each text (NOWHERE: none), the list nearest to its end, as a child; writes its key to `keys`.

    All descend in lockstep: each waits for memory at every level, so they wait together.
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
    """How many of the last tokens also precede an entry, at most `max_depth`."""
    slot = slot_before(blocks, head)
    length = 0
    while length < key.shape[0] and slot >= 0 and tokens[slot] == key[length]:
        length += 1
        slot = slot_before(blocks, slot)
    return length


@_compiled
def _collect(links: Int32Array, nodes: Int32Array, head: int, match: int, max_votes: int, votes: Int32Array) -> int:
    """Entries that share the `match` tokens before them with `head`: all of them, or `max_votes`.

    If there are more, the subtree is cut as near to its top as possible and each part gets one vote: contexts that
    differ early get one each, however often each was seen. Votes left go in turn to the newest others of equal context.
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
    """The weight of each vote for a text of this use. Text of later uses counts as age 0."""
    for i in range(size):
        age = max(use - blocks[votes[i] >> BLOCK_BITS, USE], 0)
        weights[i] = by_age[min(age, by_age.shape[0] - 1)]


@_compiled
def _add_vote(votes: Int32Array, weights: Int32Array, size: int, entry: int, weight: int) -> int:
    """Set the weight of an entry's vote, adding the vote if there is none; returns the number of votes."""
    i = 0
    while i < size and votes[i] != entry:
        i += 1
    votes[i], weights[i] = entry, weight
    return max(size, i + 1)


@_compiled
def _tally(
    tokens: Int32Array, votes: Int32Array, weights: Int32Array, start: int, end: int, seen: Int32Array
) -> tuple[int, int, int]:
    """Sum votes per token into `seen` (token, sum); returns the number of tokens voted for, and the sum of all votes.

    The third number is that sum without the discount for age: how much evidence there is, new or old.
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
    """The newest voter for a token, as a number that grows with its text's rank and then its position in the text.

    The twin counts as the newest text, the text itself as the second newest.
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
    """The row of `seen` with the most votes; in a tie, the token with the newest voter."""
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
    """Add the likeliest continuations of a node to the pending nodes; returns how many are pending now."""
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
    """Set a node's votes: its parent's votes for its token, each advanced by one."""
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
    """Remove the pending node with the likeliest path; returns its token, parent, path probability and score."""
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
    """Draft at most `budgets[i]` nodes for each text (NOWHERE: none), packed one after the other up to `ends[i]`."""
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
