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
    from paceline.rollout.files import read_prompts

    if texts and file is not None:
        raise ValueError("give prompts as arguments or with --prompts FILE, not both")
    if file is not None:
        return read_prompts(file)
    return [_from_argument(number, text) for number, text in enumerate(texts or (), 1)]


def _from_argument(number: int, text: str) -> PromptLine:
    from paceline.rollout.files import PromptLine

    place = f"prompt {number} on the command line"
    try:
        refuse_surrogates(text)  # Python's form of bytes on the command line that are not UTF-8
    except ValueError as error:
        raise ValueError(f"{place} is not UTF-8 text: {error}") from error
    return PromptLine(text=text, place=place)


def prepare_prompts(engine: Engine, is_chat: bool, lines: Sequence[PromptLine]) -> list[str | list[int]]:
    """Prompts as the engine takes them: the tokenizer's own template turns chats into token ids."""
    return [_prepare(engine, is_chat, line) for line in lines]


def _prepare(engine: Engine, is_chat: bool, line: PromptLine) -> str | list[int]:
    """The engine would name a prompt's number; whoever wrote the file looks for a line."""
    try:
        ids = _encode(engine, is_chat, line)
    except ValueError as error:
        raise ValueError(f"{line.place}: {error}") from error
    config = engine.decoder.config
    if ids is None:
        return line.text or ""
    if len(ids) >= config.max_context:
        raise ValueError(
            f"{line.place} has {len(ids)} tokens and leaves no room in the context of {config.max_context}"
        )
    if outside := next((token for token in ids if not 0 <= token < config.vocab_size), None):
        raise ValueError(f"{line.place}: token id {outside} is outside the vocabulary of {config.vocab_size} ids")
    return ids


def _encode(engine: Engine, is_chat: bool, line: PromptLine) -> list[int] | None:
    """Its token ids; None without a tokenizer, about which the engine has its own words."""
    if line.token_ids is not None:
        return line.token_ids
    if line.text is not None and not is_chat:
        return engine.tokenizer.encode(line.text) if engine.tokenizer else None
    if engine.tokenizer is None:
        raise ValueError("this model folder has no tokenizer; give prompts as lists of token ids")
    return engine.tokenizer.encode_chat(line.messages or [{"role": "user", "content": line.text}])
