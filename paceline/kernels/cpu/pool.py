"""Threads that share the work of one kernel. Every kernel of this folder passes its tasks to `share_out`.

    share_out(shared(task, work_ns), words, count)  ->  task(block, 0), task(block, 1) ... task(block, count - 1)

The split into tasks follows from shapes alone and every task computes outputs of its own, in its own fixed order;
threads only claim tasks. So results are the same bits for any number of threads. The caller claims tasks too: if no
other thread gets a core, it does all of them itself. A thread that finds nothing to do spins for SPIN_US, because the
next kernel of a forward is only microseconds away, and then sleeps until it is woken.

The threads are Python's, but they live inside one compiled function without the GIL. They start with the first job
worth sharing, never at import. A child process starts without threads. Nothing here may touch a number.
"""

from __future__ import annotations

import atexit
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numba
import numpy as np
from numpy.typing import NDArray

from paceline.core.cores import MAX_THREADS, auto_threads
from paceline.kernels.cpu import atomics
from paceline.kernels.cpu.jit import compile_callback, kernel

KernelTask = Callable[[int, int], int]
"""task(block, index): one piece of the job described by the words at address `block`; returns DONE."""
Shared = tuple[int, int]
"""Addresses of the threads' common state (0: no other threads) and of a compiled task."""

DONE = 1
"""A task that fails returns 0, as compiled functions do that raise."""

SPIN_US = 100.0
"""How long a thread without work stays awake: it costs a core that much after every burst of kernels."""
WORTH_NS = 8_000
"""Shorter jobs run in the caller alone: handing over costs some microseconds."""
TASK_NS = 6_000
"""Length of a task to aim at: long beside a claim (100 ns), short beside the wait for the last one."""
MAX_TASKS = 64
FMAS_PER_NS, BYTES_PER_NS = 40.0, 12.0
"""What one core does in about a nanosecond, to estimate work."""

# The common state, in bytes: every word has a cache line of its own, so that threads do not steal it from each other.
_LINE = 128
_TICKET = 0
"""Number of the job, shifted by _BITS, and the next task to claim."""
_TASK, _BLOCK, _COUNT, _MODE = (_LINE + 8 * word for word in range(4))
"""The job: a task, its block, how many there are, and how the caller rounds, which is part of the result."""
_NUM_DONE, _NUM_FAILED = 2 * _LINE, 2 * _LINE + 8
_OWNER = 3 * _LINE
"""1 while a job is under way: a second caller runs its own alone."""
_NUM_ASLEEP = 4 * _LINE
_IS_WAITING = 5 * _LINE
"""1 while the caller sleeps until the last task is done."""
_IS_OPEN = 6 * _LINE
"""0: the threads are to end."""
_SPINS = 7 * _LINE
_MUTEX, _WORK, _END = 8 * _LINE, 9 * _LINE, 10 * _LINE
_SIZE = 11 * _LINE

_BITS = 24
_CLOSED = (1 << _BITS) - 1
"""In place of the next task: the job's description is being written."""


@kernel
def _claim(state: int) -> tuple[int, int, int, int]:
    """Claim a task: its index, and task, block and count of its job; index -1 if there is none.

    The thread then rounds as the caller does.

    A thread may be slow and read the description of one job while the caller writes the next: then the ticket has
    changed, and the exchange fails.
    """
    while True:
        ticket = atomics.load(state + _TICKET)
        index = ticket & _CLOSED
        count = atomics.load(state + _COUNT)
        task = atomics.load(state + _TASK)
        block = atomics.load(state + _BLOCK)
        mode = atomics.load(state + _MODE)
        if index >= count:
            return -1, 0, 0, 0
        if atomics.exchange(state + _TICKET, ticket, ticket + 1):
            atomics.set_float_mode(mode)
            return index, task, block, count


@kernel
def _work(state: int) -> None:
    """Do tasks until there are none left to claim."""
    while True:
        index, task, block, count = _claim(state)
        if index < 0:
            return
        if atomics.call_task(task, block, index) != DONE:
            atomics.add(state + _NUM_FAILED, 1)
        if atomics.add(state + _NUM_DONE, 1) == count and atomics.load(state + _IS_WAITING):
            atomics.mutex_lock(state + _MUTEX)
            atomics.condition_signal(state + _END)
            atomics.mutex_unlock(state + _MUTEX)


@kernel
def float_mode() -> int:
    """How this thread rounds, for `set_float_mode` in another."""
    return atomics.float_mode()


