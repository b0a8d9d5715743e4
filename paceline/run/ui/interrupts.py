"""Ctrl-C in a run: stop at once where that is safe, or after the current step where it would leave half an update.

    with Interrupts(note) as run.interrupts: run.train()

`loop.py` marks the part of a step that must not be interrupted; `paceline train` installs the handler. A second Ctrl-C
never waits. Nothing here knows what a step does.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Handles Ctrl-C inside a `with` block, in the main thread; outside of one, Python raises at once."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        """`note` tells the user that the run continues for a moment."""
        self._note = note or (lambda text: None)
        self.came = False
        """Whether the run should end."""
        self._is_held = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def hold(self) -> None:
        """From now on, a first Ctrl-C waits for `release`."""
        self._is_held = True

    def release(self) -> None:
        """The update is complete: raise here if a Ctrl-C has been waiting."""
        self._is_held = False
        if self.came:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, self.came = not self.came, True
        if not (is_first and self._is_held):
            raise KeyboardInterrupt
        with suppress(RuntimeError):  # Python refuses to print while the interrupted code is printing
            self._note("Ctrl-C: finishing and saving this step first; press it again to stop at once")
