"""`counting`: count the letters of a row that satisfy a condition.

A template is a question with a row of letters up to renaming: `b a b` and `x q x` are one template. The dial `size` is
the longest row, `complexity` the number of question kinds (`KINDS`). Worked solutions read the row letter by letter and
keep a running count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tasks.answers import ANSWER_WORD
from paceline.tasks.procedural import LETTERS, Dice, TemplateDials, TemplateTask

KINDS = ("one", "either", "pair", "twice")
"""Equal to a letter; one of two letters; a letter right before another; distinct letters that occur twice or more."""

NUM_ASKED = {"one": 1, "either": 2, "pair": 2, "twice": 0}
"""How many letters a question names."""

LEVELS = (
    TemplateDials(size=6),
    TemplateDials(size=10, complexity=1),
    TemplateDials(size=14, complexity=2),
    TemplateDials(size=20, complexity=3),
)

ALPHABET = f"{LETTERS}0123456789: \n"
WORDS = ("count", "twice", ANSWER_WORD)


@dataclass(frozen=True)
class CountingTemplate:
    kind: str
    row: tuple[int, ...]
    """Letters as numbers, in order of first appearance."""
    asked: tuple[int, ...]
    """The letters that the question names."""


class Counting(TemplateTask[CountingTemplate]):
    """Count the letters of a row that satisfy a condition."""

    name = "counting"
    levels = LEVELS
    alphabet = ALPHABET
    words = WORDS

    def draw_template(self, dice: Dice) -> CountingTemplate:
        kind = KINDS[dice.below(self.dials.complexity + 1)]
        length = dice.between(self.dials.size * 2 // 3, self.dials.size)
        num_letters = dice.between(2, 2 + length // 4)
        row = [dice.below(num_letters) for _ in range(length)]
        asked = dice.sample(range(num_letters), NUM_ASKED[kind])
        names: dict[int, int] = {}
        for letter in (*row, *asked):
            names.setdefault(letter, len(names))
        return CountingTemplate(kind, tuple(names[letter] for letter in row), tuple(names[letter] for letter in asked))

    def key_of(self, template: CountingTemplate) -> str:
        asked = sorted(template.asked) if template.kind == "either" else template.asked  # b or a is a or b
        return f"{template.kind} {'.'.join(map(str, asked))}: {'.'.join(map(str, template.row))}"

    def dress(self, template: CountingTemplate, dice: Dice) -> tuple[str, dict[str, Any]]:
        letters = dice.sample(LETTERS, 1 + max(*template.row, *template.asked))
        row = [letters[letter] for letter in template.row]
        asked = [letters[letter] for letter in template.asked]
        count = running_counts(template.kind, row, asked)[-1]
        answer = {"value": str(count), "kind": template.kind, "row": row, "asked": asked}
        return self._prompt(template.kind, row, asked), answer

    def _prompt(self, kind: str, row: Sequence[str], asked: Sequence[str]) -> str:
        text = " ".join(row)
        if self.dials.style == "compact":
            question = {"one": " ".join(asked), "either": " ".join(asked), "pair": "".join(asked), "twice": "twice"}
            return f"count {question[kind]}: {text}\n"
        question = {
            "one": "How many of the letters are {}?",
            "either": "How many of the letters are {} or {}?",
            "pair": "How many times is {} directly followed by {}?",
            "twice": "How many different letters occur at least twice?",
        }
        return (
            f"{question[kind].format(*asked)} The letters: {text}. Write a last line of the form: {ANSWER_WORD} NUMBER"
        )

    def work(self, answer: Mapping[str, Any], dice: Dice) -> str:
        kind, row, asked = answer["kind"], answer["row"], answer["asked"]
        if dice.below(2) and kind != "pair":  # a pair reads only one way
            row = row[::-1]
        return " ".join(f"{letter}{count}" for letter, count in zip(row, running_counts(kind, row, asked), strict=True))


def running_counts(kind: str, row: Sequence[str], asked: Sequence[str]) -> list[int]:
    """The count after each letter of the row."""
    counts: list[int] = []
    count = 0
    for place, letter in enumerate(row):
        if kind == "twice":
            count += row[:place].count(letter) == 1
        elif kind == "pair":
            count += [*row[:place][-1:], letter] == asked
        else:
            count += letter in asked
        counts.append(count)
    return counts
