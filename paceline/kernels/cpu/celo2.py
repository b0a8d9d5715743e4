"""The two passes of a CELO2 step over a stack of matrices on a CPU; `rl/celo2.py` calls them and says what they do.

    advance       moves the moments on, and returns the mean square of every feature that differs by element
    directions    the network's answer for every element

Features live in registers and are computed twice rather than stored. A row is computed alone and in one fixed order,
and torch adds the sums of rows, so that threads change no bit. All tensors are contiguous float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from paceline.kernels.cpu.atomics import floats, int64s
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.pool import DONE, Shared, num_tasks, part_of, share_out, shared
from paceline.kernels.cpu.simd import LANES, first_lanes, fma, larger, load, splat, sqrt, store, total

NUM_FEATURES, WIDTH = 18, 8
ADVANCE_NS, DIRECTION_NS = 2.0, 8.0
"""What an element costs one core, to estimate work."""
Vector = Any
"""LANES floats in a register."""
_WORDS = 16
_LANE_BYTES = 4 * LANES


@kernel
def _scalar(address: int) -> Vector:
    """One float of memory in every lane."""
    return splat(carray(floats(address), 1)[0])


@kernel
def _mean(before: Vector, now: Vector, decay: float, share: float) -> Vector:
    """`share` is 1 - decay, which float32 cannot subtract precisely."""
    return fma(before, splat(np.float32(decay)), now * splat(np.float32(share)))


@kernel
def _advance_moments(g: Vector, momenta: int, stride: int, squares: int, left: int) -> None:
    """m = decay * m + (1 - decay) * g at three decays, v likewise with the square of g."""
    store(momenta, _mean(load(momenta, left), g, 0.9, 0.1), left)
    store(momenta + stride, _mean(load(momenta + stride, left), g, 0.99, 0.01), left)
    store(momenta + 2 * stride, _mean(load(momenta + 2 * stride, left), g, 0.999, 0.001), left)
    store(squares, _mean(load(squares, left), g * g, 0.95, 0.05), left)


@kernel
def _features(
    g: Vector, p: Vector, momenta: int, stride: int, squares: int, by_row: Vector, factors: int, width: int, left: int
) -> Vector:
    """The features that differ by element, in the network's order; 0 behind the end of a row."""
    zero, limit = splat(np.float32(0)), splat(np.float32(0.1))
    clipped = zero - larger(zero - larger(g, zero - limit), zero - limit)
    m0, m1, m2 = load(momenta, left), load(momenta + stride, left), load(momenta + 2 * stride, left)
    v = load(squares, left)
    inverse = first_lanes(splat(np.float32(1)) / sqrt(v + splat(np.float32(1e-8))), zero, left)
    f0 = by_row[0] * load(factors, left)
    f1 = by_row[1] * load(factors + 4 * width, left)
    f2 = by_row[2] * load(factors + 8 * width, left)
    plain = (g, clipped, p, m0, m1, m2, v)
    scaled = (m0 * inverse, m1 * inverse, m2 * inverse, inverse, g * f0, g * f1, g * f2, g * inverse)
    return plain + scaled + (m0 * f0, m1 * f1, m2 * f2)


@kernel
def _row_factors(factors: int, height: int) -> Vector:
    return _scalar(factors), _scalar(factors + 4 * height), _scalar(factors + 8 * height)


def advance(
    weights: Tensor, gradients: Tensor, momenta: Tensor, squares: Tensor, row_factors: Tensor, column_factors: Tensor
) -> Tensor:
    """Advance momenta and squares in place; [matrices, NUM_FEATURES] mean squares of the features, in float64."""
    count, height, width = weights.shape
    sums = torch.empty(count, height, NUM_FEATURES)
    given = (weights, gradients, momenta, squares, row_factors, column_factors, sums)
    work_ns = weights.numel() * ADVANCE_NS
    _share(shared(_advance_task, work_ns), work_ns, _words(given, height, width), count * height)
    return sums.double().sum(1) / (height * width)


def _words(tensors: tuple[Tensor, ...], height: int, width: int) -> Any:
    """The arguments of a task: height, width, and where the tensors are."""
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    words = np.zeros(_WORDS, np.int64)
    words[: 2 + len(tensors)] = height, width, *(tensor.data_ptr() for tensor in tensors)
    return words


@kernel
def _share(to: Shared, work_ns: float, words: Any, num_rows: int) -> None:
    count = num_tasks(num_rows, work_ns)
    words[_WORDS - 2], words[_WORDS - 1] = num_rows, count
    share_out(to, words, count)


