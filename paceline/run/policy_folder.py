"""The folder of a policy while a command or a run uses it: `random:SIZE` lives in a temporary one.

Called by the commands and by `api.py`. Any other name is passed on as it is, for `checkpoint.resolve` to find.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from paceline.model.random_config import RandomSize


@contextmanager
def found_policy(name: str, note: Callable[[str], None]) -> Iterator[str]:
    """The policy as `resolve` takes it."""
    kind, _, size = name.partition(":")
    if kind != "random":
        yield name
        return
    from paceline.model.random_model import make_random_model

    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        made = make_random_model(Path(folder), size=cast("RandomSize", size))
        note(f"created a {size} model with random weights; its text is noise")
        yield str(made)
