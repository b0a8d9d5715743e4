"""Where the GPU kernels run in tests: on a GPU, or in Triton's interpreter on CPU tensors when there is none.

Every test file about the GPU imports this first: Triton reads the switch when it is imported. Only `paceline.model.gpu`
looks at it, so files about a CPU in the same process see nothing of it. The interpreter's faults are mended here, once.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

HAS_CARD = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CARD else "cpu"
"""Where the tensors of a kernel lie. The decoder takes "cuda" in both cases."""
assert HAS_CARD or isinstance(tl.cdiv, interpreter.InterpretedFunction), "triton was imported before this module"

_CONVERT, _DOT = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
_LOAD = interpreter.InterpreterBuilder.create_masked_load
_PATCH_TENSOR = interpreter._patch_lang_tensor


def _index(tensor: Any) -> int:
    """numpy 2.4 refuses to turn an array of one number into an int, as Triton 3.6 does with loop bounds."""
    return int(tensor.handle.data.item())


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", _index)


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The interpreter cuts float32 off where a GPU rounds to the nearest bfloat16."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << 16
    if (source, target) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)
    return _CONVERT(data, source, target, rounding)


def _dot(builder: Any, a: Any, b: Any, total: Any, *others: Any) -> Any:
    """The interpreter multiplies bfloat16 numbers as if their bits were integers, and sums float32 in an order that
    depends on the tile's height; a GPU's matrix unit does not. In float64 the order is rounded away."""
    left, right = (builder.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
    if total.dtype.scalar != tl.float32:
        return _DOT(builder, left, right, total, *others)
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.matmul(left.data.astype(np.float64), right.data.astype(np.float64)) + total.data
        return interpreter.TensorHandle(found.astype(np.float32), tl.float32)


def _load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
    """Triton 3.9 refuses masks that are not bool, and the interpreter's `&` may leave int32."""
    return _LOAD(builder, pointers, interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1), *others)


class _Inspect:
    """`inspect` for the interpreter, which searches whole modules for Triton's own functions at every call.

    Which names those are is looked up once; a quarter of the time of small kernels goes there otherwise.
    """

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, owner: Any) -> list[tuple[str, Any]]:
        if id(owner) not in self._names:
            self._names[id(owner)] = [name for name, m in inspect.getmembers(owner) if tl.core.is_builtin(m)]
        return [(name, getattr(owner, name)) for name in self._names[id(owner)]]


def _mend() -> None:
    """The faults of 3.6 to 3.9; none of them has all."""
    interpreter.inspect = _Inspect()
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_masked_load = _load


if not HAS_CARD:
    _mend()
