"""`word_sums`: word problems with one sum, in plain English, for chat models too small for real ones.

A key is a kind of question with its two amounts: names and things dress it, so no test item has the sum of a train item
of its kind. A response must do the sum, with the problem's own amounts, and say nothing in numbers afterwards, as in
"Ben has 7 + 5 = 12 stamps now." The right number alone does not score: the problem's last number may happen to be it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from pydantic import Field

from paceline.core.noise import derive_key
from paceline.tasks.base import Item, Split
from paceline.tasks.procedural import Dials, Dice, ProceduralTask

QUESTIONS = {
    "find": "{who} has {a} {what} and finds {b} more. How many {what} does {who} have now?",
    "together": "{who} picks {a} {what} and {other} picks {b}. How many {what} do they have together?",
    "give": "{who} has {a} {what} and gives {b} to {other}. How many {what} are left?",
    "more": "{who} has {a} {what} and {other} has {b}. How many more {what} does {who} have?",
}
"""By kind. In the last two, the second amount is taken from the first, which is larger."""
DIFFERENCES = ("give", "more")
NAMES = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kim", "Leo")
THINGS = ("apples", "stamps", "marbles", "pencils", "shells", "coins", "books", "cards")
REQUEST = "Answer with one short sentence."
SUM_LENGTH = 24
"""Characters before the equals sign that a sum may have."""
MAX_TEXT = 2000
"""A longer response has no answer: one short sentence was asked for."""

_SUM = re.compile(r"(?<![\d.])(\d{1,9}) ?([+-]) ?(\d{1,9}) ?= ?(\d{1,9})\D*\Z", re.ASCII)
"""A sum of two numbers that no other number follows, nor a decimal place."""


class WordSumsDials(Dials):
    """Dials of `word_sums`; its texts are plain English in either style."""

    most: int = Field(12, ge=3, le=1000, description="The largest amount that is added or taken away.")
    kinds: int = Field(3, ge=1, le=4, description="How many kinds of question there are.")


LEVELS = (WordSumsDials(most=12), WordSumsDials(most=20, kinds=4), WordSumsDials(most=60, kinds=4))


@dataclass(frozen=True)
class WordSum:
    kind: str
    a: int
    b: int

    @property
    def value(self) -> int:
        return self.a - self.b if self.kind in DIFFERENCES else self.a + self.b

    @property
    def sums(self) -> list[str]:
        """What counts as doing the sum, the natural way first."""
        if self.kind in DIFFERENCES:
            return [f"{self.a} - {self.b} = {self.value}"]
        return [f"{self.a} + {self.b} = {self.value}", f"{self.b} + {self.a} = {self.value}"]

    @property
    def key(self) -> str:
        return f"{self.kind} {self.a} {self.b}"


class WordSums(ProceduralTask[WordSumsDials]):
    """One sum in words; the response has to do it."""

    name = "word_sums"
    levels = LEVELS

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        drawn = self.draw_in_split(seed, index, split, partial(draw_sum, self.dials), lambda drawn: drawn.key)
        question = dress(drawn, Dice(derive_key(seed, f"task/{self.name}/{split}/dress", index, 0)))
        prompt = question if self.dials.style == "compact" else f"{question} {REQUEST}"
        return Item(prompt=prompt, answer={"sums": drawn.sums}, key=drawn.key, level=self.level)

    def score(self, item: Item, text: str) -> float:
        return float(final_sum(text) in item.answer["sums"])

    def gold(self, item: Item) -> str:
        return str(item.answer["sums"][0])


def draw_sum(dials: WordSumsDials, dice: Dice) -> WordSum:
    kind = dice.choice(tuple(QUESTIONS)[: dials.kinds])
    first, second = dice.between(2, dials.most), dice.between(2, dials.most)
    return WordSum(kind, first + second if kind in DIFFERENCES else first, second)


def dress(drawn: WordSum, dice: Dice) -> str:
    """The question, about someone and something."""
    who, other = dice.sample(NAMES, 2)
    return QUESTIONS[drawn.kind].format(who=who, other=other, what=dice.choice(THINGS), a=drawn.a, b=drawn.b)


def final_sum(text: str) -> str | None:
    """The sum that a short text ends with, evenly spaced; None if other numbers follow it, or there is none."""
    equals = text.rfind("=") if len(text) <= MAX_TEXT else -1
    found = _SUM.search(text, max(0, equals - SUM_LENGTH)) if equals >= 0 else None
    if found is None:
        return None
    a, operator, b, value = found.groups()
    return f"{a} {operator} {b} = {value}"
