"""Launch options for Triton kernels, on a GPU or, in tests without one, in Triton's interpreter on CPU tensors.

From Hopper on, a kernel is launched while its predecessor still runs (programmatic dependent launch) and waits inside
for its results: every kernel here begins with `gdc_launch_dependents` and calls `gdc_wait` before it touches anything
another kernel has written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

IS_INTERPRETED: bool = triton.knobs.runtime.interpret


@functools.cache
def pdl_options() -> dict[str, Any]:
    """Keywords for every launch: the kernel's PDL flag and, if the GPU supports it, the launch attribute."""
    if IS_INTERPRETED or torch.cuda.get_device_capability()[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
