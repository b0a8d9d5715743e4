"""SIMD vectors for numba kernels: a float vector, an unsigned integer vector, and the few operations we need.

Every kernel in this folder is built from these, so the vector width, the use of fused multiply-add and the order of
each sum are fixed here and not left to the optimiser. A lane computes the same bits wherever it is, so a row's result
does not depend on its neighbours. Addresses are plain integers (bytes): kernels take `tensor.data_ptr()`.

`LANES` is 16 on CPUs with AVX-512 and 8 elsewhere (`PACELINE_VECTOR_LANES` overrides it). Results differ between the
two, but never between batch shapes.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model


def _choose_lanes() -> int:
    chosen = os.environ.get("PACELINE_VECTOR_LANES")
    if chosen is None:
        return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8
    if chosen not in ("8", "16"):
        raise ValueError(f"PACELINE_VECTOR_LANES must be 8 or 16; got {chosen!r}")
    return int(chosen)


LANES = _choose_lanes()

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


class _VectorType(types.Type):
    """A numba type whose values are single LLVM vectors."""

    def __init__(self, name: str, vector: ir.VectorType) -> None:
        super().__init__(name=f"paceline.{name}x{LANES}")
        self.vector = vector


FloatVector = _VectorType("float", FLOATS)
IntVector = _VectorType("uint", INTS)


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector_type: _VectorType) -> None:
        super().__init__(manager, vector_type, vector_type.vector)


def floats(value: float) -> ir.Constant:
    """The same float in every lane."""
    return ir.Constant(FLOATS, [value] * LANES)


def ints(value: int) -> ir.Constant:
    """The same integer in every lane."""
    return ir.Constant(INTS, [value] * LANES)


def call(builder: Any, name: str, *arguments: Any) -> Any:
    """Call the LLVM intrinsic `name` (say `llvm.fma`) on whole vectors."""
    element = "f32" if arguments[0].type == FLOATS else "i32"
    function = ir.FunctionType(arguments[0].type, [a.type for a in arguments])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function, f"{name}.v{LANES}{element}"), arguments
    )


def broadcast(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """A scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def _operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn `emit(builder, *values)` into a numba function; `result` and `parameters` are its numba types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emitted = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else emitted

        # numba inspects the parameter list, so each arity needs its own function.
        arities: dict[int, Callable[..., Any]] = {
            1: lambda typingctx, a: (result(*parameters), codegen),
            2: lambda typingctx, a, b: (result(*parameters), codegen),
            3: lambda typingctx, a, b, c: (result(*parameters), codegen),
            4: lambda typingctx, a, b, c, d: (result(*parameters), codegen),
        }
        definition = arities[len(parameters)]
        definition.__name__ = emit.__name__
        return intrinsic(definition)

    return decorate


def _lanes_below(builder: Any, count: Any) -> Any:
    lane = ir.Constant(INTS, list(range(LANES)))
    return builder.icmp_signed("<", lane, broadcast(builder, builder.trunc(count, INT32), INTS))


@_operation(FloatVector, types.int64, types.int64)
def load(builder: Any, address: Any, count: Any) -> Any:
    """Load `count` floats from `address` (at most LANES); the other lanes are 0 and never read."""
    pointer = builder.inttoptr(address, FLOATS.as_pointer())
    signature = ir.FunctionType(FLOATS, [FLOATS.as_pointer(), INT32, _MASK, FLOATS])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.v{LANES}f32.p0")
    return builder.call(function, [pointer, ir.Constant(INT32, 4), _lanes_below(builder, count), floats(0.0)])


@_operation(types.void, types.int64, FloatVector, types.int64)
def store(builder: Any, address: Any, value: Any, count: Any) -> Any:
    """Write the first `count` lanes."""
    pointer = builder.inttoptr(address, FLOATS.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [FLOATS, FLOATS.as_pointer(), INT32, _MASK])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.store.v{LANES}f32.p0")
    return builder.call(function, [value, pointer, ir.Constant(INT32, 4), _lanes_below(builder, count)])


