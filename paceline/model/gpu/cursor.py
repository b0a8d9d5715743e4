"""How a step goes on from one the host has not seen: on the card the drafts of a step are judged, and a cursor moves.

A step launched ahead knows the sequences it follows, but not how many of their drafted tokens were accepted. So its
rows come as if none were, with the text its drafter expects; `resolve`, the first kernel of every step, shifts
positions, slots and the place in that text by what `judge`, the last kernel of the step before, has counted. Only
chains are followed. The host's `verify.py` walks the same rows later and finds the same; it alone decides tokens.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.model.executor import MAX_AHEAD
from paceline.model.gpu.attention import PAGE
from paceline.model.gpu.launch import pdl_options

_PAGE, _MAX_AHEAD = tl.constexpr(PAGE), tl.constexpr(MAX_AHEAD)


@triton.jit(do_not_specialize=["table_length", "guess_stride"])
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
    expected,
    tables,
    accepted,
    last,
    is_guessed,
    guesses,
    table_length,
    guess_stride,
    HAS_GUESSES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row; the first of an entry also writes the entry's context."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    entry = tl.load(entries + row)
    if entry >= 0:
        at, context, before = tl.load(local + row), tl.load(given_contexts + entry), tl.load(follows + entry)
        if before >= 0:
            shift = tl.load(accepted + before)
            context += shift
            token = tl.load(expected + entry * _MAX_AHEAD + tl.minimum(shift + at, _MAX_AHEAD - 1))
            if HAS_GUESSES:
                guess = tl.load(guesses + tl.maximum(at - 1, 0) * guess_stride + before)
                token = tl.where(tl.load(is_guessed + entry) != 0, guess, token)
            if at == 0:
                token = tl.load(last + before)
            slot = context + at
            page = tl.load(tables + entry.to(tl.int64) * table_length + slot // _PAGE)
            tl.store(token_ids + row, token)
            tl.store(positions + row, tl.load(positions + row) + shift)
            tl.store(steps + row, tl.load(steps + row) + shift)
            tl.store(slots + row, page * _PAGE + slot % _PAGE)
        if at == 0:
            tl.store(contexts + entry, context)


@triton.jit
def _judge_kernel(drawn, token_ids, row_starts, row_counts, num_judged, accepted, last, PDL: tl.constexpr):
    """One entry: how many of its drafted tokens were drawn, in a row from the first, and the token after them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0)
    if entry < tl.load(num_judged):
        start, count = tl.load(row_starts + entry), tl.load(row_counts + entry)
        at = tl.arange(0, _MAX_AHEAD)
        is_draft = at < count - 1
        token = tl.load(drawn + start + at, mask=is_draft, other=0)
        guess = tl.load(token_ids + start + 1 + at, mask=is_draft, other=0)
        num_accepted = tl.min(tl.where(is_draft & (token == guess), _MAX_AHEAD, at))
        tl.store(accepted + entry, num_accepted)
        tl.store(last + entry, tl.load(drawn + start + num_accepted))


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
    expected: Tensor,
    tables: Tensor,
    accepted: Tensor,
    last: Tensor,
    is_guessed: Tensor | None = None,
    guesses: Tensor | None = None,
) -> None:
    """Finish the rows of a step in place; rows that follow nothing stay as they are.

    `guesses` [depth, entries] are those that `gpu/eagle.py` has made behind the step before.
    """
    made = last[None] if guesses is None else guesses
    _resolve_kernel[(len(entries),)](
        entries, local, token_ids, positions, steps, slots, given_contexts, contexts, follows, expected, tables,
        accepted, last, is_guessed, made, tables.stride(0), made.stride(0), guesses is not None, num_warps=1,
        **pdl_options(),
    )  # fmt: skip


def judge(
    drawn: Tensor,
    token_ids: Tensor,
    row_starts: Tensor,
    row_counts: Tensor,
    num_judged: Tensor,
    accepted: Tensor,
    last: Tensor,
) -> None:
    """Count accepted tokens of the first `num_judged` entries, chains all; there is a program per row of the step."""
    _judge_kernel[(len(token_ids),)](
        drawn, token_ids, row_starts, row_counts, num_judged, accepted, last, num_warps=1, **pdl_options()
    )
