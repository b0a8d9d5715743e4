"""Threads change when work happens, never a bit: the pool of the kernels, the threads of the backward, the setting."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_learner
import torch
from model_factory import ModelSpec
from numba import types
from numba.np.numpy_support import carray
from test_equality import assert_same, decoder_of, prompts_of, run

from paceline.core import cores
from paceline.core.cores import auto_threads, num_cores
from paceline.core.types import Sampling
from paceline.kernels.cpu import pool
from paceline.kernels.cpu.atomics import int64s
from paceline.kernels.cpu.jit import kernel
from paceline.kernels.cpu.linear import linear, pack
from paceline.model import task_threads
from paceline.model.backward import attention as attention_backward
from paceline.model.backward import head as head_backward
from paceline.model.backward import layer as layer_backward
from paceline.model.ops.native import NativeOps
from paceline.model.task_threads import each, each_in_order
from paceline.rl.learner import Learner
from paceline.rollout.settings import EngineSettings
from paceline.run.parts import threads_of, with_threads
from paceline.run.settings import RootSettings

NUMBERS = (1, 2, 3, 5, 16)
_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    yield
    pool.set_num_threads(None)


def for_all_numbers(compute: Callable[[], Any]) -> list[Any]:
    """The result with every number of threads; all but the first must have shared some work."""
    found = []
    for count in NUMBERS:
        pool.set_num_threads(count)
        found.append(compute())
        assert (pool.num_shared_jobs() > 0) == (count > 1)
    return found


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_has_the_same_bits(dtype: torch.dtype) -> None:
    # 700 is no multiple of a panel, and 900 rows are several blocks.
    weight, x, onto = pack(randn(700, 256).to(dtype)), randn(900, 256), randn(900, 700)
    first, *others = for_all_numbers(lambda: bits(linear(x, weight), linear(x, weight, onto.clone())))
    assert all(other == first for other in others)


def test_rows_have_the_same_bits() -> None:
    ops, x, weight = NativeOps(), randn(400, 512), randn(512)
    first, *others = for_all_numbers(lambda: bits(ops.rms_norm(x, weight, 1e-5), ops.swiglu(x)))
    assert all(other == first for other in others)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=5)])
def test_tokens_have_the_same_bits(sampling: Sampling) -> None:
    ops, logits = NativeOps(), randn(40, 3000)
    keys, steps = np.arange(40, dtype=np.uint64), np.arange(40)
    logits[3, 5] = float("nan")

    def compute() -> list[bytes]:
        found = ops.sample(logits, sampling, keys, steps)
        assert found.is_finite.sum() == 39
        scored = ops.log_probs(logits, torch.arange(40), 1.0)
        return [found.tokens.tobytes(), found.logprobs.tobytes(), found.truncated_logprobs.tobytes(), *bits(scored)]

    first, *others = for_all_numbers(compute)
    assert all(other == first for other in others)


SPEC = ModelSpec(family="qwen3", hidden_size=128, intermediate_size=384, vocab_size=512, num_layers=2)


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_an_engine_has_the_same_bits(drafter: str | None) -> None:
    """Prompt chunks, decode rows, chains and trees of drafts."""
    prompts = [prompt * 9 for prompt in prompts_of(random.Random(1), 12, SPEC.vocab_size)]
    decoder, sampling = decoder_of(SPEC), Sampling(max_new_tokens=10, ignore_eos=True)
    first, *others = for_all_numbers(lambda: run(decoder, prompts, sampling, drafter=drafter, kv_tokens=8192))
    for other in others:
        assert_same(first, other)


def test_denormals_are_flushed_by_all_threads_or_none() -> None:
    """Whether they are is a property of a thread, and part of the result."""
    pool.set_num_threads(3)
    weight, x = pack(randn(700, 256) * 1e-20), randn(900, 256) * 1e-20
    linear(x, weight)  # the threads exist already
    try:
        torch.set_flush_denormal(True)
        flushed = [linear(x, weight) for _ in range(20)]
    finally:
        torch.set_flush_denormal(False)
    assert all(not y.any() for y in flushed)
    assert all(linear(x, weight).any(dim=1).all() for _ in range(3))


# --- the learner ------------------------------------------------------------------------------------------------------


def learned() -> list[bytes]:
    learner = Learner(test_learner.make_decoder(), test_learner.SETTINGS, test_learner.SAMPLING)
    metrics = [learner.step(test_learner.one_batch()) for _ in range(2)]
    return [*bits(*learner.weights.values()), repr(metrics).encode()]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pieces as a large model has."""
    monkeypatch.setattr(layer_backward, "CHUNK_ROWS", 17)
    monkeypatch.setattr(layer_backward, "BLOCK_OUTPUTS", 13)
    monkeypatch.setattr(attention_backward, "PIECE_PAIRS", 200)
    monkeypatch.setattr(attention_backward, "MOST_PAIRS", 400)
    monkeypatch.setattr(head_backward, "BLOCK_ROWS", 11)
    monkeypatch.setattr(head_backward, "BLOCK_TOKENS", 7)


