"""Word problems with sums, for models too small for real ones: a data file and its reward.

    python bench/tasks/word_problems.py word_problems.jsonl
    ... --set task.name=file --set task.data=word_problems.jsonl
        --set task.reward=bench/tasks/word_problems.py:compute_score

The reward is 1 if the right number appears anywhere in the text. Of eight attempts of a small model some usually do, so
that groups differ and GRPO has something to learn from. It is not a measure of ability.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

NUM_ITEMS = 256
NAMES = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo")
THINGS = ("apples", "stamps", "marbles", "pencils", "shells", "coins")


def make_item(rng: random.Random) -> dict[str, str]:
    """A question and its answer."""
    who, other = rng.sample(NAMES, 2)
    what = rng.choice(THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    question, answer = rng.choice(
        (
            (f"{who} has {a} {what} and finds {b} more. How many {what} are there?", a + b),
            (f"{who} had {a + b} {what} and gave {a} to {other}. How many {what} are left?", b),
            (f"{who} picks {a} {what}, {other} picks {b}. How many {what} do they have together?", a + b),
        )
    )
    return {"prompt": question + " Think step by step.", "answer": str(answer)}


def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
    """1 if the number is mentioned."""
    return float(ground_truth in re.findall(r"\d+", solution_str))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FILE.jsonl")
    rng = random.Random(0)
    items = (json.dumps(make_item(rng)) + "\n" for _ in range(NUM_ITEMS))
    Path(sys.argv[1]).write_text("".join(items), encoding="utf-8")
