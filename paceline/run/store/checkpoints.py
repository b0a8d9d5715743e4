"""Checkpoints of a run: everything its next step depends on, written in the background, complete or not at all.

    checkpoints/step-000012/
        policy/              the weights as a plain Hugging Face folder, tokenizer included; or an adapter as PEFT's
        state.safetensors    every other tensor (optimizer, ...)
        state.json           the tree that holds those tensors, and the fingerprint of where it was made
        inputs.json ...      documents that the run adds, such as its inputs and its history
        manifest.json        size and sha256 of every file above

The run loop calls `save` and continues as soon as tensors are copied; a thread writes the folder atomically, and only
then removes older ones. `load` takes the newest checkpoint whose files match its manifest. Nothing here writes or reads
a pickle: state is JSON and safetensors only.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.documents import plain
from paceline.core.files import remove_folder, remove_leftovers, replaced_folder
from paceline.model.checkpoint import load_weights, save_adapter_folder, save_checkpoint
from paceline.model.fingerprint import fingerprint
from paceline.model.folder import is_adapter, load_config, tokenizer_files
from paceline.model.lora.adapter import Adapter
from paceline.model.lora.files import load_adapter
from paceline.model.tensor_files import read_tensors
from paceline.run.store.folder import step_name
from paceline.run.store.sealed import POLICY, FoundCheckpoint, candidates, find_checkpoint, seal

TENSORS, STATE = "state.safetensors", "state.json"
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
}


class CheckpointError(OSError):
    """A checkpoint could not be written; earlier ones are unchanged."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was saved, copied to the CPU; tensors that shared memory share it again."""

    step: int
    weights: dict[str, Tensor]
    """The policy's, by Hugging Face name, or its adapter's."""
    state: dict[str, Any]


@dataclass(frozen=True)
class AdapterOf:
    """What a checkpoint needs to know of an adapter besides its tensors."""

    adapter: Adapter
    base: str
    """The model's name, as PEFT and `resolve` find it."""


