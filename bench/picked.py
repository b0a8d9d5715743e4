"""Items picked from another task, to train on and to be judged by: both splits are these items, in this order.

`bench/sanity.py` writes the file: the other task's settings, then one item a line. Scores are the other task's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from paceline.core.config import validate
from paceline.tasks.base import Item, Message, Split, Task
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings


def write_picked(path: Path, settings: TaskSettings, items: Iterable[Item]) -> None:
    """The file for `task.data`."""
    rows = [settings.model_dump(mode="json"), *map(dataclasses.asdict, items)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Picked:
    """The task of a file of picked items."""

    name = "picked"

    def __init__(self, settings: TaskSettings) -> None:
        if settings.data is None:
            raise ValueError("task.data: name the file that bench/sanity.py wrote")
        first, *rows = map(json.loads, Path(settings.data).read_text(encoding="utf-8").splitlines())
        self._task: Task = make_task(validate(TaskSettings, first))
        self._items = [
            Item(**{**row, "messages": tuple(Message(**message) for message in row["messages"])}) for row in rows
        ]

    @property
    def size(self) -> int:
        return len(self._items)

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        return self._items[index % len(self._items)]

    def score(self, item: Item, text: str) -> float:
        return self._task.score(item, text)

    def gold(self, item: Item) -> str:
        return self._task.gold(item)
