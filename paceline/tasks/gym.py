"""`gym:NAME`: those reasoning-gym datasets that satisfy the contract of a task.

Every dataset was reviewed, and only those in `ALLOWED` can be used: an item must be a pure function of its seed, the
scorer must never run a model's text as code, and full marks must mean a correct answer. `EXCLUDED` says why the others
are out. Reasoning-gym derives the item of (seed, index) from `seed + index`, so neighbouring seeds share nearly all
items; here every item is a dataset of size one with its own hashed seed.

An item carries that seed instead of reasoning-gym's own record, which does not survive JSON; graders regenerate it.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from paceline.core.config import SettingsError, nearest
from paceline.core.noise import derive_key
from paceline.tasks.base import Item, Split
from paceline.tasks.files import import_extra
from paceline.tasks.procedural import split_of
from paceline.tasks.settings import TaskSettings

PREFIX = "gym:"

INSTRUCTION = "\n\nThink step by step, then write the final answer, and nothing else, between <answer> and </answer>."

MAX_REDRAWS = 300
"""After this many draws without an item of a split, the split counts as empty."""

_RUNS_TEXT = "its scorer runs the model's text as Python code"
_LAX = "its scorer gives full marks to wrong answers"
_NO_GOLD = "its items come without a right answer to prove the scorer with"
_IMPURE = "its items depend on Python's hash seed, not on their own seed alone"

EXCLUDED: dict[str, str] = {
    "binary_matrix": f"{_RUNS_TEXT} (eval)",
    "n_queens": f"{_RUNS_TEXT} (eval)",
    "spiral_matrix": f"{_RUNS_TEXT} (eval)",
    "string_insertion": f"{_RUNS_TEXT} (eval)",
    "countdown": f"{_RUNS_TEXT} (sympy's parse_expr); Paceline's own task countdown does not",
    "intermediate_integration": f"{_RUNS_TEXT} (sympy's parse_expr)",
    "polynomial_multiplication": f"{_RUNS_TEXT} (sympy's parse_expr)",
    "puzzle24": f"{_RUNS_TEXT} (sympy's parse_expr)",
    "simple_integration": f"{_RUNS_TEXT} (sympy's parse_expr)",
    "codeio": "it makes items by running programs that come with it",
    "composite": "it mixes others, excluded ones included; name one of them",
    "coin_flip": f"{_LAX}: to any that begins like the right one",
    "complex_arithmetic": f"{_LAX}: to nan",
    "game_of_life_halting": f"{_LAX}: to any",
    "letter_jumble": f"{_LAX}: to the right one with anything after it",
    "number_sorting": f"{_LAX}: to numbers that are off by one",
    "polynomial_equations": f"{_LAX}: to any text where there is no solution",
    "boxnet": _NO_GOLD,
    "graph_color": _NO_GOLD,
    "propositional_logic": _NO_GOLD,
    "rubiks_cube": _NO_GOLD,
    "rush_hour": _NO_GOLD,
    "isomorphic_strings": _IMPURE,
    "knight_swap": _IMPURE,
    "ransom_note": _IMPURE,
    "word_ladder": _IMPURE,
    "bf": "it prints to the terminal while it makes its items",
    "number_sequence": "making one of its items may take minutes",
}
"""Why a dataset cannot be used, as of reasoning-gym 0.1.25."""

ALLOWED: frozenset[str] = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic binary_alternation
    bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic color_cube_rotation count_bits
    count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery
    family_relationships figlet_font fraction_simplification futoshiki game_of_life gcd group_anagrams gsm_symbolic jugs
    kakurasu knights_knaves largest_island lcm leg_counting letter_counting list_functions mahjong_puzzle
    manipulate_matrix maze mini_sudoku modulo_grid needle_haystack number_filtering number_format palindrome_generation
    palindrome_partitioning path_star pool_matrix power_function prime_factorization products quantum_lock rearc
    rectangle_count rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations
    simple_geometry sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism
    time_intervals tower_of_hanoi tsumego word_sequence_reversal word_sorting zebra_puzzles
    """.split()  # noqa: SIM905  # eighty quoted names read worse
)
"""Datasets that were reviewed and satisfy the contract."""

ONE_NUMBER = frozenset({"gsm_symbolic"})
"""Their scorers take the first number they find and drop its sign; here the answer must contain exactly one number."""

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_TAG = ("<answer>", "</answer>")
_SAID = re.compile(r"^[ \t]*(?:final )?answer:|\banswer is\b:?", re.ASCII | re.IGNORECASE | re.MULTILINE)
"""How models announce an answer without tags, at a line's start or within it; the answer extends to the line's end."""


