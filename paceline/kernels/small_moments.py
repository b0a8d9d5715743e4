"""How AdamW's moments are stored in 8 bits, and the numbers of one step: what kernels and their slow twin share.

A code is a float of its own: relative to the largest of its block of 256 elements, four bits of mantissa and the rest
exponent, with even steps below the smallest exponent. The first moment's codes also hold a sign. `rl/small_adamw.py`
and `kernels/triton/small_adamw.py` read this; nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 256
"""Elements with one scale."""
MANTISSA = 4
"""Bits."""
FIRST_EXPONENTS, SECOND_EXPONENTS = 6, 14
"""Octaves below the largest of a block that have full precision, by moment."""


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step, the same for all elements of a parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    """What the weight is multiplied by."""
    correction1: float
    correction2: float
    """Square root of the second moment's bias correction."""
    seed: int
    """Of the rounding."""
