"""Merges one weight: W' = round(W + scale * (B @ A)), the same bits on every worker, device and after every resume.

A bfloat16 has 8 bits of precision, and most of an adapter's changes are smaller than half its step: rounded to the
nearest, they vanish. So each element has a fixed threshold, a hash of its module's name and its place, and rounds up if
its fraction of a step exceeds that. W itself, which lies on a step, stays as it is; on average over the elements, W'
has the whole change; and the same A and B always give the same W'. `Moved` says what came through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cpu import merge as host
from paceline.model.lora.adapter import Rounding, threshold_seed

ROUNDINGS: dict[Rounding, int] = {"nearest": host.NEAREST, "dither": host.DITHER}


@dataclass(frozen=True)
class Moved:
    """What a merge changed."""

    num_elements: int = 0
    num_moved: int = 0
    """Elements of W' that are not those of W."""
    kept: float = 0.0
    """Sum of (W' - W) * update, where update = scale * (B @ A)."""
    wanted: float = 0.0
    """Sum of update squared."""

    def metrics(self) -> dict[str, float]:
        """Shares for the metrics file; an update of zero counts as kept."""
        return {
            "lora/moved_share": self.num_moved / max(self.num_elements, 1),
            "lora/kept_share": self.kept / self.wanted if self.wanted else 1.0,
        }


def merge(
    module: str, base: Tensor, a: Tensor, b: Tensor, scale: float, rounding: Rounding, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """W' in `dtype` on the base's device, and what `moved` takes, there too: reading it would wait for the device."""
    assert dtype in (torch.float32, torch.bfloat16)
    way, seed = ROUNDINGS[rounding] if dtype == torch.bfloat16 else host.EXACT, threshold_seed(module)
    a, b = (tensor.detach().float().contiguous() for tensor in (a, b))
    if base.is_cuda:
        from paceline.kernels.triton.merge import merge as merge_on_gpu  # needs Triton, which CPU installs lack

        out = torch.empty(base.shape, dtype=dtype, device=base.device)
        return out, merge_on_gpu(base, a, b, scale, way, seed, out)
    whole = torch.empty(base.shape, dtype=torch.float32)
    counted = host.merge(base.float().numpy(), a.numpy(), b.numpy(), scale, way, seed, whole.numpy())
    return whole.to(dtype), torch.tensor(counted, dtype=torch.float64)


def moved(num_elements: int, counted: Sequence[Tensor]) -> Moved:
    """The second results of several merges over so many elements, added in their order."""
    total = Moved(num_elements)
    for num_moved, kept, wanted in torch.stack(list(counted)).tolist():
        total = Moved(num_elements, total.num_moved + int(num_moved), total.kept + kept, total.wanted + wanted)
    return total
