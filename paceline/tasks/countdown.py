"""`countdown`: reach a target with the given numbers, each used exactly once, and + - * / and brackets.

The default task. Items are built from a random expression, so each has a solution. `worked` is an honest random search:
it draws expressions one after another, evaluates each step by step on its own line and compares it with the target,
until one hits. The texts are diverse and long-tailed in length, yet made of single arithmetic steps that a small model
can learn.
The scorer reads the final answer with its own parser and exact fractions; it never evaluates a text as code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from pydantic import Field, model_validator

from paceline.tasks.answers import ANSWER_WORD, final_answer, write_answer
from paceline.tasks.base import Item, Split
from paceline.tasks.procedural import Dials, Dice, ProceduralTask

ALPHABET = "0123456789+-*/()=<> \n"
"""Every character of compact prompts and worked solutions, apart from `WORDS`."""
WORDS = (ANSWER_WORD,)

NUM_SEARCHES = 32
"""How many searches may exceed `max_chars` before the solution starts with a lucky guess instead."""


class CountdownDials(Dials):
    size: int = Field(3, ge=2, le=8, description="How many numbers an item has.")
    min_number: int = Field(1, ge=1, le=999, description="Smallest number.")
    max_number: int = Field(20, ge=1, le=999, description="Largest number.")
    operators: str = Field(
        "+-*", pattern=r"^[-+*/]+$", description="Operators of solutions and attempts; an answer may use all four."
    )
    max_value: int = Field(99, ge=1, le=99999, description="Largest target and largest intermediate result.")
    complexity: int = Field(0, ge=0, le=1, description="0: each number joins a running result; 1: brackets anywhere.")
    max_chars: int = Field(512, ge=64, le=65536, description="Length limit of a worked solution in characters.")
    repeats: bool = Field(True, description="The search may retry an expression; false makes it remember all of them.")
    format_credit: float = Field(
        0.0, ge=0, lt=1, description="Score of a well-formed answer with the right numbers and a wrong result."
    )

    @model_validator(mode="after")
    def _check_range(self) -> CountdownDials:
        if self.min_number > self.max_number:
            raise ValueError(f"min_number {self.min_number} is above max_number {self.max_number}; lower it")
        return self


# Levels 0 to 4 use the same arithmetic, so that one small model can learn them all.
LEVELS = (
    CountdownDials(),
    CountdownDials(operators="+-*/", complexity=1, max_chars=1024),
    CountdownDials(size=4, complexity=1, max_chars=2048),
    CountdownDials(size=4, operators="+-*/", complexity=1, max_chars=4096),
    CountdownDials(size=5, operators="+-*/", complexity=1, max_chars=4096),
    CountdownDials(size=5, max_number=99, operators="+-*/", max_value=999, complexity=1, max_chars=16384),
)

# --- expressions ------------------------------------------------------------------------------------------------------

Tree = int | tuple[str, "Tree", "Tree"]
"""A number, or an operator with its two operands."""
Part = tuple[int, Tree]
"""A value and the expression that evaluates to it."""

ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
EXACT: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def render(tree: Tree) -> str:
    """The expression as text, with just the brackets that make it parse back to the same tree."""
    if isinstance(tree, int):
        return str(tree)
    sign, left, right = tree
    strength = PRECEDENCE[sign]
    left_text, right_text = render(left), render(right)
    if not isinstance(left, int) and PRECEDENCE[left[0]] < strength:
        left_text = f"({left_text})"
    if not isinstance(right, int) and PRECEDENCE[right[0]] <= strength:
        right_text = f"({right_text})"
    return left_text + sign + right_text


def work_out(tree: Tree) -> str:
    """The expression and every step of its evaluation, joined by equals signs: `(3+4)*2=7*2=14`."""
    texts = [render(tree)]
    while not isinstance(tree, int):
        tree = _reduce_once(tree)
        texts.append(render(tree))
    return "=".join(texts)


def _reduce_once(tree: tuple[str, Tree, Tree]) -> Tree:
    """The tree with its first operation on two plain numbers replaced by the result."""
    sign, left, right = tree
    if not isinstance(left, int):
        return sign, _reduce_once(left), right
    if not isinstance(right, int):
        return sign, left, _reduce_once(right)
    return ARITHMETIC[sign](left, right)


def compare(value: int, target: int) -> str:
    """The sign that ends an attempt's line: too small, too large, or empty for a hit.

    A model can learn digit by digit on which side a number misses, and then it also knows a hit. Without these signs a
    small model has to discover that two numbers are being compared, and guesses: with 1.2 million parameters, after 3
    million tokens, it stopped at a hit hardly more often than elsewhere and solved 15 % of level 0; with them, 62 %.
    """
    return "<" if value < target else ">" if value > target else ""


def draw_tree(dice: Dice, numbers: Sequence[int], dials: CountdownDials) -> Part | None:
    """A random expression of all the numbers in which no result is negative, fractional or too large.

    None if the draw ends up with numbers that no operator may join.
    """
    parts: list[Part] = [(number, number) for number in dice.sample(numbers, len(numbers))]
    joined = parts.pop()
    while parts:
        if dials.complexity > 0:
            parts.append(joined)
            joined = parts.pop(dice.below(len(parts)))
        part = _join(dice, joined, parts.pop(dice.below(len(parts))), dials)
        if part is None:
            return None
        joined = part
    return joined


def _join(dice: Dice, first: Part, second: Part, dials: CountdownDials) -> Part | None:
    """Two parts joined by a random operator."""
    (a, left), (b, right) = first, second
    signs = [sign for sign in dials.operators if _may_join(a, sign, b, dials.max_value)]
    if not signs:
        return None
    sign = dice.choice(signs)
    # One spelling of each sum or product is enough: a bracket before a number, then the larger value first.
    if sign in "+*" and (isinstance(left, int), -a) > (isinstance(right, int), -b):
        left, right = right, left
    return ARITHMETIC[sign](a, b), (sign, left, right)


def _may_join(a: int, sign: str, b: int, max_value: int) -> bool:
    is_exact = sign != "/" or (b > 0 and a % b == 0)
    return is_exact and 0 <= ARITHMETIC[sign](a, b) <= max_value


# --- reading an answer ------------------------------------------------------------------------------------------------

MAX_EXPRESSION_LENGTH = 200
_TOKEN = re.compile(r"0|[1-9][0-9]{0,4}|[-+*/()]|[ \t]+")


def read_tokens(text: str) -> list[str] | None:
    """The numbers, operators and brackets of an expression, or None if it contains anything else."""
    if len(text) > MAX_EXPRESSION_LENGTH:
        return None
    tokens: list[str] = []
    end = 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            return None
        tokens.append(match[0])
        end = match.end()
    return [token for token in tokens if not token.isspace()]


def evaluate(tokens: Sequence[str]) -> Fraction | None:
    """The exact value of an expression, or None if it is malformed or divides by zero.

    Two stacks and no recursion, so brackets may nest to any depth. The caller has checked the numbers, which bounds
    every value. There is no unary minus: `-3` is not a number here.
    """
    values: list[Fraction] = []
    waiting: list[str] = []
    is_operand_next = True
    for token in tokens:
        if is_operand_next != (token.isdigit() or token == "("):
            return None
        if token.isdigit():
            values.append(Fraction(int(token)))
            is_operand_next = False
        elif token == "(":
            waiting.append(token)
        else:
            if not _apply_waiting(values, waiting, PRECEDENCE.get(token, 0)):
                return None
            is_operand_next = token != ")"
            if is_operand_next:
                waiting.append(token)
            elif not waiting or waiting.pop() != "(":
                return None
    is_whole = not is_operand_next and "(" not in waiting and _apply_waiting(values, waiting, 0)
    return values[0] if is_whole else None


def _apply_waiting(values: list[Fraction], waiting: list[str], strength: int) -> bool:
    """Apply the operators since the last open bracket that bind at least this strongly; False: division by zero."""
    while waiting and waiting[-1] != "(" and PRECEDENCE[waiting[-1]] >= strength:
        sign, right, left = waiting.pop(), values.pop(), values.pop()
        if sign == "/" and right == 0:
            return False
        values.append(EXACT[sign](left, right))
    return True


# --- the task ---------------------------------------------------------------------------------------------------------


class Countdown(ProceduralTask[CountdownDials]):
    """Reach a target with given numbers and + - * /."""

    name = "countdown"
    levels = LEVELS
    alphabet = ALPHABET
    words = WORDS

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        return self.draw_in_split(seed, index, split, self._draw, lambda item: item.key)

    def _draw(self, dice: Dice) -> Item | None:
        dials = self.dials
        numbers = [dice.between(dials.min_number, dials.max_number) for _ in range(dials.size)]
        target, tree = draw_tree(dice, numbers, dials) or (0, 0)
        if target == 0 or target in numbers:
            return None
        answer = {"numbers": numbers, "target": target, "solution": work_out(tree)}
        key = f"{' '.join(map(str, sorted(numbers)))} > {target}"
        return Item(prompt=self._prompt(numbers, target), answer=answer, key=key, level=self.level)

    def _prompt(self, numbers: Sequence[int], target: int) -> str:
        if self.dials.style == "compact":
            return f"{' '.join(map(str, numbers))} > {target}\n"
        return (
            f"Make {target} out of the numbers {', '.join(map(str, numbers))}. Use each number exactly once, and only "
            f"+ - * / and brackets. Think first, then write a last line of the form: {write_answer('EXPRESSION')}"
        )

    def gold(self, item: Item) -> str:
        return write_answer(item.answer["solution"].partition("=")[0])

    def worked(self, item: Item, seed: int) -> str:
        for attempt in range(NUM_SEARCHES):
            lines = self._search(item, self.dice_for_work(item, seed, attempt))
            if lines is not None:
                return "\n".join(lines)
        # A few items have one solution among thousands of expressions: their search starts with it.
        return f"{item.answer['solution']}\n{self.gold(item)}"

    def _search(self, item: Item, dice: Dice) -> list[str] | None:
        """One random search as lines, the answer last; None if it does not finish within `max_chars`."""
        target, numbers = item.answer["target"], item.answer["numbers"]
        lines: list[str] = []
        num_chars_left = self.dials.max_chars
        tried: set[Tree] = set()
        for _ in range(self.dials.max_chars):  # more draws than lines fit: a search without a new expression ends too
            drawn = draw_tree(dice, numbers, self.dials)
            if drawn is None or drawn[1] in tried:
                continue
            value, tree = drawn
            lines.append(work_out(tree) + compare(value, target))
            num_chars_left -= len(lines[-1]) + 1
            if value == target:
                lines.append(write_answer(render(tree)))
                return lines if num_chars_left >= len(lines[-1]) else None
            if num_chars_left <= 0:
                return None
            if not self.dials.repeats:
                tried.add(tree)
        return None

    def score(self, item: Item, text: str) -> float:
        """1 for an expression of exactly the item's numbers that equals the target."""
        answer = final_answer(text)
        if answer is None:
            return 0.0
        expression, equals, result = answer.partition("=")
        if equals and result.strip() != str(item.answer["target"]):
            return 0.0
        tokens = read_tokens(expression)
        if tokens is None or not _uses(tokens, item.answer["numbers"]):
            return 0.0
        value = evaluate(tokens)
        if value is None:
            return 0.0
        return 1.0 if value == item.answer["target"] else self.dials.format_credit


def _uses(tokens: Sequence[str], numbers: Sequence[int]) -> bool:
    """Whether an expression uses exactly these numbers."""
    return sorted(int(token) for token in tokens if token.isdigit()) == sorted(numbers)
