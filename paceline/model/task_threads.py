"""Threads for pieces of torch work: the backward's chunks of rows, blocks of a product, texts of an attention.

    each(function, items)                   [function(item) for item in items]
    each_in_order(function, items, take)    take(function(item)) for every item, in order, whoever computed it

Items follow from shapes alone and sums are taken in their order, so that a result is the same bits for any number of
threads. The caller works too, and waits for nothing that has not begun. torch runs every operation on one thread. Used
by `backward/` on a CPU; the number of threads is that of the kernels (`kernels/cpu/pool.py`), whose threads sleep
meanwhile. A task must not call `each` itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from paceline.kernels.cpu.pool import float_mode, num_threads, set_float_mode, without_signals

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")

_own = threading.local()
MOST_AHEAD = 2
"""Results per thread that may wait for an earlier one: each may be as large as a layer's gradients."""


def each(function: Callable[[_Input], _Output], items: Sequence[_Input]) -> list[_Output]:
    """All results, in the order of the items."""
    found: list[_Output] = []
    each_in_order(function, items, found.append, most_ahead=len(items))
    return found


def each_in_order(
    function: Callable[[_Input], _Output],
    items: Sequence[_Input],
    take: Callable[[_Output], object],
    most_ahead: int | None = None,
) -> None:
    """`take` every result in the order of the items, one at a time. The first error ends it and is raised here."""
    count = min(num_threads(), len(items))
    if count < 2:
        for item in items:
            take(function(item))
        return
    job = _Job(function, items, take, MOST_AHEAD * count if most_ahead is None else most_ahead)
    helpers = _helpers.start(job.help, count - 1)
    try:
        job.work()
    finally:
        job.stop()
        # One that has not begun finds nothing to do; one that has may still write to our tensors.
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    if job.error is not None:
        raise job.error


class _Job(Generic[_Input, _Output]):
    """The items of one call, and who is where."""

    def __init__(
        self,
        function: Callable[[_Input], _Output],
        items: Sequence[_Input],
        take: Callable[[_Output], object],
        most_ahead: int,
    ) -> None:
        self._function, self._items, self._take, self._most_ahead = function, items, take, most_ahead
        self._next = self._num_taken = 0
        self._done: dict[int, _Output] = {}
        self._is_taking = False
        self._changed = threading.Condition()
        self._mode, self._has_gradients = float_mode(), torch.is_grad_enabled()
        self._torch_threads = torch.get_num_threads()
        self.error: BaseException | None = None

    def help(self) -> None:
        """Work in another thread, which computes as the caller does."""
        set_float_mode(self._mode)
        if getattr(_own, "torch_threads", None) != self._torch_threads:
            # A new thread may use every core until it is told otherwise, and a sum over several has other bits.
            _own.torch_threads = self._torch_threads
            torch.set_num_threads(self._torch_threads)
        with torch.set_grad_enabled(self._has_gradients):
            try:
                self.work()
            except BaseException as error:
                self._fail(error)

    def work(self) -> None:
        """Do items until there are none left to begin."""
        while (index := self._claim()) is not None:
            self._note(index, self._function(self._items[index]))

    def stop(self) -> None:
        """Begin no further item."""
        with self._changed:
            self._next = len(self._items)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.stop()

    def _claim(self) -> int | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._next >= len(self._items) or self._next < self._num_taken + self._most_ahead
            )
            if self._next >= len(self._items):
                return None
            self._next += 1
            return self._next - 1

    def _note(self, index: int, result: _Output) -> None:
        """Keep a result until its turn; whoever finds the next one there takes it, without holding up the others."""
        with self._changed:
            self._done[index] = result
            if self._is_taking:
                return
            self._is_taking = True
        while True:
            with self._changed:
                if self._num_taken not in self._done:
                    self._is_taking = False
                    return
                following = self._done.pop(self._num_taken)
            self._take(following)
            with self._changed:
                self._num_taken += 1
                self._changed.notify_all()


class _Helpers:
    """The threads besides the callers'; they wait in a queue, which costs no CPU time."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def start(self, work: Callable[[], None], count: int) -> list[Future[None]]:
        if self._executor is None or self._size < count:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            self._executor, self._size = ThreadPoolExecutor(count, thread_name_prefix="paceline-torch"), count
        with without_signals():
            return [self._executor.submit(work) for _ in range(count)]

    def forget(self) -> None:
        """In a child of this process, which has none of its threads."""
        self._executor = None


_helpers = _Helpers()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_helpers.forget)
