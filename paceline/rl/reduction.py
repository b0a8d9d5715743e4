"""Gradients of packs added up in one order, whoever computed them.

The learner gives every virtual worker's sum to a `TreeSum`, in order; a virtual worker's own sum is what autograd
collects while its packs run one after the other. Floating-point sums depend on their order, so the tree's shape is
fixed by the number of virtual workers alone: real workers, their number and their speed can never enter.
"""

from __future__ import annotations

from torch import Tensor

Tensors = dict[str, Tensor]


def add_into(total: Tensors | None, more: Tensors | None) -> Tensors | None:
    """`total + more` name by name, in the tensors of `total`; None and a missing name are nothing to add.

    A virtual worker without packs has None. Adding zeros instead would give the same numbers at the cost of memory.
    """
    if total is None or more is None:
        return total if more is None else more
    for name, tensor in more.items():
        if name in total:
            total[name].add_(tensor)
        else:
            total[name] = tensor
    return total


class TreeSum:
    """Sums of virtual workers 0, 1, 2 ... added in a binary tree: (0 + 1) + (2 + 3), an odd one out joins later.

    It counts in binary: two subtrees of equal size become one at once, so that of V sums only about log2(V) are in
    memory. What is pushed belongs to the tree and is overwritten.
    """

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, Tensors | None]] = []

    def push(self, tensors: Tensors | None) -> None:
        """The next virtual worker's sum."""
        size = 1
        while self._subtrees and self._subtrees[-1][0] == size:
            tensors = add_into(self._subtrees.pop()[1], tensors)
            size *= 2
        self._subtrees.append((size, tensors))

    def finish(self) -> Tensors | None:
        """The sum of everything pushed; None if there was nothing but None. The tree is empty afterwards."""
        total: Tensors | None = None
        while self._subtrees:
            total = add_into(self._subtrees.pop()[1], total)
        return total
