"""Fused CPU sampler: one pass over a row of logits gives the token, its log-probability and whether the row is finite.

token = argmax(logits / T + gumbel(key, step, id)), ties to the lowest id, each row summed in one fixed order. The noise
is that of `paceline.core.noise` in vectors; `noise.gumbel` is the readable twin. Called by `model/ops/native.py` and
the eagle drafter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from paceline.core.noise import MULTIPLIERS, STRIDE, words
from paceline.kernels.cpu.atomics import bools, floats, int32s, int64s, number, uint64s
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.pool import DONE, Shared, num_tasks, part_of, share_out, shared
from paceline.kernels.cpu.simd import (
    LANES,
    count_from,
    exp,
    first_lanes,
    fma,
    lane,
    lane_int,
    larger,
    largest,
    load,
    log,
    multiply_add,
    scramble,
    splat,
    splat_int,
    total,
    unit_interval,
    where_greater,
    where_greater_int,
)

_M1, _M2, _M3, _M4 = (np.uint32(m) for m in MULTIPLIERS)
_STRIDE = np.uint32(STRIDE)
_ZERO, _ONE = np.float32(0), np.float32(1)
_LOWEST = np.float32(-np.inf)

SAMPLE_NS = 2.5
"""What sampling costs one core per logit, to estimate work."""

_words = kernel(words)


@kernel
def _gumbel(first: int, low: int, high: int):  # type: ignore[no-untyped-def]
    """Gumbel noise for ids first, first + 1, ...: -log(E) with E = -log(1 - u), precise for small u."""
    bits = scramble(multiply_add(count_from(first), _STRIDE, low), _M1, _M2) ^ splat_int(high)
    u = unit_interval(scramble(bits, _M3, _M4))
    rest = splat(_ONE) - u
    lost = rest - splat(_ONE)  # the part of -u that survives rounding 1 - u
    exact = log(rest) * (u / lost)
    zero = splat(_ZERO)
    return zero - log(where_greater(zero, lost, exact, u))


@kernel
def gumbel_row(key: int, step: int, count: int, out: NDArray[np.float32]) -> None:
    """Noise for ids 0 .. count - 1, for tests and drafters."""
    low, high = _words(np.uint64(key), np.uint64(step))
    for i in range(0, count, LANES):
        noise = _gumbel(i, low, high)
        for j in range(min(LANES, count - i)):
            out[i + j] = lane(noise, j)


@kernel
def sample_drafts(
    logits: NDArray[np.float32],
    ids: NDArray[np.int64],
    divisors: NDArray[np.float32],
    chosen: int,
    keys: NDArray[np.uint64],
    steps: NDArray[np.int64],
    noise: NDArray[np.float32],
    tokens: NDArray[np.int32],
    ranked: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> None:
    """Sample a drafter's tokens with the policy's noise for every divisor (0: greedy): `tokens` [rows, divisors].

    `ids` maps logit columns to policy token ids; `noise` is scratch space for the policy's vocabulary. `ranked` [rows,
    width] holds the best tokens of the chosen divisor, the sampled one first. Its score is 1/2 if the runner-up ties
    and approaches 1 as the gap grows; the other scores are at most 1/2 and fall with the gap and with rank.
    """
    width = ranked.shape[1]
    best = np.empty(width, np.float32)
    where = np.empty(width, np.int64)
    for r in range(logits.shape[0]):
        gumbel_row(keys[r], steps[r], len(noise), noise)
        for d in range(len(divisors)):
            num_ranked = width if d == chosen else 1
            best[:num_ranked] = _LOWEST
            where[:num_ranked] = 0
            for i in range(len(ids)):
                score = logits[r, i]
                if divisors[d] > _ZERO:
                    score = score / divisors[d] + noise[ids[i]]
                rank = num_ranked
                while rank > 0 and score > best[rank - 1]:
                    rank -= 1
                for below in range(num_ranked - 1, rank, -1):
                    best[below], where[below] = best[below - 1], where[below - 1]
                if rank < num_ranked:
                    best[rank], where[rank] = score, i
            tokens[r, d] = ids[where[0]]
            if d == chosen:
                for rank in range(width):
                    ranked[r, rank] = ids[where[rank]]
                    behind = best[0] - best[max(rank, 1)] if width > 1 else np.inf
                    part = np.float32(0.5) / (_ONE + behind)
                    scores[r, rank] = part / np.float32(rank) if rank else _ONE - part


@kernel
def _best(logits: int, vocab: int, temperature: float, key: int, step: int) -> Any:
    """Return the index of the best perturbed logit, the largest scaled logit, and whether all logits are finite."""
    is_greedy = temperature == 0
    low, high = _words(np.uint64(key), np.uint64(step))
    divisor = splat(_ONE if is_greedy else np.float32(temperature))
    zero, lowest = splat(_ZERO), splat(_LOWEST)
    peak, best, where, poison = lowest, lowest, splat_int(np.uint32(0)), zero
    for i in range(0, vocab, LANES):
        raw = load(logits + 4 * i, vocab - i)
        poison = fma(raw, zero, poison)  # infinities and NaN turn this into NaN
        z = first_lanes(raw / divisor, lowest, vocab - i)
        peak = larger(peak, z)
        score = z if is_greedy else z + _gumbel(i, low, high)
        where = where_greater_int(score, best, count_from(i), where)
        best = where_greater(score, best, score, best)
    token, top = np.uint32(0xFFFFFFFF), _LOWEST
    for j in range(LANES):
        if lane(best, j) > top or (lane(best, j) == top and lane_int(where, j) < token):
            token, top = lane_int(where, j), lane(best, j)
    return token, largest(peak), total(poison) == _ZERO


@kernel
def _log_sum(logits: int, vocab: int, temperature: float, peak: float) -> float:
    """log(sum(exp(z - peak))) with z = logits / T."""
    divisor = splat(_ONE if temperature == 0 else np.float32(temperature))
    top, zero = splat(np.float32(peak)), splat(_ZERO)
    sums = zero
    for i in range(0, vocab, LANES):
        weight = exp(load(logits + 4 * i, vocab - i) / divisor - top)
        sums = sums + first_lanes(weight, zero, vocab - i)
    return lane(log(splat(total(sums))), 0)


def sample(
    logits: NDArray[np.float32],
    temperature: float,
    keys: NDArray[np.uint64],
    steps: NDArray[np.int64],
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    is_finite: NDArray[np.bool_],
) -> None:
    """Sample one token per row of `logits`."""
    assert logits.flags.c_contiguous
    work_ns = logits.size * SAMPLE_NS
    _sample(shared(_sample_task, work_ns), work_ns, logits, temperature, keys, steps, tokens, logprobs, is_finite)


@kernel
def _sample(
    to: Shared,
    work_ns: float,
    logits: NDArray[np.float32],
    temperature: float,
    keys: NDArray[np.uint64],
    steps: NDArray[np.int64],
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    is_finite: NDArray[np.bool_],
) -> None:
    num_rows, vocab = logits.shape
    count = num_tasks(num_rows, work_ns)
    block = np.empty(10, np.int64)
    block.view(np.float64)[3] = temperature
    block[0], block[1], block[2] = logits.ctypes.data, num_rows, vocab
    block[4], block[5], block[6] = keys.ctypes.data, steps.ctypes.data, tokens.ctypes.data
    block[7], block[8], block[9] = logprobs.ctypes.data, is_finite.ctypes.data, count
    share_out(to, block, count)


def _sample_task(block: int, index: int) -> int:
    b = carray(int64s(block), 10)
    num_rows, vocab, temperature = b[1], b[2], number(block, 3)
    logits = carray(floats(b[0]), (num_rows, vocab))
    keys, steps, tokens = (
        carray(uint64s(b[4]), num_rows),
        carray(int64s(b[5]), num_rows),
        carray(int32s(b[6]), num_rows),
    )
    logprobs, is_finite = carray(floats(b[7]), num_rows), carray(bools(b[8]), num_rows)
    divisor = _ONE if temperature == 0 else np.float32(temperature)
    first, last = part_of(index, b[9], num_rows)
    for r in range(first, last):
        address = b[0] + r * vocab * 4
        token, peak, sound = _best(address, vocab, temperature, keys[r], steps[r])
        is_finite[r] = sound
        tokens[r] = token
        if sound:
            logprobs[r] = (logits[r, token] / divisor - peak) - _log_sum(address, vocab, temperature, peak)
    return DONE


@kernel
def _peak(logits: int, vocab: int, temperature: float) -> Any:
    """Return the largest scaled logit, computed as in `_best`, and whether all logits are finite."""
    divisor = splat(_ONE if temperature == 0 else np.float32(temperature))
    zero, lowest = splat(_ZERO), splat(_LOWEST)
    peak, poison = lowest, zero
    for i in range(0, vocab, LANES):
        raw = load(logits + 4 * i, vocab - i)
        poison = fma(raw, zero, poison)
        peak = larger(peak, first_lanes(raw / divisor, lowest, vocab - i))
    return largest(peak), total(poison) == _ZERO


def log_probs(
    logits: NDArray[np.float32], temperature: float, tokens: NDArray[np.int64], out: NDArray[np.float32]
) -> None:
    """Log-probability of one given token per row, by the formula of `sample`; NaN for a row that is not finite."""
    assert logits.flags.c_contiguous
    work_ns = logits.size * SAMPLE_NS / 2
    _log_probs(shared(_log_probs_task, work_ns), work_ns, logits, temperature, tokens, out)


@kernel
def _log_probs(
    to: Shared,
    work_ns: float,
    logits: NDArray[np.float32],
    temperature: float,
    tokens: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    num_rows, vocab = logits.shape
    count = num_tasks(num_rows, work_ns)
    block = np.empty(7, np.int64)
    block.view(np.float64)[3] = temperature
    block[0], block[1], block[2] = logits.ctypes.data, num_rows, vocab
    block[4], block[5], block[6] = tokens.ctypes.data, out.ctypes.data, count
    share_out(to, block, count)


def _log_probs_task(block: int, index: int) -> int:
    b = carray(int64s(block), 7)
    num_rows, vocab, temperature = b[1], b[2], number(block, 3)
    logits, tokens, out = (
        carray(floats(b[0]), (num_rows, vocab)),
        carray(int64s(b[4]), num_rows),
        carray(floats(b[5]), num_rows),
    )
    divisor = _ONE if temperature == 0 else np.float32(temperature)
    first, last = part_of(index, b[6], num_rows)
    for r in range(first, last):
        address = b[0] + r * vocab * 4
        peak, sound = _peak(address, vocab, temperature)
        out[r] = np.float32(np.nan)
        if sound:
            out[r] = (logits[r, tokens[r]] / divisor - peak) - _log_sum(address, vocab, temperature, peak)
    return DONE


@kernel
def _candidates(
    z: NDArray[np.float32], peak: Any, log_mass: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.int64]:
    """Ids by descending z (ties: ascending id): a prefix of the sorted vocabulary that contains all kept tokens."""
    reach = np.float32(8)
    while True:
        ids = np.nonzero(z >= peak - reach)[0]
        order = ids[np.argsort(-z[ids], kind="mergesort")]
        if len(ids) == len(z):
            return order
        if top_k > 0:
            is_enough = len(ids) >= top_k
        elif top_p < 1:
            mass = 0.0
            for i in order:
                mass += math.exp(float(z[i] - peak) - log_mass)
            is_enough = mass >= top_p
        else:
            is_enough = bool(reach >= -math.log(min_p))
        if is_enough:
            return order
        reach *= np.float32(2)


@kernel
def _num_kept(
    z: NDArray[np.float32], order: NDArray[np.int64], log_mass: float, top_k: int, top_p: float, min_p: float
) -> int:
    """How many of the ordered candidates survive top-k, then top-p, then min-p."""
    kept = len(order)
    peak = z[order[0]]
    if top_k > 0:
        while kept > top_k and z[order[kept - 1]] < z[order[top_k - 1]]:
            kept -= 1
        inside = 0.0
        for i in range(kept):
            inside += math.exp(float(z[order[i]] - peak))
        log_mass = math.log(inside)
    if top_p < 1:
        before = 0.0
        for i in range(kept):
            if i > 0 and before >= top_p:
                kept = i
                break
            before += math.exp(float(z[order[i]] - peak) - log_mass)
    if min_p > 0:
        while kept > 1 and float(z[order[kept - 1]] - peak) < math.log(min_p):
            kept -= 1
    return kept


@kernel
def sample_truncated(
    logits: NDArray[np.float32], temperature: float, key: int, step: int, top_k: int, top_p: float, min_p: float
) -> tuple[int, float, float]:
    """Sample one row with top-k, top-p or min-p; return the token and its log-probability before and after truncation.

    Temperature, top-k, top-p and min-p apply in this order, each to what the previous one kept; the most likely token
    always stays. The row must be finite (`sample` has checked).
    """
    vocab = len(logits)
    _, peak, _ = _best(logits.ctypes.data, vocab, temperature, key, step)
    log_mass = _log_sum(logits.ctypes.data, vocab, temperature, peak)
    z = logits / np.float32(temperature)
    order = _candidates(z, np.float32(peak), log_mass, top_k, top_p, min_p)
    kept = _num_kept(z, order, log_mass, top_k, top_p, min_p)
    noise = np.empty(vocab, np.float32)
    gumbel_row(key, step, vocab, noise)
    chosen, best, mass = order[0], _LOWEST, 0.0
    for i in range(kept):
        token = order[i]
        score = z[token] + noise[token]
        mass += math.exp(float(z[token] - np.float32(peak)))
        if score > best or (score == best and token < chosen):
            chosen, best = token, score
    shifted = z[chosen] - np.float32(peak)
    return chosen, shifted - np.float32(log_mass), shifted - np.float32(math.log(mass))
