"""A user's own task: `path/to/file.py:Class`, made like ours from the `task` section of the settings.

Called by `registry.make_task`, in the run and in every grader process. The class, or a function, gets the settings and
returns a `Task`; whether it is sound, that its right answers pass and cheap ones do not, `paceline tasks` checks.
"""

from __future__ import annotations

from paceline.core.plugins import call_own, load_own
from paceline.tasks.base import Task
from paceline.tasks.settings import TaskSettings

MEMBERS = ("name", "size", "item", "score", "gold")


def make_own_task(settings: TaskSettings) -> Task:
    """The task that `task.name` names a file and a class for."""
    made = load_own(settings.name, "task.name", "class")
    task: Task = call_own(lambda: made(settings), settings.name, "task.name")
    missing = [member for member in MEMBERS if not hasattr(task, member)]
    if missing:
        raise ValueError(
            f"task.name: {settings.name} makes a task without {', '.join(missing)}; a task has {', '.join(MEMBERS)}"
        )
    return task
