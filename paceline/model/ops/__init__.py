"""The machine side of the decoder: one implementation of `base.Ops` per kind of machine and guarantee.

`native` is exact on CPUs; `plain` is the library's own kernels, the readable twin the tests use as an oracle, without
the guarantee. Adding a machine is one new file and one line in `choose_ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.model.ops.base import Ops


def choose_ops(device: str, exact: bool) -> Ops:
    """The operations for this device; refuses what it cannot keep."""
    if device != "cpu":
        raise ValueError(f"device {device!r} is not supported yet; use device='cpu'")
    if exact:
        from paceline.model.ops.native import NativeOps

        return NativeOps()
    from paceline.model.ops.plain import PlainOps

    return PlainOps()
