"""What a call to `generate` cost and where: counted by the engine, read by users, `compare` and the benchmarks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TypeVar

POSITIONS = (1, 2, 4, 8, 16, 64)
"""How far into a draft acceptance is reported."""


@dataclass
class DrafterStats:
    """One source of drafts."""

    proposed: int = 0
    """Nodes the drafter offered."""
    verified: int = 0
    """Nodes that got a row."""
    accepted: int = 0
    """Nodes that became tokens."""
    firsts: int = 0
    """Drafts whose first choice became a token: unlike a share of nodes, no matter of how deep or wide they are."""
    milliseconds: float = 0.0
    """What the rows of its nodes added to forwards, by the cost curve."""
    pieces: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Drafts by how many of their nodes were verified and how many accepted."""

    def add(self, other: DrafterStats) -> None:
        """Count what another call has counted."""
        _add_counters(self, other)

    @property
    def drafts(self) -> int:
        """Drafts of which anything was verified."""
        return sum(count for (verified, _), count in self.pieces.items() if verified)

    def describe(self) -> dict[str, float]:
        """All of it as numbers with names, ready for JSON."""
        counts = {key: float(getattr(self, key)) for key in ("accepted", "milliseconds", "proposed", "verified")}
        shares = {f"at_{position}": self.accepted_at(position) for position in POSITIONS}
        return counts | {key: share for key, share in shares.items() if share is not None}

    def accepted_at(self, position: int) -> float | None:
        """Of the drafts at least so long, the share that came true up to there; None where none was."""
        tried = {piece: count for piece, count in self.pieces.items() if piece[0] >= position}
        if not tried:
            return None
        return sum(count for (_, accepted), count in tried.items() if accepted >= position) / sum(tried.values())


@dataclass
class Stats:
    """_Counters of a call, or of several that were added up."""

    steps: int = 0
    rows: int = 0
    """Token rows through the model: decode, draft and prefill."""
    tokens: int = 0
    """Tokens emitted."""
    visits: int = 0
    """How often a decoding sequence was stepped; without drafts every visit emits one token."""
    preemptions: int = 0
    ahead_made: int = 0
    """Tokens of rollouts that were not asked for yet."""
    ahead_offered: int = 0
    """Tokens made ahead for the rollouts of this call."""
    ahead_survived: int = 0
    """Of those, the tokens that came out the same, up to each text's first that did not."""
    machine_seconds: float = 0.0
    """Time the machine spent in forwards, by its own clock: on a GPU the rest of the work goes on beside it."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase of the host: plan, draft, forward, verify, commit."""
    drafters: dict[str, DrafterStats] = field(default_factory=lambda: defaultdict(DrafterStats))
    saved_ms: float = 0.0
    """What accepted tokens would have taken without drafts, by the cost curve; what their rows took is left in."""
    forwards: Counter[int] = field(default_factory=Counter)
    """Forwards by their rows, rounded down to a power of two."""
    arms: Counter[tuple[int, str]] = field(default_factory=Counter)
    """What steps were drafted with, by how many sequences were asked for, rounded down to a power of two."""
    curve: tuple[tuple[int, float], ...] = ()
    """The cost curve after the last call: rows and milliseconds."""

    @property
    def accept_length(self) -> float:
        """Tokens per visit, the bonus token included; 1 without speculation."""
        return self.tokens / self.visits if self.visits else 0.0

    def add(self, other: Stats) -> None:
        """Count what a later call has counted."""
        _add_counters(self, other)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        for name, drafter in other.drafters.items():
            self.drafters[name].add(drafter)
        self.curve = other.curve or self.curve

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time spent inside under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


_Counters = TypeVar("_Counters", DrafterStats, Stats)


def _add_counters(total: _Counters, more: _Counters) -> None:
    """Add every number and every `Counter`, field by field."""
    for each in fields(more):
        found, value = getattr(total, each.name), getattr(more, each.name)
        if isinstance(value, int | float):
            setattr(total, each.name, found + value)
        elif isinstance(value, Counter):
            found.update(value)


def floor_power(count: int) -> int:
    """The largest power of two up to a count; 0 of nothing."""
    return 1 << count.bit_length() - 1 if count > 0 else 0


def token_ms(*calls: Stats) -> float:
    """What a token costs: the machine's time for all steps, divided by the tokens that were asked for."""
    num_tokens = sum(call.tokens for call in calls)
    return 1e3 * sum(call.machine_seconds for call in calls) / num_tokens if num_tokens else 0.0
