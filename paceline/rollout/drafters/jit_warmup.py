"""JIT warm-up of drafters before the first step: they compile on first use, which takes seconds.

In the middle of a call, a drafter that compiles would look as if it cost more than it saves, and would hardly be tried
again. `make_drafters` calls this once per process and kind of drafter, on an instance that is then thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.core.types import Drafter, Sampling, Verdict

LENGTHS = (12, 12, 0)
"""Tokens of each sequence; the empty one covers the path that drops a text."""
VOCABULARY = 3


@dataclass(eq=False)
class _Actor:
    """A sequence of a prompt that is used repeatedly with the same noise."""

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
    """Exercise all code of a drafter of this kind."""
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
