"""Noise for requests without a seed: the k-th arrival of a prompt has the k-th noise, whoever else is served.

The noise of an answer is keyed by the version of the weights, a salt of the client's, the prompt, how often that prompt
has arrived, and the number of the answer. So the order in which different prompts arrive changes nothing, and the set
of answers to one prompt is reproducible without seeds. Called by `engine_loop.py`; it must never repeat a number of one
prompt for the same weights.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict

MOST_PROMPTS = 2**17
"""Prompts whose arrivals are counted one by one; some 200 bytes each."""


class Arrivals:
    """Counts the arrivals of each prompt under one version of the weights."""

    def __init__(self, most_prompts: int = MOST_PROMPTS) -> None:
        self._most = most_prompts
        self._counts: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._first = 0
        """Where a prompt begins that is not in the table: behind all that were forgotten."""

    def next(self, salt: str, prompt_id: int) -> int:
        """The number of this arrival."""
        count = self._counts.pop((salt, prompt_id), self._first)
        self._counts[salt, prompt_id] = count + 1
        if len(self._counts) > self._most:
            _, forgotten = self._counts.popitem(last=False)
            self._first = max(self._first, forgotten)
        return count

    def forget(self) -> None:
        """Start afresh: other weights have other noise."""
        self._counts.clear()
        self._first = 0


def arrival_draw(version: int, salt: str, prompt_id: int, arrival: int, num_restarts: int = 0) -> int:
    """The draw of a request without a seed: a signed 64-bit hash. Arrivals are counted anew after a restart."""
    packed = struct.pack("<qQqq", version, prompt_id, arrival, num_restarts) + salt.encode()
    digest = hashlib.blake2b(packed, digest_size=8, person=b"paceline-serve").digest()
    return int.from_bytes(digest, "little", signed=True)