@kernel
def set_float_mode(mode: int) -> None:
    atomics.set_float_mode(mode)


@kernel
def _has_work(state: int) -> bool:
    return (atomics.load(state + _TICKET) & _CLOSED) < atomics.load(state + _COUNT)


@kernel
def _serve(state: int) -> None:
    """Life of a thread: work, spin, sleep, until the pool closes."""
    while atomics.load(state + _IS_OPEN):
        _work(state)
        spins = atomics.load(state + _SPINS)
        while spins > 0 and not _has_work(state) and atomics.load(state + _IS_OPEN):
            atomics.pause()
            spins -= 1
        if spins > 0:
            continue
        atomics.mutex_lock(state + _MUTEX)
        # Counted first, checked second; the caller publishes first and counts second. So one of them sees the other.
        atomics.add(state + _NUM_ASLEEP, 1)
        while not _has_work(state) and atomics.load(state + _IS_OPEN):
            atomics.condition_wait(state + _WORK, state + _MUTEX)
        atomics.add(state + _NUM_ASLEEP, -1)
        atomics.mutex_unlock(state + _MUTEX)


@kernel
def _wake(state: int, count: int) -> None:
    """Wake at most `count` sleeping threads."""
    if atomics.load(state + _NUM_ASLEEP) > 0:
        atomics.mutex_lock(state + _MUTEX)
        for _ in range(min(count, atomics.load(state + _NUM_ASLEEP))):
            atomics.condition_signal(state + _WORK)
        atomics.mutex_unlock(state + _MUTEX)


@kernel
def _wait(state: int, count: int) -> None:
    """Wait for the tasks that others have claimed: awake for a moment, then asleep, as they may need this core."""
    spins = atomics.load(state + _SPINS)
    while spins > 0 and atomics.load(state + _NUM_DONE) < count:
        atomics.pause()
        spins -= 1
    if atomics.load(state + _NUM_DONE) == count:
        return
    atomics.mutex_lock(state + _MUTEX)
    atomics.store(state + _IS_WAITING, 1)
    while atomics.load(state + _NUM_DONE) < count:
        atomics.condition_wait(state + _END, state + _MUTEX)
    atomics.store(state + _IS_WAITING, 0)
    atomics.mutex_unlock(state + _MUTEX)


@kernel
def share_out(shared: Shared, words: NDArray[np.int64], count: int) -> None:
    """Do all `count` tasks of the job that `words` describe, in any order.

    MemoryError if one failed, as they fail for nothing else. `words` is an array, and not its address, so that numba
    keeps it until the end; whatever else it points to must outlive the call too.
    """
    state, task = shared
    block = words.ctypes.data
    if state == 0 or count < 2 or not atomics.exchange(state + _OWNER, 0, 1):
        for index in range(count):
            if atomics.call_task(task, block, index) != DONE:
                raise MemoryError("a kernel found no memory for its scratch space")
        return
    job = (atomics.load(state + _TICKET) >> _BITS) + 1
    atomics.store(state + _TICKET, job << _BITS | _CLOSED)
    atomics.store(state + _TASK, task)
    atomics.store(state + _BLOCK, block)
    atomics.store(state + _COUNT, count)
    atomics.store(state + _MODE, atomics.float_mode())
    atomics.store(state + _NUM_DONE, 0)
    atomics.store(state + _NUM_FAILED, 0)
    atomics.store(state + _TICKET, job << _BITS)
    _wake(state, count - 1)
    _work(state)
    _wait(state, count)
    num_failed = atomics.load(state + _NUM_FAILED)
    atomics.store(state + _OWNER, 0)
    if num_failed:
        raise MemoryError("a kernel found no memory for its scratch space")


@kernel
def num_tasks(num_units: int, work_ns: float) -> int:
    """How many tasks to make of a job of so many units."""
    return min(num_units, MAX_TASKS, int(work_ns / TASK_NS) + 1)


@kernel
def part_of(index: int, count: int, num_units: int) -> tuple[int, int]:
    """First unit of task `index` of `count`, and the first one behind it."""
    return index * num_units // count, (index + 1) * num_units // count


@kernel
def _spin(spins: int) -> None:
    for _ in range(spins):
        atomics.pause()


@kernel
def _prepare(state: int, spins: int) -> None:
    atomics.mutex_init(state + _MUTEX, 0)
    atomics.condition_init(state + _WORK, 0)
    atomics.condition_init(state + _END, 0)
    atomics.store(state + _SPINS, spins)
    atomics.store(state + _IS_OPEN, 1)


