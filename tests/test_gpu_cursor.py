"""How a step on a GPU goes on from one the host has not seen: `judge` counts what was accepted, `move` puts it where a
chain would have it, `resolve` moves rows.

All are compared with a few lines of Python that say the same. That rollouts come out right is `test_gpu_engine.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_device import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.limits import MAX_GUESS_WIDTH, MAX_TREE_ROWS
from paceline.kernels.text_ranks import BRANCHES, MEMBERS
from paceline.kernels.triton.attention import PAGE
from paceline.kernels.triton.cursor import Texts, judge, move, resolve
from paceline.kernels.triton.text_search import FOUND, PICKED
from paceline.model.gpu.cache import GpuCache
from paceline.model.rows import paths

UNTOUCHED = -77


def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts_of(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


def flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [value for own in rows for value in own]


def judge_trees(
    tokens: list[list[int]], sampled: list[list[int]], parents: list[list[int]], num_judged: int, padding: int = 2
) -> tuple[list[int], list[int], list[int]]:
    """All per entry and row; returns how many are accepted, the row they lead to, and what comes last."""
    counts = [len(rows) for rows in tokens]
    found = [torch.full((len(tokens) + 3,), UNTOUCHED, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    given = [ints(flat(rows) + [0] * padding) for rows in (sampled, tokens, parents)]
    report = torch.full((2, sum(counts) + padding), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    contexts = ints([0] * len(tokens))
    judge(*given, ints(starts_of(counts)), ints(counts), ints([num_judged]), contexts, *found, report)  # type: ignore
    assert report[0, : sum(counts)].tolist() == flat(tokens)
    assert report[1, :num_judged].tolist() == found[0][:num_judged].tolist()
    accepted, landed, last = (values.tolist() for values in found)
    return accepted, landed, last


def run_judge(tokens: list[list[int]], sampled: list[list[int]], num_judged: int) -> tuple[list[int], list[int]]:
    """The same for chains, which lead as far as is accepted."""
    chains = [list(range(-1, len(rows) - 1)) for rows in tokens]
    accepted, landed, last = judge_trees(tokens, sampled, chains, num_judged)
    assert landed == accepted
    return accepted, last


def test_judged_are_drafted_tokens_in_a_row() -> None:
    tokens = [[5], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [0, 0, 0], [9, 9]]
    sampled = [[8], [6, 7, 8], [6, 1, 8], [1, 7, 8], [1, 2, 3], [0, 0, 0], [1, 1]]
    accepted, last = run_judge(tokens, sampled, num_judged=6)
    assert accepted[:6] == [0, 2, 1, 0, 0, 2]
    assert last[:6] == [8, 8, 1, 1, 1, 0]
    assert accepted[6:] == last[6:] == [UNTOUCHED] * 4, "entries that only prefill are not judged"


def test_nothing_is_judged_in_a_step_of_padding() -> None:
    accepted, last = run_judge([[1, 1], [1]], [[1, 1], [1]], num_judged=0)
    assert set(accepted) == set(last) == {UNTOUCHED}


def test_the_longest_draft_can_be_accepted_whole() -> None:
    for count in (MAX_TREE_ROWS - 1, MAX_TREE_ROWS, MAX_TREE_ROWS + 1, 3 * MAX_TREE_ROWS):
        text = list(range(100, 100 + count))
        assert run_judge([text], [[*text[1:], 7]], 1) == ([count - 1] + [UNTOUCHED] * 3, [7] + [UNTOUCHED] * 3)
        wrong = [*text[1:-1], 0, 7]
        assert run_judge([text], [wrong], 1) == ([count - 2] + [UNTOUCHED] * 3, [0] + [UNTOUCHED] * 3)
    # A neighbour's tokens behind it are not taken for its own.
    accepted, last = run_judge([text[:3], text[3:6]], [[101, 102, 103], [104, 105, 106]], 2)
    assert (accepted[:2], last[:2]) == ([2, 2], [103, 106])


def walk(tokens: list[int], sampled: list[int], parents: list[int]) -> list[int]:
    """The rows of the accepted nodes."""
    path, row = list[int](), 0
    while True:
        found = [i for i, parent in enumerate(parents) if parent == row and tokens[i] == sampled[row]]
        if not found:
            return path
        path.append(row := found[0])


trees = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 2), min_size=count, max_size=count),
        st.lists(st.integers(0, 2), min_size=count, max_size=count),
        st.tuples(*(st.integers(max(row - 4, 0), row - 1) if row else st.just(-1) for row in range(count))),
    )
)
"""Tokens, what was drawn, and parents."""


@settings(max_examples=30)
@given(steps=st.lists(trees, min_size=1, max_size=4), context=st.sampled_from((0, PAGE - 4, PAGE)))
def test_accepted_nodes_of_trees_are_found_and_moved(
    steps: list[tuple[list[int], list[int], tuple[int, ...]]], context: int
) -> None:
    tokens, sampled, parents = ([list(tree[i]) for tree in steps] for i in range(3))
    accepted, landed, last = judge_trees(tokens, sampled, parents, len(steps))
    sizes: Any = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=4)
    cache = GpuCache(sizes, 2 * len(steps), torch.float32, DEVICE)
    cache.memory.copy_(torch.arange(cache.memory.numel(), device=DEVICE).view(cache.memory.shape))
    tables = [[2 * entry + 1, 2 * entry] for entry in range(len(steps))]
    expected = cache.memory.clone()
    for entry, tree in enumerate(zip(tokens, sampled, parents, strict=True)):
        path = walk(*tree)
        assert accepted[entry] == len(path) and landed[entry] == (path[-1] if path else 0)
        assert last[entry] == sampled[entry][landed[entry]]
        for depth, node in enumerate(path, 1):
            (page, at), (to_page, to) = divmod(context + node, PAGE), divmod(context + depth, PAGE)
            expected[:, :, tables[entry][to_page], :, to] = expected[:, :, tables[entry][page], :, at]
    all_paths = np.concatenate([paths(tuple(own)) for own in parents])
    starts = ints(starts_of([len(own) for own in parents]))
    given = (ints(tables), ints(all_paths.tolist()), ints([context] * len(steps)), starts)
    move(cache.memory, *given, ints(accepted), ints(landed), ints([len(steps)]))
    assert torch.equal(cache.memory, expected)


def test_guesses_of_a_comb_are_put_where_they_belong() -> None:
    """Two guesses deep and three wide behind entry 1, one deep and one wide behind entry 0, and none."""
    counts, follows, depths = [7, 2, 2], [1, 0, 2], [2, 1, 0]
    owner = [e for e, count in enumerate(counts) for _ in range(count)]
    token_ids = ints([UNTOUCHED] * 11)
    guesses = torch.arange(2 * MAX_GUESS_WIDTH * 3, dtype=torch.int32, device=DEVICE).view(2, MAX_GUESS_WIDTH, 3)
    resolve(
        ints(owner), ints(flat([range(count) for count in counts])), token_ids, ints([0] * 11), ints([0] * 11),
        ints([0] * 11), ints([0] * 3), ints([0] * 3), ints(follows), ints([[0]] * 3), ints([0] * 3),
        ints([100, 101, 102]), ints(depths), ints([0] * 3), ints([0] * 3), ints(counts), guesses,
    )  # fmt: skip
    of = guesses.tolist()
    comb = [of[0][0][1], of[1][0][1], of[0][1][1], of[0][2][1], of[1][1][1], of[1][2][1]]
    assert token_ids.tolist() == [101, *comb, 100, of[0][0][0], 102, UNTOUCHED]


entries = st.tuples(
    st.sampled_from((-1, 0, 1, 2, 3)),
    st.integers(1, 4),
    st.sampled_from((0, 7, PAGE - 3, PAGE - 1, PAGE, 2 * PAGE - 2)),
)
"""Whom it follows, its rows, and its context before anything is accepted."""


@settings(max_examples=40)
@given(steps=st.lists(entries, min_size=1, max_size=5), shifts=st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_rows_move_on_by_what_was_accepted(steps: list[tuple[int, int, int]], shifts: list[int]) -> None:
    """Rows of chains, mixed with rows that follow nothing, and padding at the end; page borders are crossed."""
    follows, counts, contexts = (list(column) for column in zip(*steps, strict=True))
    num_rows, num_padding, last = sum(counts), 2, [11, 12, 13, 14]
    owner = [e for e, count in enumerate(counts) for _ in range(count)]
    local = [i for count in counts for i in range(count)]
    tables = [[10 * e + page for page in (3, 1, 7, 5)] for e in range(len(steps))]
    positions = [contexts[e] + i for e, i in zip(owner, local, strict=True)]

    def padded(values: list[int], fill: int) -> Tensor:
        return ints(values + [fill] * num_padding)

    row_fields: dict[str, Any] = {
        "entries": padded(owner, -1),
        "local": padded(local, 0),
        "token_ids": padded([50 + row for row in range(num_rows)], 0),
        "positions": padded(positions, 0),
        "steps": padded([position + 100 for position in positions], 0),
        "slots": padded([UNTOUCHED] * num_rows, 99),
    }
    resolved = torch.full((len(steps) + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    resolve(
        **row_fields,
        given_contexts=ints(contexts),
        contexts=resolved,
        follows=ints(follows),
        tables=ints(tables),
        accepted=ints(shifts),
        last=ints(last),
    )

    shift_of = [shifts[f] if f >= 0 else 0 for f in follows]
    found = {name: values.tolist() for name, values in row_fields.items()}
    assert resolved.tolist() == [*(c + s for c, s in zip(contexts, shift_of, strict=True)), UNTOUCHED]
    for row, (e, i) in enumerate(zip(owner, local, strict=True)):
        position = contexts[e] + shift_of[e] + i
        assert found["positions"][row] == position and found["steps"][row] == position + 100
        if follows[e] < 0:
            assert (found["token_ids"][row], found["slots"][row]) == (50 + row, UNTOUCHED)
        else:
            assert found["token_ids"][row] == (50 + row if i else last[follows[e]])
            assert found["slots"][row] == tables[e][position // PAGE] * PAGE + position % PAGE
    assert all(values[num_rows:] in ([-1, -1], [0, 0], [99, 99]) for values in found.values())


def test_sampled_tokens_continue_a_sequence_s_own_text() -> None:
    """Entry 0 has three rows and accepts two, entry 1 accepts none, entry 2 has no text."""
    tokens, sampled = [[5, 6, 7], [5, 6], [5, 6]], [[6, 7, 8], [1, 2], [6, 3]]
    counts = [len(rows) for rows in tokens]
    chains = [list(range(-1, count - 1)) for count in counts]
    found = [torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    members = torch.full((3, MEMBERS), -1, dtype=torch.int32, device=DEVICE)
    members[0, 1], members[1, 1] = 2, 0
    texts = Texts(
        torch.zeros(3, 16, dtype=torch.int32, device=DEVICE), ints([4, 9, 11]), members,
        torch.zeros(3, MEMBERS, FOUND, dtype=torch.int32, device=DEVICE),
        torch.zeros(3, BRANCHES, PICKED, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    columns: list[Tensor] = [ints(flat(rows)) for rows in (sampled, tokens, chains)]
    judge(
        columns[0], columns[1], columns[2], ints(starts_of(counts)), ints(counts), ints([3]), ints([10, 3, 6]),
        found[0], found[1], found[2], torch.zeros(2, 7, dtype=torch.int32, device=DEVICE), texts,
    )  # fmt: skip
    assert texts.lengths.tolist() == [5, 9, 14]
    assert texts.tokens[2].tolist() == [0] * 11 + [6, 7, 8, 0, 0]
    assert texts.tokens[0].tolist() == [0] * 4 + [1] + [0] * 11
    assert not texts.tokens[1].any()
