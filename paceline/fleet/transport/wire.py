"""Serializes messages between processes: pickled dataclasses, with their tensors in a store.

    pack(message, store) -> Parcel -> unpack(parcel, store)

Numbers arrive bit for bit, and checksums verify tensors. Used by `process_carrier.py` and `run/worker_process.py`. Both
ends are processes of one run and trust each other. Model output is a string in a message: nothing here may ever
evaluate or import it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.fleet.transport.weights import FETCH_S, Package, Store, assemble, put_all

MESSAGE = "message"
"""The name of the message itself among its tensors, if it is shared."""


class Parcel(NamedTuple):
    """A serialized message."""

    data: bytes
    package: Package | None
    """Its tensors."""


def pack(message: Any, store: Store, is_shared: bool = False) -> Parcel:
    """`is_shared`: put all of it into the store, once for all recipients."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(message)
    data, tensors = stream.getvalue(), pickler.tensors
    if is_shared:
        data, tensors[MESSAGE] = b"", torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return Parcel(data, put_all(store, 0, tensors) if tensors else None)


def unpack(parcel: Parcel, store: Store) -> Any:
    """The message, with its own copies of tensors; raises a `WeightsError` if they are lost or damaged."""
    data, package = parcel
    tensors = {} if package is None else assemble(package.manifest, store.get(package.refs, FETCH_S))
    if MESSAGE in tensors:
        data = tensors.pop(MESSAGE).numpy().tobytes()
    # Sums are added in place, and the store has room for one per worker.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return _Unpickler(io.BytesIO(data), copies).load()


class _Pickler(pickle.Pickler):
    """Replaces every tensor by a name.

    `persistent_id` would do the same, but is called for every number of a message.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[str, Tensor] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        name = str(len(self.tensors))
        self.tensors[name] = value
        return _tensor, (name,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _tensor(name: str) -> Tensor:
    """Placeholder of a tensor in a message; `_Unpickler` replaces it by the tensor."""
    raise pickle.UnpicklingError(f"tensor {name} is not part of the pickle: read the message with `unpack`")
