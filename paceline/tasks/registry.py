"""The table of tasks by name; a new task needs one file and one line of `TASKS`.

The run, the graders (other processes, which remake the task from the settings) and the command line, which lists
`TASKS`, call `make_task`. A name of the form `kind:rest` looks up `kind:` and leaves the rest to that entry;
`file.py:Class` is a user-defined task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.config import Settings, SettingsError
from paceline.core.documents import brief, plain
from paceline.core.plugins import guess_name, names_file
from paceline.tasks.base import Task
from paceline.tasks.countdown import Countdown, CountdownDials
from paceline.tasks.counting import Counting
from paceline.tasks.files import FileDials
from paceline.tasks.graph import Graph
from paceline.tasks.gym import make_gym_task
from paceline.tasks.math import make_math_task
from paceline.tasks.own import make_own_task
from paceline.tasks.procedural import TemplateDials
from paceline.tasks.rewards import make_reward_task
from paceline.tasks.settings import TaskSettings
from paceline.tasks.spatial import Spatial
from paceline.tasks.word_sums import WordSums, WordSumsDials


@dataclass(frozen=True)
class TaskEntry:
    """One kind of task: a one-line summary, its factory, and its dials."""

    summary: str
    make: Callable[[TaskSettings], Task]
    dials: type[Settings] | None = None


def _make(kind: type[Countdown | Counting | Graph | Spatial | WordSums]) -> Callable[[TaskSettings], Task]:
    """The factory of a procedural task."""

    def make(settings: TaskSettings) -> Task:
        for field in ("data", "reward"):
            if getattr(settings, field) is not None:
                raise SettingsError(f"task.{field}: {settings.name} has its own; leave it out or choose another task")
        return kind(settings.level, settings.dials)

    return make


TASKS: dict[str, TaskEntry] = {
    "countdown": TaskEntry("Reach a target with given numbers and + - * /.", _make(Countdown), CountdownDials),
    "counting": TaskEntry("Count the letters of a row that satisfy a condition.", _make(Counting), TemplateDials),
    "graph": TaskEntry("Paths, reachable nodes and parts of a small directed graph.", _make(Graph), TemplateDials),
    "spatial": TaskEntry("Follow moves on a grid: where they lead, and how far.", _make(Spatial), TemplateDials),
    "word_sums": TaskEntry("Word problems with one sum, for small chat models.", _make(WordSums), WordSumsDials),
    "math": TaskEntry(
        "Problems from a file (task.data), final answers judged by math-verify.", make_math_task, FileDials
    ),
    "file": TaskEntry(
        "Prompts from a file (task.data), judged by your own reward (task.reward).", make_reward_task, FileDials
    ),
    "gym:": TaskEntry("A reasoning-gym dataset, as in gym:gsm_symbolic.", make_gym_task),
}

OWN = TaskEntry("A task of your own, as in path/to/file.py:Class.", make_own_task)


def make_task(settings: TaskSettings) -> Task:
    """The task that a `task` section describes."""
    return find_entry(settings.name).make(settings)


def find_entry(name: str) -> TaskEntry:
    """The table entry for a task's name."""
    if names_file(name):
        return OWN
    kind, colon, _ = name.partition(":")
    entry = TASKS.get(kind + colon)
    if entry is None:
        guess = guess_name(kind + colon, task_names(), "CLASS")
        hint = f"did you mean {plain(guess)}?" if guess else f"there are {', '.join(task_names())}, or file.py:Class"
        raise SettingsError(f"task.name: unknown task {brief(name)}: {hint}")
    return entry


def task_names() -> list[str]:
    """Every name; one that ends in a colon takes a further name after it."""
    return list(TASKS)
