"""The prompts of a run: which item each draw uses, and the prompt that the policy gets for it.

`loop.py` asks for questions by draw, `evaluate.py` for those of the test split. A draw's question depends only on the
settings, the draw and the curriculum's statistics. Nothing here knows an engine or a reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.model.tokenizer import Tokenizer
from paceline.tasks.base import FiniteTask, Item, LevelledTask, Split
from paceline.tasks.curriculum import make_curriculum
from paceline.tasks.files import prompt_length
from paceline.tasks.own import ask_item
from paceline.tasks.registry import make_task
from paceline.tasks.settings import TaskSettings

NUM_CHECKED = 500
"""How many of a data file's longest prompts are tokenized before a run begins: seconds, whatever the file's size."""


@dataclass(frozen=True, eq=False)
class Question:
    """One draw: an item, and the token ids the policy continues."""

    draw: int
    item: Item
    level: int
    prompt_ids: list[int]


class PromptSource:
    """Questions by draw. A draw keeps the level it was first planned with, whichever step trains on it."""

    def __init__(self, settings: TaskSettings, tokenizer: Tokenizer, is_chat: bool, max_context: int) -> None:
        self.task = make_task(settings)
        self._settings, self._tokenizer, self._is_chat = settings, tokenizer, is_chat
        self._max_context = max_context
        self._place = f"{settings.data}: " if settings.data is not None else ""
        self._curriculum = make_curriculum(settings, self.task)
        self._levels: dict[int, int] = {}

    def check_longest(self, max_new_tokens: int, kv_tokens: int) -> None:
        """Raise a ValueError if one of the longest prompts of a data file fits nowhere: not when it is drawn, hours on.

        Texts far below the context in bytes are not tokenized, because hardly any tokenizer makes two tokens of a byte.
        A prompt that this misses still raises when it is drawn.
        """
        if not isinstance(self.task, FiniteTask):
            return
        for item in self.task.longest(NUM_CHECKED):
            if 4 * prompt_length(item) < min(self._max_context, kv_tokens - max_new_tokens) // 2:
                return
            length = min(len(self._encode_checked(item)) + max_new_tokens, self._max_context)
            if length > kv_tokens:
                raise ValueError(
                    f"{self._place}item {item.key[:80]!r} may grow to {length} tokens, but the KV cache holds "
                    f"{kv_tokens}; raise engine.kv_tokens or lower sampling.max_new_tokens"
                )

    def question(self, step: int, draw: int) -> Question:
        """The question of a draw that a step plans."""
        level = self._levels.setdefault(draw, self._curriculum.level(step, draw))
        return self._ask(draw, level, "train")

    def foresee(self, step: int, draw: int) -> Question:
        """The most likely question of a draw of a later step; changes no state.

        Dynamic sampling may use a draw in an earlier step than expected, which may plan another level for it.
        """
        return self._ask(draw, self._levels.get(draw, self._curriculum.level(step, draw)), "train")

    def is_planned(self, step: int) -> bool:
        """Whether `foresee` can predict the questions of a step."""
        return self._curriculum.is_planned(step)

    def test_questions(self, count: int) -> list[Question]:
        """The first held-out items, at the level of the settings; fewer if a finite task has fewer."""
        found: list[Question] = []
        seen: set[str] = set()
        for index in range(count):
            question = self._ask(index, self._settings.level, "test")
            if self.task.size is not None and question.item.key in seen:
                break  # the items repeat
            seen.add(question.item.key)
            found.append(question)
        return found

    def record(self, step: int, rewards: Iterable[tuple[Question, Sequence[float]]], next_draw: int) -> None:
        """Report the rewards of a step's samples to the curriculum; draws before `next_draw` are finished."""
        by_level: dict[int, list[float]] = {}
        for question, earned in rewards:
            by_level.setdefault(question.level, []).extend(earned)
        self._curriculum.record(step, by_level)
        self._levels = {draw: level for draw, level in self._levels.items() if draw >= next_draw}

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        levels = [[draw, level] for draw, level in sorted(self._levels.items())]
        return {"curriculum": self._curriculum.state(), "levels": levels}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._curriculum.restore(state["curriculum"])
        self._levels = {int(draw): int(level) for draw, level in state["levels"]}

    def _ask(self, index: int, level: int, split: Split) -> Question:
        task = self.task.at_level(level) if isinstance(self.task, LevelledTask) else self.task
        item = ask_item(self._settings, task, index, split)
        return Question(index, item, level, self._encode_checked(item))

    def _encode_checked(self, item: Item) -> list[int]:
        prompt_ids = self._encode(item)
        if len(prompt_ids) >= self._max_context:
            raise ValueError(
                f"{self._place}item {item.key[:80]!r} has a prompt of {len(prompt_ids)} tokens and leaves no room for "
                f"an answer in the model's context of {self._max_context}; remove it from the data"
            )
        return prompt_ids

    def _encode(self, item: Item) -> list[int]:
        if item.messages:
            return self._tokenizer.encode_chat([asdict(message) for message in item.messages])
        if self._is_chat:
            return self._tokenizer.encode_chat([{"role": "user", "content": item.prompt}])
        return self._tokenizer.encode(item.prompt)
