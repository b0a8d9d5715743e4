"""One response being made, and the group of responses that share a prompt.

A `Sequence` is the engine's record and, through its read-only properties, the drafters' `SequenceView`. Tokens are
appended by `verify.py` alone, but for the prefix that a sequence goes on from; pages belong to the scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.noise import derive_key
from paceline.core.types import FinishReason, Hidden, Prefix, Sampling


@dataclass(eq=False)
class PromptGroup:
    """This use of a prompt: its samples share the cached pages of all prompt tokens but the last.

    The last prompt token is each sample's own first row, because that row draws the sample's first token.
    """

    group_id: int
    prompt_index: int
    prompt_id: int
    draw: int
    prompt: NDArray[np.int32]
    num_open: int
    """Samples not finished yet."""
    is_ahead: bool = False
    """Whether nobody has asked for it yet: its samples take what is left and give way to all others."""
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    is_closed: bool = False
    """Whether its last sample is gone. It stays so: a step under way may still hold a chunk of it."""

    def reopened(self) -> PromptGroup:
        """The same use of the prompt, for samples to come."""
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
    """A response with its tokens, log-probabilities and place in the cache."""

    def __init__(
        self, sequence_id: int, group: PromptGroup, sample_index: int, sampling: Sampling, max_length: int
    ) -> None:
        self.sequence_id = sequence_id
        self.group = group
        # Asked many times a step, hence not handed on by properties.
        self.is_ahead, self.group_id = group.is_ahead, group.group_id
        self.prompt_id, self.draw = group.prompt_id, group.draw
        self.sample_index = sample_index
        self.sampling = sampling
        self.key = derive_key(sampling.seed, sampling.stream, group.draw, sample_index)
        self.prompt_length = len(group.prompt)
        self.max_length = max_length
        self.length = self.prompt_length
        self.last_token = int(group.prompt[-1])
        self._buffer = np.empty(max_length, np.int32)
        self._buffer[: self.length] = group.prompt
        # A view through a read-only buffer: its flag cannot be turned back, so no drafter can write a token.
        self._readable = np.frombuffer(self._buffer.data.toreadonly(), np.int32)
        self.logprobs: list[float] = []
        self.truncated_logprobs: list[float] = []
        self.spans: list[tuple[int, int, str]] = []
        self.is_verified = True
        """False where it goes on from a guess: it is one itself."""
        self.finish_reason: FinishReason | None = None
        self.pages: list[int] = []
        self.num_cached = 0
        self.tapped: tuple[Any, int, int] | None = None
        """States of the latest step, which row of them is that of the last token in the cache, and whose it is."""

    @property
    def hidden(self) -> Hidden | None:
        """What `eagle` starts from; None where nobody keeps hidden states."""
        return None if self.tapped is None else Hidden(*self.tapped, self.pages, self.num_cached)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self._readable[: self.length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """Tokens made so far."""
        return self._readable[self.prompt_length : self.length]

    @property
    def num_pending(self) -> int:
        """Tokens not in the cache; 1 for a sequence that is decoding."""
        return self.length - self.num_cached

    @property
    def num_left(self) -> int:
        """Tokens that may still be made."""
        return self.max_length - self.length

    def append(self, token: int, logprob: float, truncated_logprob: float) -> None:
        """For `verify.py` only."""
        self._buffer[self.length] = self.last_token = token
        self.length += 1
        self.logprobs.append(logprob)
        self.truncated_logprobs.append(truncated_logprob)

    def go_on_from(self, prefix: Prefix) -> None:
        """Take over what was drawn for this very sequence elsewhere or before."""
        num_tokens = len(prefix.token_ids)
        assert self.length == self.prompt_length and num_tokens <= self.num_left
        self.length += num_tokens
        self._buffer[self.prompt_length : self.length] = prefix.token_ids
        self.last_token = int(self._buffer[self.length - 1])
        self.is_verified = prefix.is_verified
        self.logprobs = [math.nan] * num_tokens if prefix.logprobs is None else list(prefix.logprobs)
        truncated = prefix.truncated_logprobs
        self.truncated_logprobs = list(self.logprobs if truncated is None else truncated)
        self.spans = list(prefix.spans)

    def prefix(self) -> Prefix:
        """What another engine needs to go on from here."""
        tokens = self.response_ids.tolist()
        if not self.is_verified:
            return Prefix(self.sampling, tokens)
        truncated = list(self.truncated_logprobs) if self.sampling.is_truncated else None
        return Prefix(self.sampling, tokens, list(self.logprobs), truncated, tuple(self.spans))

    def mark_accepted(self, num_accepted: int, num_emitted: int, source: str) -> None:
        """Remember that of the tokens emitted last the first ones were drafted."""
        start = self.length - self.prompt_length - num_emitted
        self.spans.append((start, start + num_accepted, source))

    def describe(self) -> str:
        """How messages name this sequence."""
        return f"prompt {self.group.prompt_index}, sample {self.sample_index} (draw {self.draw})"
