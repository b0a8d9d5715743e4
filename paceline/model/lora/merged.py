"""The policy of an adapter: the frozen base of the weights it changes, and the decoder that receives W'.

    MergedPolicy.load(A and B) -> for every changed weight: base -> merge -> the decoder's own copy

The learner and workers without one hold the same object, so W' has the same bits wherever A and B have. What an adapter
does not change exists once, in the decoder. The base stays in the engine's precision, on its device or, if it does not
fit there beside W', in pinned host memory, from which one weight at a time passes through the device. Nobody writes to
the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from paceline.core.documents import brief
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.lora.adapter import A, Adapter, B, BasePlace
from paceline.model.lora.merge import Moved, merge, moved

RESERVED_SHARE = 0.1
"""Of a GPU's memory, what `auto` leaves to the learner's activations."""


class MergedPolicy:
    """See the module."""

    def __init__(
        self, decoder: Decoder, adapter: Adapter, base: Mapping[str, Tensor], place: BasePlace = "auto"
    ) -> None:
        """`base` has the model's weights by name; those that change are copied."""
        self.decoder, self.adapter = decoder, adapter
        self._shapes = adapter.shapes(decoder.config)
        self.dtype = decoder.ops.weight_dtype
        names = [f"{module}.weight" for module in adapter.modules]
        self.is_on_host = _is_on_host(decoder, sum(self._kept_bytes(base[name]) for name in names), place)
        self._base = {name: self._kept(base[name]) for name in names}

    @property
    def num_base_bytes(self) -> int:
        """Memory of the base."""
        return sum(tensor.nbytes for tensor in self._base.values())

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise a ValueError unless these are the tensors of this adapter."""
        check_tensors(self.adapter, tensors, self.decoder.config)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> Moved:
        """Merge A and B of all modules and load W' into the decoder, which must hold the base's other weights."""
        self.check(tensors)
        merging = _Merging(self, tensors)
        self.decoder.update_linears(merging)
        return merging.moved()

    def merged(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """W' of one module, and what its rounding left of the update, as `merge` returns them."""
        device, adapter = self.decoder.ops.device, self.adapter
        base = self._base[f"{module}.weight"].to(device, non_blocking=True)
        a, b = (tensors[f"{module}.{name}"].to(device) for name in (A, B))
        return merge(module, base, a, b, adapter.scale, adapter.rounding, self.dtype)

    def _kept(self, tensor: Tensor) -> Tensor:
        dtype = self._kept_dtype(tensor)
        if not self.is_on_host:
            return tensor.detach().to(self.decoder.ops.device, dtype, copy=True).contiguous()
        pinned = torch.empty(tensor.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        return pinned.copy_(tensor)

    def _kept_dtype(self, tensor: Tensor) -> torch.dtype:
        """That of the engine, unless the file is less precise."""
        return self.dtype if self.dtype == torch.bfloat16 else tensor.dtype

    def _kept_bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * self._kept_dtype(tensor).itemsize


class _Merging(Mapping[str, Tensor]):
    """W' of every changed weight by name, each merged when it is read."""

    def __init__(self, policy: MergedPolicy, tensors: Mapping[str, Tensor]) -> None:
        self._policy, self._tensors = policy, tensors
        self._counted: dict[str, tuple[int, Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        found, counted = self._policy.merged(name.removesuffix(".weight"), self._tensors)
        self._counted[name] = found.numel(), counted
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._policy._base

    def __iter__(self) -> Iterator[str]:
        return iter(self._policy._base)

    def __len__(self) -> int:
        return len(self._policy._base)

    def moved(self) -> Moved:
        """In the order of the modules, whichever thread merged them."""
        found = [self._counted[name] for name in self]
        return moved(sum(count for count, _ in found), [counted for _, counted in found])


def check_tensors(adapter: Adapter, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise a ValueError unless these are the tensors of an adapter of this model."""
    expected = adapter.shapes(config)
    for name, shape in expected.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ValueError(f"adapter tensor {name} must have shape {shape}; found {found}: it is another model's")
    if unknown := [name for name in tensors if name not in expected]:
        raise ValueError(f"the adapter holds {brief(unknown[0])}, which is not part of it")


def _is_on_host(decoder: Decoder, num_bytes: int, place: BasePlace) -> bool:
    """Whether the base stays in host memory."""
    if not decoder.policy.embedding.is_cuda:
        return False
    if place != "auto":
        return place == "host"
    free, total = torch.cuda.mem_get_info(decoder.policy.embedding.device)
    return num_bytes > free - RESERVED_SHARE * total
