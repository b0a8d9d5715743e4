"""`@kernel`: compiles a CPU kernel with numba and caches the result on disk.

Every file in this folder uses it. Numba's own cache only checks the file that defines a function, but our kernels are
built from pieces in several files, so an edit to one could leave a stale kernel in another. We therefore name the cache
folder by a hash of all of them. Never enable fast-math: the order of every sum is part of the guarantee.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def cache_folder() -> Path:
    """Cache folder for kernels compiled from exactly these sources at this vector width."""
    digest = hashlib.blake2b(os.environ.get("PACELINE_VECTOR_LANES", "").encode(), digest_size=8)
    folder = Path(__file__).parent
    # The noise is compiled into the sampler.
    for source in [*sorted(folder.glob("*.py")), folder.parents[1] / "core/noise.py"]:
        digest.update(source.read_bytes())
    name = Path("paceline") / f"kernels-{digest.hexdigest()}"
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    for root in (Path(chosen) if chosen else Path.home() / ".cache", Path(tempfile.gettempdir())):
        try:
            (root / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root / name, os.W_OK):
            return root / name
    raise ValueError("cannot write a cache folder for compiled kernels; set NUMBA_CACHE_DIR to a writable folder")


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
    compile_function: Any = numba.njit(cache=True, nogil=True, error_model="numpy")
    with _cached_there():
        compiled: Function = compile_function(function)
    return compiled
