"""Sums the gradients of packs in a fixed order, whichever worker computed them.

The learner gives every virtual worker's sum to a `TreeSum`, in order; a virtual worker's own sum is what autograd
accumulates while its packs run one after the other. Floating-point sums depend on their order, so the number of virtual
workers alone fixes the tree's shape: the number and speed of real workers must never matter.
"""

from __future__ import annotations

from torch import Tensor

Tensors = dict[str, Tensor]


def add_into(total: Tensors | None, more: Tensors | None) -> Tensors | None:
    """Add `more` to `total` in place, name by name; None and missing names count as zero.

    A virtual worker without packs has None. Adding zeros instead would give the same numbers but cost memory.
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
    """Adds the sums of virtual workers 0, 1, 2 ... in a binary tree: (0 + 1) + (2 + 3), an odd one joins later.

    It works like a binary counter: two subtrees of equal size merge at once, so that of V sums only about log2(V) are
    in memory. The tree owns what is pushed and overwrites it.
    """

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, Tensors | None]] = []

    def push(self, tensors: Tensors | None) -> None:
        """Add the next virtual worker's sum."""
        size = 1
        while self._subtrees and self._subtrees[-1][0] == size:
            tensors = add_into(self._subtrees.pop()[1], tensors)
            size *= 2
        self._subtrees.append((size, tensors))

    def finish(self) -> Tensors | None:
        """The sum of everything pushed; None if all of it was None. Empties the tree."""
        total: Tensors | None = None
        while self._subtrees:
            total = add_into(self._subtrees.pop()[1], total)
        return total
