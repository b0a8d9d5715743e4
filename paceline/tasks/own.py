"""User-defined tasks: `path/to/file.py:Class`, made from the `task` section like the built-in ones.

`registry.make_task` calls this, in the run and in every grader process. The class or function takes the settings and
returns a `Task`. Whoever asks a task outside of a grader process does so through `ask_task`. `paceline tasks` checks
that it is sound: right answers pass and cheap ones do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.core.plugins import call_own, load_own, names_file
from paceline.tasks.base import Item, Split, Task
from paceline.tasks.settings import TaskSettings

T = TypeVar("T")

MEMBERS = ("name", "size", "item", "score", "gold")


def make_own_task(settings: TaskSettings) -> Task:
    """The task whose file and class `task.name` names."""
    made = load_own(settings.name, "task.name", "class")
    task: Task = call_own(lambda: made(settings), settings.name, "task.name")
    missing = [member for member in MEMBERS if not hasattr(task, member)]
    if missing:
        raise ValueError(
            f"task.name: {settings.name} makes a task without {', '.join(missing)}; a task has {', '.join(MEMBERS)}"
        )
    return task


def ask_task(settings: TaskSettings, call: Callable[[], T]) -> T:
    """What a task returns; if the user's own task or reward raises, a ValueError names it and its line."""
    if names_file(settings.name):
        return call_own(call, settings.name, "task.name")
    return call() if settings.reward is None else call_own(call, settings.reward, "task.reward")


def ask_item(settings: TaskSettings, task: Task, index: int, split: Split = "train") -> Item:
    """An item of a task; a ValueError says what a user's own task has returned instead."""
    item = ask_task(settings, lambda: task.item(settings.seed, index, split))
    if not isinstance(item, Item):
        raise ValueError(
            f"task.name: {settings.name} returned a {type(item).__name__} for item {index}, not a "
            "paceline.tasks.base.Item"
        )
    for name in ("prompt", "key"):
        value = getattr(item, name)
        if not isinstance(value, str):
            raise ValueError(
                f"task.name: item {index} of {settings.name} has {value!r:.80} as its {name}, not a string"
            )
    return item