@pytest.mark.usefixtures("small_pieces")
def test_a_learner_has_the_same_bits() -> None:
    found = []
    for count in NUMBERS:
        pool.set_num_threads(count)
        found.append(learned())
    assert all(other == found[0] for other in found)


@pytest.mark.slow
def test_a_learner_has_the_same_bits_where_torch_may_use_every_core() -> None:
    """A new thread takes its number of OpenMP threads from the process, and this test run allows only one."""
    environment = {key: value for key, value in os.environ.items() if key != "MKL_NUM_THREADS"}
    name = f"{__file__}::{test_a_learner_has_the_same_bits.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    environment["OMP_NUM_THREADS"] = "2"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.usefixtures("small_pieces")
def test_control_a_split_that_depends_on_the_threads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def row_chunks(forward: Any) -> list[slice]:
        num_rows, count = forward.packed.row_starts[-1], pool.num_threads() + 1
        return [slice(i * num_rows // count, (i + 1) * num_rows // count) for i in range(count)]

    monkeypatch.setattr(layer_backward.Forward, "row_chunks", row_chunks)
    pool.set_num_threads(1)
    one = learned()
    pool.set_num_threads(2)
    assert learned() != one


# --- the pool ---------------------------------------------------------------------------------------------------------


def count_up(block: int, index: int) -> int:
    """Add to the cell of this task, sometimes after a while, as if this thread had lost its core."""
    words = carray(int64s(block), 3)
    cells = carray(int64s(words[0]), words[1])
    if (index + words[2]) % 7 == 3:
        _usleep(50)
    cells[index] += 1
    return 1


def fail_at_three(block: int, index: int) -> int:
    if index == 3:
        raise MemoryError("no memory")
    return 1


@kernel
def run_job(to: pool.Shared, cells: Any, salt: int) -> None:
    words = np.empty(3, np.int64)
    words[0], words[1], words[2] = cells.ctypes.data, len(cells), salt
    pool.share_out(to, words, len(cells))


@pytest.mark.parametrize("num_threads", [2, 16])
def test_every_task_runs_once_however_late_a_thread_is(num_threads: int) -> None:
    pool.set_num_threads(num_threads)
    to = pool.shared(count_up, 1e9)
    draw = random.Random(num_threads)
    for job in range(400):
        cells = np.zeros(draw.randrange(1, 40), np.int64)
        run_job(to, cells, job)
        assert (cells == 1).all()


def test_callers_in_several_threads_do_not_meet() -> None:
    pool.set_num_threads(3)
    weight, x = pack(randn(300, 256)), randn(200, 256)
    expected, found = bits(linear(x, weight)), list[bool]()

    def call() -> None:
        found.append(all(bits(linear(x, weight)) == expected for _ in range(50)))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_task_that_fails_is_an_error_and_ends_nothing(num_threads: int) -> None:
    pool.set_num_threads(num_threads)
    cells = np.zeros(20, np.int64)
    with pytest.raises(MemoryError, match="scratch"):
        run_job(pool.shared(fail_at_three, 1e9), cells, 0)
    run_job(pool.shared(count_up, 1e9), cells, 0)
    assert (cells == 1).all()


def test_a_child_has_threads_of_its_own() -> None:
    pool.set_num_threads(3)
    weight, x = pack(randn(700, 256)), randn(900, 256)
    expected = bits(linear(x, weight))
    child = os.fork()
    if child == 0:
        try:
            own = threading.active_count() == 1 and pool.num_shared_jobs() == 0
            is_same = bits(linear(x, weight)) == expected and each(str, range(9)) == [str(i) for i in range(9)]
            os._exit(0 if own and is_same and pool.num_shared_jobs() == 1 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert bits(linear(x, weight)) == expected


def test_ctrl_c_ends_the_loop_and_leaves_the_threads_usable() -> None:
    pool.set_num_threads(3)
    weight, x = pack(randn(700, 256)), randn(900, 256)
    expected = bits(linear(x, weight))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            linear(x, weight)
    assert bits(linear(x, weight)) == expected


def test_idle_threads_use_no_core() -> None:
    pool.set_num_threads(5)
    weight, x = pack(randn(700, 256)), randn(900, 256)
    linear(x, weight)
    each(str, range(20))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


ALONE = """
import os, threading, torch
import paceline.kernels.cpu.sampling
from paceline.kernels.cpu import pool
from paceline.kernels.cpu.linear import linear, pack
pool.set_num_threads(4)
threads = lambda: sum(thread.name.startswith("paceline") for thread in threading.enumerate())
assert threads() == 0
linear(torch.ones(1, 8), pack(torch.ones(8, 8)))
assert threads() == 0, "a small job starts none"
linear(torch.ones(900, 256), pack(torch.ones(700, 256)))
assert threads() == 3
if os.environ["END"] == "raise":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(("end", "code"), [("fall through", 0), ("raise", 7)])
def test_threads_start_with_the_first_large_job_and_end_with_the_process(end: str, code: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", ALONE], env={**os.environ, "END": end}, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (code, "")


# --- threads for torch ------------------------------------------------------------------------------------------------


def test_results_are_taken_in_order_and_not_too_far_ahead() -> None:
    pool.set_num_threads(4)
    taken, begun, most = list[int](), list[int](), list[int]()

    def compute(item: int) -> int:
        begun.append(item)
        most.append(len(begun) - len(taken))
        time.sleep(0.01 if item == 0 else 0.0)
        return item

    each_in_order(compute, range(60), taken.append)
    assert taken == list(range(60))
    assert max(most) <= 4 * task_threads.MOST_AHEAD + 1
    assert each(lambda item: item * item, range(5)) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("culprit", ["function", "take"])
def test_an_error_in_any_thread_is_raised_here(culprit: str) -> None:
    pool.set_num_threads(3)
    done: list[int] = []

    def compute(item: int) -> int:
        time.sleep(0.001)
        if culprit == "function" and item == 5:
            raise ValueError("five")
        return item

    def take(item: int) -> None:
        if culprit == "take" and item == 5:
            raise ValueError("five")
        done.append(item)

    with pytest.raises(ValueError, match="five"):
        each_in_order(compute, range(1000), take)
    assert len(done) < 100, "nothing further begins"
    assert each(lambda item: item + 1, range(4)) == [1, 2, 3, 4]


def test_helpers_compute_as_the_caller_does() -> None:
    pool.set_num_threads(4)

    def look(_: int) -> tuple[bool, bool]:
        time.sleep(0.002)
        return torch.is_grad_enabled(), float(torch.tensor(5e-39) * 1.0) == 0

    with torch.no_grad():
        try:
            torch.set_flush_denormal(True)
            assert set(each(look, range(20))) == {(False, True)}
        finally:
            torch.set_flush_denormal(False)
    assert set(each(look, range(20))) == {(True, False)}


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"), [("max 100000", 8), ("150000 100000", 1), ("300000 100000", 3), ("nonsense", 8)]
)
def test_a_container_limits_the_cores(
    content: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(content)
    assert num_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("has", "processes", "limit", "expected"),
    [
        (1, 1, None, 1),
        (2, 1, None, 2),
        (8, 1, None, 7),
        (8, 2, None, 3),
        (2, 4, None, 1),
        (8, 1, "2", 2),
        (8, 1, "", 7),
    ],
)
def test_auto_shares_the_cores(
    has: int, processes: int, limit: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: has)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert auto_threads(processes) == expected


def settings_of(**sections: dict[str, Any]) -> RootSettings:
    return RootSettings.model_validate(sections)


def test_the_processes_of_a_run_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of(settings_of()) == 8
    assert threads_of(settings_of(fleet={"workers": 2})) == 4
    assert threads_of(settings_of(fleet={"workers": 2, "in_process": True})) == 8
    assert threads_of(settings_of(engine={"threads": 3}, fleet={"workers": 2})) == 3
    assert with_threads(settings_of(fleet={"workers": 4})).engine.threads == 2


@pytest.mark.parametrize("value", [0, -1, 257, "many"])
def test_other_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="threads"):
        EngineSettings(threads=value)
