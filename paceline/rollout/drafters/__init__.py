"""Guesses at what comes next. A drafter costs time when it is wrong and can never change a token.

The engine calls `make_drafter` once and then `propose`, `observe` and `finish` of what it got. A new drafter is one
file and one entry in `DRAFTERS`; files are imported when a drafter is made, so "none" costs nothing. A user's own is
`path/to/file.py:Class`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.plugins import call_own, guess_name, load_own, names_file
from paceline.core.types import Drafter

if TYPE_CHECKING:
    from paceline.rollout.drafters.eagle import EagleDrafter


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


def _eagle(folder: str | None = None) -> Drafter:
    from paceline.rollout.drafters.eagle import EagleDrafter

    if folder is None:
        return EagleDrafter()
    from paceline.model.eagle.files import load_eagle

    return EagleDrafter(load_eagle(Path(folder)))


def _own(spec: str) -> Drafter:
    drafter = call_own(load_own(spec, "engine.drafter", "class"), spec, "engine.drafter")
    return _checked(drafter, f"of {spec}")


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "replay": _replay,
    "ngram": _ngram,
    "suffix": _suffix,
    "eagle": _eagle,
    "auto": _suffix,
}
"""`auto` is the best that needs nobody else; a run that trains a drafter makes more of it."""

EAGLE_FOLDER = "eagle:"
"""Before the folder of a trained drafter."""


def make_drafter(spec: str | Drafter | None) -> Drafter | None:
    """The drafter for a name, a comma list of names, or an object that is one already; None for no drafting."""
    if spec is None or spec == "none":
        return None
    if not isinstance(spec, str):
        return _checked(spec)
    names = [name.strip() for name in spec.split(",")]
    if len(set(names)) < len(names):
        raise ValueError(f"drafter {spec!r} names a drafter twice; name each once")
    drafters = [_factory(name)() for name in names]
    if len(drafters) == 1:
        return drafters[0]
    from paceline.rollout.drafters.combined import Combined

    combined = Combined(drafters)
    if len(set(combined.names)) < len(drafters):
        raise ValueError(f"two drafters of {spec!r} have one name ({combined.name}); give your class another `name`")
    return combined


def find_eagle(drafter: Drafter | None) -> EagleDrafter | None:
    """The drafter itself, or the one among several, that needs the policy's hidden states."""
    from paceline.rollout.drafters.combined import Combined
    from paceline.rollout.drafters.eagle import EagleDrafter

    if isinstance(drafter, Combined):
        return next(filter(None, map(find_eagle, drafter.drafters)), None)
    return drafter if isinstance(drafter, EagleDrafter) else None


def _factory(name: str) -> Callable[[], Drafter]:
    if name in DRAFTERS:
        return DRAFTERS[name]
    if name.startswith(EAGLE_FOLDER):
        return partial(_eagle, name.removeprefix(EAGLE_FOLDER))
    if names_file(name):
        return partial(_own, name)
    known = f"use none, {', '.join(DRAFTERS)}, {EAGLE_FOLDER}FOLDER, FILE.py:CLASS, or a comma list"
    if name == "none":
        raise ValueError("drafter 'none' cannot stand in a list; leave it out")
    guess = guess_name(name, ["none", *DRAFTERS], "CLASS")
    raise ValueError(f"unknown drafter {name!r}: " + (f"did you mean {guess!r}? ({known})" if guess else known))


def _checked(drafter: Any, name: str | None = None) -> Drafter:
    for method in ("propose", "observe", "finish"):
        if not callable(getattr(drafter, method, None)):
            raise ValueError(
                f"drafter {name or repr(drafter)} has no method {method!r}: "
                "pass a name, None, or an object with propose, observe and finish"
            )
    checked: Drafter = drafter
    return checked
