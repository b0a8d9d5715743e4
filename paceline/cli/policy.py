"""The policy of a command: found and checked before torch is imported, then its files, and an engine that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from paceline.cli.console import say
from paceline.run.policy_folder import found_policy

if TYPE_CHECKING:
    from paceline.rollout.engine import Engine
    from paceline.run.settings import RootSettings


def find_policy(settings: RootSettings) -> RootSettings:
    """Settings that an engine can be made of, as far as shows without torch; a run's folder becomes its newest policy.

    Called before anything is announced: whoever has mistyped a path should see nothing else.
    """
    from paceline.model.folder import check_model
    from paceline.run.checks import check_engine
    from paceline.run.recipes import with_newest_policy

    check_engine(settings)
    settings = with_newest_policy(settings)
    check_model(settings.model.path)
    return settings


@contextmanager
def loaded_engine(settings: RootSettings) -> Iterator[Engine]:
    """An engine with the policy; says what takes so long, and that nothing came of it if it is interrupted."""
    with ExitStack() as stack:
        with interruptible(f"loading {settings.model.path}"):
            say_loading(settings)
            engine = open_engine(settings, stack.enter_context(policy_folder(settings)))
        yield engine


@contextmanager
def interruptible(what: str) -> Iterator[None]:
    """Say what was going on if Ctrl-C ends it before there is a result."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped while {what}; nothing was written")
        raise


def say_loading(settings: RootSettings) -> None:
    """Announce the wait before importing torch causes it."""
    from paceline.kernels.cpu.jit import cache_folder

    line = f"loading {settings.model.path} ..."
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
