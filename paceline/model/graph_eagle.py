"""EAGLE-3 drafting on a GPU: the kernels and buffers it adds to a step, over which graphs are captured.

Within a step of the policy (`keep`) it taps the hidden states and writes the drafter's keys and values for all rows.
After the step (`draft`), for each of its first sequences, it starts at the last accepted row, as found by
`cursor.judge`, and guesses a chain with the policy's own noise: one pass of the drafter's layer per guess, each with
its runners-up. The host is not involved: the GPU knows where each sequence stands. The host reads the guesses with the
tokens, or later. Called by `graphs.py`; the CPU twin is `rollout/drafters/eagle.py`. Never writes to any cache layer
but the drafter's own.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.limits import MAX_GUESS_WIDTH, MAX_GUESSES
from paceline.kernels.triton.attention import HIGH_CHAINS, LOW, LOW_CHAINS, PAGE
from paceline.kernels.triton.sampling import gumbel, noise_bits, noise_words
from paceline.model.eagle.layer import EagleLayer, Tapped
from paceline.model.executor import Guess, StepInput
from paceline.model.gpu.cache import GpuCache
from paceline.model.gpu.staging import DeviceRows, Staging
from paceline.model.ops.gpu import GpuOps
from paceline.model.rows import Rows

MOST_TAUS = 8
FIELDS = MOST_TAUS + 2 * MAX_GUESS_WIDTH
"""Per guess: the token sampled with every divisor, the chosen divisor's best tokens, their scores."""
SAMPLE_BLOCK = 1024

_PAGE, _WIDTH = tl.constexpr(PAGE), tl.constexpr(MAX_GUESS_WIDTH)
_LOWEST, _NO_TOKEN = tl.constexpr(float("-inf")), tl.constexpr(2**31 - 1)


@triton.jit
def _next_ids_kernel(sampled, given, entries, num_sampled, next_ids):
    """The token after each row: the one sampled there, or the next one of its text as given by the host."""
    row = tl.program_id(0)
    token = tl.load(given + row)
    if row < tl.load(num_sampled):
        token = tl.load(sampled + row)
    tl.store(next_ids + row, tl.where(tl.load(entries + row) >= 0, token, 0))