@kernel
def _num_jobs(state: int) -> int:
    return atomics.load(state + _TICKET) >> _BITS


@kernel
def _end(state: int) -> None:
    atomics.mutex_lock(state + _MUTEX)
    atomics.store(state + _IS_OPEN, 0)
    for _ in range(MAX_THREADS):
        atomics.condition_signal(state + _WORK)
    atomics.mutex_unlock(state + _MUTEX)


class Pool:
    """The threads of a process besides the callers'."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` counts the caller."""
        self.memory: NDArray[np.uint8] = np.zeros(_SIZE + _LINE, np.uint8)
        self.state = -(-self.memory.ctypes.data // _LINE) * _LINE
        _serve(self.state)  # compiles, and returns at once: the pool is not open yet
        _prepare(self.state, _num_spins())
        self.threads = [
            threading.Thread(target=_live, args=(self,), name=f"paceline-kernel-{i}", daemon=True)
            for i in range(1, num_threads)
        ]
        with without_signals():
            for thread in self.threads:
                thread.start()

    @property
    def num_jobs(self) -> int:
        """Jobs shared so far."""
        return _num_jobs(self.state)

    def close(self) -> None:
        """End the threads; a job under way is finished first."""
        _end(self.state)
        for thread in self.threads:
            thread.join()


def _live(pool: Pool) -> None:
    """A thread's main function: its frame keeps the pool's memory."""
    _serve(pool.state)


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads started within leave signals to the main thread: one that lands elsewhere would not end its waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def _num_spins() -> int:
    """How often to pause for SPIN_US: a pause takes 10 to 50 ns."""
    _spin(1)
    count, best = 1000, float("inf")
    for _ in range(3):
        start = time.perf_counter()
        _spin(count)
        best = min(best, time.perf_counter() - start)
    return max(int(SPIN_US * 1e-6 * count / best), 1)


# --- the pool of this process -----------------------------------------------------------------------------------------


class _Process:
    """This process's threads, and how many it may have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pool: Pool | None = None
        self._chosen: int | None = None
        self._retired: list[Pool] = []
        """A caller in another thread may still use the state of a closed pool."""
        self._is_ending = False
        self.state: int | None = None
        """Of the open pool; 0 with one thread; None before the first job worth sharing."""

    @property
    def num_threads(self) -> int:
        if platform.system() == "Windows":  # has no POSIX threads
            return 1
        return self._chosen or auto_threads()

    def choose(self, count: int | None) -> None:
        if count != self._chosen:
            self._chosen = count
            self.close()

    def open(self) -> int:
        with self._lock:
            if self.state is None:
                count = 1 if self._is_ending else self.num_threads
                self.pool = Pool(count) if count > 1 else None
                self.state = 0 if self.pool is None else self.pool.state
            return self.state

    def close(self) -> None:
        with self._lock:
            pool, self.pool, self.state = self.pool, None, None
            if pool is not None:
                pool.close()
                self._retired.append(pool)

    def end(self) -> None:
        """Before the interpreter takes down what the threads stand on."""
        self._is_ending = True
        self.close()

    def forget(self) -> None:
        """In a child of this process, which has none of its threads; one of them may have held the lock."""
        self._lock, self.pool, self.state = threading.Lock(), None, None


_process = _Process()


def set_num_threads(count: int | None) -> None:
    """Choose how many threads the kernels of this process use; None: as `auto_threads` says."""
    if count is not None and not 1 <= count <= MAX_THREADS:
        raise ValueError(f"the number of threads must be 1 to {MAX_THREADS}; got {count}")
    _process.choose(count)


def num_threads() -> int:
    """Threads that the kernels of this process use, the caller's included."""
    return _process.num_threads


def num_shared_jobs() -> int:
    """Jobs that this process's threads have shared since they started; 0 if there are none."""
    return 0 if _process.pool is None else _process.pool.num_jobs


def shared(task: KernelTask, work_ns: float) -> Shared:
    """The first argument of `share_out` for a job that one thread would do in about so much time."""
    if work_ns < WORTH_NS:
        return 0, _address(task)
    state = _process.state
    return (_process.open() if state is None else state), _address(task)


@cache
def _address(task: KernelTask) -> int:
    found: int = compile_callback(task, numba.int64(numba.int64, numba.int64)).address
    return found


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_process.forget)
atexit.register(_process.end)
