"""Sends weights to workers as checksummed packages, verified in full before use.

    driver: Publisher.publish(version, tensors) -> Package (manifest, references) -> worker: Holder.take(package)

Tensors travel as views of their bytes, several to a chunk, through a `Store` (`ray_cluster.py` has Ray's). If worker
and driver share a machine, nothing is copied on the way out: a worker sees read-only tensors over shared memory, and
its decoder makes the only copy. Everything is verified before any tensor is used, so a set arrives complete or not at
all. The tensors of messages travel the same way (`wire.py`). Nothing here may import Ray or write to what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.kernels.cpu.jit import host_loop

Bytes = NDArray[np.uint8]
ByteChunk = Sequence[Bytes]
"""The bytes of some tensors, stored as one object."""
Ref = Any
"""A store's handle of a chunk, opaque to everyone else."""
UseWeights = Callable[[Mapping[str, Tensor]], None]

CHUNK_BYTES = 64 * 2**20
"""A chunk is closed at this size. A store reuses the space of small ones; a chunk of 1 GB once took 4 s."""
FETCH_S = 15.0
"""Timeout for the next chunk, after which its sender counts as lost."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}
_LANES = 16
_BLOCK = 8 * _LANES
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_compiled: Any = host_loop


class WeightsError(ValueError):
    """What arrived is not what was published; the message says why."""


# --- checksum ---------------------------------------------------------------------------------------------------------


@_compiled
def _mix(words: NDArray[np.uint64], lanes: NDArray[np.uint64]) -> None:
    """Every step is invertible, so a lane that differs once stays different unless a later word cancels that."""
    for start in range(0, words.size, _LANES):
        for lane in range(_LANES):
            mixed = (lanes[lane] ^ words[start + lane]) * _PRIME
            lanes[lane] = mixed ^ (mixed >> _HALF)


@_compiled
def _checksum(data: Bytes, seed: np.uint64) -> np.uint64:
    """All in one call: a set of weights has hundreds of small tensors, and each would pay for three."""
    lanes = np.arange(_LANES).astype(np.uint64) + seed
    whole = data.size // _BLOCK * _BLOCK
    _mix(data[:whole].view(np.uint64), lanes)
    rest = np.zeros(_BLOCK, np.uint8)
    rest[: data.size - whole] = data[whole:]
    _mix(rest.view(np.uint64), lanes)
    total = np.uint64(data.size)
    for lane in range(_LANES):
        mixed = (total ^ lanes[lane]) * _PRIME
        total = mixed ^ (mixed >> _HALF)
    return total


def load_checksum() -> None:
    """Load or compile the checksum early: its first call takes half a second."""
    checksum(np.zeros(0, np.uint8))


def checksum(data: Bytes, seed: int = 0) -> int:
    """64 bits that depend on every byte, its place, the length and the seed.

    Protects against faults, not attackers. 10 GB/s on a core where CRC-32 reaches 4, and it releases the GIL.
    """
    return int(_checksum(data, np.uint64(seed % 2**63)))


# --- the manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete set of weights, chunk by chunk."""

    version: int
    chunks: tuple[tuple[TensorEntry, ...], ...]
    digest: int
    """Of all other fields."""

    @classmethod
    def of(cls, version: int, chunks: Sequence[Sequence[TensorEntry]]) -> Manifest:
        held = tuple(tuple(entries) for entries in chunks)
        return cls(version, held, _digest(version, held))

    def check(self) -> None:
        if self.digest != _digest(self.version, self.chunks):
            raise WeightsError(f"the manifest of version {self.version} is damaged")


def _digest(version: int, chunks: tuple[tuple[TensorEntry, ...], ...]) -> int:
    return checksum(np.frombuffer(repr((version, chunks)).encode(), np.uint8))


def _seed(version: int, place: int) -> int:
    """Gives equal bytes of another version or tensor another checksum."""
    return (version << 24) + place + 1


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, without a copy if it is contiguous on the host."""
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def tensor_of(data: Bytes, entry: TensorEntry) -> Tensor:
    """A tensor over these bytes, without a copy. If they are read-only, so is the tensor, unknown to torch."""
    if not data.size:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    # `from_numpy` warns about read-only memory every time.
    return from_dlpack(data).view(DTYPES[entry.dtype]).view(entry.shape)


def split(tensors: Mapping[str, Tensor], chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[str]]:
    """Names by chunk, in order: a chunk ends once it is full."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        names.append(name)
        size += tensor.nbytes
        if size >= chunk_bytes:
            yield names
            names, size = [], 0
    if names:
        yield names


