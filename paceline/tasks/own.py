"""User-defined tasks: `path/to/file.py:Class`, made from the `task` section like the built-in ones.

`registry.make_task` calls this, in the run and in every grader process. The class or function takes the settings and
returns a `Task`. `paceline tasks` checks that it is sound: right answers pass and cheap ones do not.
"""

from __future__ import annotations

from paceline.core.plugins import call_own, load_own
from paceline.tasks.base import Task
from paceline.tasks.settings import TaskSettings

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
