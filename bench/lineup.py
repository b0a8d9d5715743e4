"""Contenders that make the same rollouts with one decoder: an engine each, kept alive, in turns, checked for equality.

`never_slower.py` and `first_calls.py` call it. It reads nothing of an engine but its public statistics.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.types import Prompt, Rollout, Sampling
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer
from paceline.rollout.compare import first_difference
from paceline.rollout.engine import Engine
from paceline.rollout.settings import EngineSettings

Row = dict[str, Any]
Ahead = Sequence[tuple[Prompt, int]]


@dataclass(frozen=True)
class Contender:
    """A way to make rollouts."""

    drafter: str | None
    run_ahead: bool = False


PLAIN = "off"
CONTENDERS = {
    PLAIN: Contender(None),
    "default": Contender("suffix"),
    "suffix": Contender("suffix"),
    "ngram": Contender("ngram"),
    "ngram+suffix": Contender("ngram,suffix"),
    "ahead": Contender(None, run_ahead=True),
    "all": Contender("suffix", run_ahead=True),
}


@dataclass(frozen=True)
class Call:
    """One call of `generate`."""

    rollouts: list[Rollout]
    row: Row
    difference: str | None = None
    """Where it differs from plain decoding, which must not happen."""


def engine_settings(name: str, sequences: int, kv_tokens: int) -> EngineSettings:
    """As many places again for run-ahead; the same KV pages for all."""
    run_ahead = CONTENDERS[name].run_ahead
    places = sequences * (2 if run_ahead else 1)
    return EngineSettings(max_sequences=places, kv_tokens=kv_tokens, run_ahead=run_ahead)


def timed_call(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    draws: Iterable[int],
    ahead: Ahead = (),
) -> Call:
    """One call with its time and counters."""
    start = time.perf_counter()
    rollouts = engine.generate(prompts, sampling, list(draws), ahead=ahead)
    seconds, stats = time.perf_counter() - start, engine.stats
    arms: Counter[str] = Counter()
    for (_, arm), count in stats.arms.items():
        arms[arm] += count
    row = {
        "seconds": round(seconds, 5),
        "machine_seconds": round(stats.machine_seconds, 5),
        "tokens": stats.tokens,
        "rows": stats.rows,
        "visits": stats.visits,
        "steps": stats.steps,
        "host_seconds": {phase: round(value, 4) for phase, value in stats.seconds.items()},
        "capture_seconds": round(stats.capture_seconds, 4),
        "arms": dict(arms),
        "verified": {source: drafter.verified for source, drafter in stats.drafters.items()},
        "accepted": {source: drafter.accepted for source, drafter in stats.drafters.items()},
    }
    return Call(rollouts, row)


class Lineup:
    """One engine per contender over one decoder."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer | None, names: Sequence[str], sequences: int, kv_tokens: int
    ) -> None:
        if PLAIN not in names:
            raise ValueError(f"name {PLAIN} among the contenders: the others are compared with it")
        self.names = tuple(names)
        self._engines = {
            name: Engine(decoder, tokenizer, CONTENDERS[name].drafter, engine_settings(name, sequences, kv_tokens))
            for name in names
        }

    def round(
        self, index: int, prompts: Sequence[Prompt], sampling: Sampling, draws: Iterable[int], ahead: Ahead = ()
    ) -> dict[str, Call]:
        """One call of every contender, the order reversed in every other round."""
        draws = list(draws)
        made: dict[str, Call] = {}
        for name in self.names if index % 2 == 0 else reversed(self.names):
            named = ahead if CONTENDERS[name].run_ahead else ()
            made[name] = timed_call(self._engines[name], prompts, sampling, draws, named)
        plain = made[PLAIN].rollouts
        return {name: self._compared(plain, made[name]) for name in self.names}

    @staticmethod
    def _compared(plain: Sequence[Rollout], call: Call) -> Call:
        difference = first_difference(plain, call.rollouts)
        return call if difference is None else Call(call.rollouts, call.row, str(difference))

    def close(self) -> None:
        """Free the engines; the decoder stays."""
        self._engines.clear()
        free_memory()


def free_memory() -> None:
    """Free unreferenced memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def total(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows)


def shares(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Over several calls: speed, accept length, and how much of the rows and of the time was of use.

    Prompts count as rows, so the row share of plain decoding is the most that any contender can reach.
    """
    seconds = total(rows, "seconds")
    return {
        "tokens_per_s": round(total(rows, "tokens") / seconds, 1),
        "accept_length": round(total(rows, "tokens") / max(total(rows, "visits"), 1), 4),
        "row_share": round(total(rows, "tokens") / max(total(rows, "rows"), 1), 4),
        "gpu_share": round(total(rows, "machine_seconds") / seconds, 4),
    }