class Checkpoints:
    """The checkpoints in one folder, of which the newest `keep` are kept. One process writes, any may read."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        model: Path | None = None,
        device: str = "cpu",
        on_saved: Callable[[int], None] = lambda step: None,
        adapter: AdapterOf | None = None,
    ) -> None:
        """`model` is the folder of the run's first model: its config and tokenizer are saved with the weights; only
        readers can omit it. `device` is where the run computes. `on_saved` hears, in the thread, of every step whose
        checkpoint is complete. `adapter`: the weights are an adapter's."""
        if keep < 1:
            raise ValueError(f"at least 1 checkpoint must be kept; got {keep}")
        self.folder = folder
        self._keep, self._device, self._on_saved, self._adapter = keep, device, on_saved, adapter
        self._config = load_config(model) if model is not None else None
        # As they are now: whatever becomes of the model's folder, the run's checkpoints hold what the run uses.
        self._tokenizer = {file.name: file.read_bytes() for file in tokenizer_files(model)} if model is not None else {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the write in progress. Raise its failure, unless another exception is already propagating."""
        self._writer.shutdown(wait=True)
        if kind is None:
            self.wait()
        elif self._pending is not None and (failure := self._pending.exception()) is not None:
            warnings.warn(str(failure), RuntimeWarning, stacklevel=2)

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any],
        documents: Callable[[], Mapping[str, str]] = dict,
    ) -> float:
        """Copy everything now, write it in the background; returns for how many seconds it blocked training.

        `state` is a tree of dicts, lists and tuples of tensors, strings, numbers, booleans and None; long lists of
        numbers belong in tensors. Only one write is in progress at a time: a second save waits for the first, and
        raises its CheckpointError if it failed. The thread calls `documents` for further files, name -> text.
        """
        assert self._config is not None, "saving needs the model"
        start = time.perf_counter()
        self.wait()
        snapshot = _Snapshot.take(step, weights, state, fingerprint(self._device))
        self._pending = self._writer.submit(self._write, snapshot, documents)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk; raises a CheckpointError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, intact or damaged, in order."""
        return sorted({step for step, _ in candidates(self.folder)})

    def load(self, step: int | None = None) -> Checkpoint:
        """The newest intact checkpoint, or that of `step`. Skips damaged ones with a warning."""
        return self.read(self.find(step))

    def read(self, found: FoundCheckpoint) -> Checkpoint:
        """The contents of a checkpoint; warns if it was made in another environment."""
        weights = {name: tensor.clone() for name, tensor in _policy_weights(found.policy).items()}
        with fitting(found.path):
            document = _read_json(found.path / STATE)
            tensors = {name: tensor.clone() for name, tensor in read_tensors(found.path / TENSORS)}
            made_by, state = dict(document["fingerprint"]), dict(_unpack(document["state"], tensors, weights))
        _warn_if_made_elsewhere(found.path.name, made_by, fingerprint(self._device))
        return Checkpoint(found.step, weights, state)

    def newest_policy(self) -> Path:
        """The model folder in the newest intact checkpoint."""
        return self.find().policy

    def cut_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which a run resumed after `step` makes again, and what a kill left."""
        self.wait()
        remove_leftovers(self.folder, "step-")
        for found, folder in candidates(self.folder):
            if found > step:
                remove_folder(folder)

    def find(self, step: int | None = None) -> FoundCheckpoint:
        """The newest intact checkpoint, or that of `step`, without its contents. Skips damaged ones with a warning."""
        return find_checkpoint(self.folder, step)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, snapshot: _Snapshot, documents: Callable[[], Mapping[str, str]]) -> None:
        target = self.folder / step_name(snapshot.step)
        previous = [path.name for _, path in candidates(self.folder)]
        try:
            remove_leftovers(self.folder, "step-")
            with replaced_folder(target) as new:
                self._fill(new, snapshot)
                for name, text in documents().items():
                    (new / name).write_text(text, encoding="utf-8")
                seal(new, snapshot.step)
            self._on_saved(snapshot.step)
        except (OSError, SafetensorError, ValueError) as error:
            rest = f"the previous checkpoint {previous[0]} is intact" if previous else "there is no earlier one"
            raise CheckpointError(
                f"checkpoint {target} could not be written: {_reason(error)}; {rest}. "
                "Free disk space or fix the folder's permissions, then continue with --resume"
            ) from error
        self._prune(snapshot.step)

    def _fill(self, new: Path, snapshot: _Snapshot) -> None:
        assert self._config is not None
        own, add = self._adapter, self._add_tokenizer
        if own is None:
            save_checkpoint(new / POLICY, self._config, snapshot.weights, add)
        else:
            save_adapter_folder(new / POLICY, self._config, own.adapter, snapshot.weights, own.base, add)
        save_file(snapshot.tensors, new / TENSORS)
        (new / STATE).write_text(json.dumps(snapshot.document, allow_nan=False), encoding="utf-8")

    def _add_tokenizer(self, policy: Path) -> None:
        for name, content in self._tokenizer.items():
            (policy / name).write_bytes(content)

    def _prune(self, step: int) -> None:
        """Keep the newest `keep` up to `step`. Later ones are from before a resume and do not count."""
        earlier = [path for found, path in candidates(self.folder) if found < step]
        for folder in earlier[self._keep - 1 :]:
            remove_folder(folder)


@contextmanager
def fitting(checkpoint: Path) -> Iterator[None]:
    """Turn whatever a state of another form makes its readers raise into one line that names the checkpoint.

    A manifest only says that the files are those that were written, not by whom.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise ValueError(
            f"checkpoint {checkpoint} does not hold the state of this run ({type(error).__name__}: "
            f"{plain(str(error), 300)}); restore it from a backup, or start the run again in another folder"
        ) from error


def _reason(error: Exception) -> str:
    """What went wrong, without the error number and with the file if known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower() + (f" ({error.filename})" if error.filename else "")
    return str(error)


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _policy_weights(folder: Path) -> dict[str, Tensor]:
    config = load_config(folder)
    return load_adapter(folder, config).tensors if is_adapter(folder) else load_weights(folder, config)


# --- trees ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """A checkpoint in memory: nothing in it changes as training continues."""

    step: int
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    document: dict[str, Any]
    """The contents of `state.json`."""

    @classmethod
    def take(
        cls, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], made_by: dict[str, str]
    ) -> _Snapshot:
        packer = _Packer(weights)
        tree = packer.pack(dict(state), "")
        return cls(step, packer.weights, packer.tensors, {"fingerprint": made_by, "state": tree})


class _Packer:
    """Splits a tree into JSON and CPU copies of its tensors.

    What JSON cannot express becomes an object with one key: $tensor and $weight name a tensor, $tuple and $float hold a
    tuple and a non-finite number, $dict the pairs of a dict whose keys are not all plain strings.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[tuple[Any, ...], dict[str, str]] = {}
        """Where each tensor is stored, so that one in two places of a tree is stored once."""
        for name, tensor in weights.items():
            self.weights[name] = _copy(tensor, f"weight {name}")
            self._places.setdefault(_identity(tensor), {"$weight": name})

    def pack(self, value: Any, path: str) -> Any:
        """`value` as JSON; `path` is its place in the tree."""
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        if isinstance(value, dict):
            return self._pack_dict(value, path)
        if isinstance(value, tuple):
            return {"$tuple": self.pack(list(value), path)}
        if isinstance(value, list):
            if all(type(item) is int for item in value):
                return value.copy()
            return [self.pack(item, f"{path}/{index}") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(float(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(
            f"a checkpoint cannot hold the {type(value).__name__} at {path}: it takes dicts, lists, tuples, tensors "
            "(torch.from_numpy), strings, numbers, booleans and None"
        )

    def _pack_dict(self, value: dict[Any, Any], path: str) -> Any:
        pairs = [(key, self.pack(item, f"{path}/{key}")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [[self.pack(key, f"{path}/{key}"), item] for key, item in pairs]}

    def _pack_tensor(self, tensor: Tensor, path: str) -> dict[str, str]:
        identity = _identity(tensor)
        if identity not in self._places:
            name = self._free_name(path.removeprefix("/"))
            self.tensors[name] = _copy(tensor, path)
            self._places[identity] = {"$tensor": name}
        return self._places[identity]

    def _free_name(self, path: str) -> str:
        """A name for a tensor: its path, made unique if a key with a slash gives two the same path."""
        name = path
        while name in self.tensors or name == "__metadata__":  # reserved by the file format
            name += "~"
        return name


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same slice of the same memory."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return (id(tensor),)
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tensor.dtype, tensor.shape, tensor.stride())


def _copy(tensor: Tensor, path: str) -> Tensor:
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"a checkpoint cannot hold the tensor at {path}: {tensor.layout}, {tensor.dtype}")
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _unpack(value: Any, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Any:
    """The tree that `_Packer.pack` was given."""
    match value:
        case list():
            return [_unpack(item, tensors, weights) for item in value]
        case {"$tensor": name}:
            return tensors[name]
        case {"$weight": name}:
            return weights[name]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_unpack(items, tensors, weights))
        case {"$dict": pairs}:
            return dict(_unpack(pairs, tensors, weights))
        case dict():
            return {key: _unpack(item, tensors, weights) for key, item in value.items()}
    return value


# --- where a run computes ---------------------------------------------------------------------------------------------


def _warn_if_made_elsewhere(name: str, made_by: Mapping[str, str], here: Mapping[str, str]) -> None:
    changes = list(_changes(made_by, here))
    if changes:
        warnings.warn(
            f"checkpoint {name} was made in another environment: {', '.join(changes)}. The run continues, but its "
            "numbers may differ in their last bits from those of a run that was never interrupted",
            RuntimeWarning,
            stacklevel=3,
        )


def _changes(made_by: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for key in {**made_by, **here}:
        if made_by.get(key) != here.get(key):
            yield f"{key} was {made_by.get(key, 'absent')}, is {here.get(key, 'absent')}"
