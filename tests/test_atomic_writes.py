"""Files and folders written whole: no kill, error, full disk or planted link costs the old one or touches another."""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core import files
from paceline.core.files import folders_in, make_folder, remove_folder, remove_leftovers, replaced_folder, write_file

SYSTEM_CALLS = ("open", "mkdir", "rename", "fsync", "unlink", "rmdir")
RAISED, SWALLOWED = 7, 8
"""How a process ends whose last call failed: with the error, or well, if it was cleaning up."""
OLD, NEW = {"a": "old", "sub/b": "old"}, {"a": "new", "c": "new"}


def fill(folder: Path, contents: Mapping[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def contents_of(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_folder(folder: Path) -> None:
    with replaced_folder(folder) as new:
        fill(new, NEW)


def no_exchange(a: Path, b: Path) -> bool:
    return False


@pytest.fixture(params=["exchange", "renames"])
def is_exchanged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to put a folder in the place of another."""
    if request.param == "renames":
        monkeypatch.setattr(files, "_exchange", no_exchange)
    return request.param == "exchange"


class Moments:
    """Does `work` in copies of a folder, one after the other, each in a process whose n-th system call is its last."""

    def __init__(self, tmp_path: Path, work: Callable[[Path], object], stop: Callable[[], None]) -> None:
        self._home, self._work, self._stop = tmp_path, work, stop
        self._num_calls = self._last = 0

    def __iter__(self) -> Iterator[tuple[Path, bool]]:
        """What each left behind, and whether it ended with an error; the last one was not stopped."""
        status = -1
        while status:
            self._last += 1
            folder = shutil.copytree(self._home / "begun", self._home / str(self._last))
            pid = os.fork()
            if pid == 0:
                os._exit(self._run(folder))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, SWALLOWED, RAISED, -signal.SIGKILL)
            yield folder, status == RAISED
        assert self._last > 4

    def _run(self, folder: Path) -> int:
        """In the child: nobody sees what is patched here."""
        for name in SYSTEM_CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        files._exchange = self._counted(files._exchange)
        Path.open = self._counted(Path.open)  # type: ignore[method-assign]
        try:
            self._work(folder)
        except (OSError, KeyboardInterrupt):
            return RAISED
        return SWALLOWED if self._num_calls >= self._last else 0

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_calls += 1
            if self._num_calls == self._last:
                self._stop()
            return call(*args, **kwargs)

        return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt() -> None:
    raise KeyboardInterrupt


# Files.


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        write_file(tmp_path / "file", [text, b"\n"])
        assert (tmp_path / "file").read_bytes() == text + b"\n"
    assert names_in(tmp_path) == ["file"]
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("stop", [die, fail])
def test_a_file_is_old_or_new_whatever_call_is_the_last(tmp_path: Path, stop: Callable[[], None]) -> None:
    fill(tmp_path / "begun", {"file": "old"})
    seen = set()
    for home, has_failed in Moments(tmp_path, lambda home: write_file(home / "file", [b"ne", b"w"]), stop):
        seen.add((home / "file").read_text())
        if has_failed:
            assert names_in(home) == ["file"]
        remove_leftovers(home, "file")
        assert names_in(home) == ["file"]
    assert seen == {"old", "new"}


def test_an_error_while_it_is_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", parts())
    assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode: io.BufferedWriter(FullDisk(self, mode)))
        with pytest.raises(OSError, match=r"cannot write .*/file: no space left on device; free disk space"):
            write_file(tmp_path / "file", [b"new"])
    assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("somebody's")
    (tmp_path / "link").symlink_to("other")
    write_file(tmp_path / "link", [b"new"])
    assert (tmp_path / "other").read_text() == "somebody's"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_text() == "new"


def test_a_link_in_the_place_of_what_is_being_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (tmp_path / "other").write_text("somebody's")
    (tmp_path / "folder").mkdir()
    for name in ("file", "target"):
        (tmp_path / f".{name}.guessed.new").symlink_to("folder" if name == "target" else "other")
    with pytest.raises(OSError, match="file exists"):
        write_file(tmp_path / "file", [b"new"])
    with pytest.raises(FileExistsError):
        write_folder(tmp_path / "target")
    assert (tmp_path / "other").read_text() == "somebody's" and names_in(tmp_path / "folder") == []
    assert names_in(tmp_path) == [".file.guessed.new", ".target.guessed.new", "folder", "other"]


# Folders.


@pytest.mark.usefixtures("is_exchanged")
def test_a_folder_is_made_and_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "x" / "folder", OLD)
    write_folder(tmp_path / "x" / "folder")
    write_folder(tmp_path / "y" / "z" / "folder")
    for parent in (tmp_path / "x", tmp_path / "y" / "z"):
        assert contents_of(parent / "folder") == NEW and names_in(parent) == ["folder"]


@pytest.mark.usefixtures("is_exchanged")
def test_files_that_are_kept_are_in_the_new_folder_when_it_appears(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    fill(folder, OLD | {"weights": "old", "sub/deep/d": "old", "mine": "old"})
    (folder / "link").symlink_to("mine")
    with replaced_folder(folder, lambda name: name != "weights") as new:
        fill(new, NEW)
    kept = {"sub/b": "old", "sub/deep/d": "old", "mine": "old", "link": "old"}
    assert contents_of(folder) == NEW | kept and (folder / "link").is_symlink()


@pytest.mark.parametrize("stop", [die, fail])
def test_a_folder_is_old_or_new_whatever_call_is_the_last(
    tmp_path: Path, is_exchanged: bool, stop: Callable[[], None]
) -> None:
    fill(tmp_path / "begun" / "folder", OLD)
    fill(tmp_path / "begun" / "folder-2", OLD)
    seen = []
    for home, has_failed in Moments(tmp_path, lambda home: write_folder(home / "folder"), stop):
        if is_exchanged or stop is fail:
            assert (home / "folder").is_dir()
        found = contents_of(folders_in(home, "folder")["folder"])
        assert found in (OLD, NEW)
        seen.append(found)
        if has_failed:
            assert names_in(home) == ["folder", "folder-2"]
        write_folder(home / "folder")
        remove_leftovers(home, "folder")
        assert names_in(home) == ["folder", "folder-2"]
        assert contents_of(home / "folder") == NEW and contents_of(home / "folder-2") == OLD
    assert OLD in seen and NEW in seen


@pytest.mark.usefixtures("is_exchanged")
def test_an_error_in_the_block_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path / "folder", OLD)
    with pytest.raises(KeyboardInterrupt), replaced_folder(tmp_path / "folder") as new:
        fill(new, NEW)
        raise KeyboardInterrupt
    assert contents_of(tmp_path / "folder") == OLD and names_in(tmp_path) == ["folder"]


@pytest.mark.usefixtures("is_exchanged")
def test_a_link_in_the_place_of_a_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    fill(tmp_path / "other", OLD)
    (tmp_path / "folder").symlink_to("other")
    write_folder(tmp_path / "folder")
    assert contents_of(tmp_path / "other") == OLD and not (tmp_path / "folder").is_symlink()
    assert contents_of(tmp_path / "folder") == NEW and names_in(tmp_path) == ["folder", "other"]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("mine")
    with pytest.raises(NotADirectoryError, match="folder"), replaced_folder(tmp_path / "folder"):
        raise AssertionError
    assert (tmp_path / "folder").read_text() == "mine" and names_in(tmp_path) == ["folder"]


def test_planted_links_in_the_place_of_leftovers_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", no_exchange)
    fill(tmp_path / "other", OLD)
    fill(tmp_path / "folder", OLD)
    for state in ("old", "gone", "new"):
        (tmp_path / f".folder.{state}").symlink_to("other")
    write_folder(tmp_path / "folder")
    remove_leftovers(tmp_path, "folder")
    remove_folder(tmp_path / "folder")
    assert contents_of(tmp_path / "other") == OLD and names_in(tmp_path) == ["other"]


def test_a_folder_is_removed_whole(tmp_path: Path) -> None:
    fill(tmp_path / "begun" / "folder", OLD)
    for home, _ in Moments(tmp_path, lambda home: remove_folder(home / "folder"), die):
        assert not (home / "folder").exists() or contents_of(home / "folder") == OLD
        remove_leftovers(home, "folder")
        assert set(names_in(home)) <= {"folder"}


def test_an_interrupt_leaves_nothing_hidden_of_a_folder_that_is_removed(tmp_path: Path) -> None:
    """Ctrl-C may come at any moment, and nobody may start the program again for a long time."""
    fill(tmp_path / "begun" / "folder", OLD)
    for home, _ in Moments(tmp_path, lambda home: remove_folder(home / "folder"), interrupt):
        assert set(names_in(home)) <= {"folder"}


def test_folders_are_made_with_those_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", synced.append)
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and synced == [tmp_path, tmp_path / "a"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2