def _advance_task(block: int, index: int) -> int:
    words = carray(int64s(block), _WORDS)
    height, width, weights, gradients, momenta = words[0], words[1], words[2], words[3], words[4]
    squares, row_factors, column_factors, sums = words[5], words[6], words[7], words[8]
    first, last = part_of(index, words[_WORDS - 1], words[_WORDS - 2])
    scratch = np.empty(NUM_FEATURES * LANES, np.float32)
    for row in range(first, last):
        matrix, place = row // height, row % height
        scratch[:] = 0
        by_row = _row_factors(row_factors + 4 * (3 * matrix * height + place), height)
        for i in range(0, width, LANES):
            left, at = width - i, 4 * (row * width + i)
            m_at = momenta + 4 * ((3 * matrix * height + place) * width + i)
            g = load(gradients + at, left)
            _advance_moments(g, m_at, 4 * height * width, squares + at, left)
            found = _features(
                g,
                load(weights + at, left),
                m_at,
                4 * height * width,
                squares + at,
                by_row,
                column_factors + 4 * (3 * matrix * width + i),
                width,
                left,
            )
            place_of_sum = scratch.ctypes.data
            for feature in found:
                store(place_of_sum, fma(feature, feature, load(place_of_sum, LANES)), LANES)
                place_of_sum += _LANE_BYTES
        out = carray(floats(sums + 4 * row * NUM_FEATURES), NUM_FEATURES)
        for number in range(NUM_FEATURES):
            out[number] = total(load(scratch.ctypes.data + number * _LANE_BYTES, LANES))
    return DONE


@kernel
def _unit(inputs: Vector, weights: int, start: Vector) -> Vector:
    """start + the weighted sum of the inputs."""
    found = start
    for value in inputs:
        found = fma(value, _scalar(weights), found)
        weights += 4
    return found


@kernel
def _first_unit(
    number: int, inputs: Vector, weights: int, by_row: int, height: int, by_column: int, left: int
) -> Vector:
    """One unit of the first layer; `by_row` and `by_column` are where its row's and its columns' shares are."""
    start = _scalar(by_row + 4 * number * height) + load(by_column, left)
    return larger(_unit(inputs, weights + 4 * number * NUM_FEATURES, start), splat(np.float32(0)))


def directions(
    weights: Tensor,
    gradients: Tensor,
    momenta: Tensor,
    squares: Tensor,
    row_factors: Tensor,
    column_factors: Tensor,
    first: Tensor,
    by_row: Tensor,
    by_column: Tensor,
    hidden: Tensor,
    hidden_bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
) -> Tensor:
    """[matrices, rows, columns] answers; `first`, `by_row` and `by_column` are the first layer of every matrix."""
    count, height, width = weights.shape
    found = torch.empty_like(weights, memory_format=torch.contiguous_format)
    learned = torch.cat((hidden.reshape(-1), hidden_bias, output, output_bias.reshape(1)))
    given = (
        weights,
        gradients,
        momenta,
        squares,
        row_factors,
        column_factors,
        first,
        by_row,
        by_column,
        learned,
        found,
    )
    work_ns = weights.numel() * DIRECTION_NS
    _share(shared(_direction_task, work_ns), work_ns, _words(given, height, width), count * height)
    return found


def _direction_task(block: int, index: int) -> int:
    words = carray(int64s(block), _WORDS)
    height, width, weights, gradients, momenta = words[0], words[1], words[2], words[3], words[4]
    squares, row_factors, column_factors = words[5], words[6], words[7]
    first_weights, by_row, by_column, learned, out = words[8], words[9], words[10], words[11], words[12]
    hidden_bias, output = learned + 4 * WIDTH * WIDTH, learned + 4 * (WIDTH + 1) * WIDTH
    first, last = part_of(index, words[_WORDS - 1], words[_WORDS - 2])
    for row in range(first, last):
        matrix, place = row // height, row % height
        factors = _row_factors(row_factors + 4 * (3 * matrix * height + place), height)
        own = first_weights + 4 * matrix * WIDTH * NUM_FEATURES
        row_share = by_row + 4 * (matrix * WIDTH * height + place)
        for i in range(0, width, LANES):
            left, at = width - i, 4 * (row * width + i)
            found = _features(
                load(gradients + at, left),
                load(weights + at, left),
                momenta + 4 * ((3 * matrix * height + place) * width + i),
                4 * height * width,
                squares + at,
                factors,
                column_factors + 4 * (3 * matrix * width + i),
                width,
                left,
            )
            share, step = by_column + 4 * (matrix * WIDTH * width + i), 4 * width
            h = (
                _first_unit(0, found, own, row_share, height, share, left),
                _first_unit(1, found, own, row_share, height, share + step, left),
                _first_unit(2, found, own, row_share, height, share + 2 * step, left),
                _first_unit(3, found, own, row_share, height, share + 3 * step, left),
                _first_unit(4, found, own, row_share, height, share + 4 * step, left),
                _first_unit(5, found, own, row_share, height, share + 5 * step, left),
                _first_unit(6, found, own, row_share, height, share + 6 * step, left),
                _first_unit(7, found, own, row_share, height, share + 7 * step, left),
            )
            answer = _scalar(output + 4 * WIDTH)
            for unit in range(WIDTH):
                value = _unit(h, learned + 4 * unit * WIDTH, _scalar(hidden_bias + 4 * unit))
                answer = fma(larger(value, splat(np.float32(0))), _scalar(output + 4 * unit), answer)
            store(out + at, answer, left)
    return DONE
