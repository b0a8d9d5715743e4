"""A short scene played before the first step: drafters compile when they are first used, which takes seconds.

In the middle of a call that would look like a drafter that costs more than it saves, which is then hardly ever tried.
`make_drafters` calls this, once per process and kind of drafter, with one that is thrown away afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Drafter, Sampling, Verdict

LENGTHS = (12, 12, 0)
"""Tokens of each sequence; one without any is not worth keeping."""
VOCABULARY = 3


@dataclass(eq=False)
class _Actor:
    """A sequence of a prompt that is asked again and again, with the same noise."""

    sequence_id: int
    token_ids: NDArray[np.int32]
    group_id: int
    prompt_id: int = 1
    draw: int = 0
    sample_index: int = 0
    prompt_length: int = 4
    key: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    is_run_ahead: bool = False


@cache
def warm_up_jit(make: Callable[[], Drafter]) -> None:
    """Use everything a drafter of this kind has."""
    drafter = make()
    for scene, length in enumerate(LENGTHS):
        actor = _Actor(scene, np.arange(4, dtype=np.int32) % VOCABULARY, group_id=scene)
        drafter.propose([actor], [2])
        for step in range(length):
            drafter.propose([actor], [2])
            token = step % VOCABULARY
            actor.token_ids = np.append(actor.token_ids, np.int32(token))
            drafter.observe([Verdict(scene, "rehearsal", 0, (), [token])])
        drafter.finish(scene)
