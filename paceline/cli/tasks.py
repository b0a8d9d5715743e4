"""`paceline tasks`: the list of tasks, or one task with a check that it scores answers correctly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import show
from paceline.cli.overrides import load_settings

if TYPE_CHECKING:
    from paceline.tasks.settings import TaskSettings


def command(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this task: an item, an answer, its dials.")
    ] = None,
) -> None:
    """List the tasks, or show one and check its scoring."""
    if name is None:
        _list_tasks()
    else:
        _show_task(load_settings({**ctx.obj, "task.name": name}, None, None).task)


def _list_tasks() -> None:
    from paceline.tasks.registry import OWN, TASKS

    for name, entry in TASKS.items():
        show(f"{name:<13} {entry.summary}")
    show(f"{'FILE.py:NAME':<13} {OWN.summary}")


def _show_task(settings: TaskSettings) -> None:
    from paceline.run.ui.summary import counted
    from paceline.tasks.checks import check
    from paceline.tasks.own import ask_item, ask_task
    from paceline.tasks.registry import find_entry, make_task

    task = make_task(settings)
    item = ask_item(settings, task, 0)
    answer = ask_task(settings, lambda: task.gold(item))
    show(f"item 0\n{item.prompt}\n\nan answer that scores 1\n{answer}\n")
    dials = find_entry(settings.name).dials
    for key, field in (dials.model_fields if dials else {}).items():
        show(f"--task.dials.{key}={field.default}  {field.description or ''}")
    report = ask_task(settings, lambda: check(task))
    show(f"checked {counted(report.num_items, 'item')}: {'sound' if report.is_sound else 'NOT SOUND'}")
    for problem in report.problems:
        show(f"  {problem}")
    if not report.is_sound:
        raise typer.Exit(1)
