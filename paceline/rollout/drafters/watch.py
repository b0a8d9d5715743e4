"""Watches the calls to one user's drafter: interrupts one that takes too long, and ends the process if that fails.

A call costs a few writes to a shared array. A compiled thread (`last_words.py`) looks at it now and then. When the same
call has lasted too long, the calling thread raises `Overdue` inside the drafter: by a signal if that is the main
thread, so that a wait ends too, otherwise by Python's exception for other threads. It raises it again and again,
because a drafter may catch it. If the call lasts on all the same, as it may in C code, the process ends.

Only naps are counted: neither a stopped process nor one in a debugger is overdue. Only calls to drafters are watched,
so the engine may compile for as long as it likes. Made by `guest.py`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from paceline.core.plugins import walk_up

T = TypeVar("T")

OVERDUE_SIGNAL = signal.SIGVTALRM
"""Hardly anybody uses it."""
EXIT_CODE = 1
GRACE_S = 10.0
"""How long to go on interrupting a call before the process ends."""
_CALL, _THREAD, _INTERRUPTED, _PAUSES, _IS_OVER = range(5)
"""As in `last_words.py`, which takes a second to import."""
_LONGEST_NAP_S = 1.0
_NAPS_PER_LIMIT = 20
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy")


class Overdue(BaseException):
    """Raised inside a drafter that takes too long; no Exception, which it might catch."""


class Watch:
    """`begin` before each call, `end` after it. The calling thread may change, but calls may not overlap."""

    def __init__(self, limit_s: float, words: Sequence[str]) -> None:
        """`words[kind]` are the last words if a call of that kind hangs."""
        self._limit_s, self._words = limit_s, words
        self._beat = np.zeros(5, np.int64)
        self._cells = self._beat.data  # faster to write to
        self._serial = 0
        self._lock = threading.Lock()
        self._has_begun = self._has_thrown = False

    def prepare(self) -> None:
        """Start watching, before the first call."""
        if not self._has_begun:
            self._has_begun = True
            self._start()

    def begin(self, kind: int) -> None:
        self._serial += len(self._words)
        self._cells[_THREAD] = threading.get_ident()
        self._cells[_CALL] = self._serial + kind

    def end(self) -> bool:
        """Returns whether the call was interrupted; may be called again."""
        is_interrupted = self._cells[_INTERRUPTED] >= self._serial
        self._cells[_CALL] = 0
        if self._has_thrown:
            with self._lock:  # what was on its way to this thread must not reach anybody else
                self._has_thrown = False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)
        return is_interrupted

    def close(self) -> None:
        """Let both threads end."""
        self._cells[_IS_OVER] = 1

    @property
    def is_interrupting(self) -> bool:
        return self._cells[_INTERRUPTED] == self._cells[_CALL] != 0

    # --- the threads --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from paceline.rollout.drafters.last_words import watch_calls  # compiles, or loads what was compiled

        _watches.add(self)
        main_thread = (threading.main_thread().ident or 0) if _listen() else 0
        lines = [np.frombuffer(text.encode(), np.uint8) for text in self._words]
        words = np.zeros((len(lines), max(map(len, lines))), np.uint8)
        for row, line in zip(words, lines, strict=True):
            row[: len(line)] = line
        lengths = np.array([len(line) for line in lines], np.int64)
        naps = round(1e6 * self._nap_s), round(self._limit_s / self._nap_s), round(1e6 * GRACE_S)
        given: Any = (*naps, main_thread, int(OVERDUE_SIGNAL), words, lengths, EXIT_CODE)
        # Loaded here, by a call that returns at once: while it compiles, it would hold the GIL for a second.
        watch_calls(np.ones_like(self._beat), *given)
        threading.Thread(target=watch_calls, args=(self._beat, *given), daemon=True, name="drafter watch").start()
        threading.Thread(target=self._look, daemon=True, name="drafter interrupts").start()

    @property
    def _nap_s(self) -> float:
        return min(self._limit_s / _NAPS_PER_LIMIT, _LONGEST_NAP_S)

    def _look(self) -> None:
        """What only Python can do: notice a debugger, and throw exceptions into other threads than the main one."""
        call = num_naps = 0
        while not self._cells[_IS_OVER]:
            time.sleep(self._nap_s)
            if self._cells[_CALL] != call:
                call, num_naps = self._cells[_CALL], 0
            num_naps += 1
            if call and num_naps > _NAPS_PER_LIMIT / 2 and _is_debugged(self._cells[_THREAD]):
                self._cells[_PAUSES] += 1
                num_naps = 0
            elif self.is_interrupting:
                self._throw(call)

    def _throw(self, call: int) -> None:
        with self._lock:
            self._has_thrown = True  # first: `end` writes before it reads this, so that one of the two notices
            thread = self._cells[_THREAD]
            if self._cells[_CALL] == call and not (thread == threading.main_thread().ident and _is_listening()):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Overdue))
            else:
                self._has_thrown = False


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def run_inside(call: Callable[..., T], *given: Any) -> T:
    """Make a drafter's call; `Overdue` is raised only below this function, never in the engine."""
    return call(*given)


def _raise_inside(number: int, frame: FrameType | None) -> None:
    """Handles the signal in the main thread; one that comes after the end of its call, or during itself, is ignored."""
    codes = (above.f_code for above in walk_up(frame))
    innermost = next((code for code in codes if code in (run_inside.__code__, _raise_inside.__code__)), None)
    if innermost is run_inside.__code__ and any(watch.is_interrupting for watch in _watches):
        raise Overdue


def _listen() -> bool:
    """Install the handler; returns whether it is, because only the main thread can and a user's own has priority."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(OVERDUE_SIGNAL) is signal.SIG_DFL:
        signal.signal(OVERDUE_SIGNAL, _raise_inside)
    return _is_listening()


def _is_listening() -> bool:
    return signal.getsignal(OVERDUE_SIGNAL) is _raise_inside


def _is_debugged(thread: int) -> bool:
    """Whether a debugger is at work in the thread: then the user takes the time."""
    modules = (str(frame.f_globals.get("__name__")) for frame in walk_up(sys._current_frames().get(thread)))
    return any(module.partition(".")[0] in _DEBUGGERS for module in modules)
