"""Sums of packs and virtual workers as the learner's are meant to be: the slow and obvious twin of `TreeSum`."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.rl.reduction import Tensors, TreeSum, add_into


def roles(num_virtual: int, num_workers: int) -> list[list[int]]:
    """Which virtual workers each real one plays; who plays whom changes no number."""
    return [list(range(worker, num_virtual, num_workers)) for worker in range(num_workers)]


def sum_in_order(parts: Iterable[Tensors]) -> Tensors | None:
    """One virtual worker's sum: its packs' tensors, first to last. The first part's tensors hold the result."""
    total: Tensors | None = None
    for part in parts:
        total = add_into(total, part)
    return total


def tree_sum(sums: Iterable[Tensors | None]) -> Tensors | None:
    """The sums of virtual workers 0, 1, 2 ... in a `TreeSum`; their tensors are overwritten."""
    tree = TreeSum()
    for tensors in sums:
        tree.push(tensors)
    return tree.finish()
