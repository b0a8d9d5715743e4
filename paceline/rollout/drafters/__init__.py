"""The drafters, which guess what comes next. A wrong drafter costs time and can never change a token.

The engine calls `make_drafters` once and passes the set to its `Proposer`; `check_drafters` finds a wrong name before
torch is imported. A new drafter is one file and one entry in `TEXT_DRAFTERS` or `MODEL_DRAFTERS`; files are imported
when a drafter is made, so "none" costs nothing. Users name their own drafter as `path/to/file.py:Class`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.documents import brief
from paceline.core.plugins import call_own, find_own, guess_name, load_own, names_file
from paceline.core.types import Drafter
from paceline.model.folder import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from paceline.rollout.drafters.drafter_set import DrafterSet
    from paceline.rollout.drafters.model_drafter import ModelDrafter


def _replay() -> Drafter:
    from paceline.rollout.drafters.replay import Replay

    return Replay()


def _ngram() -> Drafter:
    from paceline.rollout.drafters.jit_warmup import warm_up_jit
    from paceline.rollout.drafters.ngram import Ngram

    warm_up_jit(Ngram)
    return Ngram()


def _suffix() -> Drafter:
    from paceline.rollout.drafters.jit_warmup import warm_up_jit
    from paceline.rollout.drafters.suffix import Suffix

    warm_up_jit(Suffix)
    return Suffix()


def _eagle(folder: str | None = None) -> ModelDrafter:
    from paceline.rollout.drafters.eagle import EagleDrafter

    if folder is None:
        return EagleDrafter()
    from paceline.model.eagle.files import load_eagle

    return EagleDrafter(load_eagle(Path(folder)))


def _own(spec: str) -> Drafter:
    from paceline.rollout.drafters.surroundings import undisturbed

    with undisturbed():
        drafter = call_own(load_own(spec, "engine.drafter", "class"), spec, "engine.drafter")
    return _checked(drafter, f"of {spec}")


TEXT_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "replay": _replay,
    "ngram": _ngram,
    "suffix": _suffix,
    "auto": _suffix,
}
"""`auto` is the best drafter that needs no training; a run that trains a drafter adds it."""
MODEL_DRAFTERS: dict[str, Callable[[], ModelDrafter]] = {"eagle": _eagle}

EAGLE_FOLDER = "eagle:"
"""Prefix of a trained drafter's folder."""


def make_drafters(spec: str | Drafter | DrafterSet | None) -> DrafterSet | None:
    """Make drafters from a name, a comma-separated list of names, or an object; None for no drafting."""
    from paceline.rollout.drafters.drafter_set import DrafterSet

    if spec is None or spec == "none":
        return None
    if isinstance(spec, DrafterSet):
        return spec
    if not isinstance(spec, str):
        return DrafterSet([_checked(spec)])
    text, models = _factories(spec)
    return DrafterSet([make() for make in text.values()], next((make() for make in models.values()), None))


def check_drafters(spec: str) -> None:
    """Raise a ValueError if a setting names a drafter that is not there. Makes none, and runs no code of the user's."""
    text, models = ({}, {}) if spec == "none" else _factories(spec)
    for name in models:
        if name.startswith(EAGLE_FOLDER):
            _check_folder(Path(name.removeprefix(EAGLE_FOLDER)))
    for name in filter(names_file, text):
        find_own(name, "engine.drafter", "class")


def _check_folder(folder: Path) -> None:
    """Raise a ValueError unless a trained drafter's files are there."""
    if not folder.is_dir():
        raise ValueError(
            f"engine.drafter: there is no folder {brief(str(folder))}; give one with {CONFIG} and {WEIGHTS}"
        )
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"engine.drafter: {folder} has no {name}, so it is not a drafter folder; a run keeps its drafter in "
                "RUN/drafter/step-N/eagle3"
            )


def _factories(spec: str) -> tuple[dict[str, Callable[[], Drafter]], dict[str, Callable[[], ModelDrafter]]]:
    """What makes each drafter that a setting names: those that read text, and the network, if any."""
    names = [name.strip() for name in spec.split(",")]
    if len(set(names)) < len(names):
        raise ValueError(f"drafter {spec!r} names a drafter twice; name each once")
    models = {name: make for name in names if (make := _model_factory(name))}
    if len(models) > 1:
        raise ValueError(f"drafter {spec!r} names more than one network ({', '.join(models)}); name one")
    return {name: _text_factory(name) for name in names if name not in models}, models


def _model_factory(name: str) -> Callable[[], ModelDrafter] | None:
    if name.startswith(EAGLE_FOLDER):
        return partial(_eagle, name.removeprefix(EAGLE_FOLDER))
    return MODEL_DRAFTERS.get(name)


def _text_factory(name: str) -> Callable[[], Drafter]:
    if name in TEXT_DRAFTERS:
        return TEXT_DRAFTERS[name]
    if names_file(name):
        return partial(_own, name)
    if name == "none":
        raise ValueError("drafter 'none' cannot be part of a list; leave it out")
    names = ["none", *TEXT_DRAFTERS, *MODEL_DRAFTERS]
    known = f"use {', '.join(names)}, {EAGLE_FOLDER}FOLDER, FILE.py:CLASS, or a comma-separated list"
    guess = guess_name(name, names, "CLASS")
    hint = f"did you mean {brief(guess)}? ({known})" if guess else known
    raise ValueError(f"unknown drafter {brief(name)}: {hint}")


def _checked(drafter: Any, name: str | None = None) -> Drafter:
    missing: str | None
    try:
        methods = {"propose": drafter.propose, "observe": drafter.observe, "finish": drafter.finish}
        missing = next((name for name, method in methods.items() if not callable(method)), None)
    except AttributeError as error:
        missing = error.name
    if missing is not None:
        raise ValueError(
            f"drafter {name or repr(drafter)} has no method {missing!r}: "
            "pass a name, None, an object with propose, observe and finish, or a DrafterSet"
        )
    checked: Drafter = drafter
    return checked
