"""Looks for drafts in texts on the GPU: where did the sequence's last few tokens occur before, and what followed?

Texts are rows of one table: the sequences' own, which every step continues (`cursor.judge`), those of their siblings,
and run-ahead text. A sequence has up to MEMBERS of them, and one program per text gives the best match a rank:

- own text and siblings: the number of last tokens that agree, from SHORTEST to LONGEST; the latest of equals wins.
- run-ahead text, member 0, was sampled with the same noise, and noise belongs to a position: so what counts is whether
  it agrees *at the same positions*. Its rank is above all others, LONGEST + the number of agreeing tokens.

At the end of a step, `search` ranks the matches of its sequences and `pick` notes the best of each, and the best that
continue with another token; the next step's `cursor.resolve` drafts what follows them. Nothing here may decide a token,
only what is tried.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.text_ranks import BRANCHES, LONGEST, MEMBERS, SHORTEST
from paceline.kernels.triton.launch import pdl_options

FOUND = 2
"""Matches that are found in one text: the best, and the best that continues with another token."""
PICKED = 4
"""A picked match: its rank, the text, the place in it of the token after the match, whether it is the own text."""
PLACE_BITS = 26
"""While ranked, a match is its rank and, below, that place."""
WINDOW = 8192
"""How far back a text is searched."""
BLOCK = 1024

_SHORTEST, _LONGEST, _MEMBERS = tl.constexpr(SHORTEST), tl.constexpr(LONGEST), tl.constexpr(MEMBERS)
_PICKED, _FOUND, _BRANCHES = tl.constexpr(PICKED), tl.constexpr(FOUND), tl.constexpr(BRANCHES)
_BITS, _PLACES, _WINDOW = tl.constexpr(PLACE_BITS), tl.constexpr((1 << PLACE_BITS) - 1), tl.constexpr(WINDOW)


@triton.jit
def _agreeing(own, text, length):
    """How many of the last tokens before `length` agree at the same positions; where both begin, all before do."""
    back = tl.arange(0, _LONGEST)
    at = length - 1 - back
    ours = tl.load(own + at, mask=at >= 0, other=-1)
    theirs = tl.load(text + at, mask=at >= 0, other=-1)
    return tl.min(tl.where(ours == theirs, _LONGEST, back))


@triton.jit
def _best_match(own, text, length, end, other, BLOCK: tl.constexpr):
    """The best match for the last tokens of `own` before `end` that `other` does not follow, ranked; 0: none."""
    best = tl.zeros((), tl.int32)
    for start in range(tl.maximum(end - _WINDOW, 0), end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        agrees = place < end
        agrees = agrees & (tl.load(text + place, mask=agrees, other=-1) != other)
        count = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(_LONGEST):
            wanted = tl.load(own + length - 1 - back, mask=length > back, other=-2)
            token = tl.load(text + place - 1 - back, mask=agrees & (place > back), other=-1)
            agrees = agrees & (token == wanted)
            count += agrees.to(tl.int32)
        ranked = tl.where(count >= _SHORTEST, (count << _BITS) + place, 0)
        best = tl.maximum(best, tl.max(ranked, 0))
    return best


@triton.jit(do_not_specialize=["stride"])
def _search_kernel(
    texts, lengths, members, num_searched, num_branched, found, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The best matches of one sequence in one of its texts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry, member = tl.program_id(0), tl.program_id(1)
    if entry < tl.load(num_searched):
        row, own_row = tl.load(members + entry * _MEMBERS + member), tl.load(members + entry * _MEMBERS + 1)
        best, second = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        if (row >= 0) & (own_row >= 0):
            own, text = texts + own_row.to(tl.int64) * stride, texts + row.to(tl.int64) * stride
            length, end = tl.load(lengths + own_row), tl.load(lengths + row)
            if member == 0:
                if end > length:
                    run = _agreeing(own, text, length)
                    best = tl.where(run > 0, ((_LONGEST + run) << _BITS) + length, 0)
            else:
                # In its own text, a sequence's last tokens would find themselves.
                end = tl.minimum(end, length) if member == 1 else end
                best = _best_match(own, text, length, end, -3, BLOCK)
                if (best > 0) & (entry < tl.load(num_branched)):
                    second = _best_match(own, text, length, end, tl.load(text + (best & _PLACES)), BLOCK)
        tl.store(found + (entry * _MEMBERS + member) * _FOUND, best)
        tl.store(found + (entry * _MEMBERS + member) * _FOUND + 1, second)


@triton.jit
def found_token(picked, texts, lengths, stride, entry, branch, nth):
    """The rank of a match of an entry, and the `nth` token to draft after it; -1 if there is none.

    Branch 0 is the best match. Behind its own end a sequence's text is taken to repeat what followed the match: a loop
    goes on.
    """
    own = picked + (entry * _BRANCHES + branch) * _PICKED
    rank, row, place, is_own = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    end = tl.load(lengths + row, mask=rank > 0, other=0)
    place += tl.where(is_own != 0, nth % tl.maximum(end - place, 1), nth)
    inside = (rank > 0) & (place < end)
    return rank, tl.load(texts + row.to(tl.int64) * stride + place, mask=inside, other=-1)


@triton.jit(do_not_specialize=["stride", "report_stride"])
def _pick_kernel(
    texts, lengths, members, num_searched, found, picked, report, stride, report_stride, PDL: tl.constexpr
):
    """The best matches of one sequence that continue with different tokens, the first of equals.

    The report is the rank of the best, and the token after it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry, number = tl.program_id(0), tl.arange(0, _MEMBERS * _FOUND)
    if entry < tl.load(num_searched):
        ranked = tl.load(found + entry * _MEMBERS * _FOUND + number)
        row = tl.load(members + entry * _MEMBERS + number // _FOUND)
        place = ranked & _PLACES
        token = tl.load(texts + row.to(tl.int64) * stride + place, mask=ranked > 0, other=-1)
        for branch in tl.static_range(_BRANCHES):
            best = tl.max(ranked, 0)
            which = tl.min(tl.where(ranked == best, number, _MEMBERS * _FOUND), 0)
            chosen = tl.max(tl.where(number == which, token, -1), 0)
            own = picked + (entry * _BRANCHES + branch) * _PICKED
            tl.store(own, best >> _BITS)
            tl.store(own + 1, tl.max(tl.where(number == which, row, -1), 0))
            tl.store(own + 2, best & _PLACES)
            tl.store(own + 3, (which // _FOUND == 1).to(tl.int32))
            if branch == 0:
                tl.store(report + entry, best >> _BITS)
                tl.store(report + report_stride + entry, tl.where(best > 0, chosen, -1))
            ranked = tl.where(token == chosen, 0, ranked)


def search(
    texts: Tensor,
    lengths: Tensor,
    members: Tensor,
    num_searched: Tensor,
    num_branched: Tensor,
    found: Tensor,
    picked: Tensor,
    report: Tensor,
    num_rows: int,
) -> None:
    """Search for the first `num_searched` of at most `num_rows` sequences of a step; several drafts for `num_branched`.

    Fills `found` [sequences, MEMBERS, FOUND], `picked` [sequences, BRANCHES, PICKED], and `report`: a row of ranks and
    a row of tokens.
    """
    _search_kernel[(num_rows, MEMBERS)](
        texts, lengths, members, num_searched, num_branched, found, texts.stride(0), BLOCK, num_warps=4, **pdl_options()
    )
    _pick_kernel[(num_rows,)](
        texts, lengths, members, num_searched, found, picked, report, texts.stride(0), report.stride(0), num_warps=1,
        **pdl_options(),
    )  # fmt: skip