@_operation(FloatVector, FloatVector, FloatVector, types.int64)
def first_lanes(builder: Any, value: Any, other: Any, count: Any) -> Any:
    """`value` in the first `count` lanes, `other` in the rest."""
    return builder.select(_lanes_below(builder, count), value, other)


@_operation(FloatVector, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    """The same float in every lane."""
    return broadcast(builder, scalar, FLOATS)


@_operation(IntVector, types.uint32)
def splat_int(builder: Any, scalar: Any) -> Any:
    """The same integer in every lane."""
    return broadcast(builder, scalar, INTS)


@_operation(IntVector, types.int64)
def count_from(builder: Any, first: Any) -> Any:
    """first, first + 1, first + 2, ..."""
    return builder.add(broadcast(builder, builder.trunc(first, INT32), INTS), ir.Constant(INTS, list(range(LANES))))


@_operation(FloatVector, FloatVector, FloatVector)
def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@_operation(FloatVector, FloatVector, FloatVector)
def _sub(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@_operation(FloatVector, FloatVector, FloatVector)
def _mul(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@_operation(FloatVector, FloatVector, FloatVector)
def _div(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@_operation(IntVector, IntVector, IntVector)
def _xor(builder: Any, a: Any, b: Any) -> Any:
    return builder.xor(a, b)


@_operation(FloatVector, FloatVector, FloatVector)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """Lane-wise maximum."""
    return call(builder, "llvm.maxnum", a, b)


@_operation(FloatVector, FloatVector)
def sqrt(builder: Any, a: Any) -> Any:
    """Square root, rounded once."""
    return call(builder, "llvm.sqrt", a)


@_operation(FloatVector, FloatVector, FloatVector, FloatVector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma", a, b, c)


@_operation(FloatVector, FloatVector, FloatVector, FloatVector, FloatVector)
def where_greater(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a > b, otherwise y."""
    return builder.select(builder.fcmp_ordered(">", a, b), x, y)


@_operation(IntVector, FloatVector, FloatVector, IntVector, IntVector)
def where_greater_int(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a > b, otherwise y."""
    return builder.select(builder.fcmp_ordered(">", a, b), x, y)


@_operation(types.float32, FloatVector, types.int64)
def lane(builder: Any, value: Any, index: Any) -> Any:
    """One lane of a float vector."""
    return builder.extract_element(value, index)


@_operation(types.uint32, IntVector, types.int64)
def lane_int(builder: Any, value: Any, index: Any) -> Any:
    """One lane of an integer vector."""
    return builder.extract_element(value, index)


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine halves until one lane is left: the same reduction tree for all data."""
    width = LANES // 2
    while width:
        order = [(i + width) % LANES for i in range(LANES)]
        value = combine(value, builder.shuffle_vector(value, value, ir.Constant(INTS, order)))
        width //= 2
    return builder.extract_element(value, ir.Constant(INT32, 0))


@_operation(types.float32, FloatVector)
def total(builder: Any, value: Any) -> Any:
    """Sum of all lanes, by halves."""
    return _fold(builder, value, builder.fadd)


@_operation(types.float32, FloatVector)
def largest(builder: Any, value: Any) -> Any:
    """Largest lane."""
    return _fold(builder, value, lambda a, b: call(builder, "llvm.maxnum", a, b))


def _polynomial(builder: Any, x: Any, coefficients: list[float]) -> Any:
    value = floats(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = call(builder, "llvm.fma", value, x, floats(coefficient))
    return value


_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693145751953125  # the leading bits of ln 2: n * _LN2_HIGH is exact
_LN2_LOW = 1.4286068203094172e-06
_EXP_SMALLEST = -87.33  # below this the result is subnormal; return 0
_EXP_LARGEST = 88.0


@_operation(FloatVector, FloatVector)
def exp(builder: Any, x: Any) -> Any:
    """e**x to about one unit in the last place; 0 below -87.33, clamped to e**88 above."""
    bounded = call(builder, "llvm.minnum", call(builder, "llvm.maxnum", x, floats(_EXP_SMALLEST)), floats(_EXP_LARGEST))
    n = call(builder, "llvm.rint", builder.fmul(bounded, floats(_LOG2_E)))
    r = call(builder, "llvm.fma", n, floats(-_LN2_HIGH), bounded)
    r = call(builder, "llvm.fma", n, floats(-_LN2_LOW), r)
    series = _polynomial(builder, r, [1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040])
    exponent = builder.shl(builder.add(builder.fptosi(n, INTS), ints(127)), ints(23))
    value = builder.fmul(series, builder.bitcast(exponent, FLOATS))
    value = builder.select(builder.fcmp_ordered("<", x, floats(_EXP_SMALLEST)), floats(0.0), value)
    # Clamping above drops NaN; put it back.
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)


@_operation(FloatVector, FloatVector)
def log(builder: Any, x: Any) -> Any:
    """Natural logarithm of a positive normal float, to three units in the last place."""
    bits = builder.bitcast(x, INTS)
    # Splitting at sqrt(1/2) keeps the mantissa in [0.707, 1.414), where the series below converges fast.
    shifted = builder.sub(bits, ints(0x3F3504F3))
    exponent = builder.ashr(shifted, ints(23))
    mantissa = builder.bitcast(builder.sub(bits, builder.shl(exponent, ints(23))), FLOATS)
    f = builder.fsub(mantissa, floats(1.0))
    s = builder.fdiv(f, builder.fadd(f, floats(2.0)))
    square = builder.fmul(s, s)
    series = _polynomial(builder, square, [2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9, 2 / 11])
    n = builder.sitofp(exponent, FLOATS)
    tail = call(builder, "llvm.fma", n, floats(_LN2_LOW), builder.fmul(s, series))
    return call(builder, "llvm.fma", n, floats(_LN2_HIGH), tail)


@_operation(IntVector, IntVector, types.uint32, types.uint32)
def scramble(builder: Any, x: Any, first: Any, second: Any) -> Any:
    """One invertible mixing round of a 32-bit hash with two odd multipliers."""
    x = builder.xor(x, builder.lshr(x, ints(16)))
    x = builder.mul(x, broadcast(builder, first, INTS))
    x = builder.xor(x, builder.lshr(x, ints(15)))
    x = builder.mul(x, broadcast(builder, second, INTS))
    return builder.xor(x, builder.lshr(x, ints(16)))


@_operation(IntVector, IntVector, types.uint32, types.uint32)
def multiply_add(builder: Any, x: Any, factor: Any, offset: Any) -> Any:
    """x * factor + offset modulo 2**32."""
    return builder.add(builder.mul(x, broadcast(builder, factor, INTS)), broadcast(builder, offset, INTS))


@_operation(FloatVector, IntVector)
def unit_interval(builder: Any, bits: Any) -> Any:
    """Map 32 random bits to a float in (0, 1), fine-grained near 0: (bits + 1/2) / 2**32, at most 1 - 2**-24."""
    value = builder.fmul(builder.fadd(builder.uitofp(bits, FLOATS), floats(0.5)), floats(2.0**-32))
    return call(builder, "llvm.minnum", value, floats(1.0 - 2.0**-24))


def _overload_operator(symbol: Callable[..., Any], vector: Any, operation: Any) -> None:
    @overload(symbol)
    def implementation(a: Any, b: Any) -> Any:
        if a is not vector or b is not vector:
            return None

        # numba requires the same parameter list as above, including annotations.
        def emit(a: Any, b: Any) -> Any:
            return operation(a, b)

        return emit


_overload_operator(operator.add, FloatVector, _add)
_overload_operator(operator.sub, FloatVector, _sub)
_overload_operator(operator.mul, FloatVector, _mul)
_overload_operator(operator.truediv, FloatVector, _div)
_overload_operator(operator.xor, IntVector, _xor)
