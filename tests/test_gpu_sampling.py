"""The GPU sampler: the noise of `paceline.core.noise`, the tokens of the CPU sampler, rows that ignore each other.

Without a GPU the kernels run in Triton's interpreter on CPU tensors: slowly, so row counts are small; on a GPU they
are large. Seeds are fixed, so a result never changes by chance.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import gpu_device
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from scipy import stats

from paceline.core import noise
from paceline.core.types import Sampling
from paceline.kernels.triton import sampling as gpu
from paceline.model.mixed_sampling import MixedSampling, RowSampling, columns
from paceline.model.ops.base import Sampled
from paceline.model.ops.native import NativeOps

DEVICE, HAS_CARD = gpu_device.DEVICE, gpu_device.HAS_CARD
torch.set_num_threads(1)

Floats = NDArray[np.float32]
Keys = NDArray[np.uint64]
Steps = NDArray[np.int64]

MANY = 4000 if HAS_CARD else 16
"""Rows compared with the CPU per setting."""
NUM_DRAWS = 40_000 if HAS_CARD else 220
LIMIT = 1e-4
"""A p-value below this is a failure."""
UNTOUCHED = -77


def on_device(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def make_rows(rows: int, vocab: int, seed: int = 0, parts: int = 1) -> tuple[Floats, Keys, Steps]:
    """Random logits [parts, rows, vocab], keys of full width, steps."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (parts, rows, vocab)).astype(np.float32)
    return logits, rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 100_000, rows)


def column(values: Any, rows: int, spare: int, dtype: type = np.float32) -> torch.Tensor:
    """One number per row."""
    return on_device(np.resize(np.broadcast_to(np.asarray(values, dtype), rows), rows + spare))


def draw(
    logits: Floats, keys: Keys, steps: Steps, sampling: RowSampling, num_rows: int | None = None, spare: int = 0
) -> Sampled:
    """What the GPU sampler makes of these rows, in buffers with `spare` rows more; all of them come back."""
    parts, rows, vocab = logits.shape
    given = columns(sampling)
    buffer = torch.full((parts, rows + spare, vocab), float("nan"), device=DEVICE)
    buffer[:, :rows] = on_device(logits)
    out = gpu.SamplerOut.allocate(rows + spare, DEVICE)
    for tensor in (out.tokens, out.logprobs, out.truncated_logprobs, out.is_finite):
        tensor.fill_(UNTOUCHED)
    arguments = (
        buffer,
        torch.tensor([rows if num_rows is None else num_rows], dtype=torch.int32, device=DEVICE),
        on_device(np.resize(keys, rows + spare).view(np.int64)),
        on_device(np.resize(steps, rows + spare).astype(np.int32)),
        column(given.temperatures, rows, spare),
        gpu.Scratch.allocate(rows + spare, vocab, DEVICE),
        out,
    )
    gpu.sample(*arguments)
    if sampling.is_truncated:
        top_ks = column(given.top_ks, rows, spare, np.int32)
        gpu.sample_truncated(
            *arguments, gpu.Truncation(top_ks, *(column(own, rows, spare) for own in (given.top_ps, given.log_min_ps)))
        )
    return Sampled(*(t.cpu().numpy() for t in (out.tokens, out.logprobs, out.truncated_logprobs, out.is_finite)))


def draw_on_cpu(logits: Floats, keys: Keys, steps: Steps, sampling: RowSampling) -> Sampled:
    total = logits[0].copy()
    for part in logits[1:]:
        total += part
    return NativeOps().sample(torch.from_numpy(total), sampling, keys, steps)