@triton.jit(do_not_specialize=["table_length", "at"])
def _place_kernel(
    entries,
    policy_contexts,
    policy_starts,
    policy_steps,
    accepted,
    tables,
    positions,
    contexts,
    slots,
    steps,
    table_length,
    at,
):
    """Place one entry's row, `at` positions after the last accepted one, and find the noise step of its guess.

    The policy's positions are read on the GPU, because the step may itself follow one that the host has not seen.
    """
    entry = tl.program_id(0)
    if tl.load(entries + entry) >= 0:
        num_accepted = tl.load(accepted + entry)
        position = tl.load(policy_contexts + entry) + num_accepted + at
        page = tl.load(tables + entry.to(tl.int64) * table_length + position // _PAGE)
        tl.store(positions + entry, position)
        tl.store(contexts + entry, position)
        tl.store(slots + entry, page * _PAGE + position % _PAGE)
        first = tl.load(policy_steps + tl.load(policy_starts + entry))
        tl.store(steps + entry, first + num_accepted + 1 + at)


@triton.jit
def _extract(score, token):
    """The best score, its token (the lowest of equals), and the scores without it."""
    top = tl.max(score, 0)
    found = tl.min(tl.where(score == top, token, _NO_TOKEN), 0)
    return top, found, tl.where((score == top) & (token == found), _LOWEST, score)


@triton.jit
def _sample_kernel(
    logits,
    ids,
    keys,
    steps,
    divisors,
    chosen,
    best,
    where,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    TAUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of a row: the best perturbed logit for every divisor (0: no noise), and the chosen divisor's best four.

    A row has many chunks: with few sequences, one program per row would leave most multiprocessors idle.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, tau = chunk * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAUS)
    divisor = tl.load(divisors + tau)
    is_noisy = divisor > 0
    scale = tl.where(is_noisy, 1 / tl.where(is_noisy, divisor, 1.0), 1.0)
    low, high = noise_words(tl.load(keys + row), tl.load(steps + row))
    is_chosen = tau == tl.load(chosen)
    token = tl.load(ids + at, mask=at < V, other=_NO_TOKEN)
    raw = tl.load(logits + row * V + at, mask=at < V, other=_LOWEST)
    raw = tl.where(raw == raw, raw, _LOWEST)  # whatever a drafter computes, it must sample a valid token
    noise = gumbel(noise_bits(token, low, high))
    score = raw[None, :] * scale[:, None] + tl.where(is_noisy[:, None], noise[None, :], 0.0)
    own = (row * CHUNKS + chunk) * (TAUS + _WIDTH)
    tops = tl.max(score, 1)
    tl.store(best + own + tau, tops)
    tl.store(where + own + tau, tl.min(tl.where(score == tops[:, None], token[None, :], _NO_TOKEN), 1))
    left = tl.sum(tl.where(is_chosen[:, None], score, 0.0), 0)
    for rank in tl.static_range(_WIDTH):
        top, found, left = _extract(left, token)
        tl.store(best + own + TAUS + rank, top)
        tl.store(where + own + TAUS + rank, found)


@triton.jit(do_not_specialize=["taken_stride"])
def _merge_kernel(
    best,
    where,
    guesses,
    taken,
    taken_stride,
    CHUNKS: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    TAUS: tl.constexpr,
):
    """One row: the best over its chunks; for the chosen divisor the best four, with their scores."""
    row = tl.program_id(0).to(tl.int64)
    tau, chunk = tl.arange(0, TAUS), tl.arange(0, MOST_CHUNKS)
    first_of = (row * CHUNKS + chunk) * (TAUS + _WIDTH)
    inside = chunk < CHUNKS
    score = tl.load(best + first_of[None, :] + tau[:, None], mask=inside[None, :], other=_LOWEST)
    token = tl.load(where + first_of[None, :] + tau[:, None], mask=inside[None, :], other=_NO_TOKEN)
    winner = tl.min(tl.where(score == tl.max(score, 1)[:, None], token, _NO_TOKEN), 1)
    own = guesses + row * (TAUS + 2 * _WIDTH)
    tl.store(own + tau, winner)
    flat = tl.arange(0, MOST_CHUNKS * _WIDTH)
    at = (row * CHUNKS + flat // _WIDTH) * (TAUS + _WIDTH) + TAUS + flat % _WIDTH
    left = tl.load(best + at, mask=flat // _WIDTH < CHUNKS, other=_LOWEST)
    tokens = tl.load(where + at, mask=flat // _WIDTH < CHUNKS, other=_NO_TOKEN)
    first = tl.max(left, 0)
    for rank in tl.static_range(_WIDTH):
        top, found, left = _extract(left, tokens)
        part = 0.5 / (1 + first - (tl.max(left, 0) if rank == 0 else top))
        tl.store(own + TAUS + rank, found)
        tl.store(own + TAUS + _WIDTH + rank, (1 - part if rank == 0 else part / rank).to(tl.int32, bitcast=True))
        tl.store(taken + rank * taken_stride + row, found)


def sample_guesses(
    logits: Tensor,
    ids: Tensor,
    keys: Tensor,
    steps: Tensor,
    divisors: Tensor,
    chosen: Tensor,
    guesses: Tensor,
    taken: Tensor,
) -> None:
    """Fill `guesses` and `taken` for every row of the logits; `kernels/cpu/sampling.sample_drafts` is the twin."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, SAMPLE_BLOCK)
    shape = (num_rows, num_chunks, MOST_TAUS + MAX_GUESS_WIDTH)
    best, where = (torch.empty(shape, dtype=kind, device=logits.device) for kind in (torch.float32, torch.int32))
    _sample_kernel[(num_rows, num_chunks)](
        logits, ids, keys, steps, divisors, chosen, best, where, vocab_size, num_chunks, MOST_TAUS, SAMPLE_BLOCK,
        num_warps=4,
    )  # fmt: skip
    most = triton.next_power_of_2(num_chunks)
    _merge_kernel[(num_rows,)](best, where, guesses, taken, taken.stride(0), num_chunks, most, MOST_TAUS, num_warps=4)


class DeviceGuesses:
    """See `executor.Guessed`: guesses in transit from the GPU."""

    def __init__(self, event: Any, inbox: Tensor, num_entries: int, chosen: int) -> None:
        self.num_entries, self.depth, self.chosen = num_entries, len(inbox), chosen
        self._event, self._inbox = event, inbox
        self._found: NDArray[np.int32] | None = None

    def of(self, entry: int) -> Guess:
        if self._found is None:
            self._event.synchronize()
            # Copy, because the buffer is reused.
            self._found = self._inbox.numpy().copy()
        own, ranked = self._found[:, entry], slice(MOST_TAUS, MOST_TAUS + MAX_GUESS_WIDTH)
        return Guess(own[:, :MOST_TAUS], own[:, ranked], own[:, ranked.stop :].view(np.float32))


class DeviceEagle:
    """One drafter's buffers for one decoder's graphs."""

    def __init__(self, layer: EagleLayer, num_layers: int, staging: Staging, cache: GpuCache, num_buffers: int) -> None:
        assert isinstance(layer.ops, GpuOps)
        self.layer, self._ops = layer, layer.ops
        config, limits, device = layer.eagle.config, staging.limits, layer.ops.device
        rows = limits.rows
        self.taps = Tapped(num_layers, rows, config.target_hidden_size, device, torch.bfloat16)
        self._cache, self._policy = cache, staging
        # A guess may extend one page past its sequence's pages, and past the context.
        wider = replace(limits, pages_per_sequence=limits.pages_per_sequence + 1)
        self._staging = Staging(wider, config.num_heads, config.head_dim, device, num_buffers, lender=staging)
        # One row of each sequence.
        self._kinds = (LOW_CHAINS if config.num_heads <= LOW * config.num_kv_heads else HIGH_CHAINS,)
        self._kept = torch.zeros(rows, config.hidden_size, device=device)
        self._next_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._ids = layer.eagle.draft_ids.to(device, torch.int32)
        self._known_divisors: list[float] = []
        self._known_chosen = 0
        self._divisors = torch.zeros(MOST_TAUS, device=device)
        self._chosen = torch.zeros(1, dtype=torch.int32, device=device)
        self._steps = torch.zeros(rows, dtype=torch.int32, device=device)
        self.taken = torch.zeros(MAX_GUESSES, MAX_GUESS_WIDTH, rows, dtype=torch.int32, device=device)
        size = MAX_GUESSES * rows * FIELDS
        self._guesses = torch.zeros(size, dtype=torch.int32, device=device)
        self._inboxes = [torch.zeros(size, dtype=torch.int32, pin_memory=device != "cpu") for _ in range(num_buffers)]

    @property
    def num_bytes(self) -> int:
        """GPU memory without weights."""
        tensors = (self._kept, self._next_ids, self._ids, self._steps, self.taken, self._guesses)
        return self.taps.states.nbytes + self._staging.num_bytes + sum(tensor.nbytes for tensor in tensors)

    def keep(self, rows: DeviceRows, sampled: Tensor) -> None:
        """Runs after the policy's layers and sampler; `sampled` holds the tokens of the sampled rows."""
        count = len(rows)
        next_ids = self._next_ids[:count]
        _next_ids_kernel[(count,)](sampled, rows.next_ids, rows.entries, rows.num_sampled, next_ids, num_warps=1)
        self._kept[:count] = self.layer.keep(self.taps.states[None, :count], next_ids, rows, self._cache)

    def fill(self, step: StepInput, bucket: int, depth: int, divisors: list[float], chosen: int) -> None:
        """Send the input of the guesses after a step; the rest is already on the GPU."""
        # The host blocks on such a copy, so send one per temperature and none per choice.
        if divisors != self._known_divisors:
            self._known_divisors = divisors
            self._divisors.copy_(torch.tensor(divisors + divisors[-1:] * (MOST_TAUS - len(divisors))))
        if chosen != self._known_chosen:
            self._known_chosen = chosen
            self._chosen.fill_(chosen)
        rows, firsts = _first_rows(step, self._cache.num_pages)
        slack = np.diff(step.rows.row_starts)[: len(rows)] - 1 + depth
        if step.overlap is not None:
            slack += step.overlap.slack[: len(rows)]
        work = self._ops.plan_work(rows, self.layer.eagle.config, slack.astype(np.int32))
        steps = np.zeros(len(rows), np.int64)
        self._staging.fill(rows, work, bucket, self._cache.scratch_slot, len(rows), 0, step.keys[firsts], steps)

    def clear(self, bucket: int) -> None:
        """Prepare a draft without sequences."""
        self._staging.clear(bucket, self._cache.scratch_slot)

    def draft(self, num_entries: int, depth: int) -> None:
        """Guess a chain for each of the first entries of the policy's step."""
        rows, policy = self._staging.rows(num_entries, self._kinds), self._policy.rows(self._policy.limits.rows)
        firsts = policy.row_starts[:num_entries] + policy.landed[:num_entries]
        x = self._kept.index_select(0, firsts.clamp(0, len(self._kept) - 1))
        ids = policy.last[:num_entries]
        guesses = _shaped(self._guesses, num_entries, depth)
        for at in range(depth):
            _place_kernel[(num_entries,)](
                rows.entries, policy.contexts, policy.row_starts, policy.steps, policy.accepted, rows.tables,
                rows.positions, rows.contexts, rows.slots, self._steps, rows.tables.stride(0), at, num_warps=1,
            )  # fmt: skip
            x, logits = self.layer.advance(x, ids, rows, self._cache)
            taken = self.taken[at]
            sample_guesses(logits, self._ids, rows.keys, self._steps, self._divisors, self._chosen, guesses[at], taken)
            ids = taken[0, :num_entries]

    def fetch(self, slot: int, bucket: int, num_entries: int, depth: int, chosen: int, event: Any) -> DeviceGuesses:
        """Start copying the guesses to the host, in one piece: the host blocks on a copy of several."""
        inbox, size = self._inboxes[slot], depth * bucket * FIELDS
        inbox[:size].copy_(self._guesses[:size], non_blocking=True)
        event.record()
        return DeviceGuesses(event, _shaped(inbox, bucket, depth), num_entries, chosen)


def _shaped(guesses: Tensor, num_entries: int, depth: int) -> Tensor:
    """[depth, entries, fields]"""
    return guesses[: depth * num_entries * FIELDS].view(depth, num_entries, FIELDS)


def _first_rows(step: StepInput, scratch_page: int) -> tuple[Rows, NDArray[np.int32]]:
    """One row per draftable sequence, placed at its first row in the step, and the indices of those first rows.

    Missing pages map to the scratch page: a guess may extend past a sequence's reserved pages.
    """
    count, given = step.num_draftable, step.rows
    contexts, nothing = given.contexts[:count], np.zeros(count, np.int32)
    width = given.page_tables.shape[1] + 1
    tables = np.full((count, width), scratch_page, np.int32)
    tables[:, :-1] = np.where(
        np.arange(width - 1) < given.num_pages[:count, None], given.page_tables[:count], scratch_page
    )
    rows = Rows(
        nothing,
        contexts,
        nothing - 1,
        np.arange(count + 1, dtype=np.int32),
        contexts,
        np.zeros(count, np.bool_),
        tables,
        given.page_size,
        given.num_pages[:count] + 1,
    )
    return rows, given.row_starts[:count]
