"""Exports a run's drafter and policy as folders that other software loads: `export-drafter` and `export-policy`.

    drafter    EAGLE-3 layout, as vLLM and SGLang load it beside the policy
    policy     Hugging Face layout: weights, config, generation config, tokenizer; an adapter merged or in PEFT's layout

The run's own files are read and checked, never changed; an existing folder is replaced only by one of the same kind,
and only on request. A folder appears complete or not at all.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from paceline.core.files import replaced_folder
from paceline.integrations.targets import check_dtype, check_target, no_drafter, run_around
from paceline.model.checkpoint import copy_tokenizer, load_weights, save_checkpoint
from paceline.model.eagle.files import load_eagle, save_eagle
from paceline.model.eagle.network import Eagle
from paceline.model.folder import CONFIG, is_adapter, load_config
from paceline.run.open_fleet import FLEET
from paceline.run.recipes import newest_policy
from paceline.run.store.folder import DRAFTER, step_name
from paceline.run.store.sealed import POLICY
from paceline.spot.checkpoints import EAGLE, DrafterCheckpoints

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LEAST_LAYERS = 5
"""A smaller policy lacks the three hidden states that engines pass to a drafter, or has them in another order."""


@dataclass(frozen=True, eq=False)
class FoundDrafter:
    """A drafter and where it was found."""

    folder: Path
    eagle: Eagle
    run: Path | None
    """The folder of its run, if any."""

    def find_policy(self) -> Path:
        """The newest policy of its run."""
        if self.run is None:
            raise ValueError(f"{self.folder} is not part of a run, so its policy is unknown; give a run's folder")
        return newest_policy(self.run)


def find_drafter(path: Path) -> FoundDrafter:
    """The newest drafter of a run, or the one in a given folder; ValueError if there is none or it is damaged."""
    run = run_around(path)
    if path == run:
        # A fleet keeps its drafter apart from that of a single worker, which the run may have used before.
        kept = [path / DRAFTER, path / DRAFTER / FLEET]
        folder = _newest(max(kept, key=lambda own: max(DrafterCheckpoints(own).steps(), default=-1)))
    elif DrafterCheckpoints(path).steps():
        folder = _newest(path)
    else:
        folder = path / EAGLE if (path / EAGLE).is_dir() else path
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{path} is neither a run nor a drafter; give a run's folder, or RUN/{DRAFTER}/step-N")
    return FoundDrafter(folder, load_eagle(folder), run)


def _newest(folder: Path) -> Path:
    steps = DrafterCheckpoints(folder).steps()
    if not steps:
        raise no_drafter(folder)
    return folder / step_name(steps[-1]) / EAGLE


def export_drafter(drafter: FoundDrafter, out: Path, dtype: str = "bfloat16", is_forced: bool = False) -> list[str]:
    """Write a drafter; returns notes for loading it elsewhere."""
    check_target(out, drafter.run, is_forced)
    save_eagle(out, drafter.eagle, _dtype(dtype))
    notes = []
    if "eagle3" not in out.name:
        notes.append(f'{out.name!r} does not contain \'eagle3\', so tell engines the method: "method": "eagle3"')
    num_layers = _num_layers(drafter.run)
    if num_layers is not None and num_layers < LEAST_LAYERS:
        notes.append(f"the policy has {num_layers} layers; engines expect {LEAST_LAYERS} or more and may reject it")
    return notes


def _num_layers(run: Path | None) -> int | None:
    """The policy's number of layers, from any checkpoint; None without one."""
    policies = sorted(run.glob(f"checkpoints/step-*/{POLICY}/{CONFIG}")) if run is not None else []
    return load_config(policies[-1].parent).num_layers if policies else None


def export_policy(run: Path, out: Path, dtype: str = "float32", is_forced: bool = False) -> Path:
    """Write the newest policy of a run; returns the folder of its checkpoint."""
    policy = newest_policy(run)
    check_target(out, run, is_forced)
    config = load_config(policy)
    found = load_weights(policy, config, _dtype(dtype))
    weights = {name: weight.to(_dtype(dtype)) for name, weight in found.items()}
    save_checkpoint(out, config, weights, partial(copy_tokenizer, policy))
    return policy.parent


def export_adapter(run: Path, out: Path, is_forced: bool = False) -> Path:
    """Copy the newest adapter of a run; returns the folder of its checkpoint."""
    policy = newest_policy(run)
    check_target(out, run, is_forced)
    if not is_adapter(policy):
        raise ValueError(f"{run} trains all weights, not an adapter (rl.lora.rank is 0); leave --adapter out")
    with replaced_folder(out) as new:
        for file in policy.iterdir():
            shutil.copyfile(file, new / file.name)
    return policy.parent


def _dtype(name: str) -> torch.dtype:
    check_dtype(name)
    return DTYPES[name]


def step_in(folder: Path) -> str:
    """The step in a checkpoint's path, for display."""
    found = re.findall(r"step-0*(\d+)", str(folder))
    return f"step {found[-1]}" if found else folder.name
