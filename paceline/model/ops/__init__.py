"""The machine side of the decoder: one implementation of `base.Ops` per kind of machine and guarantee.

`native` is exact on CPUs, `gpu/ops.py` on CUDA cards; `plain` is the library's own kernels, the readable twin the tests
use as an oracle, without the guarantee. Adding a machine is one new implementation and one line in `choose_ops`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

from paceline.extras import how_to_install

if TYPE_CHECKING:
    from paceline.model.ops.base import Ops


OLDEST_TRITON = (3, 5)
OLDEST_CARD = (8, 0)
"""Compute capability of the first cards with bfloat16 matrix units."""


def choose_ops(device: str, exact: bool, precision: str = "auto") -> Ops:
    """The operations for this device; refuses what it cannot keep."""
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            raise ValueError(f"device {device!r} needs Triton: {how_to_install('gpu')}, or use device='cpu'")
        version = importlib.metadata.version("triton")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
            oldest = ".".join(map(str, OLDEST_TRITON))
            raise ValueError(f"device {device!r} needs Triton {oldest} or newer; {version} is installed")
        from paceline.model.gpu.ops import GpuOps

        return GpuOps(device, exact, precision)
    if device != "cpu":
        raise ValueError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if exact:
        from paceline.model.ops.native import NativeOps

        return NativeOps(precision)
    from paceline.model.ops.plain import PlainOps

    return PlainOps(precision)
