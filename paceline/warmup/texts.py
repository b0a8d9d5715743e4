"""Training texts of the warm start: batches of worked solutions as token ids, a pure function of (settings, step).

`train.py` reads a `BatchStream`. Its worker processes run this module with `python -m`: worker w of n writes the
batches of steps w, w + n, ... to its pipe and blocks until they are read, so it never holds more than the batch it is
writing. The number of workers changes no token. This module must never import torch: workers start fast.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

import numpy as np

from paceline.core.config import SettingsError, nearest
from paceline.core.noise import derive_key
from paceline.core.types import Int32Array
from paceline.model.char_tokenizer import END, make_char_tokenizer, make_pieces
from paceline.model.tokenizer import Tokenizer
from paceline.tasks.base import WorkedTask
from paceline.tasks.countdown import Countdown
from paceline.tasks.counting import Counting
from paceline.tasks.graph import Graph
from paceline.tasks.procedural import Dice
from paceline.tasks.spatial import Spatial
from paceline.warmup.settings import DataSettings

WORKED_TASKS = (Countdown, Counting, Graph, Spatial)
"""The tasks whose characters and words the tokenizer covers, whichever is trained on first."""

MAX_TEXTS = 1 << 24
"""Exceeds the number of texts in a batch; numbers items across steps."""
MEMORY_LIMIT = 1 << 26
"""Exceeds the tokens of a batch; a length read from a pipe is checked against it before allocating."""


@dataclass(frozen=True, eq=False)
class WorkedText:
    """One worked solution as token ids; the response ends with the end token."""

    prompt_ids: Int32Array
    response_ids: Int32Array

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


TextBatch = list[WorkedText]


def common_letters(max_length: int) -> Tokenizer:
    """The tokenizer shared by all worked tasks, for a model with a context of `max_length` tokens."""
    return make_char_tokenizer(*_letters_and_words(), max_length)


def _letters_and_words() -> tuple[str, list[str]]:
    alphabet = "".join(task.alphabet for task in WORKED_TASKS)
    return alphabet, [word for task in WORKED_TASKS for word in task.words]


class TextSource:
    """Generates the batch of any step."""

    def __init__(self, settings: DataSettings, max_context: int) -> None:
        """Texts longer than `max_context` tokens are skipped."""
        self._settings = settings
        self._max_context = max_context
        self._pieces = make_pieces(*_letters_and_words())
        self._end = np.int32(self._pieces.encode(END).ids[0])
        self.tasks = {level: make_worked_task(settings, level) for level in settings.levels}
        shares = np.cumsum(list(settings.levels.values()))
        self._thresholds = dict(zip(settings.levels, (shares / shares[-1]).tolist(), strict=True))

    def batch(self, step: int) -> TextBatch:
        """Texts of at least `batch_tokens` tokens in all, shortest first, so that packs need little padding."""
        texts: TextBatch = []
        num_tokens = 0
        for index in range(MAX_TEXTS):
            text = self.text(step, index)
            if len(text) <= self._max_context:
                texts.append(text)
                num_tokens += len(text)
            if num_tokens >= self._settings.batch_tokens:
                return sorted(texts, key=len)
        raise ValueError(f"no text of {self._settings.task} fits in {self._max_context} tokens; raise max_context")

    def text(self, step: int, index: int) -> WorkedText:
        """One worked train item, at a random level."""
        seed, number = self._settings.seed, step * MAX_TEXTS + index
        task = self.tasks[self._draw_level(Dice(derive_key(seed, "warmup/level", number, 0)))]
        item = task.item(seed, number)
        prompt, response = (self._encode(text) for text in (item.prompt, task.worked(item, seed)))
        return WorkedText(prompt, np.append(response, self._end))

    def _draw_level(self, dice: Dice) -> int:
        roll = dice.below(1 << 30) / (1 << 30)
        return next(level for level, threshold in self._thresholds.items() if roll < threshold)

    def _encode(self, text: str) -> Int32Array:
        return np.array(self._pieces.encode(text).ids, dtype=np.int32)


def make_worked_task(settings: DataSettings, level: int) -> WorkedTask:
    """The configured task at a level."""
    tasks = {task.name: task for task in WORKED_TASKS}
    if settings.task not in tasks:
        guess = nearest(settings.task, list(tasks))
        hint = f"did you mean {guess}?" if guess else f"there are {', '.join(tasks)}"
        raise SettingsError(f"data.task: {settings.task!r} has no worked solutions: {hint}")
    kind = tasks[settings.task]
    if level >= len(kind.levels):
        raise SettingsError(f"{settings.task} has levels 0 to {len(kind.levels) - 1}, got {level}")
    task: object = kind(level, settings.dials)
    assert isinstance(task, WorkedTask)
    return task


# --- processes --------------------------------------------------------------------------------------------------------


class BatchStream:
    """The batches of steps 0, 1, ... in order. Close it, or use a `with` block."""

    def __init__(self, settings: DataSettings, max_context: int, num_steps: int) -> None:
        self._source = TextSource(settings, max_context)  # here too, so that bad settings fail at once
        self._num_steps = num_steps
        num_workers = min(settings.workers, num_steps)
        start = {"settings": settings.model_dump(mode="json"), "max_context": max_context, "num_steps": num_steps}
        self._workers: list[subprocess.Popen[bytes]] = []
        try:
            for first in range(num_workers):
                self._workers.append(_start_worker({**start, "first": first, "stride": num_workers}))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[TextBatch]:
        for step in range(self._num_steps):
            yield self._read(self._workers[step % len(self._workers)]) if self._workers else self._source.batch(step)

    def close(self) -> None:
        """Kill all processes."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, worker: subprocess.Popen[bytes]) -> TextBatch:
        assert worker.stdout is not None
        try:
            return read_batch(worker.stdout)
        except EOFError:
            code = worker.wait()
            raise RuntimeError(
                f"a text worker ended with exit code {code}; its last output is above. "
                "data.workers=0 generates the texts in this process"
            ) from None


