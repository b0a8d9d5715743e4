"""Which checkpoints of a run are intact: the manifest that seals one, and the search for the newest good one.

`checkpoints.py` writes and reads what is in them; the commands look here for a run's policy before torch is imported,
so nothing here may import it. A checkpoint counts only if every file matches its manifest.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.core.documents import plain
from paceline.core.files import folders_in
from paceline.run.store.folder import step_name, step_of

FORMAT = 1
MAX_PROBLEMS, MAX_PROBLEM = 5, 300
"""A message names so many damaged checkpoints, with so many characters of what is wrong: names in a damaged manifest
have any length."""
POLICY, MANIFEST = "policy", "manifest.json"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint on disk that matches its manifest."""

    step: int
    path: Path

    @property
    def policy(self) -> Path:
        """Its model folder."""
        return self.path / POLICY

    def document(self, name: str) -> bytes | None:
        """A document that the run added; None if an older version wrote the checkpoint."""
        return (self.path / name).read_bytes() if (self.path / name).is_file() else None


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """Folders that may be checkpoints, with their steps, newest first."""
    found = ((step_of(name), name, path) for name, path in folders_in(folder, "step-").items())
    named = ((step, path) for step, name, path in found if step is not None and name == step_name(step))
    return sorted(named, reverse=True)


def find_checkpoint(place: Path, step: int | None = None) -> FoundCheckpoint:
    """The newest intact checkpoint, or that of `step`, without its contents. Skips damaged ones with a warning."""
    problems: list[str] = []
    for found, folder in candidates(place):
        if step is not None and found != step:
            continue
        try:
            _verify(folder, found)
        except (ValueError, OSError) as error:
            problem = plain(str(error), MAX_PROBLEM)  # it may quote what a damaged manifest says
            problems.append(f"{folder.name}: {problem}")
            warnings.warn(f"skipping checkpoint {folder}: {problem}", RuntimeWarning, stacklevel=4)
        else:
            return FoundCheckpoint(found, folder)
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    if problems:
        named = "; ".join(problems[:MAX_PROBLEMS])
        raise ValueError(
            f"{place} holds no intact {wanted} ({named}); restore one from a backup, or start "
            "the run again in another folder"
        )
    raise ValueError(f"{place} holds no {wanted}; start the run again without --resume, in another folder")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int
    sha256: str


class _Manifest(BaseModel):
    """The contents of a complete checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    step: int
    files: dict[str, _File]


def seal(new: Path, step: int) -> None:
    """Write the manifest of all files."""
    files = sorted(path for path in new.rglob("*") if path.is_file())
    entries = {
        path.relative_to(new).as_posix(): _File(bytes=path.stat().st_size, sha256=_sha256(path)) for path in files
    }
    text = _Manifest(format=FORMAT, step=step, files=entries).model_dump_json(indent=1)
    (new / MANIFEST).write_text(text, encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _verify(folder: Path, step: int) -> None:
    """Raise a ValueError that says what is wrong if a checkpoint is damaged."""
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        manifest = _Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{MANIFEST} is damaged ({error.errors()[0]['msg']})") from error
    if manifest.format != FORMAT:
        raise ValueError(f"it has format {manifest.format}, this version of paceline reads format {FORMAT}")
    if manifest.step != step:
        raise ValueError(f"{MANIFEST} belongs to step {manifest.step}")
    for name, entry in manifest.files.items():
        _verify_file(folder, name, entry)


def _verify_file(folder: Path, name: str, entry: _File) -> None:
    if not (folder / name).is_file():
        raise ValueError(f"{name} is missing")
    size = (folder / name).stat().st_size
    if size != entry.bytes:
        raise ValueError(f"{name} has {size:,} bytes, but {entry.bytes:,} were written")
    if _sha256(folder / name) != entry.sha256:
        raise ValueError(f"{name} is damaged: its sha256 does not match the manifest")
