"""Weights as buckets of plain bytes, which Ray carries from the trainer to a server through host memory.

`buckets` is called in the trainer by `adapter.py`, `BucketStore` in the server by `server.py`. No weight is loaded
before all have come, so a transfer that breaks off changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class WeightBytes(NamedTuple):
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: NDArray[np.uint8]


def to_bytes(name: str, tensor: Tensor) -> WeightBytes:
    """A copy: the sender may use the tensor's memory for the next one at once."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    copied.copy_(tensor.detach())
    content = copied.reshape(-1).view(torch.uint8).numpy()
    return WeightBytes(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content)


def to_tensor(found: WeightBytes) -> Tensor:
    """A copy too: what Ray hands out is read-only and fills its store as long as someone holds it."""
    return torch.from_numpy(np.array(found.content)).view(getattr(torch, found.dtype)).reshape(found.shape)


async def buckets(weights: AsyncIterator[tuple[str, Tensor]], most_bytes: int) -> AsyncIterator[list[WeightBytes]]:
    """The weights in their order, `most_bytes` at a time or one tensor; the last bucket may be empty."""
    bucket, size = list[WeightBytes](), 0
    async for name, tensor in weights:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(to_bytes(name, tensor))
        size += tensor.nbytes
    yield bucket


class BucketStore:
    """Collects the buckets of one transfer; the first bucket of the next one discards what an earlier one left."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._next = 0

    def add(self, number: int, bucket: Sequence[WeightBytes]) -> None:
        """Keep a bucket; ValueError unless it follows the one before."""
        if number == 0:
            self._weights, self._next = {}, 0
        if number != self._next:
            raise ValueError(f"bucket {number} of the weights came where bucket {self._next} was due; send them again")
        self._weights |= {found.name: to_tensor(found) for found in bucket}
        self._next += 1

    def take(self) -> dict[str, Any]:
        """All of them; the staging is empty then."""
        weights, self._weights, self._next = self._weights, {}, 0
        return weights