def write_batch(pipe: IO[bytes], batch: Sequence[WorkedText]) -> None:
    """One batch as bytes: the number of texts, the lengths of their prompts and responses, then all ids."""
    lengths = [[len(text.prompt_ids), len(text.response_ids)] for text in batch]
    ids = [part for text in batch for part in (text.prompt_ids, text.response_ids)]
    pipe.write(np.concatenate([[len(batch)], np.ravel(lengths), *ids]).astype("<i4").tobytes())
    pipe.flush()


def read_batch(pipe: IO[bytes]) -> TextBatch:
    """The batch that `write_batch` wrote; EOFError if the pipe ends before it is complete."""
    lengths = _read_ints(pipe, 2 * int(_read_ints(pipe, 1)[0]))
    parts = np.split(_read_ints(pipe, int(lengths.sum())), np.cumsum(lengths)[:-1])
    return [WorkedText(prompt, response) for prompt, response in zip(parts[::2], parts[1::2], strict=True)]


def _read_ints(pipe: IO[bytes], count: int) -> Int32Array:
    assert 0 < count <= MEMORY_LIMIT, f"{count} numbers are no part of a batch"
    data = pipe.read(4 * count)
    if len(data) < 4 * count:
        raise EOFError
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def _start_worker(start: dict[str, object]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    worker = subprocess.Popen(
        [sys.executable, "-m", "paceline.warmup.texts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(start).encode() + b"\n")
    worker.stdin.flush()
    return worker


def main() -> None:
    """Write batches to the pipe until all are written or nobody reads them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a closed pipe ends this process
    start = json.loads(sys.stdin.buffer.readline())
    source = TextSource(DataSettings.model_validate(start["settings"]), start["max_context"])
    try:
        for step in range(start["first"], start["num_steps"], start["stride"]):
            write_batch(sys.stdout.buffer, source.batch(step))
    except BrokenPipeError:
        os._exit(0)  # `sys.exit` would flush the broken pipe once more


if __name__ == "__main__":
    main()
