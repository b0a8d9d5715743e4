"""Building blocks of the procedural tasks: keyed dice, train/test split, levels of dials, template tasks.

`countdown`, `counting`, `graph` and `spatial` build on it. An item is drawn with dice keyed by a hash of (task, seed,
split, index, attempt), and redrawn until its canonical key falls into the wanted split. A hash of the key alone decides
that, so no item is ever in both splits, whatever the seed, level or dials. Nothing here keeps state that a call
changes.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import Field

from paceline.core.config import Settings, SettingsError, validate
from paceline.core.noise import derive_key
from paceline.tasks.answers import final_answer, write_answer
from paceline.tasks.base import Item, Split

TEST_SHARE = 8
"""One key in this many is held out for the test split."""

MAX_REDRAWS = 2000
"""After this many draws without an item of a split, the split counts as empty."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Names for things in compact prompts."""

T = TypeVar("T")


class Dice:
    """Random choices that depend on the key alone, in every Python version: only `random()` is used."""

    def __init__(self, key: int) -> None:
        self._random = random.Random(key).random

    def below(self, bound: int) -> int:
        """A number from 0 to bound - 1."""
        return int(self._random() * bound)

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` of the options in random order, without replacement."""
        pool = list(options)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]


def split_of(task: str, key: str) -> Split:
    """The split that an item with this canonical key always belongs to."""
    digest = hashlib.blake2b(f"{task}\n{key}".encode(), digest_size=8, person=b"paceline-split").digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


class Dials(Settings):
    """Dials of every procedural task; a task adds its own."""

    style: Literal["compact", "chat"] = Field(
        "compact", description="compact: few symbols, for a model trained from scratch; chat: plain English."
    )


class TemplateDials(Dials):
    """Dials of the template tasks."""

    size: int = Field(5, ge=3, le=25, description="How many objects an item is about.")
    diversity: int = Field(0, ge=0, description="How many templates the train split draws from; 0: no limit.")
    complexity: int = Field(0, ge=0, le=3, description="How involved the questions are.")


D = TypeVar("D", bound=Dials)


class ProceduralTask(Generic[D]):
    """A task that generates its items. A subclass defines its levels and draws one item with given dice."""

    name: str
    levels: tuple[D, ...]
    """The dials of each level, the easiest first."""
    alphabet: str
    words: tuple[str, ...]

    def __init__(self, level: int = 0, dials: Mapping[str, Any] | None = None) -> None:
        if not 0 <= level < len(self.levels):
            raise SettingsError(f"task.level: {self.name} has levels 0 to {len(self.levels) - 1}, got {level}")
        self.level = level
        self._changed_dials = dict(dials or {})
        preset = self.levels[level]
        try:
            self.dials: D = validate(type(preset), {**preset.model_dump(), **self._changed_dials})
        except SettingsError as error:
            raise SettingsError(f"task.dials of {self.name}: {error}") from None

    @property
    def size(self) -> int | None:
        """Endless."""
        return None

    @property
    def num_levels(self) -> int:
        return len(self.levels)

    def at_level(self, level: int) -> Self:
        """The same task at another level; dials set by hand keep their values."""
        return type(self)(level, self._changed_dials)

    def draw_in_split(
        self, seed: int, number: int, split: Split, draw: Callable[[Dice], T | None], key_of: Callable[[T], str]
    ) -> T:
        """The first draw that yields something of this split."""
        for attempt in range(MAX_REDRAWS):
            drawn = draw(Dice(derive_key(seed, f"task/{self.name}/{split}", number, attempt)))
            if drawn is not None and split_of(self.name, key_of(drawn)) == split:
                return drawn
        raise ValueError(f"{self.name}: the {split} split is empty; turn up task.dials, now {self.dials}")

    def dice_for_work(self, item: Item, seed: int, attempt: int = 0) -> Dice:
        """Dice for one worked solution of an item."""
        return Dice(derive_key(seed, f"task/{self.name}/worked/{item.prompt}", 0, attempt))


class TemplateTask(ABC, ProceduralTask[TemplateDials], Generic[T]):
    """A task whose items are filled-in templates: the template is the structure, dressing it adds names and amounts.

    The key is the template, so a test item never has the structure of a train item. `diversity` limits the number of
    templates for train items; test items always come from all held-out templates.
    """

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        dice = Dice(derive_key(seed, f"task/{self.name}/{split}/dress", index, 0))
        is_limited = self.dials.diversity > 0 and split == "train"
        number = dice.below(self.dials.diversity) if is_limited else index
        template = self.draw_in_split(seed, number, split, self.draw_template, self.key_of)
        prompt, answer = self.dress(template, dice)
        return Item(prompt=prompt, answer=answer, key=self.key_of(template), level=self.level)

    @abstractmethod
    def draw_template(self, dice: Dice) -> T | None:
        """A template of either split, or None if this draw yields none."""

    @abstractmethod
    def key_of(self, template: T) -> str:
        """Equal for templates that differ only in names."""

    @abstractmethod
    def dress(self, template: T, dice: Dice) -> tuple[str, dict[str, Any]]:
        """A prompt with names and amounts from the dice, and its answer: `value`, and what `work` needs."""

    @abstractmethod
    def work(self, answer: Mapping[str, Any], dice: Dice) -> str:
        """The reasoning that leads to an answer, as lines, in an order chosen by the dice."""

    def worked(self, item: Item, seed: int) -> str:
        return f"{self.work(item.answer, self.dice_for_work(item, seed))}\n{self.gold(item)}"

    def gold(self, item: Item) -> str:
        return write_answer(item.answer["value"])

    def score(self, item: Item, text: str) -> float:
        answer = final_answer(text)
        is_right = answer is not None and answer.replace(" ", "").removesuffix(".") == item.answer["value"]
        return float(is_right)
