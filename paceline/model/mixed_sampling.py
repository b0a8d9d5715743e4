"""The sampling settings of a step's rows: one `Sampling` for all of them, or a `MixedSampling` where rows differ.

The runner makes it, executors pass it on, and the devices' samplers read it: `runs` on a CPU, `columns` on a GPU. It
must never affect a row that has other settings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Sampling


@dataclass(frozen=True)
class MixedSampling:
    """Settings that differ from row to row."""

    kinds: tuple[Sampling, ...]
    of_row: NDArray[np.int64]
    """Per sampled row, which of them."""

    @property
    def is_truncated(self) -> bool:
        """Whether any row is truncated."""
        return any(self.kinds[kind].is_truncated for kind in np.unique(self.of_row).tolist())

    @property
    def temperature(self) -> float:
        """The temperature of most rows, for a drafter that can take only one."""
        return self.kinds[int(np.bincount(self.of_row).argmax())].temperature


RowSampling = Sampling | MixedSampling


def runs(sampling: RowSampling, num_rows: int) -> Iterator[tuple[slice, Sampling]]:
    """Rows next to each other that have the same settings."""
    if isinstance(sampling, Sampling):
        yield slice(0, num_rows), sampling
        return
    bounds = [0, *(np.flatnonzero(np.diff(sampling.of_row)) + 1).tolist(), num_rows]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield slice(start, stop), sampling.kinds[int(sampling.of_row[start])]


class SamplerColumns(NamedTuple):
    """The settings as numbers: each is one for all rows, or an array with one per row."""

    temperatures: Any
    top_ks: Any
    """0: off, as for all rows that are not truncated."""
    top_ps: Any
    """1: off."""
    log_min_ps: Any
    """-inf: off."""


def columns(sampling: RowSampling) -> SamplerColumns:
    """The settings as a GPU's sampler takes them."""
    if isinstance(sampling, Sampling):
        return _numbers(sampling)
    found = zip(*map(_numbers, sampling.kinds), strict=True)
    types = (np.float32, np.int32, np.float32, np.float32)
    return SamplerColumns(*(np.array(own, kind)[sampling.of_row] for own, kind in zip(found, types, strict=True)))


def _numbers(sampling: Sampling) -> SamplerColumns:
    if not sampling.is_truncated:
        return SamplerColumns(sampling.temperature, 0, 1.0, -math.inf)
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return SamplerColumns(sampling.temperature, sampling.top_k, sampling.top_p, log_min_p)