def same_bits(some: Sampled, all_rows: Sampled, first: int = 0, count: int = 3) -> bool:
    """Are the first `count` rows of `some`, bit for bit, those of `all_rows` from `first` on?"""
    names = ("tokens", "logprobs", "truncated_logprobs", "is_finite")
    pairs = [(getattr(some, name)[:count], getattr(all_rows, name)[first : first + count]) for name in names]
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def log_softmax(logits: Floats, temperature: float, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Of these tokens, one per row, in double precision."""
    z = logits.astype(np.float64) / (temperature or 1.0)
    z -= z.max(axis=1, keepdims=True)
    values: NDArray[np.float64] = z[np.arange(len(z)), tokens] - np.log(np.exp(z).sum(axis=1))
    return values


# --- noise ------------------------------------------------------------------------------------------------------------


@triton.jit
def bits_kernel(keys, steps, out, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    row = tl.program_id(0)
    low, high = gpu.noise_words(tl.load(keys + row), tl.load(steps + row))
    tl.store(out + row * COUNT + ids, gpu.noise_bits(ids, low, high).to(tl.int32, bitcast=True))


@triton.jit
def gumbel_kernel(bits, out, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    tl.store(out + ids, gpu.gumbel(tl.load(bits + ids).to(tl.uint32, bitcast=True)))


def expected_bits(key: int, step: int, count: int) -> NDArray[np.uint32]:
    """The integer part of `noise.gumbel`."""
    with np.errstate(over="ignore"):
        low, high = noise.words(np.uint64(key), np.uint64(step))
        bits = np.arange(count, dtype=np.uint32) * np.uint32(noise.STRIDE) + low
        bits = noise._scramble(bits, *noise.MULTIPLIERS[:2]) ^ high
        return noise._scramble(bits, *noise.MULTIPLIERS[2:])


def gumbel_of(bits: NDArray[np.uint32]) -> Floats:
    out = torch.zeros(len(bits), device=DEVICE)
    gumbel_kernel[(1,)](on_device(bits.view(np.int32)), out, len(bits))
    values: Floats = out.cpu().numpy()
    return values


def expected_gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    uniform = np.minimum((bits + 0.5) / 2.0**32, 1 - 2.0**-24)
    values: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return values


def check_gumbel(found: Floats, expected: NDArray[np.float64]) -> None:
    """Within a few units in the last place; near 0, where -log(E) loses digits of E = 1, of the number 1."""
    unit = np.spacing(np.maximum(np.abs(expected), 1).astype(np.float32))
    assert (np.abs(found - expected) / unit).max() < 4


def test_the_integer_noise_is_bit_for_bit_that_of_the_readable_twin() -> None:
    keys = np.array([0, 1, 2**63, 2**64 - 1, *(noise.derive_key(7, "train", d, 1) for d in range(8))], np.uint64)
    steps = np.array([0, 1, 2**31 - 1, 12345] * 3, np.int32)
    out = torch.zeros((len(keys), 4096), dtype=torch.int32, device=DEVICE)
    bits_kernel[(len(keys),)](on_device(keys.view(np.int64)), on_device(steps), out, 4096)
    found = out.cpu().numpy().view(np.uint32)
    for row, key, step in zip(found, keys, steps, strict=True):
        assert (row == expected_bits(int(key), int(step), 4096)).all()
        check_gumbel(gumbel_of(row), noise.gumbel(int(key), int(step), np.arange(4096)))


def test_gumbel_is_precise_at_both_ends() -> None:
    small = np.unique((2.0 ** np.linspace(0, 31.99, 1500)).astype(np.uint32))
    near = np.arange(512, dtype=np.uint32)
    edges = np.concatenate([near, ~near, np.uint32(2**31) + near, np.uint32(2**31 - 512) + near, small, ~small])
    bits = np.resize(edges, 8192)
    found = gumbel_of(bits)
    check_gumbel(found, expected_gumbel(bits))
    assert np.isfinite(found).all() and found.max() > 22 and found.min() > -2.82


def test_the_precision_check_can_fail() -> None:
    bits = ~np.arange(1, 4096, dtype=np.uint32)
    rounded = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        imprecise = -np.log(-np.log1p(-np.minimum(rounded, np.float32(1 - 2.0**-24))))
    with pytest.raises(AssertionError):
        check_gumbel(imprecise, expected_gumbel(bits))


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
def test_tokens_and_logprobs_are_those_of_the_cpu(temperature: float) -> None:
    logits, keys, steps = make_rows(MANY, 259, seed=int(10 * temperature))
    sampling = Sampling(temperature=temperature)
    found, expected = draw(logits, keys, steps, sampling), draw_on_cpu(logits, keys, steps, sampling)
    assert (found.tokens == expected.tokens).all()
    assert found.is_finite.all()
    assert np.abs(found.logprobs - log_softmax(logits[0], temperature, found.tokens)).max() < 1e-5
    assert (found.truncated_logprobs == found.logprobs).all()
    if temperature == 0:
        assert (found.tokens == logits[0].argmax(axis=1)).all()


@pytest.mark.parametrize("vocab", [1, 2, 3, 1023, 1024, 1025, 5001, 49152])
def test_any_vocabulary_size(vocab: int) -> None:
    logits, keys, steps = make_rows(1 if vocab > 9999 and not HAS_CARD else 4, vocab, seed=vocab)
    for temperature in (0.0, 1.0) if vocab < 9999 else (1.0,):
        sampling = Sampling(temperature=temperature)
        found = draw(logits, keys, steps, sampling)
        assert (found.tokens == draw_on_cpu(logits, keys, steps, sampling).tokens).all()
        assert np.abs(found.logprobs - log_softmax(logits[0], temperature, found.tokens)).max() < 1e-5


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}], ids=str)
def test_parts_are_added_in_order(truncation: dict[str, Any]) -> None:
    logits, keys, steps = make_rows(3, 1100, parts=3)
    logits[1] *= 1000
    logits[2] -= logits[1]
    assert ((logits[0] + logits[1]) + logits[2] != logits[0] + (logits[1] + logits[2])).any(), "the order must matter"
    for parts in (2, 3):
        some = logits[:parts]
        total = some[0].copy()
        for part in some[1:]:
            total += part
        sampling = Sampling(**truncation)
        whole = draw(total[None], keys, steps, sampling)
        assert same_bits(draw(some, keys, steps, sampling, num_rows=3, spare=2), whole)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.001}], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_alone_is_the_row_among_many(parts: int, truncation: dict[str, Any]) -> None:
    rows = 64 if HAS_CARD else (3 if truncation else 17)
    logits, keys, steps = make_rows(rows, 151936 if HAS_CARD else 2500, seed=5, parts=parts)
    sampling = Sampling(temperature=0.8, **truncation)
    together = draw(logits, keys, steps, sampling)
    for first, count in ((0, 1), (2, 1), (1, 2), (0, 16), (0, 17), (5, 33)):
        if first + count <= rows:
            some = slice(first, first + count)
            assert same_bits(draw(logits[:, some], keys[some], steps[some], sampling), together, first, count)


def test_a_sum_in_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, keys, steps = make_rows(16, 2500, seed=5)
    greedy = Sampling(temperature=0)
    expected = draw(2 * logits, keys, steps, greedy)
    monkeypatch.setattr(gpu, "CHUNK", gpu.CHUNK // 2)
    found = draw(2 * logits, keys, steps, greedy)
    assert (found.tokens == expected.tokens).all() and not same_bits(found, expected, count=16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about what this test is for
@pytest.mark.parametrize("truncation", [{}, {"min_p": 0.1}], ids=str)
def test_rows_with_infinities_or_nan_are_flagged_and_others_untouched(truncation: dict[str, Any]) -> None:
    logits, keys, steps = make_rows(8, 1030)
    sampling = Sampling(**truncation)
    sound = draw(logits, keys, steps, sampling)
    poisoned = logits.copy()
    for row, (token, value) in {1: (0, np.nan), 2: (1029, np.inf), 4: (1024, -np.inf), 6: (5, -np.nan)}.items():
        poisoned[0, row, token] = value
    poisoned[0, 7] = np.nan
    found = draw(poisoned, keys, steps, sampling)
    assert found.is_finite.tolist() == [1, 0, 0, 1, 0, 1, 0, 0]
    for row in (0, 3, 5):
        for name in ("tokens", "logprobs", "truncated_logprobs"):
            assert getattr(found, name)[row] == getattr(sound, name)[row]
    assert not found.tokens[found.is_finite == 0].any() and not found.logprobs[found.is_finite == 0].any()


def test_ties_go_to_the_lowest_id() -> None:
    _, keys, steps = make_rows(4, 1)
    logits = np.zeros((1, 4, 3000), np.float32)
    logits[0, 0, [2999, 1700, 1024]] = 5
    logits[0, 1, 1:] = 2
    logits[0, 2, [1023, 1024]] = 1
    assert draw(logits, keys, steps, Sampling(temperature=0)).tokens.tolist() == [1024, 1, 1023, 0]
    # So large that the noise disappears in the rounding.
    huge = np.full((1, 4, 3000), -(2.0**40), np.float32)
    for row, tokens in enumerate(([2999, 1024], [7, 8], [0, 2048], [1023, 1024])):
        huge[0, row, tokens] = 2.0**40
    assert draw(huge, keys, steps, Sampling()).tokens.tolist() == [1024, 7, 0, 1023]
    assert draw(huge, keys, steps, Sampling(top_k=2, top_p=0.9)).tokens.tolist() == [1024, 7, 0, 1023]


@pytest.mark.parametrize("truncation", [{}, {"min_p": 0.1}], ids=str)
def test_rows_beyond_the_count_stay(truncation: dict[str, Any]) -> None:
    logits, keys, steps = make_rows(5, 300)
    sampling = Sampling(**truncation)
    whole = draw(logits, keys, steps, sampling)
    for num_rows in (0, 1, 3, 5):
        found = draw(logits, keys, steps, sampling, num_rows=num_rows, spare=2)
        for name in ("tokens", "logprobs", "truncated_logprobs", "is_finite"):
            assert (getattr(found, name)[:num_rows] == getattr(whole, name)[:num_rows]).all()
            assert (getattr(found, name)[num_rows:] == UNTOUCHED).all()


# --- truncation -------------------------------------------------------------------------------------------------------

TRUNCATIONS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.03},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "min_p": 0.2},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.4, "min_p": 0.01},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncation_keeps_what_the_cpu_keeps(truncation: dict[str, Any]) -> None:
    rows = MANY if HAS_CARD else 2
    logits, keys, steps = make_rows(rows, 259, seed=len(str(truncation)))
    sampling = Sampling(temperature=0.9, **truncation)
    found, expected = draw(logits, keys, steps, sampling), draw_on_cpu(logits, keys, steps, sampling)
    assert (found.tokens == expected.tokens).all()
    assert np.abs(found.logprobs - log_softmax(logits[0], 0.9, found.tokens)).max() < 1e-5
    # One id more or less changes the mass, and with it this number, by more.
    assert np.abs(found.truncated_logprobs - expected.truncated_logprobs).max() < 1e-5
    if truncation != {"top_k": 400}:  # more than the vocabulary
        assert (found.truncated_logprobs > found.logprobs).all()


MIXED = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=0.0, top_p=0.5),
    *(Sampling(temperature=0.9, **truncation) for truncation in TRUNCATIONS[::2]),
)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_each_row_of_a_mix_is_what_it_is_among_its_like(parts: int, seed: int) -> None:
    """Also one that is not truncated, in a launch that truncates others."""
    rows = 300 if HAS_CARD else 14
    logits, keys, steps = make_rows(rows, 2500 if HAS_CARD else 1100, seed, parts)
    mix = MixedSampling(MIXED, np.random.default_rng(seed).integers(0, len(MIXED), rows))
    found, on_cpu = draw(logits, keys, steps, mix), draw_on_cpu(logits, keys, steps, mix)
    for nth, kind in enumerate(mix.of_row.tolist()):
        row = slice(nth, nth + 1)
        for some, sampler in ((found, draw), (on_cpu, draw_on_cpu)):
            alone = sampler(logits[:, row], keys[row], steps[row], MIXED[kind])
            assert same_bits(alone, some, nth, 1), (sampler, MIXED[kind])
    assert (found.tokens == on_cpu.tokens).all()


@pytest.mark.parametrize("sampler", [draw, draw_on_cpu], ids=["gpu", "cpu"])
def test_settings_of_another_row_are_seen(sampler: Any) -> None:
    """The control: what the test above compares does tell settings apart."""
    logits, keys, steps = make_rows(6, 1100, seed=3)
    kinds = (Sampling(temperature=0.9, top_p=0.4), Sampling(temperature=0.8))
    right, wrong = (sampler(logits, keys, steps, MixedSampling(kinds, np.full(6, kind))) for kind in (0, 1))
    assert not any(same_bits(wrong, right, nth, 1) for nth in range(6) if wrong.tokens[nth] == right.tokens[nth])
    assert not (right.logprobs == wrong.logprobs).any()


def test_truncation_over_several_blocks() -> None:
    logits, keys, steps = make_rows(2, 9001)
    for truncation in ({"top_k": 500, "top_p": 0.9}, {"min_p": 0.01}):
        sampling = Sampling(temperature=1.2, **truncation)  # type: ignore[arg-type]
        found, expected = draw(logits, keys, steps, sampling), draw_on_cpu(logits, keys, steps, sampling)
        assert (found.tokens == expected.tokens).all()
        assert np.abs(found.truncated_logprobs - expected.truncated_logprobs).max() < 1e-5


def test_ids_that_tie_with_the_last_one_kept_are_kept() -> None:
    _, keys, steps = make_rows(2, 1)
    logits = np.full((1, 2, 20), -9, np.float32)
    logits[0, 0, [3, 5, 8, 11]] = [1.0, 0.0, -0.0, 0.0]
    logits[0, 1, [3, 5, 8, 11]] = [4.0, -3.5, -3.5, -3.5]
    for sampling, kept in ((Sampling(top_k=2), [3, 5, 8, 11]), (Sampling(top_p=0.9985), [3, 5, 8, 11])):
        found = draw(logits, keys, steps, sampling)
        masses = np.exp(logits[0][:, kept].astype(np.float64)).sum(axis=1)
        row = 0 if sampling.top_k else 1  # row 1's best id alone has mass 0.998 of 1
        chosen = logits[0, row, found.tokens[row]]
        assert abs(found.truncated_logprobs[row] - (chosen - np.log(masses[row]))) < 1e-5


# --- distribution -----------------------------------------------------------------------------------------------------

VOCAB = 12
SMALL = np.random.default_rng(4).normal(0, 1, VOCAB).astype(np.float32)


def fit(tokens: NDArray[np.int32], temperature: float, min_p: float = 0.0) -> float:
    """p-value of these tokens under the (truncated) softmax; 0 when one was drawn that cannot be."""
    weights = np.exp(SMALL.astype(np.float64) / temperature)
    weights[weights < min_p * weights.max()] = 0
    counts, possible = np.bincount(tokens, minlength=VOCAB), weights > 0
    if counts[~possible].any():
        return 0.0
    expected = weights[possible] / weights.sum() * len(tokens)
    return float(stats.chisquare(counts[possible], expected).pvalue)


@pytest.mark.parametrize("min_p", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_draws_follow_the_softmax(min_p: float) -> None:
    keys = np.array([noise.derive_key(0, "train", d, 0) for d in range(NUM_DRAWS)], np.uint64)
    logits = np.repeat(SMALL[None, None], NUM_DRAWS, axis=1)
    tokens = draw(logits, keys, np.zeros(NUM_DRAWS, np.int64), Sampling(min_p=min_p)).tokens
    assert fit(tokens, 1.0, min_p) > LIMIT
    assert fit(tokens, 1.8, min_p) < LIMIT, "the check must see a wrong temperature"
    assert fit(tokens, 1.0, 0.2 - min_p) < LIMIT, "and a wrong truncation"


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_graph_reads_what_is_there_when_it_runs() -> None:
    logits, keys, steps = make_rows(48, 151936, seed=1)
    rows = (on_device(keys.view(np.int64)), on_device(steps.astype(np.int32)))
    num_rows, temperature = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.ones(48, device=DEVICE)
    out, scratch = gpu.SamplerOut.allocate(48, DEVICE), gpu.Scratch.allocate(48, 151936, DEVICE)
    arguments = (on_device(logits), num_rows, *rows, temperature, scratch, out)
    gpu.sample(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.sample(*arguments)
    for count, heat in ((48, 0.7), (5, 0.0), (17, 1.3)):
        num_rows.fill_(count)
        temperature.fill_(heat)
        out.tokens.fill_(UNTOUCHED)
        graph.replay()
        expected = draw(logits, keys, steps, Sampling(temperature=heat), num_rows=count)
        assert (out.tokens.cpu().numpy() == expected.tokens).all()
        assert (out.logprobs.cpu().numpy()[:count] == expected.logprobs[:count]).all()
