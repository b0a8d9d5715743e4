"""`spatial`: follow moves on a grid, or facts about relative positions; say where they lead or how far.

A template is the question with its sequence of directions; dressing it adds amounts and names. The dial `size` is the
maximum number of moves, `complexity` the number of forms (`FORMS`). Worked solutions go move by move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tasks.answers import ANSWER_WORD
from paceline.tasks.procedural import LETTERS, Dice, TemplateDials, TemplateTask

KINDS = ("where", "far")
"""The final position as x,y; its distance in steps, without diagonals."""

FORMS = {"compass": "NESW", "turns": "FLR", "backing": "FLRB", "facts": "NESW"}
"""The directions of each form.

compass: go north, east, south or west; turns: go ahead, or turn left or right and go, facing north at first; backing:
also go back without turning; facts: each object's position relative to another, in random order.
"""

STEPS = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
TURNS = {"L": -1, "R": 1}
COMPASS = "NESW"
"""In clockwise order."""
MAX_AMOUNT = 9

LEVELS = (
    TemplateDials(size=4),
    TemplateDials(size=6, complexity=1),
    TemplateDials(size=8, complexity=2),
    TemplateDials(size=10, complexity=3),
)

ALPHABET = f"{LETTERS}NESWFLRB0123456789-,: \n"
WORDS = (*KINDS, ANSWER_WORD)


@dataclass(frozen=True)
class SpatialTemplate:
    kind: str
    form: str
    moves: str
    """A sequence of directions, one letter each."""


class Spatial(TemplateTask[SpatialTemplate]):
    """Follow moves on a grid: where do they lead, and how far away."""

    name = "spatial"
    levels = LEVELS
    alphabet = ALPHABET
    words = WORDS

    def draw_template(self, dice: Dice) -> SpatialTemplate:
        kind = dice.choice(KINDS)
        form = list(FORMS)[dice.below(self.dials.complexity + 1)]
        num_moves = dice.between(max(2, self.dials.size - 2), self.dials.size)
        return SpatialTemplate(kind, form, "".join(dice.choice(FORMS[form]) for _ in range(num_moves)))

    def key_of(self, template: SpatialTemplate) -> str:
        return f"{template.kind} {template.form}: {template.moves}"

    def dress(self, template: SpatialTemplate, dice: Dice) -> tuple[str, dict[str, Any]]:
        amounts = [dice.between(1, MAX_AMOUNT) for _ in template.moves]
        names = dice.sample(LETTERS, len(template.moves) + 1) if template.form == "facts" else []
        *_, (_, x, y) = follow(template.moves, amounts, names)
        value = f"{x},{y}" if template.kind == "where" else str(abs(x) + abs(y))
        answer = {"value": value, "moves": template.moves, "amounts": amounts, "names": names}
        told = [f"{move}{amount}" for move, amount in zip(template.moves, amounts, strict=True)]
        if names:
            told = [f"{thing}{text}{other}" for other, text, thing in zip(names[:-1], told, names[1:], strict=True)]
            told = dice.sample(told, len(told))
        return self._prompt(template, told, names), answer

    def _prompt(self, template: SpatialTemplate, told: Sequence[str], names: Sequence[str]) -> str:
        if self.dials.style == "compact":
            asked = f"{template.kind} {names[-1]} {names[0]}" if names else template.kind
            return f"{asked}: {' '.join(told)}\n"
        form = "X,Y" if template.kind == "where" else "NUMBER"
        return f"{_tell(template, told, names)} Write a last line of the form: {ANSWER_WORD} {form}"

    def work(self, answer: Mapping[str, Any], dice: Dice) -> str:
        stops = list(follow(answer["moves"], answer["amounts"], answer["names"]))
        if dice.below(2):
            return " ".join(f"{mark}{x},{y}" for mark, x, y in stops)
        return f"x {' '.join(f'{mark}{x}' for mark, x, _ in stops)}\ny {' '.join(f'{mark}{y}' for mark, _, y in stops)}"


def follow(moves: str, amounts: Sequence[int], names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Every stop on the way from 0,0: a mark and the position. The mark is the facing, or the object there."""
    x, y, facing = 0, 0, "N"
    for number, (move, amount) in enumerate(zip(moves, amounts, strict=True)):
        if move in COMPASS:
            facing = move
        elif move in TURNS:
            facing = COMPASS[(COMPASS.index(facing) + TURNS[move]) % len(COMPASS)]
        step_x, step_y = STEPS[facing]
        distance = -amount if move == "B" else amount
        x, y = x + step_x * distance, y + step_y * distance
        yield names[number + 1] if names else facing, x, y


def _tell(template: SpatialTemplate, told: Sequence[str], names: Sequence[str]) -> str:
    """The item in plain English."""
    rules = {
        "compass": "You go from 0,0 by compass directions with a number of steps: {}.",
        "turns": "You are at 0,0 facing north. F: go on; L, R: turn left or right, then go so many steps: {}.",
        "backing": "You are at 0,0 facing north. F: go on; L, R: turn left or right, then go; B: go backwards without "
        "turning, each so many steps: {}.",
        "facts": "bN3a means that b lies 3 steps north of a. These are the facts: {}.",
    }
    where = f"At which x,y is {names[-1]} if {names[0]} is at 0,0?" if names else "At which x,y do you end?"
    way = f"from {names[0]} to {names[-1]}" if names else "from there back to 0,0"
    question = {
        "where": f"{where} North adds to y, east to x.",
        "far": f"How many steps is it {way}, without diagonals?",
    }
    return f"{rules[template.form].format(', '.join(told))} {question[template.kind]}"