def describe(version: int, first: int, tensors: Mapping[str, Tensor], arrays: ByteChunk) -> tuple[TensorEntry, ...]:
    """The entries of a chunk whose first tensor is number `first` of the set."""
    entries = []
    for place, ((name, tensor), array) in enumerate(zip(tensors.items(), arrays, strict=True), first):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"{name} is {dtype}; weights can be {', '.join(DTYPES)}")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), checksum(array, _seed(version, place))))
    return tuple(entries)


def assemble(manifest: Manifest, chunks: Sequence[ByteChunk]) -> dict[str, Tensor]:
    """All tensors of a manifest over the bytes that arrived, or a `WeightsError`. Read-only: copy before writing."""
    manifest.check()
    if len(chunks) != len(manifest.chunks):
        raise WeightsError(f"version {manifest.version}: {len(chunks)} chunks of {len(manifest.chunks)} arrived")
    found: dict[str, Tensor] = {}
    for number, (entries, chunk) in enumerate(zip(manifest.chunks, chunks, strict=True)):
        if not isinstance(chunk, list | tuple) or len(chunk) != len(entries):
            raise WeightsError(f"version {manifest.version}: chunk {number} should hold {len(entries)} tensors")
        for entry, data in zip(entries, chunk, strict=True):
            _verify(manifest.version, len(found), entry, data)
            found[entry.name] = tensor_of(data, entry)
    return found


def _verify(version: int, place: int, entry: TensorEntry, data: Any) -> None:
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise WeightsError(f"version {version}: {entry.name} did not arrive as bytes")
    if data.size != entry.num_bytes:
        raise WeightsError(f"version {version}: {entry.name} has {data.size} bytes, not {entry.num_bytes}")
    if checksum(data, _seed(version, place)) != entry.checksum:
        raise WeightsError(f"version {version}: {entry.name} is damaged or of another version: its checksum is wrong")


# --- transport --------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """Holds chunks between the publisher and those who fetch them."""

    def put(self, chunk: ByteChunk) -> Ref:
        """Copy a chunk into the store; it lives as long as its reference."""

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        """Views of chunks, or a `WeightsError` if they are lost or none arrives for `seconds`."""


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """A set of weights in a store."""

    manifest: Manifest
    refs: tuple[Ref, ...]


def put_all(store: Store, version: int, tensors: Mapping[str, Tensor], chunk_bytes: int = CHUNK_BYTES) -> Package:
    """Copy a set into a store. Checksums come from the original tensors, so they also catch faults on the way in."""
    chunks: list[tuple[TensorEntry, ...]] = []
    refs: list[Ref] = []
    num_tensors = 0
    for names in split(tensors, chunk_bytes):
        part = {name: tensors[name] for name in names}
        arrays = [bytes_of(tensor) for tensor in part.values()]
        chunks.append(describe(version, num_tensors, part, arrays))
        refs.append(store.put(arrays))
        num_tensors += len(names)
    return Package(Manifest.of(version, chunks), tuple(refs))


def _touch(store: Store, num_bytes: int) -> None:
    zeros = np.zeros(CHUNK_BYTES, np.uint8)
    refs = [store.put([zeros]) for _ in range(-(-num_bytes // CHUNK_BYTES))]
    del refs  # only now: the next chunk would reuse the memory of one freed at once


class Publisher:
    """Copies weights into a store in the background. Keeps only the newest set alive."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._thread.submit(load_checksum)
        self._version: int | None = None
        self._job: Future[Package] | None = None

    def warm(self, num_bytes: int) -> None:
        """Start touching the memory of two sets of this size: the first touch takes several times as long as a copy.

        Two, since the old set stays until all workers have the new one. What is published meanwhile waits for this.
        """
        self._thread.submit(_touch, self._store, 2 * num_bytes)

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Start copying. The tensors must not change until `wait` has returned: workers would reject them."""
        if self._job is not None:
            self._job.exception()
        assert self._version is None or version > self._version, "versions only grow"
        self._version = version
        self._job = self._thread.submit(put_all, self._store, version, dict(tensors))

    def wait(self, seconds: float | None = None) -> Package:
        """Wait for the newest set to be in the store; raises if copying failed."""
        assert self._job is not None, "nothing was published"
        return self._job.result(seconds)

    def close(self) -> None:
        self._thread.shutdown()
        self._job = None


class Holder:
    """The weights of one worker: all of one version, or none."""

    def __init__(self, store: Store, load: UseWeights) -> None:
        self._store, self._load = store, load
        load_checksum()
        self.version: int | None = None

    def take(self, package: Package, seconds: float = FETCH_S) -> bool:
        """Replace older weights by these; returns whether they were new. Rejected ones change nothing."""
        version = package.manifest.version
        if self.version is not None and version <= self.version:
            return False
        tensors = assemble(package.manifest, self._store.get(package.refs, seconds))
        self.version = None  # a load that fails half-way leaves a mixture, which must not be used
        self._load(tensors)
        self.version = version
        return True
