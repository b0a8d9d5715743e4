"""The policy of a command: its files, and an engine that runs it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from paceline.cli.console import say
from paceline.run.policy_folder import found_policy

if TYPE_CHECKING:
    from paceline.rollout.engine import Engine
    from paceline.run.settings import RootSettings


def say_loading(settings: RootSettings, name: str | None = None) -> None:
    """Announce the wait before importing torch causes it; `name` replaces the settings' model."""
    from paceline.kernels.cpu.jit import cache_folder

    line = f"loading {name or settings.model.path} ..."
    if settings.model.device == "cpu" and not any(cache_folder().iterdir()):
        line += " (compiling kernels first, once per machine: about a minute)"
    say(line)


def policy_folder(settings: RootSettings) -> AbstractContextManager[str]:
    """The policy as `resolve` takes it; `random:<size>` lives in a temporary folder."""
    return found_policy(settings.model.path, say)


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
