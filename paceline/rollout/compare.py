"""Compares two lists of rollouts bit for bit, finds where they first differ, and times the engines that made them.

`paceline compare`, the end of a run and the equality tests call it. To it, an engine is something that generates and
counts; it never looks inside. Token ids alone would be a blind judge (a wrong sum order flips one token in millions),
so it compares log-probabilities by their bits.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from paceline.core.types import Prompt, Rollout, Sampling

T = TypeVar("T")
Mode = Literal["off", "on", "everything"]


class Generator(Protocol):
    """The part of an engine that a comparison needs."""

    @property
    def stats(self) -> Any: ...
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]: ...


@dataclass(frozen=True)
class Difference:
    """The first place where two rollouts of one prompt and sample differ; None means that one ended before."""

    prompt_index: int
    sample_index: int
    position: int
    token_ids: tuple[int | None, int | None]
    logprobs: tuple[float | None, float | None]
    finish_reasons: tuple[str, str]

    def __str__(self) -> str:
        sides = zip(("off", "on"), self.token_ids, self.logprobs, self.finish_reasons, strict=True)
        shown = "; ".join(
            f"{name}: ended before ({reason!r})"
            if token is None
            else f"{name}: token {token}, log-probability {logprob!r}"
            for name, token, logprob, reason in sides
        )
        return f"prompt {self.prompt_index}, sample {self.sample_index}, position {self.position}: {shown}"


@dataclass
class Comparison:
    """The same rollouts generated without and with speculation, several times, alternating."""

    num_rollouts: int = 0
    num_tokens: int = 0
    num_identical: int = 0
    seconds_off: list[float] = field(default_factory=list)
    seconds_on: list[float] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)
    """Tokens per forward and sequence with speculation on, including the policy's own token."""
    num_verified: int = 0
    """Draft tokens verified in the run that verifies all of them."""
    num_accepted: int = 0
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By source of drafts, from the last run with speculation on: see `DrafterStats`."""
    difference: Difference | None = None

    def record(self, off: Sequence[Rollout], on: Sequence[Rollout]) -> None:
        """Compare what both sides made of the same work."""
        self.num_rollouts += len(off)
        self.num_tokens += sum(len(rollout.token_ids) for rollout in off)
        self.num_identical += count_identical(off, on)
        self.difference = self.difference or first_difference(off, on)

    @property
    def ratio(self) -> float:
        """Speedup of the median run with speculation on."""
        return statistics.median(self.seconds_off) / statistics.median(self.seconds_on)

    @property
    def accept_length(self) -> float:
        return statistics.median(self.accept_lengths)

    def to_json(self) -> dict[str, Any]:
        """Everything measured, ready for `json.dumps`."""
        return asdict(self) | {"ratio": self.ratio, "accept_length": self.accept_length}


def compare_engines(
    make: Callable[[Mode], Generator], prompts: Sequence[Prompt], sampling: Sampling, repeats: int
) -> Comparison:
    """Time `make("off")` and `make("on")` on the same work, alternating, and compare their rollouts.

    Every run gets a new engine: a drafter that remembers the previous repeat would replay its answers and look better
    than it is. A few tokens beforehand, with other keys, pay for compilation and for the first touch of its memory.
    At the end `make("everything")`, which verifies every draft token whether or not it pays, is compared too: a budget
    that finds no draft token worth its row would otherwise leave nothing to compare.
    """
    result = Comparison()
    for _ in range(repeats):
        seconds_off, off, _ = _timed(make("off"), prompts, sampling)
        engine = make("on")
        seconds_on, on, accept_length = _timed(engine, prompts, sampling)
        result.sources = {name: drafter.describe() for name, drafter in sorted(engine.stats.drafters.items())}
        result.seconds_off.append(seconds_off)
        result.seconds_on.append(seconds_on)
        result.accept_lengths.append(accept_length)
        result.num_rollouts = result.num_tokens = result.num_identical = 0  # every repeat makes the same ones
        result.record(off, on)
        if result.difference is not None:
            return result
    checked = make("everything")
    on = checked.generate(prompts, sampling)
    result.num_verified = sum(drafter.verified for drafter in checked.stats.drafters.values())
    result.num_accepted = sum(drafter.accepted for drafter in checked.stats.drafters.values())
    result.num_identical = min(result.num_identical, count_identical(off, on))
    result.difference = first_difference(off, on)
    return result


def compare_in_turns(
    off: Callable[[T], list[Rollout]], on: Callable[[T], list[Rollout]], rounds: Sequence[T]
) -> Comparison:
    """Time two ways of making the same rollouts, round by round, in alternating order; the first round only warms up.

    Every round has work of its own: after one round a drafter would know its texts by heart.
    """
    result = Comparison()
    sides = {"off": (off, result.seconds_off), "on": (on, result.seconds_on)}
    for turn, work in enumerate(rounds):
        made = {}
        for name in ("off", "on") if turn % 2 else ("on", "off"):
            generate, seconds = sides[name]
            start = time.perf_counter()
            made[name] = generate(work)
            if turn:
                seconds.append(time.perf_counter() - start)
        result.record(made["off"], made["on"])
    return result


def _timed(engine: Generator, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[float, list[Rollout], float]:
    engine.generate(prompts, replace(sampling, max_new_tokens=min(4, sampling.max_new_tokens), stream="warm-up"))
    start = time.perf_counter()
    rollouts = engine.generate(prompts, sampling)
    return time.perf_counter() - start, rollouts, float(engine.stats.accept_length)


def first_difference(off: Sequence[Rollout], on: Sequence[Rollout]) -> Difference | None:
    """The first difference in order of prompt, sample, position; None if the two lists are identical."""
    if [_name(rollout) for rollout in off] != [_name(rollout) for rollout in on]:
        raise ValueError("the lists have different prompts or samples: generate both with the same prompts and n")
    return next((found for pair in zip(off, on, strict=True) if (found := _compare(*pair)) is not None), None)


def count_identical(off: Sequence[Rollout], on: Sequence[Rollout]) -> int:
    """The number of rollouts that are identical in both lists."""
    return sum(_compare(a, b) is None for a, b in zip(off, on, strict=True))


def _name(rollout: Rollout) -> tuple[int, int, int]:
    return rollout.prompt_index, rollout.sample_index, rollout.draw


def _compare(a: Rollout, b: Rollout) -> Difference | None:
    steps_a, steps_b = _steps(a), _steps(b)
    ends_alike = (a.finish_reason, a.text) == (b.finish_reason, b.text)
    if steps_a == steps_b and ends_alike:
        return None
    shared = min(len(steps_a), len(steps_b))
    position = next((t for t in range(shared) if steps_a[t] != steps_b[t]), shared)
    sides = (a, b)
    return Difference(
        a.prompt_index,
        a.sample_index,
        position,
        token_ids=_pair(*(rollout.token_ids[position : position + 1] for rollout in sides)),
        logprobs=_pair(*(rollout.logprobs[position : position + 1] for rollout in sides)),
        finish_reasons=(a.finish_reason, b.finish_reason),
    )


def _pair(first: Sequence[T], second: Sequence[T]) -> tuple[T | None, T | None]:
    return (first[0] if first else None, second[0] if second else None)


def _steps(rollout: Rollout) -> list[tuple[int, bytes]]:
    """Each token with the bits of its log-probability: 0.0 and -0.0 differ, a NaN equals itself."""
    bits = (struct.pack("<d", logprob) for logprob in rollout.logprobs)
    return list(zip(rollout.token_ids, bits, strict=True))
