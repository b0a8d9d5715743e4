"""The record of a run: what its folder must remember even if `config.yaml` or `checkpoints/` are lost or changed.

    .record.json     the settings that the run wrote to config.yaml, and its newest checkpoint

`RunFolder` writes it, before config.yaml and after a checkpoint is complete, so that a kill never makes a sound folder
look damaged. A folder of an older version has none; what is not known is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.core.config import SettingsError, read_yaml
from paceline.core.files import write_file

CONFIG, RECORD = "config.yaml", ".record.json"
SHOWN = 5
"""A message names so many settings, and counts the rest."""


class FolderRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    settings: tuple[dict[str, Any], ...] = ()
    """What config.yaml may hold: the newest settings last, and those before them while they are being replaced."""
    saved: int | None = None
    """The step of the newest checkpoint that was completed."""


def read_record(run: Path) -> FolderRecord | None:
    """The record of a run; None if it has none that can be read."""
    try:
        return FolderRecord.model_validate_json((run / RECORD).read_bytes())
    except (OSError, ValidationError):
        return None


def write_record(run: Path, record: FolderRecord) -> None:
    write_file(run / RECORD, [record.model_dump_json().encode()])


def config_changes(run: Path, known: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between config.yaml and the settings that the run wrote, which are one of `known`."""
    now = flatten(read_yaml(run / CONFIG))
    if not known or any(flatten(tree) == now for tree in known):
        return []
    changes = differing(flatten(known[-1]), now)
    said = [f"{key} {_changed(key in now, *values)}" for key, values in changes.items()]
    return said[:SHOWN] + ([f"{len(said) - SHOWN} more"] if len(said) > SHOWN else [])


def refuse_config_changes(run: Path, known: Sequence[Mapping[str, Any]]) -> None:
    """Raise if config.yaml holds other settings than the run wrote."""
    if changes := config_changes(run, known):
        raise SettingsError(
            f"{run / CONFIG} is not as the run left it: {', '.join(changes)}; undo that (and give new values on the "
            "command line, as in --rl.lr=1e-5), or resume with these settings: --accept-changes"
        )


def _changed(is_there: bool, before: Any, now: Any) -> str:
    return f"was {before!r}, is {now!r}" if is_there else f"is missing (it was {before!r})"


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two flat trees: key -> (old value, new value)."""
    return {
        key: (old.get(key), new.get(key))
        for key in [*new, *(key for key in old if key not in new)]
        if key not in old or key not in new or old[key] != new[key]
    }


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key. An empty section counts as a leaf, so that it is not lost."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict) and value
        leaves |= flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return leaves
