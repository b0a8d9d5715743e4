"""`@kernel` and `@host_loop`: compile a function with numba and cache the result on disk.

Every file in this folder uses `kernel`; `host_loop` is for loops of the host elsewhere. Numba's own cache only checks
the file that defines a function, but our kernels are built from pieces in several files, so an edit to one could leave
a stale kernel in another. We therefore name the cache folder by a hash of all of them. The index of a cache is a
pickle, which runs code when it is read: the folder must be this user's alone. Never call numba's `njit` with a cache of
its own choice. Never enable fast-math: the order of every sum is part of the guarantee.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numba

from paceline.core.private_folder import private_folder, temporary_folder

Function = TypeVar("Function", bound=Callable[..., Any])

FOR_CHILDREN = "PACELINE_KERNELS"
"""Tells the processes that this one starts where its temporary cache is."""


@cache
def cache_folder() -> Path:
    """Cache folder for kernels compiled from exactly these sources at this vector width."""
    digest = hashlib.blake2b(os.environ.get("PACELINE_VECTOR_LANES", "").encode(), digest_size=8)
    folder = Path(__file__).parent
    # The noise is compiled into the sampler.
    for source in [*sorted(folder.glob("*.py")), folder.parents[1] / "core/noise.py"]:
        digest.update(source.read_bytes())
    names = "paceline", f"kernels-{digest.hexdigest()}"
    places = (os.environ.get(name) for name in (FOR_CHILDREN, "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"))
    root = Path(next(filter(None, places), None) or Path.home() / ".cache")
    try:
        found = private_folder(root, *names)
        if os.access(found, os.W_OK):
            return found
        reason = f"{found} is not writable"
    except (OSError, ValueError) as error:
        reason = str(error)
    return private_folder(_temporary_root(reason), *names)


def _temporary_root(reason: str) -> Path:
    """A fresh folder for this process and those it starts."""
    try:
        root = temporary_folder("kernels")
    except OSError as error:
        raise ValueError(
            f"found no cache folder for compiled kernels ({reason}; {error}); set NUMBA_CACHE_DIR to a folder of yours"
        ) from error
    os.environ[FOR_CHILDREN] = str(root)
    warnings.warn(
        f"compiling kernels anew, for this process only: cannot keep them, because {reason}; set NUMBA_CACHE_DIR to a "
        "folder that only you can write to",
        RuntimeWarning,
        stacklevel=3,
    )
    return root


@contextmanager
def _cached_there() -> Iterator[None]:
    # Numba reads this setting when it decorates a function, so we change it only for that moment.
    config: Any = numba.config
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = previous


def kernel(function: Function) -> Function:
    """Compile `function` on first call (seconds), or load it from the cache (milliseconds)."""
    return _compile(function, "numpy")


def host_loop(function: Function) -> Function:
    """As `kernel`, with Python's errors: a division by zero raises."""
    return _compile(function, "python")


def compile_callback(function: Function, signature: Any) -> Any:
    """Compile `function` now, as a C function with an `address`; where it raises, it returns 0 and prints why."""
    decorate: Any = numba.cfunc(signature, cache=True, error_model="numpy")
    with _cached_there():
        return decorate(function)


def _compile(function: Function, error_model: Literal["python", "numpy"]) -> Function:
    compile_function: Any = numba.njit(cache=True, nogil=True, error_model=error_model)
    with _cached_there():
        compiled: Function = compile_function(function)
    return compiled