class GymTask:
    """One reasoning-gym dataset, configured by `dials`."""

    def __init__(self, dataset: str, dials: dict[str, Any] | None = None) -> None:
        check_name(dataset)
        self.name = PREFIX + dataset
        self._dataset = dataset
        self._dials = dict(dials or {})
        self._make(0)  # report a wrong dial now, not in the first step

    @property
    def size(self) -> None:
        """Endless."""

    def item(self, seed: int, index: int, split: Split = "train") -> Item:
        for attempt in range(MAX_REDRAWS):
            own_seed = derive_key(seed, f"task/{self.name}/{split}", index, attempt) % 2**32
            entry = self._make(own_seed)[0]
            key = " ".join(entry["question"].split()).casefold()
            if split_of(self.name, key) == split:
                answer = {"seed": own_seed, "gold": entry["answer"]}
                return Item(prompt=entry["question"] + INSTRUCTION, answer=answer, key=key)
        raise ValueError(
            f"{self.name}: none of {MAX_REDRAWS} items falls into the {split} split; the dataset has too few questions"
        )

    def gold(self, item: Item) -> str:
        return f"{_TAG[0]}{item.answer['gold']}{_TAG[1]}"

    def score(self, item: Item, text: str) -> float:
        """1 only if the scorer returns exactly 1: some of its sums and exponentials overshoot for wrong answers."""
        answer = find_answer(text)
        if answer is not None and self._dataset in ONE_NUMBER:
            answer = _only_number(answer)
        if not answer:
            return 0.0
        dataset = self._make(item.answer["seed"])
        entry = dataset[0]
        if entry["answer"] != item.answer["gold"]:
            raise ValueError(
                f"{self.name} makes another item from the same seed: is reasoning-gym the same everywhere?"
            )
        try:
            return float(dataset.score_answer(answer, entry) == 1)
        except MemoryError:
            raise
        except Exception:  # its scorers parse numbers, grids and lists, and raise anything if a text is none
            return 0.0

    def prepare(self) -> None:
        """Import everything before the first item's clock starts."""
        self._make(0)

    @cached_property
    def _factory(self) -> Any:
        return import_extra("reasoning_gym.factory", f"task {self.name}")

    def _make(self, seed: int) -> Any:
        """A dataset of one item."""
        try:
            return self._factory.create_dataset(self._dataset, **self._dials, seed=seed, size=1)
        except (TypeError, AssertionError) as error:
            # Its configurations are dataclasses with asserts.
            known = self._factory.DATASETS[self._dataset][1].__dataclass_fields__
            names = ", ".join(name for name in known if name not in ("seed", "size"))
            raise SettingsError(f"task.dials of {self.name}: {error}; its dials are {names}") from None


def make_gym_task(settings: TaskSettings) -> GymTask:
    """The task for a name like gym:gsm_symbolic."""
    for name in ("data", "reward"):
        if getattr(settings, name) is not None:
            raise SettingsError(f"task.{name}: {settings.name} has its own; leave it out or choose another task")
    return GymTask(settings.name.removeprefix(PREFIX), settings.dials)


def check_name(dataset: str) -> None:
    """Raise a ValueError unless this dataset may be used."""
    if dataset in EXCLUDED:
        raise SettingsError(f"task.name: {PREFIX}{dataset} is not offered: {EXCLUDED[dataset]}")
    if dataset not in ALLOWED:
        guess = nearest(dataset, sorted(ALLOWED))
        hint = f"did you mean {PREFIX}{guess}?" if guess else f"there are {', '.join(sorted(ALLOWED))}"
        raise SettingsError(f"task.name: {PREFIX}{dataset} is unknown, or newer than our review: {hint}")


def find_answer(text: str) -> str | None:
    """The text between the last answer tags; without tags, the text after the last `Answer:` or `answer is`."""
    end = text.rfind(_TAG[1])
    start = text.rfind(_TAG[0], 0, end) if end >= 0 else -1
    if start >= 0:
        return text[start + len(_TAG[0]) : end].strip()
    said = [match.end() for match in _SAID.finditer(text)]
    return text[said[-1] :].partition("\n")[0].strip().removesuffix(".") if said else None


def _only_number(answer: str) -> str | None:
    """The number in an answer, without commas; None if it is negative or there is not exactly one."""
    numbers = _NUMBER.findall(answer)
    return numbers[0].replace(",", "") if len(numbers) == 1 and numbers[0][0] != "-" else None
