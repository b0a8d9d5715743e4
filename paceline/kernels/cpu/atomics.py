"""What threads need to share work inside numba kernels: atomic words, raw memory, sleeping, and calls by address.

All atomics are sequentially consistent. Addresses are plain integers (bytes), as in `simd.py`. Used by `pool.py`, and
by the tasks of the kernels, which read their arguments from memory. Nothing here takes the GIL.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT64 = ir.IntType(64)
_DOUBLE = ir.DoubleType()
_INT32, _BYTE = ir.IntType(32), ir.IntType(8)
_ARMS = ("aarch64", "arm64")
_PAUSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.isb", (15,)),
    "arm64": ("llvm.aarch64.isb", (15,)),
}
"""By machine the LLVM intrinsic, with its arguments, that lets a spinning core rest for a moment."""

mutex_init: Any = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
mutex_lock: Any = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
mutex_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
condition_init: Any = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))
condition_wait: Any = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
condition_signal: Any = types.ExternalFunction("pthread_cond_signal", types.int32(types.int64))


def _operation(define: Callable[..., Any]) -> Any:
    """Turn a definition, which takes numba's typing context first, into a function for compiled code."""
    return intrinsic(define)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT64.as_pointer())


@_operation
def load(typingctx: Any, address: Any) -> Any:
    """Read a word."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_word(builder, values[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@_operation
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], _word(builder, values[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@_operation
def add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to a word; return the sum."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        before = builder.atomic_rmw("add", _word(builder, values[0]), values[1], "seq_cst")
        return builder.add(before, values[1])

    return types.int64(types.int64, types.int64), emit


@_operation
def exchange(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a word if it holds `expected`; return whether it did."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.cmpxchg(_word(builder, values[0]), values[1], values[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@_operation
def pause(typingctx: Any) -> Any:
    """Let the core rest for a moment."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() in _PAUSES:
            name, numbers = _PAUSES[platform.machine()]
            arguments = [ir.Constant(ir.IntType(32), value) for value in numbers]
            function = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)
        return context.get_dummy_value()

    return types.void(), emit


@_operation
def float_mode(typingctx: Any) -> Any:
    """How this thread rounds, and whether it flushes denormals: its control register."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() == "x86_64":
            place = cgutils.alloca_once(builder, _INT32)
            _control(builder, "llvm.x86.sse.stmxcsr", builder.bitcast(place, _BYTE.as_pointer()))
            return builder.zext(builder.load(place), INT64)
        if platform.machine() in _ARMS:
            function = ir.FunctionType(INT64, [])
            return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.aarch64.get.fpcr"), [])
        return ir.Constant(INT64, 0)

    return types.int64(), emit


@_operation
def set_float_mode(typingctx: Any, mode: Any) -> Any:
    """Compute like the thread with this `float_mode`."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() == "x86_64":
            place = cgutils.alloca_once(builder, _INT32)
            builder.store(builder.trunc(values[0], _INT32), place)
            _control(builder, "llvm.x86.sse.ldmxcsr", builder.bitcast(place, _BYTE.as_pointer()))
        elif platform.machine() in _ARMS:
            _control(builder, "llvm.aarch64.set.fpcr", values[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


def _control(builder: Any, name: str, argument: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [argument.type])
    builder.call(cgutils.get_or_insert_function(builder.module, function, name), [argument])


@_operation
def call_task(typingctx: Any, task: Any, block: Any, index: Any) -> Any:
    """Call the C function at address `task` with (block, index); return its result."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(INT64, [INT64, INT64])
        return builder.call(builder.inttoptr(values[0], function.as_pointer()), [values[1], values[2]])

    return types.int64(types.int64, types.int64, types.int64), emit


@_operation
def number(typingctx: Any, block: Any, index: Any) -> Any:
    """The float64 in word `index` of a block."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        base = builder.inttoptr(values[0], _DOUBLE.as_pointer())
        return builder.load(builder.gep(base, [values[1]]))

    return types.float64(types.int64, types.int64), emit


def _pointer(element: Any) -> Callable[..., Any]:
    """Make a numba function from an address to a pointer, which `numba.carray` takes."""

    @_operation
    def pointer(typingctx: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    found: Callable[..., Any] = pointer
    return found


int64s = _pointer(types.int64)
uint64s = _pointer(types.uint64)
int32s = _pointer(types.int32)
floats = _pointer(types.float32)
bools = _pointer(types.boolean)
