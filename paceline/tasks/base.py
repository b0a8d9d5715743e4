"""What a task is: items to solve, made from (seed, index) alone, and a strict score for a text.

`run/loop.py` asks for items, the graders ask for scores; `warmup` asks for worked solutions. A task knows no model and
no tokenizer, holds no state that a call changes, and never evaluates a text as code: texts come from a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Message:
    """One turn of a chat, for data sets that come as conversations."""

    role: str
    content: str


@dataclass(frozen=True)
class Item:
    """One problem. Everything in it survives a trip through JSON, for graders are other processes."""

    prompt: str
    """The text a model continues; of a chat, the last user turn."""
    answer: Any
    """What `score` needs to know, and the model must not see."""
    key: str
    """Canonical form: items with equal keys are the same problem, and train and test share none."""
    level: int = 0
    """Difficulty, for curricula and statistics; 0 is the easiest."""
    messages: tuple[Message, ...] = ()
    """The whole chat, where there is one."""


class Task(Protocol):
    """A family of items. `item` is a pure function: same arguments, same item, in any process."""

    name: str

    @property
    def size(self) -> int | None:
        """How many items the train split has; None: endless."""

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        """The index-th item of a split."""

    def score(self, item: Item, text: str) -> float:
        """0 to 1 by how right the text is; 1 only for a correct answer."""

    def gold(self, item: Item) -> str:
        """A text that scores 1."""


@runtime_checkable
class WorkedTask(Task, Protocol):
    """A task that can show its work, which a model can be trained on from nothing."""

    alphabet: str
    """Every character of the compact prompts and worked solutions; with `words`, all a tokenizer has to know."""
    words: tuple[str, ...]
    """The words in them that come as wholes."""

    def worked(self, item: Item, seed: int) -> str:
        """A solution as a model should write it, reasoning included; other seeds give other ones where there are."""


@runtime_checkable
class LevelledTask(Task, Protocol):
    """A task with levels of difficulty, which a curriculum chooses from. Any level scores the items of all."""

    level: int

    @property
    def num_levels(self) -> int:
        """Levels are 0, the easiest, to num_levels - 1."""

    def at_level(self, level: int) -> LevelledTask:
        """The same task at another level."""
