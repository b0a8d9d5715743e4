"""Settings on the command line: split off before typer parses it, then applied on top of a settings file.

`main` calls `split_overrides`; commands pass the result to `load_settings`. Nothing here knows a setting by name except
`model.path`, which has its own option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.documents import brief, plain

if TYPE_CHECKING:
    from paceline.run.settings import RootSettings

_OVERRIDE = re.compile(r"--(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)


def split_overrides(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split `--section.key=value` and `--section.key value` off a command line, up to `--`."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg == "--":
            return [*rest, arg, *queue], overrides
        match = _OVERRIDE.fullmatch(arg)
        if match is None:
            rest.append(arg)
            continue
        key, value = match["key"], match["value"]
        if value is None:
            if not queue or queue[0].startswith("--"):
                raise ValueError(f"--{plain(key)} needs a value: --{plain(key)}=VALUE")
            value = queue.pop(0)
        if value.startswith("{") and value.endswith(":"):  # the shell split it; the rest would pass as an argument
            raise ValueError(f"--{key}={value} ends at a space; put it in quotes: --{key}='{value} VALUE}}'")
        if overrides.setdefault(key, value) != value:
            raise ValueError(f"--{plain(key)} is given twice: {brief(overrides[key])} and {brief(value)}; keep one")
    return rest, overrides


def load_settings(overrides: Mapping[str, str], config: Path | None, model: str | None) -> RootSettings:
    """The settings of a file (`--config`), with `--model` and the overrides on top."""
    from paceline.core.config import SettingsError, load
    from paceline.run.settings import RootSettings

    if model is not None and overrides.get("model.path", model) != model:
        raise SettingsError("--model and --model.path name different models; keep one")
    return load(RootSettings, config, {**overrides, **({} if model is None else {"model.path": model})})
