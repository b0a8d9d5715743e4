"""Receives weights that a trainer broadcasts: rank 0 of a group in which this server is one of the others.

The wire is that of vLLM's NCCL engine: one broadcast per tensor, or of packed buffers. On a GPU the group is NCCL; on a
CPU the same code runs over gloo. What has come is kept beside the weights in use until `finish`, so a trainer that dies
on the way changes nothing. Called by `weights.py`, one call at a time. Nothing that comes over the wire is unpickled:
the one message that vLLM pickles, NCCL's id, is read by `_UniqueId`, which builds no other object.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.core.documents import brief

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.decoder import Decoder
    from paceline.serving.protocol import GroupInfo, TensorList

MEET_S, RECEIVE_S = 300, 300
"""How long to wait for the trainer to join, and for the next tensor."""
DTYPES = ("float32", "bfloat16", "float16")
HEAD = "lm_head.weight"
ID_BYTES = 128
TransferBackend = Literal["nccl", "gloo"]


class Group(Protocol):
    """What receives."""

    def receive(self, tensor: Tensor) -> None:
        """Fill the tensor with what rank 0 broadcasts."""

    def close(self) -> None:
        """Leave the group."""


class Transfer:
    """The tensors of an update on their way, and the group that they come by."""

    def __init__(self, backend: TransferBackend, decoder: Decoder) -> None:
        self.backend = backend
        self._decoder = decoder
        self._shapes: Mapping[str, Sequence[int]] = decoder.config.weight_shapes()
        self._info: GroupInfo | None = None
        self._group: Group | None = None
        self._received: dict[str, Tensor] | None = None

    def join(self, info: GroupInfo) -> None:
        """Join the trainer's group; an earlier one is left."""
        self.leave()
        try:
            self._group = _gloo(info) if self.backend == "gloo" else NcclGroup(info, self._decoder.ops.device)
        except RuntimeError as error:
            raise ValueError(f"the trainer's group cannot be joined: {_line(error)}") from error
        self._info = info

    def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self._group, self._received = self._group, None, None
        if group is not None:
            group.close()

    def start(self) -> None:
        """Begin an update."""
        self._received = {}

    def receive(self, tensors: TensorList) -> None:
        """Receive these tensors. If that fails the update is dropped, and the trainer has to join anew."""
        if self._group is None or self._info is None:
            raise ValueError("no trainer has joined; call /init_weight_transfer_engine first")
        if self._received is None:
            raise ValueError("no update has begun; call /start_weight_update first")
        wanted = list(zip(tensors.names, tensors.dtype_names, tensors.shapes, strict=True))
        for name, dtype, shape in wanted:
            self._check(name, dtype, shape)
        is_packed = self._info.packed if tensors.packed is None else tensors.packed
        try:
            if is_packed:
                self._receive_packed(self._group, wanted, self._info.packed_buffer_size_bytes)
            else:
                for name, dtype, shape in wanted:
                    self._received[name] = _receive(self._group, dtype, shape, self._decoder.ops.device)
        except RuntimeError as error:
            self.leave()
            raise ValueError(f"the weights did not arrive, and the old ones stay in use: {_line(error)}") from error

    def _check(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        expected = self._shapes.get(name)
        if expected is None and name == HEAD and self._decoder.config.tie_embeddings:
            expected = self._shapes["model.embed_tokens.weight"]
        if expected is None:
            raise ValueError(f"the model has no weight {brief(name)}")
        if list(expected) != list(shape):
            raise ValueError(f"{name} has the shape {list(expected)} here; the trainer announces {list(shape)}")
        if dtype not in DTYPES:
            raise ValueError(f"{name}: the dtype {brief(dtype)} is not one of {', '.join(DTYPES)}")

    def _receive_packed(self, group: Group, wanted: Sequence[tuple[str, str, list[int]]], buffer_bytes: int) -> None:
        import torch

        assert self._received is not None
        for part in _parts(wanted, buffer_bytes):
            sizes = [_num_bytes(dtype, shape) for _, dtype, shape in part]
            buffer = _receive(group, "uint8", [sum(sizes)], self._decoder.ops.device)
            for (name, dtype, shape), piece in zip(part, buffer.split(sizes), strict=True):
                # A copy starts at an address that any dtype can.
                self._received[name] = piece.clone().view(getattr(torch, dtype)).view(shape)

    def finish(self) -> Callable[[], None]:
        """End the update; returns what puts it into place, between two steps."""
        if not self._received:
            raise ValueError("no weights have been received; call /start_weight_update and /update_weights first")
        received, self._received = self._received, None
        decoder = self._decoder

        def change() -> None:
            head = received.pop(HEAD, None) if decoder.config.tie_embeddings else None
            weights = received if self._shapes.keys() <= received.keys() else {**decoder.weights(), **received}
            if head is not None and not head.equal(weights["model.embed_tokens.weight"].to(head)):
                raise ValueError(f"the model ties {HEAD} to its embeddings, but the trainer sent another")
            decoder.load_weights(weights)

        return change


def _parts(wanted: Sequence[tuple[str, str, list[int]]], most: int) -> Iterator[list[tuple[str, str, list[int]]]]:
    """What vLLM packs into one buffer: tensors until they have more bytes than `most`."""
    part: list[tuple[str, str, list[int]]] = []
    size = 0
    for one in wanted:
        part.append(one)
        size += _num_bytes(*one[1:])
        if size > most:
            yield part
            part, size = [], 0
    if part:
        yield part


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * (4 if dtype == "float32" else 2)


def _receive(group: Group, dtype: str, shape: Sequence[int], device: str) -> Tensor:
    import torch

    tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    group.receive(tensor)
    return tensor


def _line(error: Exception) -> str:
    return brief(" ".join(str(error).split()), 300)[1:-1]


# --- groups -----------------------------------------------------------------------------------------------------------


def _store(info: GroupInfo) -> Any:
    """The trainer's key-value store, by which the group meets."""
    from torch._C._distributed_c10d import TCPStore

    assert info.master_address is not None and info.master_port is not None
    return TCPStore(
        info.master_address,
        info.master_port,
        info.world_size,
        is_master=False,
        timeout=timedelta(seconds=MEET_S),
        use_libuv=False,
    )


def _gloo(info: GroupInfo) -> Group:
    if info.master_address is None:
        raise ValueError("nccl_unique_id_b64 needs --weight-transfer nccl")
    return GlooGroup(_store(info), info.rank_offset, info.world_size)


class GlooGroup:
    """Over gloo: for trainers and servers without a GPU. A trainer makes the same with rank 0 to send."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import ProcessGroupGloo

        timeout = timedelta(seconds=RECEIVE_S)
        self._group: Any = ProcessGroupGloo(PrefixStore("paceline", store), rank, world_size, timeout)
        self._store = store

    def receive(self, tensor: Tensor) -> None:
        """Take part in a broadcast of rank 0, which sends what its tensor holds."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leave the group."""
        self._group = self._store = None


class NcclGroup:
    """Over NCCL, as vLLM's trainers meet: by a key-value store, or by an id that came with the request."""

    def __init__(self, info: GroupInfo, device: str) -> None:
        import torch
        from torch.cuda import nccl

        self._device = torch.device(device)
        self._store = None if info.master_address is None else _store(info)
        if self._store is None:
            unique_id = _decoded(info.nccl_unique_id_b64 or "")
        else:
            unique_id = read_unique_id(self._store.get("broadcast_from/0/0"))
        with torch.cuda.device(self._device):
            self._comm: Any = nccl.init_rank(info.world_size, unique_id, info.rank_offset)
            # Every peer begins with this, and would wait for us.
            one = torch.zeros(1, device=self._device)
            nccl.all_reduce([one], comms=[self._comm])
            torch.cuda.synchronize(self._device)

    def receive(self, tensor: Tensor) -> None:
        """Take part in a broadcast of rank 0."""
        import torch
        from torch.cuda import nccl

        with torch.cuda.device(self._device):
            nccl.broadcast([tensor], root=0, comms=[self._comm])
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the group."""
        self._comm = self._store = None


def _decoded(text: str) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("nccl_unique_id_b64 is not base64") from error
    if len(found) != ID_BYTES:
        raise ValueError(f"nccl_unique_id_b64 must hold {ID_BYTES} bytes; it holds {len(found)}")
    return found


class _UniqueId(pickle.Unpickler):
    """Reads the one pickle of vLLM's rendezvous, NCCL's id, and refuses to build anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return lambda kind, state: state[1]
        if name == "ncclUniqueId" and module.startswith("vllm."):
            return object
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an id")


def read_unique_id(data: bytes) -> bytes:
    """NCCL's id as vLLM's trainer puts it into the store: a pickled structure of 128 bytes."""
    try:
        found = _UniqueId(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"the trainer's NCCL id cannot be read: {_line(error)}") from error
    if not isinstance(found, bytes) or len(found) != ID_BYTES:
        raise ValueError("the trainer's NCCL id cannot be read: it is something else")
    return found
