"""Where metrics go besides the run folder: TensorBoard files, Weights & Biases, trackio.

`open.py` calls `make_loggers` once; the run then calls `log` after every step and `close` at its end. All of them are
optional packages. Nothing leaves this machine unless the user names a service. No logger can end a run: one that fails
is dropped with a warning.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from paceline.core.config import SettingsError, nearest
from paceline.core.documents import brief
from paceline.core.files import write_file
from paceline.run.store.folder import TENSORBOARD

PROJECT = "paceline"
"""Project name at the services, unless their own environment variable sets another."""
WANDB_ID_FILE = "wandb-id.txt"


class Logger(Protocol):
    """Takes one row of metrics after every step."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass a row on, numbers only."""

    def close(self) -> None:
        """No more rows will come."""


@dataclass(frozen=True)
class Place:
    """The run as a logger sees it."""

    folder: Path
    config: Mapping[str, Any]
    first_step: int
    """The first step to be logged; above 1, the run resumes from a checkpoint."""

    @property
    def is_resumed(self) -> bool:
        return self.first_step > 1


@dataclass(frozen=True)
class LoggerEntry:
    """A kind of logger: the package it needs, the module to import and how to make one."""

    package: str
    module: str
    make: Callable[[ModuleType, Place], Logger]
    hint: str
    """What to try if it is installed but fails to start."""


def make_loggers(
    names: str | Sequence[str],
    folder: Path,
    config: Mapping[str, Any],
    *,
    first_step: int = 0,
    warn: Callable[[str], None] | None = None,
) -> list[Logger]:
    """The loggers of `run.loggers`: names, or a comma-separated list of them.

    `auto` is TensorBoard, which only writes files, if it is installed. `config` is what `config.yaml` holds. `warn`
    reports loggers that fail later; without it, Python warnings do.
    """
    place = Place(folder, config, first_step)
    tell = warn if warn is not None else _warn
    found: list[Logger] = []
    for name in _chosen(names):
        is_asked_for = name != "auto"
        name = name if is_asked_for else "tensorboard"
        logger = _make_asked_for(name, place) if is_asked_for else _make_if_possible(name, place, tell)
        if logger is not None:
            found.append(_Guarded(name, logger, tell))
    return found


def check_loggers(names: str | Sequence[str]) -> None:
    """Raise if `make_loggers` would not know one of these names, or would not find its package."""
    for name in _chosen(names):
        if name != "auto" and LOGGERS[name].package not in sys.modules and find_spec(LOGGERS[name].package) is None:
            raise SettingsError(_not_installed(name))


def _chosen(names: str | Sequence[str]) -> list[str]:
    """Names in order, without repeats; an unknown one is an error that suggests the nearest."""
    given = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    valid = ["auto", "none", *LOGGERS]
    for name in given:
        if name not in valid:
            guess = nearest(name.lower(), valid)
            hint = f"did you mean {guess}?" if guess else f"choose from {', '.join(valid)}"
            raise SettingsError(f"run.loggers: unknown logger {brief(name)}: {hint}")
    if "none" in given:
        if set(given) != {"none"}:
            raise SettingsError(f"run.loggers: none excludes all others, got {', '.join(given)}; keep one or the other")
        return []
    chosen = list(dict.fromkeys(given))
    return [name for name in chosen if name != "auto" or "tensorboard" not in chosen]


def _make_asked_for(name: str, place: Place) -> Logger:
    """A logger the user named. If it cannot start, the user must know now, not after a night of training."""
    entry = LOGGERS[name]
    try:
        return entry.make(importlib.import_module(entry.module), place)
    except Exception as error:  # every service fails in its own way, and the user must see it
        if _is_missing(error, entry):
            raise SettingsError(_not_installed(name)) from error
        raise SettingsError(
            f"run.loggers: {name} failed to start ({_describe(error)}): {entry.hint}, or choose others with "
            "--run.loggers"
        ) from error


def _not_installed(name: str) -> str:
    package = LOGGERS[name].package
    return f"run.loggers: {name} is not installed: pip install {package}, or choose others with --run.loggers"


def _make_if_possible(name: str, place: Place, warn: Callable[[str], None]) -> Logger | None:
    """A logger nobody asked for: silent if missing, a warning if broken."""
    entry = LOGGERS[name]
    try:
        return entry.make(importlib.import_module(entry.module), place)
    except Exception as error:  # a broken installation must not keep a run from starting
        if not _is_missing(error, entry):
            warn(f"{name} is installed but failed to start; the run continues without it: {_describe(error)}")
        return None


def _is_missing(error: Exception, entry: LoggerEntry) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == entry.package


def _describe(error: Exception) -> str:
    """An error in one line: services explain themselves at length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What can be plotted. NaN can, and is worth seeing; the step is already the axis of every plot."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real) and name != "step"}


class _Guarded:
    """Drops a logger at its first failure, with a warning, instead of ending the run."""

    def __init__(self, name: str, logger: Logger, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._logger: Logger | None = logger

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._logger is None:
            return
        try:
            self._logger.log(step, metrics)
        except Exception as error:  # whatever it is, a plot is not worth a run
            self._drop(f"at step {step}", error)

    def close(self) -> None:
        logger, self._logger = self._logger, None
        if logger is None:
            return
        try:
            logger.close()
        except Exception as error:  # as above
            self._warn(f"{self._name} failed while closing; its last rows may be missing: {_describe(error)}")

    def _drop(self, when: str, error: Exception) -> None:
        self._logger = None
        self._warn(f"{self._name} failed {when} and gets no more rows; metrics.jsonl has all: {_describe(error)}")


class TensorBoard:
    """Event files in the run folder, for `tensorboard --logdir runs`."""

    def __init__(self, module: ModuleType, place: Place) -> None:
        # Events of a killed run may lie past its checkpoint; the viewer hides those.
        purge_step = place.first_step if place.is_resumed else None
        self._writer = module.SummaryWriter(log_dir=str(place.folder / TENSORBOARD), purge_step=purge_step)
        if not place.is_resumed:
            settings = json.dumps(place.config, indent=2, default=str)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # cheap beside a step, and a full disk shows up where it happens

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run, whose id lies in the run folder so that a resumed run continues it.

    After a crash, rows since the last checkpoint are sent again. W&B keeps the first of each; they differ only in their
    timings, because the run repeats itself exactly.
    """

    def __init__(self, module: ModuleType, place: Place) -> None:
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=place.folder.name,
            id=_wandb_id(place.folder),
            resume="allow",
            dir=str(place.folder),
            config=dict(place.config),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: Path) -> str:
    """Random, not derived from the path: a new run must not continue a deleted one of the same name."""
    file = folder / WANDB_ID_FILE
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    name = secrets.token_hex(4)
    write_file(file, [f"{name}\n".encode()])
    return name


class Trackio:
    """A trackio run: a local database, unless trackio's own environment variables name a Space or a server."""

    def __init__(self, module: ModuleType, place: Place) -> None:
        self._run = module.init(
            project=PROJECT,
            name=place.folder.name,
            resume="allow" if place.is_resumed else "never",
            config=dict(place.config),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, LoggerEntry] = {
    "tensorboard": LoggerEntry(
        "tensorboard", "torch.utils.tensorboard", TensorBoard, "try pip install --upgrade tensorboard"
    ),
    "wandb": LoggerEntry("wandb", "wandb", Wandb, "try `wandb login`, or WANDB_MODE=offline"),
    "trackio": LoggerEntry("trackio", "trackio", Trackio, "try pip install --upgrade trackio"),
}
"""Adding one is a class and a line here."""
