"""Checkpoints of the drafter's training: its weights and optimizer state, written in the background.

    drafter/log.jsonl                  its training log (log.py)
    drafter/step-000012/
        eagle3/                        the published version, as other engines load it
        trainer.safetensors            weights, average, optimizer
        trainer.json                   counts, and how many lines of the log it covers

`save` returns once the tensors are copied; a thread writes the folder atomically. Embeddings and head belong to the
policy and are not written. The run loop saves with each of its own checkpoints; a resumed run takes the newest one that
is no newer than the policy's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.documents import brief, plain, read_json
from paceline.core.files import folders_in, remove_folder, remove_leftovers, replaced_folder
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.eagle.network import Eagle
from paceline.model.tensor_files import read_tensors

EAGLE, TENSORS, COUNTS = "eagle3", "trainer.safetensors", "trainer.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, eq=False)
class Saved:
    """The contents of a checkpoint."""

    step: int
    folder: Path
    eagle: Eagle
    tensors: dict[str, Tensor]
    counts: dict[str, int]

    def count(self, name: str) -> int:
        """One of the counts, which a checkpoint of a single worker must have."""
        if name not in self.counts:
            raise ValueError(f"{self.folder / COUNTS} lacks {name}; copy it again")
        return self.counts[name]


class DrafterCheckpoints:
    """The checkpoints in one folder, of which the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        self._pending: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}
        """Memory of the last snapshot, reused: fresh pages would cost more than the copy itself."""

    def save(self, step: int, eagle: Eagle, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> float:
        """Copy everything now, write it in the background; returns for how many seconds it blocked the caller.

        An eagle never changes, so it is not copied. A second save waits for the first, and raises its OSError.
        """
        start = time.perf_counter()
        self.wait()
        if self._copies.keys() != tensors.keys():
            self._copies = {name: _room_for(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            # From a GPU, the copy runs before the next training kernel, while the caller continues.
            self._copies[name].copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors.values()) else None
        if copied is not None:
            copied.record()
        self._pending = self._writer.submit(
            self._write, Saved(step, self._place(step), eagle, self._copies, dict(counts)), copied
        )
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return sorted(self._folders())

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _folders(self) -> dict[int, Path]:
        found = ((_NAME.fullmatch(name), path) for name, path in folders_in(self.folder, "step-").items())
        return {int(match[1]): path for match, path in found if match}

    def load(self, newest: int) -> Saved | None:
        """The last checkpoint up to this step; ValueError if it is damaged."""
        folders = {step: folder for step, folder in self._folders().items() if step <= newest}
        if not folders:
            return None
        step, folder = max(folders.items())
        try:
            counts = _checked(read_json(folder / COUNTS), folder / COUNTS)
            tensors = dict(read_tensors(folder / TENSORS))
            return Saved(step, folder, load_eagle(folder / EAGLE), tensors, counts)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is damaged ({error}); remove it to start from an older one") from error

    def cut_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which a resumed run makes again, and what a kill left."""
        self.wait()
        remove_leftovers(self.folder, "step-")
        self._remove(found for found in self.steps() if found > step)

    def _remove(self, steps: Iterable[int]) -> None:
        folders = self._folders()
        for step in steps:
            remove_folder(folders[step])

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, saved: Saved, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        remove_leftovers(self.folder, "step-")
        with replaced_folder(saved.folder) as new:
            save_eagle(new / EAGLE, saved.eagle)
            save_file(saved.tensors, new / TENSORS)
            (new / COUNTS).write_text(json.dumps(saved.counts), encoding="utf-8")
        self._remove(self.steps()[: -self._keep])


def _checked(found: Mapping[str, Any], place: Path) -> dict[str, int]:
    """The contents of `trainer.json`: names with counts."""
    for name, count in found.items():
        if type(count) is not int or not 0 <= count < 2**63:
            raise ValueError(f"{place} must give {plain(name)} as a count; found {brief(count)}")
    return dict(found)


def _room_for(tensor: Tensor) -> Tensor:
    """Host memory for a copy of the tensor; pinned for a GPU's, so that the copy does not block."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
