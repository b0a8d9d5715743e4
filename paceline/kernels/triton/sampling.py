"""GPU sampler: turns logits into a token, its log-probability and a finiteness flag without leaving the GPU.

token = argmax(logits / T + gumbel(key, step, id)), ties to the lowest id. The integer part of the noise matches
`paceline.core.noise` bit for bit; `kernels/cpu/sampling.py` is the CPU twin. The GPU forward pass calls `sample` always
and then `sample_truncated` if any row has top-k, top-p or min-p; both run inside its CUDA graph.

A result must never depend on the other rows of the launch: no float atomics, no block size or load width chosen by row
count. The grid must not depend on device data, and nothing outside `allocate` may allocate or wait for the host.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.core import noise

CHUNK = 1024
"""Ids per program of the first pass. Part of the numerics, since sums are per chunk. Small enough for one row of a
150,000 id vocabulary to keep every multiprocessor busy."""
BLOCK = 4096
"""Ids per step of the truncated sampler, which walks a row with one program. Also part of the numerics."""

_STRIDE = tl.constexpr(noise.STRIDE)
_M1, _M2, _M3, _M4 = (tl.constexpr(m) for m in noise.MULTIPLIERS)
_LOWEST = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class Scratch:
    """Intermediate results between passes. `sample_truncated` reads what `sample` left here."""

    scores: Tensor  # [rows, chunks] best perturbed logit of the chunk
    ids: Tensor  # [rows, chunks] its id
    peaks: Tensor  # [rows, chunks] largest z = logits / T
    masses: Tensor  # [rows, chunks] sum of exp(z - the chunk's peak), NaN when a logit is infinite or NaN
    row_peaks: Tensor  # [rows]
    row_log_masses: Tensor  # [rows] log of the sum of exp(z - the row's peak)

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device | str) -> Scratch:
        chunks = (rows, triton.cdiv(vocab, CHUNK))
        return cls(
            torch.zeros(chunks, device=device),
            torch.zeros(chunks, device=device, dtype=torch.int32),
            torch.zeros(chunks, device=device),
            torch.zeros(chunks, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows, device=device),
        )


@dataclass(frozen=True)
class SamplerOut:
    """One sampled token per row. A row with an infinity or NaN has is_finite 0, token 0 and log-probabilities 0."""

    tokens: Tensor  # int32 [rows]
    logprobs: Tensor  # float32 [rows], of log_softmax(logits / T), at T = 0 of log_softmax(logits)
    truncated_logprobs: Tensor  # float32 [rows], the same after truncation
    is_finite: Tensor  # int32 [rows]

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> SamplerOut:
        return cls(
            torch.zeros(rows, device=device, dtype=torch.int32),
            torch.zeros(rows, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows, device=device, dtype=torch.int32),
        )


@dataclass(frozen=True)
class Truncation:
    """How each row is truncated; a row with top-k 0, top-p 1 and min-p 0 is not."""

    top_ks: Tensor  # int32 [rows]
    top_ps: Tensor  # float32 [rows]
    log_min_ps: Tensor  # float32 [rows], -inf for min-p 0


# --- noise ------------------------------------------------------------------------------------------------------------


@triton.jit
def noise_words(key, step):
    """`noise.words`: two 32-bit words that identify position `step` of the response with this key (int64 bits)."""
    key = key.to(tl.uint64, bitcast=True)
    x = key ^ (step.to(tl.uint64) * 0x9E3779B97F4A7C15)
    for _ in tl.static_range(2):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = (x ^ (x >> 31)) + key
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _scramble(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def noise_bits(ids, low, high):
    """The 32 random bits of these token ids at the position identified by `low` and `high`."""
    bits = _scramble(ids.to(tl.uint32) * _STRIDE + low, _M1, _M2) ^ high
    return _scramble(bits, _M3, _M4)


@triton.jit
def gumbel(bits):
    """-log(E) with E = -log(1 - u), u = (bits + 1/2) / 2**32 at most 1 - 2**-24, precise at both ends.

    Above one half, 1 - u comes from the inverted bits, because float32 leaves too few digits in u. Below, log(1 - u) is
    corrected by u / lost, where `lost` is the part of -u that survives rounding 1 - u.
    """
    u = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    is_upper = bits >= 0x80000000
    complement = tl.maximum(((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (2.0**-32), 2.0**-24)
    rest = tl.where(is_upper, complement, 1.0 - u)
    lost = rest - 1.0
    is_lost = lost == 0.0
    ratio = tl.where(is_upper, -1.0, u / tl.where(is_lost, 1.0, lost))
    return -tl.log(tl.where(is_lost, u, tl.log(rest) * ratio))


@triton.jit
def _noise_of(ids, keys, steps, row):
    low, high = noise_words(tl.load(keys + row), tl.load(steps + row))
    return gumbel(noise_bits(ids, low, high))


# --- logits -----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(logits, row, ids, capacity, V: tl.constexpr, PARTS: tl.constexpr):
    """The row's logits at these ids, with parts added in order; 0 beyond the vocabulary."""
    places = logits + row.to(tl.int64) * V + ids
    value = tl.load(places, mask=ids < V, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(places + part * capacity.to(tl.int64) * V, mask=ids < V, other=0.0)
    return value


@triton.jit
def _divisor(temperatures, row):
    t = tl.load(temperatures + row)
    return tl.where(t == 0, 1.0, t)


@triton.jit
def _scale(raw, ids, divisor, V: tl.constexpr):
    """z = logits / T, rounded as on the CPU; -inf beyond the vocabulary."""
    z = raw
    if divisor != 1:  # a correctly rounded division takes a tenth of the time, and training divides by 1
        z = tl.div_rn(raw, divisor)
    return tl.where(ids < V, z, _LOWEST)


@triton.jit
def _scaled(logits, row, ids, capacity, divisor, V: tl.constexpr, PARTS: tl.constexpr):
    """z of the row at these ids."""
    return _scale(_load(logits, row, ids, capacity, V, PARTS), ids, divisor, V)


# --- sampling ---------------------------------------------------------------------------------------------------------

# Triton compiles a separate kernel, with another load width and thus another summation order, for integers equal to 1
# or divisible by 16 and for pointers divisible by 16. Arguments that vary between launches are excluded from this
# specialization, so that no slice of a buffer triggers a new compilation either. The logits need wide loads: `_check`
# asserts their alignment.
_NO_VALUE = ["capacity"]
_INPUTS = ["num_rows", "keys", "steps", "temperatures", "top_ks", "top_ps", "log_min_ps"]
_BETWEEN = ["scores", "best_ids", "peaks", "masses", "row_peaks", "row_log_masses"]
_OUTPUTS = ["tokens", "logprobs", "truncated_logprobs", "is_finite"]
_NO_ALIGNMENT = [*_INPUTS, *_BETWEEN, *_OUTPUTS]


@triton.jit(do_not_specialize=_NO_VALUE, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def chunk_kernel(
    logits,
    num_rows,
    keys,
    steps,
    temperatures,
    scores,
    best_ids,
    peaks,
    masses,
    capacity,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """First pass, one program per row and vocabulary chunk: its best id, its peak and its mass."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    raw = _load(logits, row, ids, capacity, V, PARTS)
    z = _scale(raw, ids, _divisor(temperatures, row), V)
    score = z
    if tl.load(temperatures + row) != 0:
        score = z + _noise_of(ids, keys, steps, row)
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, ids, V), 0)
    peak = tl.max(z, 0)
    weight = tl.where(tl.abs(raw) < _INFINITY, tl.exp(z - peak), float("nan"))
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + place, best)
    tl.store(best_ids + place, token)
    tl.store(peaks + place, peak)
    tl.store(masses + place, tl.sum(weight, 0))


@triton.jit(do_not_specialize=_NO_VALUE, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def combine_kernel(
    logits,
    num_rows,
    temperatures,
    scores,
    best_ids,
    peaks,
    masses,
    row_peaks,
    row_log_masses,
    tokens,
    logprobs,
    truncated_logprobs,
    is_finite,
    capacity,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Second pass, one program per row: the best of the chunks and their combined mass."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    chunk = tl.arange(0, PADDED)
    is_chunk = chunk < CHUNKS
    places = row.to(tl.int64) * CHUNKS + chunk
    score = tl.load(scores + places, mask=is_chunk, other=_LOWEST)
    ids = tl.load(best_ids + places, mask=is_chunk, other=V)
    chunk_peaks = tl.load(peaks + places, mask=is_chunk, other=_LOWEST)
    chunk_masses = tl.load(masses + places, mask=is_chunk, other=0.0)
    peak = tl.max(chunk_peaks, 0)
    mass = tl.sum(chunk_masses * tl.exp(chunk_peaks - peak), 0)
    is_sound = mass == mass
    log_mass = tl.log(mass)
    token = tl.min(tl.where(score == tl.max(score, 0), ids, V), 0)
    token = tl.where(is_sound, token, 0)
    z = _scaled(logits, row, token, capacity, _divisor(temperatures, row), V, PARTS)
    logprob = tl.where(is_sound, (z - peak) - log_mass, 0.0)
    tl.store(row_peaks + row, peak)
    tl.store(row_log_masses + row, log_mass)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, logprob)
    tl.store(truncated_logprobs + row, logprob)
    tl.store(is_finite + row, is_sound.to(tl.int32))


# --- truncation -------------------------------------------------------------------------------------------------------


@triton.jit
def _rank(z):
    """An unsigned integer that sorts like z; both zeros map to one value."""
    bits = tl.where(z == 0, 0.0, z).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _weigh(
    logits,
    row,
    capacity,
    divisor,
    peak,
    first,
    second,
    third,
    IS_COUNT: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mass (of exp(z - peak), or the number of ids) that ranks at or above each of three thresholds.

    Rounding cannot make it grow with the threshold: every sum runs in the same order and terms only turn to 0.
    """
    lane = tl.arange(0, BLOCK)
    one = tl.zeros((BLOCK,), tl.float32)
    two = tl.zeros((BLOCK,), tl.float32)
    three = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + lane
        z = _scaled(logits, row, ids, capacity, divisor, V, PARTS)
        rank = _rank(z)
        weight = tl.where(ids < V, 1.0, 0.0) if IS_COUNT else tl.exp(z - peak)
        one += tl.where(rank >= first, weight, 0.0)
        two += tl.where(rank >= second, weight, 0.0)
        three += tl.where(rank >= third, weight, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _find_threshold(
    logits,
    row,
    capacity,
    divisor,
    peak,
    limit,
    IS_COUNT: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest rank at or above which the mass reaches `limit`, or 0; two of its bits per walk over the row.

    An id ranks at or above it exactly when the mass ranked above that id is less than `limit`.
    """
    threshold = tl.full((), 0, tl.uint32)
    digit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        one, two, three = _weigh(
            logits,
            row,
            capacity,
            divisor,
            peak,
            threshold + digit,
            threshold + 2 * digit,
            threshold + 3 * digit,
            IS_COUNT,
            V,
            PARTS,
            BLOCK,
        )
        num_reached = (one >= limit).to(tl.uint32) + (two >= limit).to(tl.uint32) + (three >= limit).to(tl.uint32)
        threshold += num_reached * digit
        digit = digit >> 2
    return threshold


@triton.jit(do_not_specialize=_NO_VALUE, do_not_specialize_on_alignment=_NO_ALIGNMENT)
def truncated_kernel(
    logits,
    num_rows,
    keys,
    steps,
    temperatures,
    row_peaks,
    row_log_masses,
    tokens,
    logprobs,
    truncated_logprobs,
    is_finite,
    capacity,
    top_ks,
    top_ps,
    log_min_ps,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: thresholds for top-k and top-p, then the best perturbed logit among the kept ids.

    The settings are numbers of the row, not of the launch: one kernel serves all of them, so a row's bits cannot depend
    on those of its neighbours.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    if tl.load(is_finite + row) == 0:
        return
    top_k, top_p, log_min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(log_min_ps + row)
    if (top_k == 0) & (top_p >= 1) & (log_min_p == _LOWEST):
        return
    divisor = _divisor(temperatures, row)
    peak = tl.load(row_peaks + row)
    threshold = tl.full((), 0, tl.uint32)
    if top_k > 0:
        limit = tl.minimum(top_k, V).to(tl.float32)
        threshold = _find_threshold(logits, row, capacity, divisor, peak, limit, True, V, PARTS, BLOCK)
    if top_p < 1:
        mass, _, _ = _weigh(
            logits, row, capacity, divisor, peak, threshold, threshold, threshold, False, V, PARTS, BLOCK
        )
        # Never below top-k's threshold: all the mass that top-k keeps is above it, and the limit is less than that.
        threshold = _find_threshold(logits, row, capacity, divisor, peak, mass * top_p, False, V, PARTS, BLOCK)
    threshold = tl.minimum(threshold, _rank(peak))
    token, mass = _best_kept(logits, row, capacity, divisor, peak, threshold, log_min_p, keys, steps, V, PARTS, BLOCK)
    shifted = _scaled(logits, row, token, capacity, divisor, V, PARTS) - peak
    tl.store(tokens + row, token)
    tl.store(logprobs + row, shifted - tl.load(row_log_masses + row))
    tl.store(truncated_logprobs + row, shifted - tl.log(mass))


@triton.jit
def _best_kept(
    logits,
    row,
    capacity,
    divisor,
    peak,
    threshold,
    log_min_p,
    keys,
    steps,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best perturbed logit among the ids that top-k, top-p and min-p keep, and their mass."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _LOWEST, tl.float32)
    where = tl.full((BLOCK,), V, tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + lane
        z = _scaled(logits, row, ids, capacity, divisor, V, PARTS)
        is_kept = (ids < V) & (_rank(z) >= threshold) & (z - peak >= log_min_p)
        score = tl.where(is_kept, z + _noise_of(ids, keys, steps, row), _LOWEST)
        where = tl.where(score > best, ids, where)
        best = tl.maximum(score, best)
        mass += tl.where(is_kept, tl.exp(z - peak), 0.0)
    token = tl.min(tl.where(best == tl.max(best, 0), where, V), 0)
    return token, tl.sum(mass, 0)


# --- callers ----------------------------------------------------------------------------------------------------------


def _check(logits: Tensor, num_rows: Tensor, keys: Tensor, steps: Tensor, temperatures: Tensor, out: SamplerOut) -> int:
    """Return the row stride between parts of the logits; reject anything the kernels would misread."""
    parts, rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.data_ptr() % 16 == 0
    assert rows == 1 or logits.stride(1) == vocab
    assert logits.stride(2) == 1 and (parts == 1 or logits.stride(0) % vocab == 0)
    assert num_rows.dtype == torch.int32 and temperatures.dtype == torch.float32
    assert keys.dtype == torch.int64 and steps.dtype == torch.int32
    assert min(len(keys), len(steps), len(temperatures), len(out.tokens)) >= rows
    return rows if parts == 1 else logits.stride(0) // vocab


def _launch(warps: int, pdl: bool) -> dict[str, Any]:
    return {"num_warps": warps, "PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def sample(
    logits: Tensor,
    num_rows: Tensor,
    keys: Tensor,
    steps: Tensor,
    temperatures: Tensor,
    scratch: Scratch,
    out: SamplerOut,
    pdl: bool = False,
) -> None:
    """Sample one token for each of the first `num_rows` rows of `logits` into `out`; leave later rows of `out` alone.

    logits: float32 [parts, rows, vocab], summed over parts in order; may be a view of the first rows of a larger
    buffer. num_rows: int32 [1]. keys: int64 [>= rows], the bits of unsigned keys. steps: int32 [>= rows]. temperatures:
    float32 [>= rows], 0 for greedy. All are on the device and read when the kernels run.
    """
    capacity = _check(logits, num_rows, keys, steps, temperatures, out)
    parts, rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    assert len(scratch.row_peaks) >= rows and scratch.scores.shape[1] == chunks
    parts_of_row = (scratch.scores, scratch.ids, scratch.peaks, scratch.masses)
    chunk_kernel[(rows, chunks)](
        logits,
        num_rows,
        keys,
        steps,
        temperatures,
        *parts_of_row,
        capacity,
        V=vocab,
        PARTS=parts,
        CHUNK=CHUNK,
        **_launch(4, pdl),
    )
    combine_kernel[(rows,)](
        logits,
        num_rows,
        temperatures,
        *parts_of_row,
        scratch.row_peaks,
        scratch.row_log_masses,
        out.tokens,
        out.logprobs,
        out.truncated_logprobs,
        out.is_finite,
        capacity,
        V=vocab,
        PARTS=parts,
        CHUNKS=chunks,
        PADDED=triton.next_power_of_2(chunks),
        **_launch(4, pdl),
    )


def sample_truncated(
    logits: Tensor,
    num_rows: Tensor,
    keys: Tensor,
    steps: Tensor,
    temperatures: Tensor,
    scratch: Scratch,
    out: SamplerOut,
    truncation: Truncation,
    pdl: bool = False,
) -> None:
    """Resample the finite rows that are truncated; `sample` must have run just before with the same arguments.

    Temperature (above 0), top-k, top-p and min-p apply in this order, each to what the previous one kept; the most
    likely token always stays. Ids that tie with the last one kept are kept too, whereas top-p on the CPU cuts ties in
    id order. A tie exactly at the cutoff is rare and its ids are equally likely, so it is not worth a sort.
    """
    capacity = _check(logits, num_rows, keys, steps, temperatures, out)
    parts, rows, vocab = logits.shape
    assert truncation.top_ks.dtype == torch.int32
    assert truncation.top_ps.dtype == truncation.log_min_ps.dtype == torch.float32
    assert min(map(len, (truncation.top_ks, truncation.top_ps, truncation.log_min_ps))) >= rows
    truncated_kernel[(rows,)](
        logits,
        num_rows,
        keys,
        steps,
        temperatures,
        scratch.row_peaks,
        scratch.row_log_masses,
        out.tokens,
        out.logprobs,
        out.truncated_logprobs,
        out.is_finite,
        capacity,
        truncation.top_ks,
        truncation.top_ps,
        truncation.log_min_ps,
        V=vocab,
        PARTS=parts,
        BLOCK=BLOCK,
        **_launch(16, pdl),
    )
