"""A drafter in training on disk, written beside the training: its weights and its optimizer's memory, nothing else.

    drafter/log.jsonl                  what was done to it (log.py)
    drafter/step-000012/
        eagle3/                        the published version, as other engines load it
        trainer.safetensors            weights, average, optimizer
        trainer.json                   counts, and how many lines of the log it has seen

`save` copies the tensors and goes on; a thread writes a folder that appears as a whole. Embeddings and the policy's
head are the policy's, and not written. The run loop saves with every checkpoint of its own; resuming takes the newest
one that is no newer than the policy's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.files import folders_in, remove_folder, remove_leftovers, replaced_folder
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.eagle.network import Eagle

EAGLE, TENSORS, COUNTS = "eagle3", "trainer.safetensors", "trainer.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, eq=False)
class Saved:
    """What a checkpoint holds."""

    step: int
    eagle: Eagle
    tensors: dict[str, Tensor]
    counts: dict[str, int]


class DrafterCheckpoints:
    """The checkpoints in one folder, the newest `keep` of them kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        self._pending: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}
        """Memory of the last snapshot, used again: fresh pages would cost more than the copy itself."""

    def save(self, step: int, eagle: Eagle, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> float:
        """Copy everything now, write it beside the training; returns for how many seconds the caller stood still.

        An eagle is never changed, so it is not copied. A second save waits for the first, whose OSError it raises.
        """
        start = time.perf_counter()
        self.wait()
        if self._copies.keys() != tensors.keys():
            self._copies = {name: _room_for(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            # From a GPU it is done before the training's next kernel, while the caller goes on.
            self._copies[name].copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors.values()) else None
        if copied is not None:
            copied.record()
        self._pending = self._writer.submit(self._write, Saved(step, eagle, self._copies, dict(counts)), copied)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until what is being written is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def steps(self) -> list[int]:
        """In order."""
        return sorted(self._folders())

    def _folders(self) -> dict[int, Path]:
        found = ((_NAME.fullmatch(name), path) for name, path in folders_in(self.folder, "step-").items())
        return {int(match[1]): path for match, path in found if match}

    def load(self, newest: int) -> Saved | None:
        """The last checkpoint up to this step; ValueError for one that is damaged."""
        folders = {step: folder for step, folder in self._folders().items() if step <= newest}
        if not folders:
            return None
        step, folder = max(folders.items())
        try:
            tensors, counts = load_file(folder / TENSORS), json.loads((folder / COUNTS).read_text(encoding="utf-8"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(
                f"{folder} is damaged ({error}); remove it, and the drafter starts from an older one"
            ) from error
        return Saved(step, load_eagle(folder / EAGLE), tensors, counts)

    def cut_after(self, step: int) -> None:
        """Remove those of later steps, which a resumed run makes again."""
        self.wait()
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
        with replaced_folder(self.folder / f"step-{saved.step:06d}") as new:
            save_eagle(new / EAGLE, saved.eagle)
            save_file(saved.tensors, new / TENSORS)
            (new / COUNTS).write_text(json.dumps(saved.counts), encoding="utf-8")
        self._remove(self.steps()[: -self._keep])


def _room_for(tensor: Tensor) -> Tensor:
    """Memory of the host that the tensor is copied to; from a GPU nobody waits if it is pinned."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
