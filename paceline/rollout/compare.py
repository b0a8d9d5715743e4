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
from math import inf
from typing import Any, Literal, Protocol, TypeVar

from paceline.core.types import Prompt, Rollout, Sampling
from paceline.rollout.stats import Stats, device_share

T = TypeVar("T")
Mode = Literal["off", "on", "everything"]
Made = tuple[list[Rollout], Stats]
"""What a call generated, and its counters."""
SHORT = 4
"""Tokens per rollout in the call that warms up an engine on a CPU."""


class Generator(Protocol):
    """The part of an engine that a comparison needs."""

    @property
    def stats(self) -> Any: ...
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]: ...
    def release_memory(self) -> None: ...


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
    gpu_share_off: float | None = None
    """Share of the timed runs' wall-clock time that the GPU spent in forward passes of the policy; None on a CPU, which
    does everything itself."""
    gpu_share_on: float | None = None
    work: str = ""
    """What both sides did, in words."""

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
    def ratios(self) -> list[float]:
        """Speedup of every repeat."""
        pairs = zip(self.seconds_off, self.seconds_on, strict=True)
        return [without / with_it for without, with_it in pairs if with_it > 0]

    @property
    def accept_length(self) -> float:
        return statistics.median(self.accept_lengths)

    def to_json(self) -> dict[str, Any]:
        """Everything measured, ready for `json.dumps`."""
        return asdict(self) | {"ratio": self.ratio, "accept_length": self.accept_length}


def describe_speedup(ratio: float, ratios: Sequence[float] = ()) -> str:
    """A speedup in words that do not hide a loss, nor claim what its repeats do not agree on."""
    shown = f"{ratio:.2f}"
    if ratios and min(ratios) < 1 < max(ratios):
        return f"{shown}x of plain decoding's speed; repeats lie on both sides of 1x, so there is no clear difference"
    if float(shown) < 1:
        return f"{shown}x: slower than plain decoding; engine.drafter=none is faster here"
    return f"{shown}x as fast as plain decoding" if float(shown) > 1 else f"{shown}x: no faster than plain decoding"


def compare_engines(
    make: Callable[[Mode], Generator],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    repeats: int,
    has_gpu: bool = False,
) -> Comparison:
    """Time `make("off")` and `make("on")` on the same work, alternating, and compare their rollouts.

    Every run gets a new engine: a drafter that remembers the previous repeat would replay its answers and look better
    than it is. A call with other keys comes before. On a CPU it makes a few tokens, which pay for compilation and for
    the first touch of memory; more would teach the drafters. On a GPU the device searches only the texts of the same
    call, so this call is as long as the timed one: it captures the graphs of all batch sizes, and tries what may pay.
    At the end `make("everything")`, which verifies every draft token whether or not it pays, is compared too: a budget
    that finds no draft token worth its row would otherwise leave nothing to compare.
    """
    length = sampling.max_new_tokens if has_gpu else min(SHORT, sampling.max_new_tokens)
    warm_up = replace(sampling, max_new_tokens=length, stream="warm-up")
    result = Comparison(
        work="every timed run has a new engine that has made as many rollouts with other keys before"
        if has_gpu
        else "every timed run has a new engine, so its time includes finding out what pays"
    )
    calls: dict[Mode, list[Stats]] = {"off": [], "on": []}

    def time_one(mode: Mode, seconds: list[float]) -> list[Rollout]:
        engine = make(mode)
        engine.generate(prompts, warm_up)
        start = time.perf_counter()
        rollouts = engine.generate(prompts, sampling)
        seconds.append(time.perf_counter() - start)
        calls[mode].append(engine.stats)
        engine.release_memory()  # the next engine is to find as much
        return rollouts

    for _ in range(repeats):
        off, on = time_one("off", result.seconds_off), time_one("on", result.seconds_on)
        latest = calls["on"][-1]
        result.sources = {name: drafter.describe() for name, drafter in sorted(latest.drafters.items())}
        result.accept_lengths.append(float(latest.accept_length))
        result.num_rollouts = result.num_tokens = result.num_identical = 0  # every repeat makes the same ones
        result.record(off, on)
        if has_gpu:
            result.gpu_share_off, result.gpu_share_on = device_share(*calls["off"]), device_share(*calls["on"])
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
    off: Callable[[T], Made],
    on: Callable[[T], Made],
    rounds: Sequence[T],
    seconds: float = inf,
    has_gpu: bool = False,
) -> Comparison:
    """Time two ways of making the same rollouts, round by round, in alternating order; the first round only warms up.

    Every round has work of its own: after one round a drafter would know its texts by heart. No third round begins
    that would probably end later than `seconds` after the first one began.
    """
    result, begun = Comparison(), time.perf_counter()
    sides = {"off": (off, result.seconds_off), "on": (on, result.seconds_on)}
    calls: dict[str, list[Stats]] = {"off": [], "on": []}
    for turn, work in enumerate(rounds):
        start_of_round = time.perf_counter()
        made = {}
        for name in ("off", "on") if turn % 2 else ("on", "off"):
            generate, measured = sides[name]
            start = time.perf_counter()
            made[name], stats = generate(work)
            if turn:
                measured.append(time.perf_counter() - start)
                calls[name].append(stats)
        result.record(made["off"], made["on"])
        now = time.perf_counter()
        if turn and now - begun + now - start_of_round > seconds:
            break
    if has_gpu:
        result.gpu_share_off, result.gpu_share_on = device_share(*calls["off"]), device_share(*calls["on"])
    return result


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
