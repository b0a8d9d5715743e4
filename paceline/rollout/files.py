"""Reads prompts from files and writes rollouts to files, for `paceline generate` and `compare`; knows no engine.

A prompt file is read and validated to its last line before any work starts. A rollout file loses nothing: every
finished rollout is on disk at once in `FILE.partial`, and only a complete run moves the sorted `FILE` into place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from paceline.core.documents import BadJson, brief, numbered_lines, parse_json
from paceline.core.files import write_file
from paceline.core.types import Rollout

MessageFields = Mapping[str, Any]


@dataclass(frozen=True)
class PromptLine:
    """One prompt as given: text, token ids, or the messages of a chat. Exactly one of the three is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[MessageFields] | None = None
    place: str = field(default="a prompt", compare=False)
    """Where it comes from, for messages: the file and its line."""

    @property
    def given(self) -> str | list[int] | list[MessageFields]:
        """The prompt as given, for the rollout file."""
        return next(value for value in (self.text, self.token_ids, self.messages) if value is not None)


def read_prompts(file: Path) -> list[PromptLine]:
    """The prompts of a .txt file (one per line) or .jsonl file (`prompt`: text or token ids, or `messages`)."""
    readers = {".txt": _text_line, ".jsonl": _json_line}
    if file.suffix not in readers:
        raise ValueError(f"{file}: prompts come from a .txt file (one per line) or a .jsonl file, not {file.suffix!r}")
    prompts = []
    for number, line in numbered_lines(file):
        place = f"{file}, line {number}"
        try:
            prompts.append(replace(readers[file.suffix](line), place=place))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def _text_line(line: str) -> PromptLine:
    return PromptLine(text=line)


def _json_line(line: str) -> PromptLine:
    try:
        record = parse_json(line)
    except BadJson as error:
        raise ValueError(f"not valid JSON: {error}") from error
    given = [key for key in ("prompt", "messages") if isinstance(record, dict) and key in record]
    if len(given) != 1:
        raise ValueError('expected an object with either "prompt" or "messages"')
    value = record[given[0]]
    if given == ["messages"]:
        return PromptLine(messages=check_messages(value))
    if isinstance(value, str) and value:
        return PromptLine(text=value)
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return PromptLine(token_ids=value)
    raise ValueError(f'"prompt" must be text or a list of token ids, and not empty; got {brief(value)}')


def check_messages(value: Any) -> list[MessageFields]:
    """The messages of a chat; a ValueError if it is none."""
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message for message in value
    )
    if not is_chat or not value:
        raise ValueError(
            f'"messages" must be a list of {{"role": ..., "content": ...}}, and not empty; got {brief(value)}'
        )
    return list(value)


def to_line(rollout: Rollout, prompt: PromptLine) -> str:
    """One rollout as a line of JSON; Python writes floats so that they read back bit for bit."""
    record = {
        "prompt_index": rollout.prompt_index,
        "sample_index": rollout.sample_index,
        "draw": rollout.draw,
        "prompt": prompt.given,
        "text": rollout.text,
        "token_ids": [int(token) for token in rollout.token_ids],
        "logprobs": [float(logprob) for logprob in rollout.logprobs],
        "finish_reason": rollout.finish_reason,
    }
    return json.dumps(record, ensure_ascii=False)


def partial_file(file: Path) -> Path:
    """Where rollouts are until all have finished."""
    return file.with_name(file.name + ".partial")


def check_rollout_file(file: Path) -> None:
    """Raise a ValueError if rollouts cannot go into this file."""
    if partial_file(file).exists():
        raise ValueError(
            f"{partial_file(file)} is left from an interrupted run: move its rollouts elsewhere or remove it"
        )
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name a file for the rollouts")


class RolloutFile:
    """A file of rollouts, one JSON object per line, sorted by prompt and sample once complete."""

    def __init__(self, file: Path, prompts: Sequence[PromptLine]) -> None:
        self.file = file
        self.partial = partial_file(file)
        self._prompts = prompts
        self._places: list[tuple[int, int, int]] = []
        """(prompt index, sample index, offset in the partial file) of every written line."""

    def __enter__(self) -> Self:
        check_rollout_file(self.file)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._handle = self.partial.open("xb")
        return self

    def write(self, rollout: Rollout) -> None:
        """Write one finished rollout to disk now."""
        self._places.append((rollout.prompt_index, rollout.sample_index, self._handle.tell()))
        line = to_line(rollout, self._prompts[rollout.prompt_index])
        # A lone surrogate has no UTF-8 form; backslashreplace writes the escape JSON itself would use.
        self._handle.write(line.encode(errors="backslashreplace") + b"\n")
        self._handle.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()
        if kind is None:
            self._put_in_place()
        elif not self._places:
            self.partial.unlink()

    @property
    def num_written(self) -> int:
        return len(self._places)

    def _put_in_place(self) -> None:
        with self.partial.open("rb") as source:
            write_file(self.file, _lines_at(source, (offset for _, _, offset in sorted(self._places))))
        self.partial.unlink()


def _lines_at(source: BinaryIO, offsets: Iterable[int]) -> Iterable[bytes]:
    for offset in offsets:
        source.seek(offset)
        yield source.readline()
