"""What a run is given in Python: its reward and its data, as files in its folder, `RUN/inputs/`.

`api.py` collects it before anything is written. The files are named by their contents, so that none ever replaces
another, and an equal reward or data set is the same file again: a resumed run notices a difference by the name. Nothing
here decides whether a difference is welcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.documents import brief
from paceline.core.files import make_folder, write_file
from paceline.run.store.folder import GIVEN
from paceline.run.store.record import CONFIG
from paceline.tasks.given_rows import GivenData, rows_by_split
from paceline.tasks.reward_code import reward_code

DIGITS = 12
TRAIN, TEST, REWARD = "task.data", "task.dials.test_data", "task.reward"
ARGUMENTS = {TRAIN: "dataset", TEST: "test_dataset", REWARD: "reward"}
"""The arguments of `paceline.train` by the settings that name what they give."""


class GivenInputs:
    """Reward and data of a run, checked and not yet written."""

    def __init__(
        self, reward: str | Callable[..., Any] | None, dataset: GivenData | None, test_dataset: GivenData | None
    ) -> None:
        self._named: dict[str, str] = {}
        """Settings that name a file or module of the user's."""
        self._files: dict[str, tuple[str, Sequence[bytes], str]] = {}
        """Settings that name a file of the run: its name, its contents, and what follows the name in the setting."""
        self.name: str | None = None
        """The reward's, which a run without a recipe is named by."""
        if dataset is not None:
            self._add_data(dataset, TRAIN)
        if test_dataset is not None:
            self._add_data(test_dataset, TEST)
        if isinstance(reward, str):
            self._named[REWARD], self.name = reward, reward.rpartition(":")[2]
        elif reward is not None:
            self._add_reward(reward)

    def _add_data(self, data: GivenData, setting: str) -> None:
        if setting == TEST and isinstance(data, Mapping):
            raise ValueError("test_dataset: give rows or a file, not a mapping; dataset takes rows by split")
        for split, rows in rows_by_split(data, ARGUMENTS[setting]).items():
            key = TEST if split == "test" else setting
            if isinstance(rows, str):
                self._named[key] = rows
            else:
                self._files[key] = (_file_name("test" if key == TEST else "train", rows, "jsonl"), rows, "")

    def _add_reward(self, reward: Callable[..., Any]) -> None:
        if not callable(reward):
            raise ValueError(f"reward: {brief(reward)} is neither a function nor the name of one, as in 'file.py:NAME'")
        code = reward_code(reward)
        self.name = code.name
        if code.spec is not None:
            self._named[REWARD] = code.spec
            return
        parts = [code.source.encode()]
        self._files[REWARD] = (_file_name("reward", parts, "py"), parts, f":{code.name}")

    @property
    def has_data(self) -> bool:
        return TRAIN in self._named or TRAIN in self._files

    @property
    def has_reward(self) -> bool:
        return REWARD in self._named or REWARD in self._files

    def settings(self, run: Path) -> dict[str, str]:
        """The settings that name everything, for a run in this folder."""
        folder = (run / GIVEN).absolute()
        return self._named | {key: f"{folder / name}{end}" for key, (name, _, end) in self._files.items()}

    def changes(self, run: Path, before: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Arguments that give something else than the run's settings name, with what those name."""
        for key, value in self.settings(run).items():
            known = before.get(key)
            is_same_file = key in self._files and known is not None and Path(str(known)).name == Path(value).name
            if known != value and not is_same_file:  # the run's folder may have been moved
                yield ARGUMENTS[key], known

    @contextmanager
    def written(self, run: Path) -> Iterator[None]:
        """Write the files; if the block fails before a run has begun in the folder, they are removed again."""
        new = [run / GIVEN / name for name, _, _ in self._files.values() if not (run / GIVEN / name).exists()]
        if self._files:
            make_folder((run / GIVEN).absolute())
        for name, parts, _ in self._files.values():
            write_file(run / GIVEN / name, parts)
        try:
            yield
        except BaseException:
            if not (run / CONFIG).exists():
                _remove(new, run)
            raise


def _file_name(stem: str, parts: Sequence[bytes], ending: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"{stem}-{digest.hexdigest()[:DIGITS]}.{ending}"


def _remove(files: Sequence[Path], run: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    for folder in (run / GIVEN, run):
        with suppress(OSError):  # not ours alone
            folder.rmdir()
