"""Keyed randomness: every random number is a hash of where it is used, never the next one of a stream.

`derive_key` identifies a response, `words` a position in it, `gumbel` a token id there. Any step, worker or batch gets
the same number again. The engine's sampler computes the same noise vectorized (`kernels/cpu/sampling.py`); `gumbel`
here is its readable twin. Nothing in this file may hold state.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97, 0x7FEB352D, 0x846CA68B)
"""Odd multipliers of the two mixing rounds, chosen for the low bias of the 32-bit hash."""
STRIDE = 0x9E3779B1
"""Spreads neighbouring token ids over all 32 bits before mixing."""


def derive_key(seed: int, stream: str, draw: int, sample: int) -> int:
    """The 64-bit key of one response: run seed, stream (train, eval, serve), draw, index in the group."""
    text = stream.encode()
    packed = struct.pack(f"<qqqq{len(text)}s", seed, draw, sample, len(text), text)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"paceline-key").digest(), "little")


def prompt_hash(token_ids: Sequence[int] | NDArray[np.int32]) -> int:
    """A 64-bit id of a prompt, the same in every call and process."""
    packed = np.asarray(token_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"paceline-prompt").digest(), "little")


def words(key, step):  # type: ignore[no-untyped-def]  # the kernels compile it too, where annotations would lie
    """Two 32-bit words that identify position `step` of the response with this key (both unsigned 64-bit)."""
    x = key ^ (step * np.uint64(0x9E3779B97F4A7C15))
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) + key
    return np.uint32(x & np.uint64(0xFFFFFFFF)), np.uint32(x >> np.uint64(32))


def _scramble(x: NDArray[np.uint32], first: int, second: int) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(first)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(second)
    return x ^ (x >> np.uint32(16))


def gumbel(key: int, step: int, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float64]:
    """Gumbel(0, 1) noise for these token ids at position `step`, in double precision."""
    with np.errstate(over="ignore"):
        low, high = words(np.uint64(key), np.uint64(step))
        ids = np.asarray(token_ids, dtype=np.uint32)
        bits = _scramble(ids * np.uint32(STRIDE) + low, MULTIPLIERS[0], MULTIPLIERS[1]) ^ high
        bits = _scramble(bits, MULTIPLIERS[2], MULTIPLIERS[3])
    uniform = np.minimum((bits + 0.5) / 2.0**32, 1 - 2.0**-24)
    result: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return result
