"""Statistics of a `generate` call: filled by the engine, read by users, `compare` and the benchmarks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TypeVar

POSITIONS = (1, 2, 4, 8, 16, 64)
"""Draft positions at which acceptance is reported."""


@dataclass
class DrafterStats:
    """Counters of one drafter."""

    proposed: int = 0
    """Nodes the drafter proposed."""
    verified: int = 0
    """Nodes that got a row."""
    accepted: int = 0
    """Nodes that were accepted."""
    firsts: int = 0
    """Drafts whose first choice was accepted: unlike the share of nodes, this does not depend on depth or width."""
    milliseconds: float = 0.0
    """Time its rows added to forwards, by the cost curve."""
    pieces: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Drafts by their number of verified and of accepted nodes."""

    def add(self, other: DrafterStats) -> None:
        """Add another call's counters."""
        _add_counters(self, other)

    @property
    def drafts(self) -> int:
        """Drafts with at least one verified node."""
        return sum(count for (verified, _), count in self.pieces.items() if verified)

    def describe(self) -> dict[str, float]:
        """The counters as a flat dictionary, ready for JSON."""
        counts = {key: float(getattr(self, key)) for key in ("accepted", "milliseconds", "proposed", "verified")}
        shares = {f"at_{position}": self.accepted_at(position) for position in POSITIONS}
        return counts | {key: share for key, share in shares.items() if share is not None}

    def accepted_at(self, position: int) -> float | None:
        """Of the drafts with at least `position` nodes, the share accepted that far; None if there were none."""
        tried = {piece: count for piece, count in self.pieces.items() if piece[0] >= position}
        if not tried:
            return None
        return sum(count for (_, accepted), count in tried.items() if accepted >= position) / sum(tried.values())


@dataclass
class Stats:
    """Counters of one call, or the sum of several."""

    steps: int = 0
    rows: int = 0
    """Token rows through the model: decode, draft and prefill."""
    tokens: int = 0
    """Tokens emitted."""
    visits: int = 0
    """Steps times decoding sequences; without drafts every visit emits one token."""
    preemptions: int = 0
    ahead_made: int = 0
    """Run-ahead tokens generated."""
    ahead_offered: int = 0
    """Tokens of run-ahead text for the rollouts of this call."""
    ahead_survived: int = 0
    """How many of those came out the same, up to the first difference in each text."""
    machine_seconds: float = 0.0
    """Time the device spent in forwards, by its own clock; on a GPU, the host works in parallel."""
    wall_seconds: float = 0.0
    """Wall-clock time of the steps, without what the caller does between them."""
    capture_seconds: float = 0.0
    """Time spent on capturing graphs for steps of new sizes."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Host time by phase: plan, draft, forward, verify, commit."""
    drafters: dict[str, DrafterStats] = field(default_factory=lambda: defaultdict(DrafterStats))
    saved_ms: float = 0.0
    """Time the accepted tokens would have taken without drafts, by the cost curve; the cost of their rows is not
    subtracted."""
    forwards: Counter[int] = field(default_factory=Counter)
    """Forwards by number of rows, rounded down to a power of two."""
    arms: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Steps by number of requested sequences, rounded down to a power of two, and by arm."""
    curve: tuple[tuple[int, float], ...] = ()
    """The cost curve after the last call: rows and milliseconds."""

    @property
    def accept_length(self) -> float:
        """Tokens per visit, the bonus token included; 1 without speculation."""
        return self.tokens / self.visits if self.visits else 0.0

    def add(self, other: Stats) -> None:
        """Add a later call's counters."""
        _add_counters(self, other)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        for name, drafter in other.drafters.items():
            self.drafters[name].add(drafter)
        self.curve = other.curve or self.curve

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the block to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


_Counters = TypeVar("_Counters", DrafterStats, Stats)


def _add_counters(total: _Counters, more: _Counters) -> None:
    """Add all numbers and `Counter`s, field by field."""
    for each in fields(more):
        found, value = getattr(total, each.name), getattr(more, each.name)
        if isinstance(value, int | float):
            setattr(total, each.name, found + value)
        elif isinstance(value, Counter):
            found.update(value)


def floor_power(count: int) -> int:
    """The largest power of two up to a count; 0 for 0."""
    return 1 << count.bit_length() - 1 if count > 0 else 0


def token_ms(*calls: Stats) -> float:
    """The cost of a token: wall-clock time of all steps divided by the number of requested tokens."""
    num_tokens = sum(call.tokens for call in calls)
    return 1e3 * sum(call.wall_seconds for call in calls) / num_tokens if num_tokens else 0.0


def device_share(*calls: Stats) -> float:
    """The share of the steps' wall-clock time that the device spent in forwards of the policy; what a learned drafter
    guesses between them does not count."""
    wall = sum(call.wall_seconds for call in calls)
    return min(1.0, sum(call.machine_seconds for call in calls) / wall) if wall else 0.0
