"""Atomic writes: readers see the old file or folder or the new one, never a part, even after a kill or a power cut.

    write_file(file, parts)             one file
    with replaced_folder(folder) as new:
        ...                             write into `new`; it replaces the folder when the block succeeds
    open(file, "ab", opener=not_a_link) a log or a lock, which grows in place

Run folders, checkpoints, drafters, exports and reports write through it. New files are created exclusively, under a
hidden random name, so a planted link is never followed; they are on disk before they get their name. A killed process
leaves only hidden files. `remove_leftovers` removes them; only the one process that writes there may call it. Nothing
else in the package may open a file for writing; `tests/test_writers.py` lists the exceptions and their reasons.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Hidden names beside a file or folder. `new` is being written and `gone` being removed: neither is ever read. `old` is
# complete: it was moved aside for a folder that was not in place when the process ended.
_NEW, _OLD, _GONE = ".new", ".old", ".gone"
_AT_CWD, _RENAME_EXCHANGE = -100, 2  # Linux constants


def write_file(file: Path, parts: Iterable[bytes]) -> None:
    """Replace a file's contents; they are on disk when this returns."""
    new = _new_name(file)
    with named_errors("write", file):
        opened = new.open("xb")  # exclusive creation never follows a link
        try:
            with opened:
                opened.writelines(parts)
                opened.flush()
                os.fsync(opened.fileno())
            os.rename(new, file)
            sync(file.parent)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def not_a_link(file: str, flags: int) -> int:
    """Opener for files that are written in place: a planted link would lead the writes to another file."""
    try:
        return os.open(file, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(file):
            raise ValueError(f"{file} is a link, which may lead to another file; remove it") from None
        raise


@contextmanager
def replaced_folder(folder: Path, keeps: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """A new folder beside `folder` to write into, which replaces it when the block succeeds.

    `keeps` selects entries of the old folder that the new one inherits unless it has its own. If the system cannot
    exchange two folders atomically, `folder` is missing for a moment; a process killed then leaves the old one hidden
    beside it, where `folders_in` finds it and the next write restores it.
    """
    folder = folder.absolute()
    make_folder(folder.parent)
    new, old = _new_name(folder), _hidden(folder, _OLD)
    if old.is_dir() and not os.path.lexists(folder):
        os.rename(old, folder)
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    new.mkdir()
    try:
        yield new
        if folder.is_dir():
            _take_over(folder, new, keeps)
        for path in (*new.rglob("*"), new):
            if path.is_file() or path.is_dir():
                sync(path)
        _put_in_place(new, folder)
        sync(folder.parent)
    finally:
        _discard(new)  # half-written, or the previous folder
        if folder.exists():
            _discard(old)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, on disk when this returns."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Hide a folder, then remove it: a process killed meanwhile leaves no visible half of it."""
    gone = folder.with_name(f".{folder.name.lstrip('.')}{_GONE}")
    _discard(gone)
    try:
        os.rename(folder, gone)
    finally:  # an interrupt may come right after it
        try:
            _discard(gone)
        except BaseException:  # or in the middle of this
            _discard(gone)
            raise


def folders_in(parent: Path, prefix: str) -> dict[str, Path]:
    """The folders whose names begin with `prefix`: in place, or moved aside by a process that was killed."""
    aside = {path.name[1 : -len(_OLD)]: path for path in parent.glob(f".{prefix}*{_OLD}")}
    return aside | {path.name: path for path in parent.glob(f"{prefix}*")}


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove what killed processes left behind of files and folders whose names begin with `prefix`."""
    for state in (_NEW, _GONE, _OLD):
        for path in parent.glob(f".{prefix}*{state}"):
            if state != _OLD or path.with_name(path.name[1 : -len(_OLD)]).exists():
                _discard(path)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk: otherwise a power cut may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn disk errors into messages for the user that name the file."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"cannot {doing} {path}: {reason}; free disk space or fix its permissions") from error


def _new_name(path: Path) -> Path:
    return _hidden(path, f".{secrets.token_hex(8)}{_NEW}")


def _hidden(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}{state}")


def _take_over(old: Path, new: Path, keeps: Callable[[str], bool]) -> None:
    for entry in old.iterdir():
        target = new / entry.name
        if not keeps(entry.name) or os.path.lexists(target):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(entry, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no hard links, or another file system
        shutil.copy2(source, target, follow_symlinks=False)


def _put_in_place(new: Path, folder: Path) -> None:
    """Give a folder its name; a previous folder gets a hidden one."""
    if not os.path.lexists(folder):
        os.rename(new, folder)
    elif not _exchange(new, folder):
        old = _hidden(folder, _OLD)
        _discard(old)
        os.rename(folder, old)
        try:
            os.rename(new, folder)
        except BaseException:
            os.rename(old, folder)
            raise


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_AT_CWD, os.fsencode(a), _AT_CWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _discard(path: Path) -> None:
    """Remove a file, folder or link, never a link's target; what cannot be removed stays, hidden."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
