"""The policy of a command: its files, and an engine that runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.cli.console import say

if TYPE_CHECKING:
    from paceline.model.random_config import RandomSize
    from paceline.rollout.engine import Engine
    from paceline.run.settings import RootSettings


def say_loading(settings: RootSettings, name: str | None = None) -> None:
    """Announce the wait before importing torch causes it; `name` replaces the settings' model."""
    from paceline.kernels.cpu.jit import cache_folder

    line = f"loading {name or settings.model.path} ..."
    if settings.model.device == "cpu" and not any(cache_folder().iterdir()):
        line += " (compiling kernels first, once per machine: about a minute)"
    say(line)


@contextmanager
def policy_folder(settings: RootSettings) -> Iterator[str]:
    """The policy as `resolve` takes it; `random:<size>` lives in a temporary folder."""
    kind, _, size = settings.model.path.partition(":")
    if kind != "random":
        yield settings.model.path
        return
    from paceline.model.random_model import make_random_model

    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        made = make_random_model(Path(folder), size=cast("RandomSize", size))
        say(f"created a {size} model with random weights; its text is noise")
        yield str(made)


def open_engine(settings: RootSettings, folder: str) -> Engine:
    """An engine that may fill the free memory; on a GPU, say how it does."""
    from paceline.rollout.engine import Engine
    from paceline.run.recipes import drafter_of

    engine = Engine.from_pretrained(
        folder,
        device=settings.model.device,
        drafter=drafter_of(settings),
        exact=settings.engine.exact,
        settings=settings.engine,
        budget=settings.budget,
    )
    if settings.model.device != "cpu":
        say(str(engine.memory_plan()))
    return engine
