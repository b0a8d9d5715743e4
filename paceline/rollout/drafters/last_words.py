"""Interrupts a call that takes too long, or ends the process; compiled, so that it runs while C code holds the GIL.

`watch.py` runs it in a thread of its own. It counts its own naps instead of reading a clock, so that a process that was
stopped or a laptop that slept does not look like a call that hangs. It must never call back into Python.
"""

from __future__ import annotations

from typing import Any

from numba import types

from paceline.core.types import IntArray
from paceline.kernels.cpu.jit import kernel

CALL, THREAD, INTERRUPTED, PAUSES, IS_OVER = range(5)
"""The beat: the call in progress or 0, and its thread; the call that is being interrupted; how often to begin counting
anew; whether there will be no more calls."""
NUM_BEATS = 5
SLOW_US, FAST_US = 100_000, 20
"""Between interruptions, faster and faster: one of them will arrive between a drafter's attempts to catch them."""
NAP_COSTS_US = 80
"""How much longer than asked a short nap takes."""

_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
_pthread_kill: Any = types.ExternalFunction("pthread_kill", types.int32(types.uint64, types.int32))
_write: Any = types.ExternalFunction("write", types.int64(types.int32, types.voidptr, types.uint64))
_exit: Any = types.ExternalFunction("_exit", types.void(types.int32))


@kernel
def watch_calls(
    beat: IntArray,
    nap_us: int,
    num_naps: int,
    grace_us: int,
    main_thread: int,
    number: int,
    words: IntArray,
    lengths: IntArray,
    code: int,
) -> None:
    """Interrupt calls that outlast `num_naps`, by a signal of this number if they run in the main thread.

    A call that goes on for `grace_us` more ends the process: first its kind's words to stderr. Returns when it is over.
    """
    call, pauses, num_slept, grace, gap_us = 0, 0, 0, 0, SLOW_US
    while beat[IS_OVER] == 0:
        is_late = call != 0 and num_slept >= num_naps
        _usleep(gap_us if is_late else nap_us)
        if beat[CALL] != call or beat[PAUSES] != pauses:
            call, pauses, num_slept, grace, gap_us = beat[CALL], beat[PAUSES], 0, 0, SLOW_US
        elif not is_late:
            num_slept += 1
        elif grace < grace_us:
            beat[INTERRUPTED] = call
            if beat[THREAD] == main_thread:
                _pthread_kill(main_thread, number)
            grace += gap_us + NAP_COSTS_US
            gap_us = max(gap_us // 2, FAST_US)
        else:
            kind = call % len(lengths)
            _write(2, words[kind].ctypes.data, lengths[kind])
            _exit(code)
