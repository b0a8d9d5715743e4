"""A sequence, which is one response being generated, and the group of sequences that share a prompt.

`Sequence` is the engine's record. Drafters see its `view`, a copy that the engine writes and never reads. Only
`verify.py` appends tokens, apart from the prefix that a sequence continues; pages belong to the scheduler.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.noise import derive_key
from paceline.core.types import FinishReason, Prefix, Sampling
from paceline.model.executor import Guessed
from paceline.rollout.drafters.model_drafter import Hidden
from paceline.rollout.view import ReadOnlyView, ShownText


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
    is_closed: bool = False
    """Whether its last sample has finished. It is never reset: a step in flight may still hold a chunk of it."""

    def reopened(self) -> PromptGroup:
        """A new group for later samples of the same draw."""
        return PromptGroup(self.group_id, self.prompt_index, self.prompt_id, self.draw, self.prompt, num_open=0)

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
        self, sequence_id: int, group: PromptGroup, sample_index: int, sampling: Sampling, max_length: int
    ) -> None:
        self.sequence_id = sequence_id
        self.group = group
        # Plain attributes, not properties: read many times a step.
        self.is_ahead, self.group_id = group.is_ahead, group.group_id
        self.prompt_id, self.draw = group.prompt_id, group.draw
        self.sample_index = sample_index
        self.sampling = sampling
        self.key = derive_key(sampling.seed, sampling.stream, group.draw, sample_index)
        self.prompt_length = len(group.prompt)
        self.max_length = max_length
        self.length = self.prompt_length
        self.last_token = int(group.prompt[-1])
        self._token_ids, shown = np.empty(max_length, np.int32), np.empty(max_length, np.int32)
        self._token_ids[: self.length] = shown[: self.length] = group.prompt
        # Single tokens are written through these memoryviews, which is faster than through arrays.
        self._write, self._show = self._token_ids.data, shown.data
        # An array over a read-only buffer cannot be made writable again.
        self._shown = ShownText(np.frombuffer(self._show.toreadonly(), np.int32), self.length)
        self.view = ReadOnlyView(
            sequence_id=sequence_id,
            prompt_id=group.prompt_id,
            group_id=group.group_id,
            draw=group.draw,
            sample_index=sample_index,
            prompt_length=self.prompt_length,
            key=self.key,
            sampling=copy(sampling),
            is_run_ahead=group.is_ahead,
            _shown=self._shown,
        )
        """For drafters; the engine never reads it."""
        self.logprobs: list[float] = []
        self.truncated_logprobs: list[float] = []
        self.spans: list[tuple[int, int, str]] = []
        self.is_verified = True
        """False if it continues unverified run-ahead text: then it is unverified itself."""
        self.finish_reason: FinishReason | None = None
        self.pages: list[int] = []
        self.num_cached = 0
        self.tapped: tuple[Tensor | None, Guessed | None, int, int] | None = None
        """From the latest step: its hidden states, the guesses after it, the row of the last cached token, and the
        sequence's index in the step."""

    @property
    def hidden(self) -> Hidden | None:
        """What a model drafter starts from; None if hidden states are not kept or tokens were emitted since."""
        if self.tapped is None or self.num_pending != 1:
            return None
        return Hidden(*self.tapped, self.pages, self.num_cached)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and response so far."""
        return self._token_ids[: self.length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The response so far."""
        return self._token_ids[self.prompt_length : self.length]

    @property
    def num_pending(self) -> int:
        """Tokens not in the cache; 1 for a sequence that is decoding."""
        return self.length - self.num_cached

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - self.length

    def append(self, token: int, logprob: float, truncated_logprob: float) -> None:
        """For `verify.py` only."""
        at = self.length
        self._write[at] = self._show[at] = self.last_token = token
        self.length = self._shown.length = at + 1
        self.logprobs.append(logprob)
        self.truncated_logprobs.append(truncated_logprob)

    def go_on_from(self, prefix: Prefix) -> None:
        """Continue from tokens that were sampled for the same key elsewhere or earlier."""
        num_tokens = len(prefix.token_ids)
        assert self.length == self.prompt_length and num_tokens <= self.num_left
        new = slice(self.length, self.length + num_tokens)
        self._token_ids[new] = prefix.token_ids
        self._show[new] = self._write[new]
        self.length = self._shown.length = new.stop
        self.last_token = int(self._token_ids[self.length - 1])
        self.is_verified = prefix.is_verified
        self.logprobs = [math.nan] * num_tokens if prefix.logprobs is None else list(prefix.logprobs)
        truncated = prefix.truncated_logprobs
        self.truncated_logprobs = list(self.logprobs if truncated is None else truncated)
        self.spans = list(prefix.spans)

    def prefix(self) -> Prefix:
        """A prefix from which another engine can continue."""
        tokens = self.response_ids.tolist()
        if not self.is_verified:
            return Prefix(self.sampling, tokens)
        truncated = list(self.truncated_logprobs) if self.sampling.is_truncated else None
        return Prefix(self.sampling, tokens, list(self.logprobs), truncated, tuple(self.spans))

    def mark_accepted(self, num_accepted: int, num_emitted: int, source: str) -> None:
        """Record that the first `num_accepted` of the last `num_emitted` tokens came from a draft."""
        start = self.length - self.prompt_length - num_emitted
        self.spans.append((start, start + num_accepted, source))

    def describe(self) -> str:
        """The sequence's name in messages."""
        return f"prompt {self.group.prompt_index}, sample {self.sample_index} (draw {self.draw})"
