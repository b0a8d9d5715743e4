"""What an export may read and replace, checked before torch is imported: the run, the folder to write, the dtype.

The commands call it first, and `export.py` again before it writes. Nothing here imports torch or writes anything.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.config import nearest
from paceline.core.documents import brief
from paceline.model.folder import CONFIG
from paceline.run.store.folder import CHECKPOINTS, DRAFTER, ROLLOUTS
from paceline.run.store.record import CONFIG as RUN_CONFIG

EAGLE = "eagle3"
"""The folder of a drafter among its own run's."""
DTYPE_NAMES = ("bfloat16", "float32")
KEPT = (CHECKPOINTS, DRAFTER, ROLLOUTS)
"""Folders of a run that only the run writes to."""


def check_dtype(name: str) -> None:
    """Raise a ValueError if weights cannot be written in this dtype."""
    if name not in DTYPE_NAMES:
        guess = nearest(name, DTYPE_NAMES)
        hint = f" (did you mean {guess}?)" if guess else ""
        raise ValueError(f"dtype {brief(name)} cannot be written; choose {' or '.join(DTYPE_NAMES)}{hint}")


def run_around(path: Path) -> Path | None:
    """The run that a folder is, or lies in; None if it is in none."""
    return next((folder for folder in (path, *path.absolute().parents[:4]) if (folder / RUN_CONFIG).is_file()), None)


def check_drafter_source(path: Path) -> None:
    """Raise a ValueError if a folder can be neither a run's nor a drafter's."""
    run = run_around(path)
    if path == run:
        if not any((path / DRAFTER).glob(f"**/{EAGLE}")):
            raise no_drafter(path)
    elif not any(any(path.glob(place)) for place in (CONFIG, f"*/{CONFIG}", f"*/*/{CONFIG}")):
        raise ValueError(f"{path} is neither a run nor a drafter; give a run's folder, or RUN/{DRAFTER}/step-N")


def no_drafter(folder: Path) -> ValueError:
    """What to say of a run that has trained none."""
    return ValueError(
        f"{folder} holds no drafter: a run saves one with the first checkpoint after it has learned something, "
        "if spot.enabled=true and there was time to train it (spot.open_share)"
    )


def check_target(out: Path, run: Path | None, is_forced: bool) -> None:
    """Raise a ValueError if writing to `out` would destroy something."""
    target = out.absolute()
    if run is not None and any(target.is_relative_to(run.absolute() / name) for name in KEPT):
        raise ValueError(f"{out} is where the run keeps its own state; export to a folder outside it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_forced:
        raise ValueError(f"{out} exists; give another folder, or --force to replace it")
    if not (out / CONFIG).is_file() or (out / RUN_CONFIG).is_file():
        raise ValueError(f"{out} is not a model folder (no {CONFIG}), and --force replaces nothing else")
