"""The multiply-accumulate loop behind all CPU matrix work: linear layers, attention scores, attention values.

A tile computes `y[m, :] = sum_k x[m, k] * w[k, :]` for a few rows m and a few vectors of columns, in ascending k, with
one fused multiply-add per term. Every output element is therefore the same chain of roundings for any number of rows,
which is all that exactness requires of a matrix product. `linear.py` and `attention.py` use it. The widths below only
affect register use, never a result.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline.kernels.cpu.simd import FLOAT, FLOATS, INT64, INTS, LANES, broadcast, call, floats, ints

# Accumulators fill the register file: 6 x 4 of 32 registers with AVX-512, 3 x 4 of 16 without.
MAX_ROWS = 6 if LANES == 16 else 3
VECTORS = 4
PANEL = VECTORS * LANES
"""Columns of a packed weight panel."""

SET, ADD, CONTINUE = 0, 1, 2
"""What to do with the old y: overwrite it; add the finished sum to it; start the sum from it."""

INT16 = ir.IntType(16)
_HALVES = ir.VectorType(INT16, LANES)


def _load_vector(builder: Any, base: Any, index: Any, is_bf16: bool) -> Any:
    if not is_bf16:
        value = builder.load(builder.bitcast(builder.gep(base, [index]), FLOATS.as_pointer()))
        value.align = 4
        return value
    halves = builder.load(builder.bitcast(builder.gep(base, [index]), _HALVES.as_pointer()))
    halves.align = 2
    # bfloat16 is the upper half of a float32, so widening is exact.
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), ints(16)), FLOATS)


def _row_pointers(builder: Any, address: Any, stride: Any, num_rows: int) -> list[Any]:
    base = builder.inttoptr(address, FLOAT.as_pointer())
    return [builder.gep(base, [builder.mul(stride, ir.Constant(INT64, m))]) for m in range(num_rows)]


def _output(builder: Any, row: Any, vector: int) -> Any:
    return builder.bitcast(builder.gep(row, [ir.Constant(INT64, vector * LANES)]), FLOATS.as_pointer())


def make_tile(num_vectors: int, mode: int, is_bf16: bool = False) -> Any:
    """Make a numba function tile(num_rows, x, x_stride, w, w_stride, depth, y, y_stride) for 1 to MAX_ROWS rows.

    Addresses are in bytes, strides in elements; `depth`, the number of terms per sum, is at least 1.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        num_rows, *rest = arguments
        done = builder.append_basic_block("tile.done")
        choice = builder.switch(num_rows, done)
        for count in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block(f"tile.rows{count}")
            choice.add_case(ir.Constant(INT64, count), block)
            builder.position_at_end(block)
            _emit_tile(builder, count, num_vectors, mode, is_bf16, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    @intrinsic
    def tile(
        typingctx: Any, num_rows: Any, x: Any, x_stride: Any, w: Any, w_stride: Any, depth: Any, y: Any, y_stride: Any
    ) -> Any:
        return types.void(*[types.int64] * 8), emit

    return tile


def _emit_tile(
    builder: Any,
    num_rows: int,
    num_vectors: int,
    mode: int,
    is_bf16: bool,
    x: Any,
    x_stride: Any,
    w: Any,
    w_stride: Any,
    depth: Any,
    y: Any,
    y_stride: Any,
) -> None:
    x_rows = _row_pointers(builder, x, x_stride, num_rows)
    y_rows = _row_pointers(builder, y, y_stride, num_rows)
    weights = builder.inttoptr(w, (INT16 if is_bf16 else FLOAT).as_pointer())

    def old(m: int, v: int) -> Any:
        value = builder.load(_output(builder, y_rows[m], v))
        value.align = 4
        return value

    cells = [(m, v) for m in range(num_rows) for v in range(num_vectors)]
    start = {cell: old(*cell) if mode == CONTINUE else floats(0.0) for cell in cells}
    sums = _accumulate(builder, x_rows, weights, w_stride, depth, start, num_vectors, is_bf16)
    for m, v in cells:
        value = builder.fadd(old(m, v), sums[m, v]) if mode == ADD else sums[m, v]
        builder.store(value, _output(builder, y_rows[m], v)).align = 4


def _accumulate(
    builder: Any,
    x_rows: list[Any],
    weights: Any,
    w_stride: Any,
    depth: Any,
    start: dict[tuple[int, int], Any],
    num_vectors: int,
    is_bf16: bool,
) -> dict[tuple[int, int], Any]:
    """Emit the loop over k; return the final sums."""
    before = builder.block
    loop = builder.append_basic_block("tile.loop")
    after = builder.append_basic_block("tile.after")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(INT64)
    k.add_incoming(ir.Constant(INT64, 0), before)
    sums = {cell: builder.phi(FLOATS) for cell in start}
    first = builder.mul(k, w_stride)
    columns = [
        _load_vector(builder, weights, builder.add(first, ir.Constant(INT64, v * LANES)), is_bf16)
        for v in range(num_vectors)
    ]
    following = {}
    for m, row in enumerate(x_rows):
        scalar = broadcast(builder, builder.load(builder.gep(row, [k])), FLOATS)
        for v in range(num_vectors):
            following[m, v] = call(builder, "llvm.fma", scalar, columns[v], sums[m, v])
    next_k = builder.add(k, ir.Constant(INT64, 1))
    k.add_incoming(next_k, loop)
    for cell, phi in sums.items():
        phi.add_incoming(start[cell], before)
        phi.add_incoming(following[cell], loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, after)
    builder.position_at_end(after)
    return following
