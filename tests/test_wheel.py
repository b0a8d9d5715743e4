"""The wheel has all that the package needs: installed far from the clone, it trains, generates and reports."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tree. Its backend comes from pip's index unless it is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *options,
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(pip, check=True, cwd=folder)
    (found,) = folder.glob("paceline-*.whl")
    return found


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with the wheel in it, which sees this one's packages but not its link to the clone."""
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # Folders named in a .pth file are searched last; .pth files inside them, such as the clone's, are not read.
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def run(bin_folder: Path, cwd: Path, *args: str) -> str:
    """What a program of the clean environment prints, with nothing in its surroundings that leads to the clone."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(bin_folder / args[0]), *args[1:]]
    done = subprocess.run(command, cwd=cwd, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "paceline").rglob("*") if file.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    files |= {f"paceline/recipes/{file.name}" for file in (ROOT / "recipes").iterdir()}
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert names == files


def test_it_trains_generates_and_reports(bin_folder: Path, tmp_path: Path) -> None:
    found = run(bin_folder, tmp_path, "python", "-c", "import paceline; print(paceline.__file__)")
    assert Path(found.strip()).is_relative_to(bin_folder.parent)
    settings = ["--rl.steps=1", "--rl.prompts_per_step=2", "--eval.items=0", "--run.compare=false"]
    run(bin_folder, tmp_path, "paceline", "train", *settings, "--sampling.max_new_tokens=32", "--run.dir=run")
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "manifest.json").is_file()
    model = str(tmp_path / "run" / "checkpoints" / "step-000001" / "policy")
    made = run(bin_folder, tmp_path, "paceline", "generate", "--model", model, "--sampling.max_new_tokens=8", "1 + 1")
    assert made.strip()
    run(bin_folder, tmp_path, "paceline", "report", "run")
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
