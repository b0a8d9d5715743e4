"""What routes and the engine's thread exchange: jobs one way, events the other. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.core.types import Rollout, Sampling

if TYPE_CHECKING:
    from paceline.rollout.requests import NewTokens

PauseMode = Literal["abort", "wait", "keep"]


class Busy(Exception):
    """There are too many open answers."""


class Grown(NamedTuple):
    """An answer has grown."""

    number: int
    tokens: NewTokens


class Answered(NamedTuple):
    """An answer is complete."""

    number: int
    rollout: Rollout


class Broken(NamedTuple):
    """The engine failed; no more answers will come."""

    message: str


JobEvent = Grown | Answered | Broken


@dataclass(eq=False)
class AnswerJob:
    """A client's request: `n` answers to each of its prompts, numbered prompt by prompt."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    deliver: Callable[[list[JobEvent]], None]
    """Called in the engine's thread."""
    has_seed: bool = False
    salt: str = ""
    open: dict[str, int] = field(default_factory=dict)
    """The numbers of the answers still to come, by the names that the engine knows."""

    @property
    def num_answers(self) -> int:
        """To all of its prompts."""
        return len(self.prompts) * self.sampling.n
