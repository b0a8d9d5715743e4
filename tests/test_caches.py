"""Caches of compiled kernels hold pickles and libraries: nothing is read from a folder that others could write to."""

from __future__ import annotations

import ast
import os
import pickle
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.private_folder import UntrustedError, private_folder, temporary_folder
from paceline.kernels.triton import cache as triton_cache

ROOT = Path(__file__).parent.parent
STRANGER = 12345
"""A user id that owns nothing here."""


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a path belong to somebody else; without the rights for that, everything does."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.lchown(path, STRANGER, STRANGER)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    return give


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_private_from_its_first_moment(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "cache", "paceline", "kernels")
    finally:
        os.umask(before)
    assert folder == tmp_path / "cache" / "paceline" / "kernels"
    assert mode_of(folder) == mode_of(folder.parent) == 0o700
    assert private_folder(tmp_path / "cache", "paceline", "kernels") == folder


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "paceline" / "kernels").mkdir(parents=True)
    (tmp_path / "paceline").chmod(0o775)
    folder = private_folder(tmp_path, "paceline", "kernels")
    assert mode_of(folder) == mode_of(folder.parent) == 0o700


def test_a_shared_folder_serves_if_nobody_can_replace_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    assert mode_of(private_folder(tmp_path / "shared", "paceline")) == 0o700
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UntrustedError, match=r"every user can replace what is in .*shared"):
        private_folder(tmp_path / "shared", "paceline")
    with pytest.raises(UntrustedError, match=r"every user can replace what is in .*shared"):
        private_folder(tmp_path / "shared" / "mine", "paceline")


@pytest.mark.parametrize("place", ["cache/paceline", "cache/paceline/kernels"])
def test_a_planted_link_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).symlink_to(tmp_path / "theirs")
    with pytest.raises(UntrustedError, match="is not a folder"):
        private_folder(tmp_path / "cache", "paceline", "kernels")
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.parametrize("place", ["cache", "cache/paceline", "cache/paceline/kernels"])
def test_a_strangers_folder_is_refused(tmp_path: Path, give_away: Callable[[Path], None], place: str) -> None:
    (tmp_path / "cache" / "paceline" / "kernels").mkdir(parents=True)
    give_away(tmp_path / place)
    with pytest.raises(UntrustedError, match=r"belongs to (another user \(id|the user)"):
        private_folder(tmp_path / "cache", "paceline", "kernels")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_could_fill_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline").chmod(mode)
    with pytest.raises(UntrustedError, match="other users can write to"):
        private_folder(tmp_path, "paceline")


# --- numba ------------------------------------------------------------------------------------------------------------

_USER = """
from paceline.kernels.cpu.jit import cache_folder, kernel

@kernel
def plus_one(x):
    return x + 1

print(plus_one(1), cache_folder())
"""


class Poison:
    """Runs a command when it is unpickled, as numba does with the index of a cache."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


def run_kernel(folder: Path, **variables: str) -> tuple[Path, str]:
    """Compile or load a kernel in a new process; returns its cache folder, and what it said to the user."""
    (folder / "user.py").write_text(_USER)
    cleared = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PACELINE_KERNELS"}
    environment = {name: value for name, value in os.environ.items() if name not in cleared}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, str(folder / "user.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    value, place = found.stdout.split()
    assert value == "2"
    return Path(place), found.stderr


def poison(root: Path, trace: Path) -> None:
    """As a stranger would, who knows the folder's name: it is a hash of public sources."""
    indexes = list(root.rglob("*.nbi"))
    assert indexes
    for index in indexes:
        index.write_bytes(pickle.dumps(Poison(trace)))
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        folder.chmod(0o777)


def test_a_poisoned_cache_runs_nothing(tmp_path: Path) -> None:
    """Neither in the temporary directory, where the cache went without a home, nor where a setting points."""
    shared, trace = tmp_path / "shared", tmp_path / "ran"
    shared.mkdir()
    run_kernel(tmp_path, XDG_CACHE_HOME=str(shared))
    poison(shared, trace)
    shared.chmod(0o1777)
    fresh, said = run_kernel(tmp_path, HOME="/proc/none", TMPDIR=str(shared))
    assert not trace.exists()
    assert fresh.parent.parent.parent == shared and not fresh.exists(), "it has a folder of its own, until it ends"
    assert "compiling kernels anew" in said and "set NUMBA_CACHE_DIR" in said
    shared.chmod(0o777)
    _, said = run_kernel(tmp_path, NUMBA_CACHE_DIR=str(shared))
    assert not trace.exists()
    assert f"every user can replace what is in {shared}" in said


def test_a_folder_of_ones_own_is_kept_without_a_word(tmp_path: Path) -> None:
    place, said = run_kernel(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "mine"))
    assert place.is_relative_to(tmp_path / "mine") and mode_of(place) == 0o700
    assert said == "" and list(place.rglob("*.nbi"))


def test_no_function_is_cached_elsewhere() -> None:
    """Numba's own choice of a folder is not checked by anyone."""
    for file in sorted((ROOT / "paceline").rglob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        imported = {
            alias.name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module == "numba"
            for alias in node.names
        }
        if file.name != "jit.py":
            assert not (names | imported) & {"njit", "jit_module"}, f"{file} should use kernels/cpu/jit.py"


def test_a_temporary_folder_is_removed_by_its_owner_only(tmp_path: Path) -> None:
    code = """
import os, sys
from paceline.core.private_folder import temporary_folder
folder = temporary_folder("test")
if os.fork() == 0:
    sys.exit()  # runs what is registered for the exit
os.wait()
print(folder, oct(folder.stat().st_mode & 0o777), folder.exists())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    place, mode, exists = found.stdout.split()
    assert (mode, exists) == ("0o700", "True")
    assert not Path(place).exists()


# --- Triton -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def triton_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], list[str]]:
    """Chooses Triton's folder as a GPU's operations do; returns the notes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def choose(folder: Path) -> list[str]:
        monkeypatch.setenv(triton_cache.CACHE_DIR, str(folder))
        triton_cache.keep_cache_private.cache_clear()
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            triton_cache.keep_cache_private()
        return [str(note.message) for note in notes]

    return choose


def test_triton_keeps_a_cache_of_ones_own(tmp_path: Path, triton_at: Callable[[Path], list[str]]) -> None:
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "new" / "cache"):
        assert triton_at(folder) == []
        assert triton_cache.cache_folder() == folder


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_triton_gets_a_fresh_cache_if_others_can_write(
    tmp_path: Path, triton_at: Callable[[Path], list[str]], mode: int
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    (note,) = triton_at(tmp_path / "shared")
    assert f"every user can write to {tmp_path / 'shared'}" in note
    fresh = triton_cache.cache_folder()
    assert fresh.parent == tmp_path and fresh.name.startswith("paceline-triton-") and mode_of(fresh) == 0o700


def test_triton_gets_a_fresh_cache_if_it_is_a_strangers(
    tmp_path: Path, triton_at: Callable[[Path], list[str]], give_away: Callable[[Path], None]
) -> None:
    (tmp_path / "theirs").mkdir()
    give_away(tmp_path / "theirs")
    (note,) = triton_at(tmp_path / "theirs")
    assert "belongs to" in note and triton_cache.cache_folder() != tmp_path / "theirs"


def test_a_fresh_folder_has_a_name_that_nobody_can_guess() -> None:
    names = {temporary_folder("test").name for _ in range(3)}
    assert len(names) == 3
