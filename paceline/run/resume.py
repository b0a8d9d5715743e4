"""Where a run continues: its checkpoint, its inputs and its model, checked before anything is loaded.

    folder -> find_checkpoint -> refuse_changed_settings -> check_inputs -> restore_history -> policy_folder

`open.py` calls it for `--resume`. Nothing that a run has written is lost here, and no input that decides a token
changes unsaid: the user is told what is missing or different, and decides.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from paceline.core.config import SettingsError, dump, validate
from paceline.core.files import replaced_folder
from paceline.model.checkpoint import weight_files
from paceline.model.folder import CONFIG, GENERATION_CONFIG, WEIGHTS_INDEX, load_config, tokenizer_files
from paceline.run.inputs import HARMLESS
from paceline.run.scoring import Note
from paceline.run.settings import RootSettings
from paceline.run.store.checkpoints import Checkpoints, fitting
from paceline.run.store.folder import CHECKPOINTS, MODEL, RunFolder
from paceline.run.store.history import HISTORY, RunHistory
from paceline.run.store.inputs import INPUTS, InputReader, Inputs
from paceline.run.store.record import flatten, read_record, refuse_config_changes
from paceline.run.store.sealed import FoundCheckpoint

FIXED = (
    "model.path",
    "task.name",
    "task.curriculum",
    "rl.optimizer",
    "rl.weight_decay",
    "rl.betas",
    "rl.master_precision",
    "rl.lora.rank",
    "rl.lora.alpha",
    "rl.lora.targets",
    "rl.lora.adapter",
    "rl.lora.rounding",
)
"""Settings that a run cannot change once it has begun: its checkpoints depend on them."""


def find_checkpoint(folder: RunFolder, note: Note) -> FoundCheckpoint | None:
    """The checkpoint to continue from; None at the beginning. Raises if there must have been one."""
    checkpoints = Checkpoints(folder.path / CHECKPOINTS, keep=1)
    record = read_record(folder.path)
    steps = checkpoints.steps()
    if not steps:
        _refuse_lost(folder, None if record is None else record.saved)
        return None
    found = checkpoints.find()
    if record is not None and record.saved is not None and record.saved > steps[-1]:
        note(f"the checkpoint of step {record.saved} is missing; the steps after {found.step} are repeated")
    return found


def _refuse_lost(folder: RunFolder, saved: int | None) -> None:
    """Raise if checkpoints were lost: without them, resuming would erase the run's rows and rollouts."""
    place = folder.path / CHECKPOINTS
    is_dangling = place.is_symlink() and not place.exists()
    if saved is None and not is_dangling and not _must_have_saved(folder):
        return
    if is_dangling:
        what = f"{place} is a link to {place.readlink()}, which is not there"
    else:
        what = f"{place} {'holds no checkpoint' if place.is_dir() else 'is missing'}"
    raise ValueError(
        f"{what}, but the run saved checkpoints there, and resuming without them would erase its records; put them "
        "back, or begin again at step 1 with --start-over, which keeps the old records in a folder before-1"
    )


def _must_have_saved(folder: RunFolder) -> bool:
    """Whether the rows of a run without a record say that it saved a checkpoint.

    A process that was killed while it wrote its first one has left a hidden folder behind.
    """
    if read_record(folder.path) is not None:
        return False
    given = validate(RootSettings, folder.read_config())
    first = min(given.run.checkpoint_every or given.rl.steps, given.rl.steps)
    return folder.last_step() >= first and not any((folder.path / CHECKPOINTS).glob(".step-*"))


def refuse_changed_settings(folder: RunFolder, settings: RootSettings, known: Inputs | None, accepts: bool) -> None:
    """Reject settings that the run's state cannot follow, and a config.yaml that the run has not written."""
    record = read_record(folder.path)
    written = record.settings if record is not None else (known.settings,) if known is not None else ()
    if record is None and not accepts:
        refuse_config_changes(folder.path, written)
    earlier = validate(RootSettings, written[-1] if written else folder.read_config())
    before, now = flat_settings(earlier), flat_settings(settings)
    for key in FIXED:
        if before[key] != now[key]:
            raise SettingsError(
                f"{key}: the run began with {before[key]!r} and cannot change to {now[key]!r}; begin a new run for that"
            )


def known_inputs(found: FoundCheckpoint) -> Inputs | None:
    """The inputs in a checkpoint; None if an older version wrote it."""
    text = found.document(INPUTS)
    with fitting(found.path):
        return None if text is None else Inputs.model_validate_json(text)


def check_inputs(known: Inputs, reader: InputReader, accepts: bool, note: Note) -> None:
    """Compare the files of now with those of the checkpoint. A setting given anew may name other files."""
    now = reader.result()
    before, after = flatten(known.settings), flatten(now.settings)
    stopping = []
    for setting, change in known.changes(now):
        if setting in HARMLESS:
            note(f"{setting}: {change} since the run was saved; that changes no token")
        elif before.get(setting) == after.get(setting):
            stopping.append(f"{setting}: {change}")
    if stopping and not accepts:
        raise ValueError(
            f"the run's inputs are not those of its last checkpoint: {'; '.join(stopping)}; restore them, or continue "
            "with what is there now: --accept-changes"
        )
    for change in stopping:
        note(f"{change} since the run was saved; it continues with that")


def restore_history(folder: RunFolder, found: FoundCheckpoint, note: Note) -> None:
    """Give the folder its history, and tell what was lost or altered since."""
    text = found.document(HISTORY)
    if text is None:
        folder.adopt_history(found.step)
        return
    with fitting(found.path):
        folder.history = RunHistory.model_validate_json(text)
    for problem in folder.history_problems(found.step):
        note(problem)


def policy_folder(folder: RunFolder, found: FoundCheckpoint, base: Path, note: Note) -> Path | None:
    """The checkpoint's config and tokenizer with links to the base model's weights, if the base model's differ."""
    if _is_alike(found.policy, base):
        return None
    note(f"the config or tokenizer in {base} is not the run's; the run keeps using its own")
    with replaced_folder(folder.path / MODEL) as new:
        for file in (found.policy / CONFIG, found.policy / GENERATION_CONFIG, *tokenizer_files(found.policy)):
            shutil.copyfile(file, new / file.name)
        for file in (*weight_files(base), base / WEIGHTS_INDEX):
            if file.is_file():
                (new / file.name).symlink_to(file.absolute())
    return folder.path / MODEL


def _is_alike(policy: Path, base: Path) -> bool:
    """Whether two model folders have one config and one tokenizer."""
    ours, theirs = ({file.name: file.read_bytes() for file in tokenizer_files(own)} for own in (policy, base))
    try:
        return ours == theirs and load_config(policy) == load_config(base)
    except ValueError:  # the base model's config is damaged
        return False


def flat_settings(settings: RootSettings) -> dict[str, Any]:
    """Settings by dotted key, as config.yaml would give them back."""
    return flatten(yaml.safe_load(dump(settings)))
