"""Packs samples in draw order, without padding, and deals the packs to virtual workers.

The learner runs one forward and backward per pack: a pack is a micro-batch, a flat list of token rows like every
forward of the engine. Which samples share a pack, and which virtual worker sums it, is a pure function of the samples
and two settings. The number and speed of real workers must never matter: sums would change their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Float32Array, Int32Array, IntArray

LEAST_ROWS = {"cpu": 512, "cuda": 16_384}
"""Smaller packs take longer per row: on a CPU a tenth at 400 rows, a fifth at 250. On a GPU a small pack costs the host
as much as a large one."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to learn from. All arrays but `prompt_ids` have one entry per response token."""

    draw: int
    sample: int
    prompt_ids: Int32Array
    response_ids: Int32Array
    logprobs: Float32Array
    """Under the policy that sampled it, as the engine reported them."""
    advantages: Float32Array
    mask: NDArray[np.bool_]
    """Which tokens count in the loss."""

    def __post_init__(self) -> None:
        assert len(self.prompt_ids) and len(self.response_ids), f"draw {self.draw}: no prompt or no response"
        for values in (self.logprobs, self.advantages, self.mask):
            assert len(values) == len(self.response_ids), f"draw {self.draw}: one entry per response token"

    @classmethod
    def of(
        cls,
        draw: int,
        sample: int,
        prompt_ids: Sequence[int] | IntArray,
        response_ids: Sequence[int] | IntArray,
        logprobs: Sequence[float] | NDArray[np.floating[Any]],
        advantage: float | NDArray[np.floating[Any]] = 0.0,
        mask: NDArray[np.bool_] | None = None,
    ) -> Sample:
        """From plain lists; an advantage is one number for all tokens or one per token; no mask trains on all."""
        num_tokens = len(response_ids)
        return cls(
            draw,
            sample,
            np.asarray(prompt_ids, dtype=np.int32),
            np.asarray(response_ids, dtype=np.int32),
            np.asarray(logprobs, dtype=np.float32),
            np.broadcast_to(np.asarray(advantage, dtype=np.float32), (num_tokens,)),
            np.ones(num_tokens, dtype=np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_),
        )

    @property
    def num_rows(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, eq=False)
class Pack:
    """Whole sequences laid end to end. Row arrays have one entry per token, `T` arrays one per response token."""

    index: int
    """Its number in the batch."""
    samples: tuple[Sample, ...]

    @cached_property
    def token_ids(self) -> Int32Array:
        """Prompt and response of each sample, one after the other."""
        return np.concatenate([part for s in self.samples for part in (s.prompt_ids, s.response_ids)])

    @cached_property
    def starts(self) -> Int32Array:
        """First row of each sequence, then the number of rows."""
        return _offsets([s.num_rows for s in self.samples])

    @cached_property
    def response_lengths(self) -> tuple[int, ...]:
        """How many of the `T` entries belong to each sample."""
        return tuple(len(s.response_ids) for s in self.samples)

    @cached_property
    def logprobs(self) -> Float32Array:
        """[T]"""
        return np.concatenate([s.logprobs for s in self.samples])

    @cached_property
    def advantages(self) -> Float32Array:
        """[T]"""
        return np.concatenate([s.advantages for s in self.samples])

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """[T]"""
        return np.concatenate([s.mask for s in self.samples])

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A `T` array split by sample."""
        return np.split(values, np.cumsum(self.response_lengths)[:-1])


def pack_samples(samples: Iterable[Sample], max_rows: int) -> list[Pack]:
    """Pack samples ordered by (draw, sample), with a new pack wherever the next one would exceed `max_rows` rows.

    Filling earlier packs with later samples would save nothing, since packs hold no padding, and a change at the end of
    a batch could affect packs at its start. A sample longer than `max_rows` gets its own pack.
    """
    ordered = sorted(samples, key=lambda s: (s.draw, s.sample))
    assert len({(s.draw, s.sample) for s in ordered}) == len(ordered), "a sample is in the batch twice"
    runs: list[list[Sample]] = []
    room = 0
    for sample in ordered:
        if not runs or sample.num_rows > room:
            runs.append([])
            room = max_rows
        runs[-1].append(sample)
        room -= sample.num_rows
    return [Pack(index, tuple(run)) for index, run in enumerate(runs)]


def even_bound(samples: Iterable[Sample], max_rows: int, num_hands: int, least_rows: int) -> int:
    """The smallest bound for `pack_samples`, from `least_rows` up, that gives all hands equally many packs.

    Full packs and a remainder would leave one hand with twice the rows of another, and a step waits for the slowest.
    The bound depends only on the samples, so packs are the same for any number of workers.
    """
    lengths = [sample.num_rows for sample in sorted(samples, key=lambda s: (s.draw, s.sample))]
    if num_hands == 1 or not lengths:
        return max_rows
    most = -(-_num_packs(lengths, max_rows) // num_hands) * num_hands
    least, enough = min(least_rows, max_rows), max_rows
    while least < enough:
        middle = (least + enough) // 2
        if _num_packs(lengths, middle) <= most:
            enough = middle
        else:
            least = middle + 1
    return enough


def _num_packs(lengths: Iterable[int], max_rows: int) -> int:
    """The number of packs that `pack_samples` makes."""
    count = room = 0
    for length in lengths:
        if not count or length > room:
            count, room = count + 1, max_rows
        room -= length
    return count


def deal(packs: Sequence[Pack], num_virtual: int) -> list[list[Pack]]:
    """The packs of each virtual worker, dealt round-robin, so that their numbers differ by at most one."""
    return [list(packs[worker::num_virtual]) for worker in range(num_virtual)]


def _offsets(lengths: Sequence[int]) -> Int32Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
