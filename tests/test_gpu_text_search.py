"""The GPU's search for drafts in texts, against a few lines of Python that say the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.text_ranks import BRANCHES, LONGEST, MEMBERS, SHORTEST
from paceline.kernels.triton import text_search
from paceline.kernels.triton.cursor import Texts, resolve
from paceline.kernels.triton.text_search import FOUND, PICKED, search

UNTOUCHED = -77
LENGTH = 40


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def agreeing(own: list[int], text: list[int], place: int) -> int:
    """How many tokens before `place` of a text are the last ones of `own`."""
    count = 0
    while count < LONGEST and count < place and count < len(own) and text[place - 1 - count] == own[-1 - count]:
        count += 1
    return count


def rank_in(own: list[int], text: list[int], is_own: bool, other: int | None = None) -> tuple[int, int]:
    """The best match in a text that `other` does not follow: its rank and its place."""
    places = (place for place in range(1, len(own) if is_own else len(text)) if text[place] != other)
    found = [(agreeing(own, text, place), place) for place in places]
    return max((match for match in found if match[0] >= SHORTEST), default=(0, 0))


def rank_of_run_ahead(own: list[int], text: list[int]) -> tuple[int, int]:
    if len(text) <= len(own):
        return 0, 0
    run = 0
    while run < LONGEST and (run >= len(own) or own[-1 - run] == text[len(own) - 1 - run]):
        run += 1
    return (LONGEST + run, len(own)) if run else (0, 0)


def drafts(texts: list[list[int]], members: list[int], count: int) -> list[tuple[int, list[int]]]:
    """The ranks of a sequence's best matches, and the tokens to draft after each; -1 where there are none."""
    own = texts[members[1]]
    found: list[tuple[int, int, int]] = []
    for which, row in enumerate(members):
        if row >= 0 and which == 0:
            found.append((*rank_of_run_ahead(own, texts[row]), which))
        elif row >= 0:
            rank, place = rank_in(own, texts[row], which == 1)
            found.append((rank, place, which))
            if rank:
                found.append((*rank_in(own, texts[row], which == 1, other=texts[row][place]), which))
    made = []
    for _ in range(BRANCHES):
        rank, place, which = max(found, key=lambda match: match[:2], default=(0, 0, 0))  # the first of equals
        text, tokens = texts[members[which]], []
        for nth in range(count if rank else 0):
            at = place + (nth % (len(text) - place) if which == 1 else nth)
            tokens.append(text[at] if at < len(text) else -1)
        made.append((rank, tokens))
        found = [match for match in found if match[0] and texts[members[match[2]]][match[1]] != tokens[0]]
    return made


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH)


@settings(max_examples=12, deadline=None)
@given(
    tables=st.lists(token_lists, min_size=2, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    num_searched=st.integers(0, 3),
)
def test_matches_are_found_as_python_finds_them(tables: list[list[int]], seed: int, num_searched: int) -> None:
    random = np.random.default_rng(seed)
    num_entries, num_rows, depth = 3, len(tables), 5
    members = random.integers(-1, num_rows, (num_entries, MEMBERS))
    members[:, 1] = random.integers(0, num_rows, num_entries)
    if random.random() < 0.7:  # run-ahead text often begins like the sequence
        own = tables[members[0, 1]]
        tables.append([*own, *random.integers(0, 3, 4).tolist()])
        members[0, 0] = num_rows
    tokens = torch.full((len(tables), LENGTH + 8), 9, dtype=torch.int32, device=DEVICE)
    for row, text in enumerate(tables):
        tokens[row, : len(text)] = ints(text)
    texts = Texts(
        tokens, ints([len(text) for text in tables]), ints(members.tolist()),
        torch.full((num_entries, MEMBERS, FOUND), UNTOUCHED, dtype=torch.int32, device=DEVICE),
        torch.full((num_entries, BRANCHES, PICKED), UNTOUCHED, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    report = torch.full((2, num_entries), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    num_branched = int(random.integers(0, num_entries + 1))
    counts = ints([num_searched]), ints([num_branched])
    search(texts.tokens, texts.lengths, texts.members, *counts, texts.found, texts.picked, report, num_entries)
    for entry in range(num_entries):
        if entry >= num_searched:
            assert report[:, entry].tolist() == [UNTOUCHED] * 2, "only searched sequences are reported"
            continue
        made = drafts(tables, members[entry].tolist(), depth)
        rank, expected = made[0]
        assert report[0, entry] == rank
        assert report[1, entry] == (expected[0] if rank else -1)
        given = [0] + [UNTOUCHED] * depth
        for least in (1, rank, rank + 1):
            found = resolved(texts, entry, given, least)
            is_drafted = rank > 0 and 0 < least <= rank
            assert found[1:] == (filled(expected, depth) if is_drafted else given[1:])
        if entry < num_branched:
            size = 2
            found = resolved(texts, entry, [0] + [UNTOUCHED] * (size * BRANCHES), 1, size)
            assert found[1:] == [token for _, tokens in made for token in filled(tokens, size)]


def filled(tokens: list[int], count: int) -> list[int]:
    """Rows stay as they were where there is no token for them."""
    return [token if token >= 0 else UNTOUCHED for token in (tokens + [-1] * count)[:count]]


def resolved(texts: Texts, before: int, tokens: list[int], least: int, size: int = 0) -> list[int]:
    """The rows of a step with one sequence that follows entry `before` and drafts from texts; `size`: of branches."""
    count = len(tokens)
    token_ids = ints(tokens)
    nothing = [0] * count
    resolve(
        ints(nothing), ints(list(range(count))), token_ids, ints(list(range(count))), ints(nothing), ints(nothing),
        ints([0]), ints([0]), ints([before]), ints([[0]]), ints([0] * 8), ints([0] * 8), ints([0]), ints([least]),
        ints([size]), ints([count]), None, texts,
    )  # fmt: skip
    found: list[int] = token_ids.tolist()
    return found


def test_a_long_text_is_searched_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest of equal matches wins, wherever the borders of blocks are."""
    monkeypatch.setattr(text_search, "BLOCK", 16)
    text = np.random.default_rng(3).integers(0, 4, 200).tolist()
    found = torch.zeros(1, MEMBERS, FOUND, dtype=torch.int32, device=DEVICE)
    picked = torch.zeros(1, BRANCHES, PICKED, dtype=torch.int32, device=DEVICE)
    report = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    members = [-1, 0] + [-1] * (MEMBERS - 2)
    search(ints([text, text]), ints([200, 200]), ints([members]), ints([1]), ints([1]), found, picked, report, 1)
    rank, place = rank_in(text, text, is_own=True)
    assert picked[0, 0, [0, 2]].tolist() == [rank, place]
    assert picked[0, 1, [0, 2]].tolist() == list(rank_in(text, text, is_own=True, other=text[place]))
