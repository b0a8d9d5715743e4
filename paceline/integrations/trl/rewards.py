"""A user's reward functions, called as TRL calls them; what goes wrong in one is named by its file and line.

`trainers.py` wraps them when it is constructed. An error keeps its type and gets a note; a result that TRL could not
read is a ValueError. Rewards themselves are never changed: TRL's loss gets what the function returned.
"""

from __future__ import annotations

import functools
import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

RewardFunction = Callable[..., Any]

ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
"""Where frames of other people's code begin."""


def guard_rewards(functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The functions, guarded; reward models stay as they are."""
    return [
        function if isinstance(function, torch.nn.Module) else guard(function, name)
        for function, name in zip(functions, names, strict=True)
    ]


def guard(function: RewardFunction, name: str) -> RewardFunction:
    """A function that does what `function` does, and explains where it fails."""
    reward = f"the reward {name}{_place_of(function)}"

    def called(**given: Any) -> list[Any]:
        with _explained(reward, given):
            rewards = function(**given)
        return checked(rewards, reward, len(given["completions"]))

    async def awaited(**given: Any) -> list[Any]:
        with _explained(reward, given):
            rewards = await function(**given)
        return checked(rewards, reward, len(given["completions"]))

    return awaited if _is_async(function) else called


def checked(rewards: Any, reward: str, num_wanted: int) -> list[Any]:
    """The rewards as a list; a ValueError unless there is one finite number, or None, per completion.

    NaN means None to TRL.
    """
    wanted = f"a list with a number, or None, for each of the {num_wanted} completions"
    try:
        values = [value.item() if isinstance(value, torch.Tensor) else value for value in rewards]
    except (TypeError, RuntimeError):
        values = None
    if values is None or isinstance(rewards, str | Mapping):
        raise ValueError(f"{reward} returned {rewards!r:.200}; it must return {wanted}")
    if len(values) != num_wanted:
        raise ValueError(f"{reward} returned {len(values)} rewards; it must return {wanted}")
    for index, value in enumerate(values):
        if value is not None and (not isinstance(value, Real | np.bool_) or math.isinf(value)):
            raise ValueError(f"{reward} returned {value!r:.200} for completion {index}; it must return {wanted}")
    return values


@contextmanager
def _explained(reward: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Add a note to an error in the user's code."""
    try:
        yield
    except Exception as error:
        error.add_note(_note(error, reward, given))
        raise


def _note(error: Exception, reward: str, given: Mapping[str, Any]) -> str:
    """Where an error came up, or what the function was called with if it never ran."""
    frames = traceback.extract_tb(error.__traceback__)[2:]  # after that of `_explained` and its caller
    if not frames:
        columns = ", ".join(name for name in given if name not in ALWAYS_PASSED) or "none"
        return f"{reward} was called with {', '.join(ALWAYS_PASSED)} and the dataset's other columns ({columns})"
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or list(frames)
    note = f"{reward} raised this at {Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name}"
    if isinstance(given["completions"][0], list):
        note += '; here a completion is a list of messages, and its text is completion[0]["content"]'
    return note


def _place_of(function: RewardFunction) -> str:
    """File and line of a function, or of the class that is called like one; empty if it has none."""
    target: Any = function
    while isinstance(target, functools.partial):
        target = target.func
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target).__call__
    code = getattr(inspect.unwrap(target), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def _is_async(function: Any) -> bool:
    """As TRL decides it."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
