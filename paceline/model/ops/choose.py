"""Choice of the operations for a device; the only place that decides it, and rejects what the device cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.model.device import check_arithmetic

if TYPE_CHECKING:
    from paceline.model.ops.base import Ops


def choose_ops(device: str, exact: bool, precision: str = "auto") -> Ops:
    """The operations for this device; a ValueError if it cannot provide them."""
    check_arithmetic(device, precision)
    if device.startswith("cuda"):
        from paceline.kernels.triton.cache import keep_cache_private
        from paceline.model.ops.gpu import GpuOps

        keep_cache_private()
        return GpuOps(device, exact, precision)
    if exact:
        from paceline.model.ops.native import NativeOps

        return NativeOps(precision)
    from paceline.model.ops.plain import PlainOps

    return PlainOps(precision)
