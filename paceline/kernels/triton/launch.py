"""How kernels are launched: on a GPU, or by Triton's interpreter on CPU tensors, which is how tests without one run.

On Hopper and later a kernel is launched while the one before it still runs (programmatic dependent launch) and waits
inside for its results: every kernel here begins with `gdc_launch_dependents` and calls `gdc_wait` before it touches
anything another kernel has written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

IS_INTERPRETED: bool = triton.knobs.runtime.interpret


@functools.cache
def pdl_options() -> dict[str, Any]:
    """Keywords for every launch: the kernels' own PDL and, where the GPU knows it, the launch attribute."""
    if IS_INTERPRETED or torch.cuda.get_device_capability()[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
