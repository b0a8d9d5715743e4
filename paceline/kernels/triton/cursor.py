"""Cursor of overlapped steps: the GPU judges a step's drafts itself, so the next step needs no word from the host.

A step launched before its predecessor's result arrives knows its sequences, but not how many drafted tokens each of
them accepted. Its rows are laid out as if none were. `resolve`, one of the first kernels of every step, shifts
positions and slots by the count that `judge` left at the end of the step before, and fills in the draft: what follows
the best match in the texts on the GPU (`text_search.py`), or what the GPU itself has guessed. `judge` also continues
the sequences' own texts. `move` takes keys and values of nodes accepted off a tree's first branch to where a chain
would have them. The host's `verify.py` walks the same rows later with the same result; it alone decides tokens.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.limits import MAX_GUESS_WIDTH, MAX_TREE_DEPTH, MAX_TREE_ROWS
from paceline.kernels.text_ranks import MEMBERS
from paceline.kernels.triton.attention import PAGE
from paceline.kernels.triton.launch import pdl_options
from paceline.kernels.triton.text_search import found_token

_PAGE, _WIDTH, _MEMBERS = tl.constexpr(PAGE), tl.constexpr(MAX_GUESS_WIDTH), tl.constexpr(MEMBERS)
_TREE_ROWS, _PATH_LENGTH = tl.constexpr(MAX_TREE_ROWS), tl.constexpr(MAX_TREE_DEPTH)
MOVERS = 32
"""Programs per layer that look for nodes to move."""


@triton.jit
def _comb_place(at, depth, count):
    """Where a row of a comb (the eagle drafter's layout) is: its depth behind the first row, and its rank."""
    beside = tl.maximum((count - 1) // tl.maximum(depth, 1) - 1, 1)
    nth = at - 1 - depth
    is_chain = nth < 0
    return tl.where(is_chain, at - 1, nth // beside), tl.where(is_chain, 0, 1 + nth % beside)


@triton.jit(do_not_specialize=["table_length", "guess_stride", "text_stride"])
def _resolve_kernel(
    entries,
    local,
    token_ids,
    positions,
    steps,
    slots,
    given_contexts,
    contexts,
    follows,
    tables,
    accepted,
    last,
    guessed,
    ranks,
    branches,
    row_counts,
    guesses,
    texts,
    text_lengths,
    picked,
    table_length,
    guess_stride,
    text_stride,
    HAS_GUESSES: tl.constexpr,
    HAS_TEXTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Resolve one row; the first row of an entry also writes the entry's context."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    entry = tl.load(entries + row)
    if entry >= 0:
        at, context, before = tl.load(local + row), tl.load(given_contexts + entry), tl.load(follows + entry)
        token = tl.load(token_ids + row)
        if before >= 0:
            shift = tl.load(accepted + before)
            context += shift
            if at == 0:
                token = tl.load(last + before)
            slot = context + at
            page = tl.load(tables + entry.to(tl.int64) * table_length + slot // _PAGE)
            tl.store(positions + row, tl.load(positions + row) + shift)
            tl.store(steps + row, tl.load(steps + row) + shift)
            tl.store(slots + row, page * _PAGE + slot % _PAGE)
        if at > 0:
            nth, beside = at - 1, at * 0
            if HAS_GUESSES:
                depth = tl.load(guessed + entry)
                if depth > 0:
                    nth, beside = _comb_place(at, depth, tl.load(row_counts + entry))
                    if before >= 0:
                        token = tl.load(guesses + (nth * _WIDTH + beside) * guess_stride + before)
            if HAS_TEXTS:
                least = tl.load(ranks + entry)
                if (least > 0) & (before >= 0):
                    # Branches have this many rows each, one after the other; 0: there is only one.
                    size, branch = tl.load(branches + entry), at * 0
                    if size > 0:
                        branch, nth = nth // size, nth % size
                    rank, read = found_token(picked, texts, text_lengths, text_stride, before, branch, nth)
                    if (rank >= least) & (beside == 0) & (read >= 0):
                        token = read
        tl.store(token_ids + row, token)
        if at == 0:
            tl.store(contexts + entry, context)


@triton.jit(do_not_specialize=["text_stride"])
def _judge_kernel(
    sampled,
    token_ids,
    parents,
    row_starts,
    row_counts,
    num_judged,
    contexts,
    accepted,
    landed,
    last,
    texts,
    text_lengths,
    members,
    report,
    text_stride,
    report_stride,
    HAS_TEXTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Walk down one entry's draft while a child holds the sampled token; store depth, last row and next token.

    The report is each row's token and, per entry, the number of accepted ones. With texts, the sampled tokens are added
    to the entry's own.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0)
    tl.store(report + entry, tl.load(token_ids + entry))
    if entry < tl.load(num_judged):
        start, count = tl.load(row_starts + entry), tl.load(row_counts + entry)
        at = tl.arange(0, _TREE_ROWS)
        inside = at < count
        token = tl.load(sampled + start + at, mask=inside, other=0)
        guess = tl.load(token_ids + start + at, mask=inside, other=0)
        parent = tl.load(parents + start + at, mask=inside, other=-1)
        row, num_accepted = start * 0, start * 0
        next_token = tl.sum(tl.where(at == row, token, 0))
        own = start * 0 - 1
        if HAS_TEXTS:
            own = tl.load(members + entry * _MEMBERS + 1)
            own_text = texts + own.to(tl.int64) * text_stride + tl.load(contexts + entry) + 1
            tl.store(own_text, next_token, mask=own >= 0)
        child = tl.min(tl.where(inside & (parent == row) & (guess == next_token), at, _TREE_ROWS))
        while child < _TREE_ROWS:  # the first of equal siblings wins
            row, num_accepted = child, num_accepted + 1
            next_token = tl.sum(tl.where(at == row, token, 0))
            if HAS_TEXTS:
                tl.store(own_text + num_accepted, next_token, mask=own >= 0)
            child = tl.min(tl.where(inside & (parent == row) & (guess == next_token), at, _TREE_ROWS))
        # More rows than a tree may have are a chain.
        goes_on = row + 1 >= _TREE_ROWS
        while goes_on & (row + 1 < count):
            goes_on = tl.load(token_ids + start + row + 1) == next_token
            if goes_on:
                row, num_accepted = row + 1, num_accepted + 1
                next_token = tl.load(sampled + start + row)
                if HAS_TEXTS:
                    tl.store(own_text + num_accepted, next_token, mask=own >= 0)
        tl.store(accepted + entry, num_accepted)
        tl.store(landed + entry, row)
        tl.store(last + entry, next_token)
        tl.store(report + report_stride + entry, num_accepted)
        if HAS_TEXTS:
            tl.store(text_lengths + own, tl.load(contexts + entry) + num_accepted + 2, mask=own >= 0)


@triton.jit(do_not_specialize=["table_length", "plane_size"])
def _move_kernel(
    memory,
    tables,
    paths,
    contexts,
    row_starts,
    accepted,
    landed,
    num_judged,
    table_length,
    plane_size,
    KV: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move a layer's keys or values of some entries. Nodes come in ascending order, so none is overwritten unread."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.arange(0, LANES)
    inside = lane < KV * D
    plane = memory + tl.program_id(1).to(tl.int64) * plane_size + (lane // D) * (_PAGE * D) + lane % D
    for entry in range(tl.program_id(0), tl.load(num_judged), tl.num_programs(0)):
        row, num_accepted = tl.load(landed + entry), tl.load(accepted + entry)
        if row != num_accepted:  # otherwise its path is already contiguous
            context = tl.load(contexts + entry)
            table = tables + entry * table_length
            path = paths + (tl.load(row_starts + entry) + row).to(tl.int64) * _PATH_LENGTH
            for depth in range(1, num_accepted + 1):
                source, target = context + tl.load(path + depth), context + depth
                from_page, to_page = tl.load(table + source // _PAGE), tl.load(table + target // _PAGE)
                found = tl.load(plane + (from_page.to(tl.int64) * KV * _PAGE + source % _PAGE) * D, mask=inside)
                tl.store(plane + (to_page.to(tl.int64) * KV * _PAGE + target % _PAGE) * D, found, mask=inside)


@dataclass(frozen=True)
class Texts:
    """The texts on the GPU, and what was found in them after the latest step, by its entries; all int32."""

    tokens: Tensor
    """[texts, length]"""
    lengths: Tensor
    members: Tensor
    """[entries, MEMBERS]: rows of `tokens`, or -1; see `text_search.py`."""
    found: Tensor
    """[entries, MEMBERS, FOUND]"""
    picked: Tensor
    """[entries, BRANCHES, PICKED]"""


def resolve(
    entries: Tensor,
    local: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    steps: Tensor,
    slots: Tensor,
    given_contexts: Tensor,
    contexts: Tensor,
    follows: Tensor,
    tables: Tensor,
    accepted: Tensor,
    last: Tensor,
    guessed: Tensor | None = None,
    ranks: Tensor | None = None,
    branches: Tensor | None = None,
    row_counts: Tensor | None = None,
    guesses: Tensor | None = None,
    texts: Texts | None = None,
) -> None:
    """Finish the rows of a step in place; rows that follow no step and are not drafted from texts stay as they are.

    `guesses` [depth, MAX_GUESS_WIDTH, entries] are those that `model/graph_eagle.py` made after the step before.
    """
    made = last[None, None] if guesses is None else guesses
    given = (last,) * 3 if texts is None else (texts.tokens, texts.lengths, texts.picked)
    stride = 0 if texts is None else texts.tokens.stride(0)
    _resolve_kernel[(len(entries),)](
        entries, local, token_ids, positions, steps, slots, given_contexts, contexts, follows, tables, accepted, last,
        guessed, ranks, branches, row_counts, made, *given, tables.stride(0), made.stride(1), stride,
        guesses is not None, texts is not None, num_warps=1, **pdl_options(),
    )  # fmt: skip


def judge(
    sampled: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    row_starts: Tensor,
    row_counts: Tensor,
    num_judged: Tensor,
    contexts: Tensor,
    accepted: Tensor,
    landed: Tensor,
    last: Tensor,
    report: Tensor,
    texts: Texts | None = None,
) -> None:
    """Judge the drafts of the first `num_judged` entries, with one program per row of the step."""
    given = (last,) * 3 if texts is None else (texts.tokens, texts.lengths, texts.members)
    stride = 0 if texts is None else texts.tokens.stride(0)
    _judge_kernel[(len(token_ids),)](
        sampled, token_ids, parents, row_starts, row_counts, num_judged, contexts, accepted, landed, last, *given,
        report, stride, report.stride(0), texts is not None, num_warps=1, **pdl_options(),
    )  # fmt: skip


def move(
    memory: Tensor,
    tables: Tensor,
    paths: Tensor,
    contexts: Tensor,
    row_starts: Tensor,
    accepted: Tensor,
    landed: Tensor,
    num_judged: Tensor,
) -> None:
    """Move accepted tree nodes to the slots of their positions, in every layer, including the drafter's."""
    planes = memory.flatten(0, 1)
    _, _, num_kv_heads, _, head_dim = planes.shape
    _move_kernel[(MOVERS, len(planes))](
        planes, tables, paths, contexts, row_starts, accepted, landed, num_judged, tables.stride(0), planes.stride(0),
        num_kv_heads, head_dim, triton.next_power_of_2(num_kv_heads * head_dim), num_warps=1, **pdl_options(),
    )  # fmt: skip
