"""Ring of texts for drafter training: token ids and the policy's hidden states, bounded in bytes.

`worker.py` fills it from the learner's forwards; planner and trainer read it. The newest texts stay longest, except
that the long responses of the previous step outlast its short ones: the tail of the next step will look like them. What
is kept depends on what was put in and in which order, never on time. It is not part of a checkpoint: after a resume it
fills again within a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StoredText:
    """One text with the policy's states; row t belongs to token t, and the last token has no row."""

    serial: int
    """Number of the text among all that were ever put in."""
    token_ids: NDArray[np.int32]
    prompt_length: int
    taps: Tensor
    """[rows, 3 * hidden]"""
    final: Tensor
    """[rows, hidden]: before the final norm."""
    version: int
    """Number of steps the policy had learned from when it computed the states."""
    weight: float = 1.0
    """Weight of this text's tokens in the loss."""

    def __post_init__(self) -> None:
        assert len(self.taps) == len(self.final) == len(self.token_ids) - 1, "one row per token but the last"

    @property
    def num_rows(self) -> int:
        return len(self.final)

    @property
    def num_bytes(self) -> int:
        return self.taps.nbytes + self.final.nbytes + self.token_ids.nbytes

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


class Ring(Mapping[int, StoredText]):
    """Texts by serial number, limited to `max_bytes`."""

    def __init__(self, max_bytes: int, dtype: torch.dtype, kept_share: float = 0.25) -> None:
        """`kept_share`: share of the bytes for the long responses of the previous step."""
        self._max_bytes, self._dtype, self._kept_bytes = max_bytes, dtype, int(max_bytes * kept_share)
        self._texts: dict[int, StoredText] = {}
        self._next_serial = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        return iter(self._texts)

    def __getitem__(self, serial: int) -> StoredText:
        return self._texts[serial]

    @property
    def next_serial(self) -> int:
        """Number of texts ever put in."""
        return self._next_serial

    def put(
        self,
        token_ids: NDArray[np.int32],
        prompt_length: int,
        taps: Tensor,
        final: Tensor,
        version: int,
        weight: float = 1.0,
    ) -> None:
        """Add a text with copies of its states; one larger than the whole ring is left out."""
        taps, final = (states.to(self._dtype, copy=True) for states in (taps, final))
        text = StoredText(self._next_serial, token_ids.copy(), prompt_length, taps, final, version, weight)
        self._next_serial += 1
        if text.num_bytes <= self._max_bytes:
            self._texts[text.serial] = text
            self.num_bytes += text.num_bytes
            self._evict(version)

    def _evict(self, version: int) -> None:
        """Evict down to the limit: oldest first, but the long texts of the previous step last."""
        if self.num_bytes <= self._max_bytes:
            return
        kept = self._long_of_previous(version)
        for serial in [*(s for s in self._texts if s not in kept), *kept]:
            if self.num_bytes <= self._max_bytes:
                return
            self.num_bytes -= self._texts.pop(serial).num_bytes

    def _long_of_previous(self, version: int) -> list[int]:
        """The longest responses of the last step before this one, as many as fit their share of the bytes."""
        older = [text for text in self._texts.values() if text.version < version]
        newest = max((text.version for text in older), default=0)
        found, num_bytes = [], 0
        for text in sorted((t for t in older if t.version == newest), key=lambda t: (-t.response_length, t.serial)):
            num_bytes += text.num_bytes
            if num_bytes > self._kept_bytes:
                break
            found.append(text.serial)
        return sorted(found)

    def skip_to(self, serial: int) -> None:
        """Number texts from here on: a log must not use a number twice."""
        self._next_serial = max(self._next_serial, serial)
