"""Ctrl-C in a run: it ends at once where nothing is half changed, and after the step is finished where something is.

    with Interrupts(note) as run.interrupts: run.train()

`loop.py` says from where to where a step must not be broken off; `paceline train` lets this take the signal. A second
Ctrl-C is never kept waiting. Nothing here knows what is being finished.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Takes Ctrl-C inside a `with` block, in the main thread; outside of one it is Python's, and raises at once."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        """`note` is told in a sentence that the run goes on for a moment."""
        self._note = note or (lambda text: None)
        self.came = False
        """Whether the run is to end."""
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
        """From now on a first Ctrl-C waits for `release`."""
        self._is_held = True

    def release(self) -> None:
        """Nothing is half changed any more; a Ctrl-C that has waited is raised here."""
        self._is_held = False
        if self.came:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, self.came = not self.came, True
        if not (is_first and self._is_held):
            raise KeyboardInterrupt
        with suppress(RuntimeError):  # how Python refuses a line inside a line, where the signal came in one
            self._note("Ctrl-C: this step is finished and saved first; once more ends the run at once")
