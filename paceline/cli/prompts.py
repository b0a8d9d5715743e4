"""The prompts of `generate` and `compare`: read and checked before any work starts, then encoded for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.documents import refuse_surrogates

if TYPE_CHECKING:
    from paceline.rollout.engine import Engine
    from paceline.rollout.files import PromptLine


def read_prompt_lines(texts: Sequence[str] | None, file: Path | None) -> list[PromptLine]:
    """Prompts from the command line or a file, checked; an empty list if there are none."""
    from paceline.rollout.files import PromptLine, read_prompts

    if texts and file is not None:
        raise ValueError("give prompts as arguments or with --prompts FILE, not both")
    if file is not None:
        return read_prompts(file)
    for number, text in enumerate(texts or (), 1):
        try:
            refuse_surrogates(text)  # Python's form of bytes on the command line that are not UTF-8
        except ValueError as error:
            raise ValueError(f"prompt {number} on the command line is not UTF-8 text: {error}") from error
    return [PromptLine(text=text) for text in texts or ()]


def prepare_prompts(engine: Engine, is_chat: bool, lines: Sequence[PromptLine]) -> list[str | list[int]]:
    """Prompts as the engine takes them: the tokenizer's own template turns chats into token ids."""
    return [_prepare(engine, is_chat, line) for line in lines]


def _prepare(engine: Engine, is_chat: bool, line: PromptLine) -> str | list[int]:
    if line.token_ids is not None:
        return line.token_ids
    if line.text is not None and not is_chat:
        return line.text
    if engine.tokenizer is None:
        raise ValueError("this model folder has no tokenizer; give prompts as lists of token ids")
    return engine.tokenizer.encode_chat(line.messages or [{"role": "user", "content": line.text}])
