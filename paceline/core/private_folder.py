"""Folders that only this user can write to, for files that are executed or trusted when they are read back.

    private_folder(root, "paceline", "kernels-1234")   a folder below a place that the user chose
    temporary_folder("kernels")                        a fresh one in the temporary directory, removed at exit

Compiled kernels and Ray's session live in them: whoever can write there can run code as this user. Every folder below
the root is a real one of this user with mode 0700, and nobody else can replace it. A name in the temporary directory
that others can guess is never trusted, only created.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path


class UntrustedError(ValueError):
    """Somebody else could write to this folder, or has."""


def private_folder(root: Path, *names: str) -> Path:
    """The folder `root/names...`, created if missing; an `UntrustedError` if others can write there."""
    root.mkdir(parents=True, exist_ok=True)
    check_root(root)
    folder = root.resolve()
    for name in names:
        folder /= name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            _take_over(folder, is_last=name == names[-1])
    return folder


def check_root(root: Path, is_shared: bool = True) -> None:
    """Raise if other users can replace folders in `root`, or add some unless `is_shared`.

    In a folder that everyone can write to, only the sticky bit prevents replacing. Its group is trusted: whoever chose
    the place chose that too, and on many systems every user has a group of his own.
    """
    place = root.resolve()
    owner = place.stat().st_uid
    if not is_shared and place.stat().st_mode & stat.S_IWOTH:
        raise UntrustedError(f"every user can write to {place}")
    for folder in (place, *place.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UntrustedError(f"every user can replace what is in {folder}")
    if owner not in (os.geteuid(), 0):
        raise UntrustedError(f"{place} belongs to {_name(owner)}")


def temporary_folder(name: str) -> Path:
    """A new folder of this user that this process removes when it exits."""
    folder = Path(tempfile.mkdtemp(prefix=f"paceline-{name}-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _take_over(folder: Path, is_last: bool) -> None:
    """Check a folder that exists, and close it to others if an older umask left it open."""
    found = folder.lstat()  # a link is not followed: it may lead anywhere
    if not stat.S_ISDIR(found.st_mode):
        raise UntrustedError(f"{folder} is not a folder")
    if found.st_uid != os.geteuid():
        raise UntrustedError(f"{folder} belongs to {_name(found.st_uid)}")
    if is_last and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedError(f"other users can write to {folder}")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _remove(folder: Path, process_id: int) -> None:
    if os.getpid() == process_id:  # not in a forked child, which inherits this
        shutil.rmtree(folder, ignore_errors=True)


def _name(user: int) -> str:
    try:
        import pwd

        return f"the user {pwd.getpwuid(user).pw_name}"
    except (ImportError, KeyError):
        return f"another user (id {user})"
