"""A sequence, which is one response being generated, and the group of sequences that share a prompt.

`Sequence` is the engine's record. While it runs, its numbers live in a slot of the `SequenceTable`, where a step
advances all sequences at once; it fetches its latest tokens from there when somebody asks for them. Drafters see its
`view`, a copy that the engine writes and never reads. Only `verify.py` appends tokens, apart from the prefix that a
sequence continues; pages belong to the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.noise import derive_key
from paceline.core.types import FinishReason, Prefix, Sampling
from paceline.model.executor import Guessed
from paceline.rollout.drafters.model_drafter import Hidden
from paceline.rollout.table import SequenceTable
from paceline.rollout.view import ReadOnlyView, ShownText

NO_SLOT = -1


@dataclass(eq=False)
class PromptGroup:
    """One draw of a prompt: its samples share the cached pages of all prompt tokens but the last.

    The last prompt token is each sample's own first row, because the sample's first token is sampled from that row.
    """

    group_id: int
    prompt_index: int
    prompt_id: int
    draw: int
    prompt: NDArray[np.int32]
    num_open: int
    """Samples not finished yet."""
    is_ahead: bool = False
    """Whether it is run-ahead: its samples use leftover capacity and yield to all requested ones."""
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    salt: str = ""
    """Whose cached prompts it may use."""
    is_closed: bool = False
    """Whether its last sample has finished. It is never reset: a step in flight may still hold a chunk of it."""

    def reopened(self) -> PromptGroup:
        """A new group for later samples of the same draw."""
        return PromptGroup(
            self.group_id, self.prompt_index, self.prompt_id, self.draw, self.prompt, num_open=0, salt=self.salt
        )

    @property
    def num_shared(self) -> int:
        """Prompt tokens the samples share."""
        return len(self.prompt) - 1

    @property
    def is_ready(self) -> bool:
        """Whether samples can start."""
        return self.num_cached == self.num_shared


class Sequence:
    """A response with its tokens, log-probabilities and KV pages."""

    def __init__(
        self,
        sequence_id: int,
        group: PromptGroup,
        sample_index: int,
        sampling: Sampling,
        max_length: int,
        kind: int = 0,
        request_id: str | None = None,
        is_foreseen: bool = True,
        version: int = 0,
    ) -> None:
        """`version`: of the weights that sample its first token."""
        self.sequence_id = sequence_id
        self.kind, self.request_id = kind, request_id
        self.is_foreseen = is_foreseen
        """Whether there may be run-ahead text for it."""
        self.group = group
        # Plain attributes, not properties: read many times a step.
        self.is_ahead, self.group_id = group.is_ahead, group.group_id
        self.prompt_id, self.draw = group.prompt_id, group.draw
        self.sample_index = sample_index
        self.sampling = sampling
        self.key = derive_key(sampling.seed, sampling.stream, group.draw, sample_index)
        self.prompt_length = len(group.prompt)
        self.max_length = max_length
        self.table: SequenceTable | None = None
        self.slot = NO_SLOT
        """Its place in the table while it runs."""
        self._length = self.prompt_length
        self._num_cached = 0
        self._last_token = int(group.prompt[-1])
        self._token_ids = np.empty(max_length, np.int32)
        self._token_ids[: self._length] = group.prompt
        self._shown_ids: NDArray[np.int32] | None = None
        """What the view shows, if there is one."""
        self._logprobs: list[float] = []
        self._truncated_logprobs: list[float] = []
        self._spans: list[tuple[int, int, str]] = []
        self._versions = [(version, 0)]
        """Versions of the weights, each with the first token that it samples."""
        self.num_told = 0
        """Tokens of the response that the caller has seen."""
        self.is_verified = True
        """False if it continues unverified run-ahead text: then it is unverified itself."""
        self.finish_reason: FinishReason | None = None
        self.pages: list[int] = []
        self.tapped: tuple[Tensor | None, Guessed | None, int, int] | None = None
        """From the latest step: its hidden states, the guesses after it, the row of the last cached token, and the
        sequence's index in the step."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response so far."""
        return self._length if self.table is None else int(self.table.lengths[self.slot])

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self._num_cached if self.table is None else int(self.table.cached[self.slot])

    @num_cached.setter
    def num_cached(self, count: int) -> None:
        self._num_cached = count
        if self.table is not None:
            self.table.cached[self.slot] = count

    @property
    def last_token(self) -> int:
        return self._last_token if self.table is None else int(self.table.last[self.slot])

    @property
    def view(self) -> ReadOnlyView:
        """For drafters; the engine never reads it. Made when somebody asks: where nobody does, it costs nothing."""
        self.fetch()
        if self._shown_ids is None:
            self._shown_ids = self._token_ids.copy()
            self._view = self._make_view(self._shown_ids)
        return self._view

    def _make_view(self, shown_ids: NDArray[np.int32]) -> ReadOnlyView:
        # An array over a read-only buffer cannot be made writable again.
        self._shown = ShownText(np.frombuffer(shown_ids.data.toreadonly(), np.int32), self._length)
        return ReadOnlyView(
            sequence_id=self.sequence_id,
            prompt_id=self.prompt_id,
            group_id=self.group_id,
            draw=self.draw,
            sample_index=self.sample_index,
            prompt_length=self.prompt_length,
            key=self.key,
            sampling=copy(self.sampling),
            is_run_ahead=self.is_ahead,
            _shown=self._shown,
        )

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of every token of the response."""
        self.fetch()
        return self._logprobs

    @property
    def truncated_logprobs(self) -> list[float]:
        """The same after truncation."""
        self.fetch()
        return self._truncated_logprobs

    @property
    def spans(self) -> list[tuple[int, int, str]]:
        """Which parts of the response came from which drafts."""
        self.fetch()
        return self._spans

    @property
    def versions(self) -> list[tuple[int, int, int]]:
        """Which weights sampled which part of the response."""
        starts = [start for _, start in self._versions]
        ends = [*starts[1:], self.length - self.prompt_length]
        spans = [(version, start, end) for (version, start), end in zip(self._versions, ends, strict=True)]
        return [span for span in spans if span[1] < span[2]]

    def switch(self, version: int) -> None:
        """Other weights sample from the next token on."""
        self._versions.append((version, self.length - self.prompt_length))
        self.tapped = None

    @property
    def hidden(self) -> Hidden | None:
        """What a model drafter starts from; None if hidden states are not kept or tokens were emitted since."""
        if self.tapped is None or self.num_pending != 1:
            return None
        return Hidden(*self.tapped, self.pages, self.num_cached)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far."""
        self.fetch()
        return self._token_ids[: self._length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The response so far."""
        return self.token_ids[self.prompt_length :]

    @property
    def num_pending(self) -> int:
        """Tokens not in the cache; 1 for a sequence that is decoding."""
        return self.length - self.num_cached

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - self.length

    def enter(self, table: SequenceTable, slot: int) -> None:
        """For the table: from now on the numbers are there."""
        self.table, self.slot = table, slot

    def leave(self) -> None:
        """For the table: take everything back from there."""
        assert self.table is not None
        self.fetch()
        self._num_cached = self.num_cached
        self.table, self.slot = None, NO_SLOT

    def fetch(self) -> None:
        """Copy the tokens emitted since the last time from the table."""
        if self.table is not None and self.table.num_recent[self.slot]:
            tokens, logprobs, truncated_logprobs, spans = self.table.take_recent(self.slot)
            self._extend(tokens)
            self._logprobs += logprobs
            self._truncated_logprobs += truncated_logprobs
            self._spans += spans

    def _extend(self, tokens: SequenceOf[int] | NDArray[np.int32]) -> None:
        new = slice(self._length, self._length + len(tokens))
        self._token_ids[new] = tokens
        self._length = new.stop
        if self._shown_ids is not None:
            self._shown_ids[new] = self._token_ids[new]
            self._shown.length = new.stop
        self._last_token = int(self._token_ids[new.stop - 1])

    def append(self, token: int, logprob: float, truncated_logprob: float) -> None:
        """For `verify.py` only: the slow way to emit a token."""
        self.fetch()
        self._extend([token])
        self._logprobs.append(logprob)
        self._truncated_logprobs.append(truncated_logprob)
        if self.table is not None:
            self.table.lengths[self.slot], self.table.last[self.slot] = self._length, token

    def go_on_from(self, prefix: Prefix) -> None:
        """Continue from tokens that were sampled for the same key elsewhere or earlier."""
        num_tokens = len(prefix.token_ids)
        assert self.length == self.prompt_length and num_tokens <= self.num_left and self.table is None
        if num_tokens:
            self._extend(np.asarray(prefix.token_ids, np.int32))
        self.is_verified = prefix.is_verified
        self._logprobs = [math.nan] * num_tokens if prefix.logprobs is None else list(prefix.logprobs)
        truncated = prefix.truncated_logprobs
        self._truncated_logprobs = list(self._logprobs if truncated is None else truncated)
        self._spans = list(prefix.spans)
        self.num_told = num_tokens
        if prefix.versions:
            starts = [(version, start) for version, start, _ in prefix.versions]
            self._versions = [*starts, (self._versions[-1][0], num_tokens)]

    def prefix(self) -> Prefix:
        """A prefix from which another engine can continue."""
        tokens = self.response_ids.tolist()
        if not self.is_verified:
            return Prefix(self.sampling, tokens)
        truncated = list(self.truncated_logprobs) if self.sampling.is_truncated else None
        versions = tuple(self.versions) if len(self._versions) > 1 else ()
        return Prefix(self.sampling, tokens, list(self.logprobs), truncated, tuple(self.spans), versions)

    def describe(self) -> str:
        """The sequence's name in messages."""
        if self.request_id is not None:
            return f"request {self.request_id!r}"
        return f"prompt {self.group.prompt_index}, sample {self.sample_index} (draw {self.draw})"
