"""What all code in a process shares and a drafter may disturb: it is put back after the drafter's call.

`Numerics` decide numbers or the next call's course, so they are compared around every call (half a microsecond).
`Manners` break nothing before the end of a generation, so they are compared over a whole one. Called by `guest.py` and
where a drafter's file is loaded. Whatever is not listed here, a drafter can change for the whole process.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Numerics = tuple[int, torch.dtype, bool, int, bool, int]
_SUBNORMAL, _ONE = 5e-324, 1.0


def numerics() -> Numerics:
    """The settings that may change a number, or whether a call succeeds."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch._C._len_torch_function_stack(),  # a default device is an entry there, and slow to ask for
        _SUBNORMAL * _ONE == 0,  # torch cannot tell whether it flushes denormals
        sys.getrecursionlimit(),
    )


def restore_numerics(wanted: Numerics) -> list[str]:
    """Undo all changes; returns the names of what had changed."""
    given = zip(_NUMERICS, wanted, numerics(), strict=True)
    changed = [(name, restore, value) for (name, restore), value, found in given if found != value]
    for _, restore, value in changed:
        restore(value)
    return [name for name, _, _ in changed]


def _leave_torch_functions(depth: int) -> None:
    torch.set_default_device(None)
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


_NUMERICS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("torch.set_num_threads", torch.set_num_threads),
    ("torch.set_default_dtype", torch.set_default_dtype),
    ("torch.set_grad_enabled", torch.set_grad_enabled),
    ("torch.set_default_device", _leave_torch_functions),
    ("torch.set_flush_denormal", torch.set_flush_denormal),
    ("sys.setrecursionlimit", sys.setrecursionlimit),
)


class Manners:
    """A snapshot of what matters to the rest of the run."""

    def __init__(self) -> None:
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._matmul = torch.get_float32_matmul_precision()
        self._collects = gc.isenabled()
        self._filters = list(warnings.filters)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._folder = _working_folder()

    def restore(self) -> list[str]:
        """Undo all changes; returns the names of what had changed."""
        found, changed = Manners(), list[str]()
        if (found._is_deterministic, found._warns_only) != (self._is_deterministic, self._warns_only):
            # What torch.use_deterministic_algorithms calls after it has imported a compiler for seconds.
            torch._C._set_deterministic_algorithms(self._is_deterministic, warn_only=self._warns_only)
            changed.append("torch.use_deterministic_algorithms")
        if found._matmul != self._matmul:
            torch.set_float32_matmul_precision(self._matmul)
            changed.append("torch.set_float32_matmul_precision")
        if found._collects != self._collects:
            (gc.enable if self._collects else gc.disable)()
            changed.append("gc.enable" if found._collects else "gc.disable")
        if found._filters != self._filters:
            warnings.filters[:] = self._filters  # type: ignore[index]
            changed.append("warnings.filters")
        if found._handlers != self._handlers and threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                if handler is not None:  # None was not installed by Python
                    signal.signal(number, handler)
            changed.append("signal.signal")
        if found._folder != self._folder and self._folder is not None:
            with suppress(OSError):  # the folder is gone
                os.chdir(self._folder)
                changed.append("os.chdir")
        return changed


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGVTALRM)


def _working_folder() -> str | None:
    with suppress(OSError):
        return os.getcwd()
    return None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put everything back at the end of a `with` block."""
    before, manners = numerics(), Manners()
    try:
        yield
    finally:
        manners.restore()
        restore_numerics(before)
