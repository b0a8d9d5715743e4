"""The folder in which Triton keeps compiled kernels and the libraries that launch them, which it loads unchecked.

Called by `model/ops/choose.py` before the first kernel compiles. Triton takes `TRITON_CACHE_DIR`, or `.triton/cache` in
`TRITON_HOME` or the home folder; if somebody else could have written there, this process gets a fresh folder.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

from paceline.core.private_folder import UntrustedError, check_root, temporary_folder

CACHE_DIR = "TRITON_CACHE_DIR"


@cache
def keep_cache_private() -> None:
    """Make Triton compile anew, for this process and those it starts, if its cache is not this user's alone."""
    folder = cache_folder()
    try:
        if folder.exists():
            check_root(folder, is_shared=False)
        else:
            check_root(next(place for place in folder.absolute().parents if place.exists()))
    except (UntrustedError, OSError) as error:
        os.environ[CACHE_DIR] = str(temporary_folder("triton"))
        warnings.warn(
            f"compiling Triton's kernels anew, for this process only: cannot keep them, because {error}; set "
            f"{CACHE_DIR} to a folder that only you can write to",
            RuntimeWarning,
            stacklevel=2,
        )


def cache_folder() -> Path:
    """Where Triton looks."""
    chosen, home = os.environ.get(CACHE_DIR), os.environ.get("TRITON_HOME")
    return Path(chosen) if chosen else Path(home or Path.home()) / ".triton" / "cache"
