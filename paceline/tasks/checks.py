"""Soundness checks for a task: gold answers and worked solutions must pass, answers that take no work must fail.

`paceline tasks` and the tests call `check`; a task that fails it would train a model to cheat. The check only reads the
task, and reports everything it finds instead of stopping at the first problem.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.tasks.base import Item, Split, Task, WorkedTask

MAX_LUCK = 0.5
"""The largest share of items that one constant answer may solve; short answers do repeat."""

MAX_SHARED = 0.05
"""The largest share of items that another item's answer, written differently, may solve: 1/2 is 0.5."""

NUM_EXAMPLES = 3
"""How many items a report names for each kind of problem."""

NUM_JUNKED = 20
"""How many items are tried with each long text; a slow grader takes its time over them."""

LONG = 100_000
JUNK = {
    "an empty text": "",
    "blanks": " \n\t\n",
    "brackets without end": "(" * LONG,
    "an answer without end": "answer " + "1+" * LONG,
    "nested brackets": f"answer {'(' * LONG}1{')' * LONG}",
    "a huge number": f"answer {'9' * LONG}",
    "a tower of powers": "answer 9**9**9**9**9",
    "code": "answer __import__('os').getcwd()",
    "other digits": "answer \u0663+\u0664",
    "many answers": "answer \n<answer>" * (LONG // 10),
}
"""Texts that must not solve any item."""


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. `luck` is the share of items that the best constant answer solves."""

    num_items: int
    luck: float
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        return not self.problems


def check(task: Task, num_items: int = 100, seed: int = 0) -> CheckReport:
    """Check up to `num_items` items of each split."""
    count = num_items if task.size is None else min(num_items, task.size)
    splits: tuple[Split, ...] = ("train", "test")
    items = {split: [task.item(seed, index, split) for index in range(count)] for split in splits}
    luck = _luck(task, items["train"])
    problems = [
        *_check_splits(task, items, seed),
        *(text for split in items for text in _check_scores(task, items[split], split, seed)),
    ]
    if luck > MAX_LUCK + max(count, 1) ** -0.5:  # a few items may agree by chance
        problems.append(f"one constant answer solves {luck:.0%} of the items")
    return CheckReport(count, luck, tuple(problems))


def _luck(task: Task, items: Sequence[Item]) -> float:
    """The share of items that the most common gold answer solves."""
    if not items:
        return 0.0
    constant = Counter(task.gold(item) for item in items).most_common(1)[0][0]
    return sum(_score(task, item, constant) >= 1 for item in items) / len(items)


def _score(task: Task, item: Item, text: str) -> float:
    score = task.score(item, text)
    if not isinstance(score, int | float):
        raise ValueError(f"task {task.name}: score must return a number from 0 to 1, not {score!r:.100}")
    return score


def _check_splits(task: Task, items: dict[Split, list[Item]], seed: int) -> Iterator[str]:
    """Each split has items, they are reproducible and survive JSON, and none is in both splits."""
    for split, drawn in items.items():
        if not drawn:
            yield f"the {split} split has no items"
        changed = [i for i, item in enumerate(drawn) if task.item(seed, i, split) != item]
        unsafe = [i for i, item in enumerate(drawn) if json.loads(json.dumps(dataclasses.asdict(item))) != _plain(item)]
        yield from _name_items(split, "changes when it is asked for again", changed)
        yield from _name_items(split, "does not survive a trip through JSON", unsafe)
    shared = {item.key for item in items["train"]} & {item.key for item in items["test"]}
    for key in sorted(shared)[:NUM_EXAMPLES]:
        yield f"train and test share an item: {key}"


def _plain(item: Item) -> dict[str, object]:
    """An item as it comes back from JSON."""
    return {**dataclasses.asdict(item), "messages": [dataclasses.asdict(message) for message in item.messages]}


def _check_scores(task: Task, items: Sequence[Item], split: Split, seed: int) -> Iterator[str]:
    scores = [_score(task, item, task.gold(item)) for item in items]
    yield from _name_items(
        split, "is not solved by its own answer", [i for i, score in enumerate(scores) if score != 1]
    )
    if isinstance(task, WorkedTask):
        worked = [_score(task, item, task.worked(item, seed)) for item in items]
        yield from _name_items(
            split, "is not solved by its worked solution", [i for i, s in enumerate(worked) if s != 1]
        )
    for what, text in JUNK.items():
        few = items[:NUM_JUNKED]
        yield from _name_items(split, f"is solved by {what}", _solved_by(task, few, [text] * len(few)))
    prompts = [item.prompt for item in items]
    yield from _name_items(split, "is solved by its own prompt", _solved_by(task, items, prompts))
    yield from _check_neighbours(task, items, split)


def _check_neighbours(task: Task, items: Sequence[Item], split: Split) -> Iterator[str]:
    """One item's gold answer must not solve the next item, unless both are written the same."""
    golds = [task.gold(item) for item in items]
    others = [*golds[1:], *golds[:1]]
    solved = [i for i in _solved_by(task, items, others) if others[i] != golds[i]]
    if len(solved) > MAX_SHARED * len(items):
        yield from _name_items(split, "is solved by another item's answer", solved)


def _solved_by(task: Task, items: Sequence[Item], texts: Sequence[str]) -> list[int]:
    """The items that their text solves; a score outside 0 to 1 counts too, being just as wrong."""
    scores = [_score(task, item, text) for item, text in zip(items, texts, strict=True)]
    return [i for i, score in enumerate(scores) if not 0 <= score < 1]


def _name_items(split: Split, what: str, indices: Sequence[int]) -> Iterator[str]:
    """One line that states a problem and names the first items that have it."""
    if indices:
        names = ", ".join(map(str, indices[:NUM_EXAMPLES]))
        more = f" and {len(indices) - NUM_EXAMPLES} more" if len(indices) > NUM_EXAMPLES else ""
        yield f"{what}: {split} item {names}{more}"
