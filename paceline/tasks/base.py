"""The task interface: items generated from (seed, index) alone, and a strict score for each response.

`run/loop.py` calls `item`, the graders call `score`, and `warmup` calls `worked`. A task knows no model and no
tokenizer, keeps no state that a call changes, and never evaluates a text as code: texts come from a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Message:
    """One turn of a chat, for datasets of conversations."""

    role: str
    content: str


@dataclass(frozen=True)
class Item:
    """One problem. All of it survives a JSON round trip, because graders are other processes."""

    prompt: str
    """The text the model continues; in a chat, the last user turn."""
    answer: Any
    """What `score` needs and the model must not see."""
    key: str
    """Canonical form: items with equal keys are the same problem, and no key is in both train and test."""
    level: int = 0
    """Difficulty, for curricula and statistics; 0 is easiest."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, if the item is one."""


class Task(Protocol):
    """A family of items. `item` is a pure function: same arguments, same item, in any process."""

    name: str

    @property
    def size(self) -> int | None:
        """Number of items in the train split; None: endless."""

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        """The index-th item of a split."""

    def score(self, item: Item, text: str) -> float:
        """How correct the text is, from 0 to 1; 1 only for a correct answer."""

    def gold(self, item: Item) -> str:
        """A text that scores 1."""


@runtime_checkable
class FiniteTask(Task, Protocol):
    """A task whose items are all known, so that the longest prompts can be tried before a run begins."""

    def longest(self, count: int, split: Split = "train") -> Sequence[Item]:
        """The items with the longest prompts, the longest first."""


@runtime_checkable
class WorkedTask(Task, Protocol):
    """A task that can show its work, so that a model can be trained on it from scratch."""

    alphabet: str
    """Every character of the compact prompts and worked solutions; together with `words`, a complete vocabulary."""
    words: tuple[str, ...]
    """Words in those texts that are single tokens."""

    def worked(self, item: Item, seed: int) -> str:
        """A solution as a model should write it, with its reasoning; seeds give different ones where several exist."""


@runtime_checkable
class LevelledTask(Task, Protocol):
    """A task with difficulty levels for a curriculum to choose from. A task at any level scores items of all levels."""

    level: int

    @property
    def num_levels(self) -> int:
        """Levels run from 0, the easiest, to num_levels - 1."""

    def at_level(self, level: int) -> LevelledTask:
        """The same task at another level."""
