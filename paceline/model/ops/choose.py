"""Choice of the operations for a device; the only place that decides it, and rejects what the device cannot do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

from paceline.core.extras import how_to_install

if TYPE_CHECKING:
    from paceline.model.ops.base import Ops


OLDEST_TRITON = (3, 5)


def choose_ops(device: str, exact: bool, precision: str = "auto") -> Ops:
    """The operations for this device; a ValueError if it cannot provide them."""
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            raise ValueError(f"device {device!r} needs Triton: {how_to_install('gpu')}, or use device='cpu'")
        version = importlib.metadata.version("triton")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
            oldest = ".".join(map(str, OLDEST_TRITON))
            raise ValueError(f"device {device!r} needs Triton {oldest} or newer; {version} is installed")
        from paceline.kernels.triton.cache import keep_cache_private
        from paceline.model.ops.gpu import GpuOps

        keep_cache_private()
        return GpuOps(device, exact, precision)
    if device != "cpu":
        raise ValueError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if exact:
        from paceline.model.ops.native import NativeOps

        return NativeOps(precision)
    from paceline.model.ops.plain import PlainOps

    return PlainOps(precision)
