"""Signals that ask a process to end: Ctrl-C (SIGINT), SIGTERM from a scheduler, SIGHUP from a terminal that closes.

    with Interrupts(note, grace_s) as run.interrupts: run.train()

A signal raises `Interrupted` where that is safe. `loop.py` marks the part of a step where it would leave half an
update: there it waits, for SIGTERM and SIGHUP at most `grace_s`. A deliberate second Ctrl-C does not wait either.
Signals close after one another count as one, as from a key that is held down or from a terminal and a scheduler
together. What follows an `Interrupted`, saving and cleaning up, is never interrupted. The `paceline` command has one of
its own, for whatever runs outside of a run. Nothing here knows what a step does, and nothing but the standard library
is imported.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 20.0
"""Kubernetes, Slurm and systemd leave 30 s or more between SIGTERM and SIGKILL, of which writing needs some."""
BURST_S = 1.0
"""Signals less far apart than this count as one. A key that is held down repeats sooner."""
SOON_S = 0.01
"""By then, a callback that swallowed an `Interrupted` has returned."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Interrupts:
    """Handles these signals inside a `with` block, in the main thread; in any other thread it does nothing."""

    def __init__(
        self, note: Callable[[str], None] | None = None, grace_s: float = GRACE_S, is_last: bool = False
    ) -> None:
        """`note` tells the user that the run continues for a moment. `is_last`: the process ends with the block, so
        signals that follow the first, or `finish`, are ignored after it too."""
        self._note = note or (lambda text: None)
        self._grace_s, self._is_last = grace_s, is_last
        self.came: signal.Signals | None = None
        """The first signal that came; the run should end."""
        self._is_held = self._is_ending = self._is_over = False
        self._is_lost = self._is_in_hook = False
        """Python has dropped what was raised; it is being told so."""
        self._heard_at = -BURST_S
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._outer: Interrupts | None = None
        """The one whose block this one's is in."""
        self._unraisable: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = [getattr(signal.getsignal(number), "__self__", None) for number in STOPPING]
        self._outer = next((outer for outer in handlers if isinstance(outer, Interrupts)), None)
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
                self._before[number] = signal.signal(number, self._hear)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._raise_again
        if self._outer is not None and self._outer.came is not None:
            self.came = self._outer.came
            self._end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._before:
            return
        if self._outer is not None and self.came is not None:
            self._outer._is_ending = True
        sys.unraisablehook = self._unraisable
        restored, self._before = self._before, {}
        is_over = self._is_last and (self.came is not None or self._is_ending)
        for number, before in restored.items():
            signal.signal(number, signal.SIG_IGN if is_over else before)

    def hold(self) -> None:
        """From now on, a signal waits for `release`."""
        if self.came is not None:
            self._end()
        self._is_held = True

    def release(self) -> None:
        """The update is complete: raise here if a signal has been waiting."""
        self._is_held = False
        if self.came is not None:
            self._end()

    def finish(self) -> None:
        """There is nothing left to stop: what remains, such as ending child processes, is not interrupted."""
        self._is_ending = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, is_deliberate = self.came is None, time.monotonic() - self._heard_at >= BURST_S
        self._heard_at = time.monotonic()
        if self._is_in_hook or (self._is_ending and not self._is_lost):
            return
        self._is_ending = self._is_lost = False
        self._note_first(signal.Signals(number))
        is_pressed_again = number == signal.SIGINT and is_deliberate and not is_first
        if not self._is_held or self._is_over or is_pressed_again:
            self._end()
        if number != signal.SIGINT:
            self._limit_wait()
        if is_first:
            with suppress(RuntimeError):  # Python refuses to print while the interrupted code is printing
                self._note(self._explain())

    def _explain(self) -> str:
        assert self.came is not None
        if self.came == signal.SIGINT:
            return "Ctrl-C: finishing and saving this step first; press it again in a while to discard the step"
        return (
            f"{self.came.name}: finishing and saving this step first, if that takes no longer than {self._grace_s:g} s"
        )

    def _limit_wait(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._grace_s, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        self._is_over = True
        if self._is_held:
            self._repeat()

    def _repeat(self) -> None:
        """Send the signal to the main thread again, which alone can raise; called in another one."""
        main = threading.main_thread().ident
        if self.came is not None and self._before and main is not None:
            signal.pthread_kill(main, self.came)

    def _end(self) -> None:
        assert self.came is not None
        self._is_ending, self._is_lost = True, False
        raise Interrupted(self.came)

    def _raise_again(self, lost: Any) -> None:
        """Python drops what is raised in a destructor or in a callback from C, where a signal may well arrive."""
        if not issubclass(lost.exc_type, Interrupted):
            self._unraisable(lost)
            return
        self._is_in_hook = self._is_lost = True
        threading.Thread(target=self._repeat_lost, daemon=True).start()
        self._is_in_hook = False

    def _repeat_lost(self) -> None:
        while self._is_lost and self._before:
            time.sleep(SOON_S)
            self._repeat()

    def _note_first(self, number: signal.Signals) -> None:
        """Outer blocks learn of it at once: a signal may come just while this one's ends."""
        self.came = self.came or number
        if self._outer is not None:
            self._outer._note_first(self.came)
